"""Objects that reference counts alone must free."""

import gc
from contextlib import contextmanager


@contextmanager
def without_garbage_collector():
    """Cycles of references are not freed in this context."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
