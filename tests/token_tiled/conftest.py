"""NaN in uninitialized memory, also where the token-tiled kernels allocate it."""

import pytest
import torch


@pytest.fixture
def uninitialized_is_nan(uninitialized_is_nan):
    """What kernels leave unwritten shows, and so does what they read before it is written."""
    x = torch.ones(1, 1, 1)
    assert all(buffer.isnan().all() for buffer in (x.new_empty(3), torch.empty_like(x), torch.empty(3)))
