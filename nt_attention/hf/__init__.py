"""Support for Hugging Face transformers. Importing this package imports transformers."""

from .attention import register

__all__ = ["register"]
