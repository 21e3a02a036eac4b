"""Every test of graphs starts with an empty compile cache."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
