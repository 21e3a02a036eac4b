"""Inputs that are changed in place around a call."""
