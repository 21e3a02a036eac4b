"""Support for Hugging Face transformers. Importing this package imports transformers."""

from .attention import register
from .families import add_family

__all__ = ["add_family", "register"]
