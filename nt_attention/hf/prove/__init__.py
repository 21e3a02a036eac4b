"""Finds out, with a small model of the same class, whether and how a Hugging Face model can be packed."""
