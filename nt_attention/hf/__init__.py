"""Support for Hugging Face transformers. Importing this package imports transformers.

It also registers the attention implementation "nt_attention/flash" with transformers, and refuses ours for classes that
would not run it.
"""

from . import installed  # noqa: F401 (first: it checks the version)
from .families import add_family
from .pack.padded_on_read import packed
from .route.attention import register
from .route.by_name import refuse_name
from .route.flash import register_flash
from .transformers_private import check_attention_names

__all__ = ["add_family", "packed", "register"]

register_flash()
check_attention_names(refuse_name)
