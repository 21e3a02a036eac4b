"""Hooks into Hugging Face transformers. Importing this package imports transformers."""

from .interface import register

__all__ = ["register"]
