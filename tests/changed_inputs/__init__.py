"""Inputs that are changed in place, in all argument combinations. The tables are entries, changes, forms and modes."""
