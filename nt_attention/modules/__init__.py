"""Modules with parameters: `VarlenMultiheadAttention` and its parts."""
