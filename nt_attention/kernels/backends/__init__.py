"""The kernels that are called, a file each. None imports another."""
