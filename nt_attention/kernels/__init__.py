"""The kernels: what each can do, which one runs, and what all of them get from above."""
