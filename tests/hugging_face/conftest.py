"""A fixture for tests of store."""

import pytest

from nt_attention.hf.prove import store


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of store, on the disk and in this process."""
    monkeypatch.setenv("NT_ATTENTION_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "_made", {})
    return tmp_path
