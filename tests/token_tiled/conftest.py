"""NaN in uninitialized memory, also where the token-tiled kernels allocate it."""

import pytest
import torch


@pytest.fixture
def uninitialized_is_nan(uninitialized_is_nan):
    """NaN shows rows that a kernel does not write, and rows that it reads before they are written."""
    x = torch.ones(1, 1, 1)
    assert all(buffer.isnan().all() for buffer in (x.new_empty(3), torch.empty_like(x), torch.empty(3)))
