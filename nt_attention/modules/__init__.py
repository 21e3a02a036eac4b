"""Modules that hold parameters."""
