"""Which packages `flash_attn_4` needs."""

from nt_attention.kernels.backends import flash_attn_4


def test_flash_attn_4_without_cutlass_is_missing(monkeypatch, tmp_path):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flash_attn_4, "no_cuda", lambda: None)
    assert "nvidia-cutlass-dsl" in flash_attn_4.missing.__wrapped__()
    (tmp_path / "cutlass").mkdir()
    assert flash_attn_4.missing.__wrapped__() is None
