"""Support for Hugging Face transformers. Importing this package imports transformers.

It also registers the attention implementation "nt_attention/flash" with transformers.
"""

from .families import add_family
from .route.attention import register
from .route.flash import register_flash

__all__ = ["add_family", "register"]

register_flash()
