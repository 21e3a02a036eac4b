"""A fixture for tests of proofs."""

import weakref

import pytest

from nt_attention.hf import proofs


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of proofs, on the disk and in this process."""
    monkeypatch.setenv("NT_ATTENTION_CACHE", str(tmp_path))
    monkeypatch.setattr(proofs, "_made", {})
    monkeypatch.setattr(proofs, "_made_for", weakref.WeakKeyDictionary())
    return tmp_path
