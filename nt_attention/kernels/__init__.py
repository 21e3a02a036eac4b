"""The kernels, the choice among them, and the adapters around them."""
