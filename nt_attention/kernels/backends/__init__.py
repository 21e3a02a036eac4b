"""The backends, one file for each. No backend imports another one."""
