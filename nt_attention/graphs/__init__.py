"""Calls of modules as CUDA graphs."""
