"""Support for Hugging Face transformers. Importing this package imports transformers."""

from .families import add_family
from .route.attention import register

__all__ = ["add_family", "register"]
