"""What every patch uses: the `forward` of a patched instance, and the handle."""
