"""What a backend supports on a GPU: by the verified support, else by its documentation. No GPU is needed."""

import dataclasses
import json
from importlib import resources
from pathlib import Path

import pytest
import torch

from nt_attention.kernels import support, token_tiled
from nt_attention.kernels.backend import COMMON
from nt_attention.kernels.backends import flash_attn_2, flash_attn_4, torch_efficient, torch_flash
from nt_attention.kernels.call import FEATURES, AttentionSpec
from nt_attention.kernels.cost_model import CallSize
from nt_attention.kernels.measurements import dims_of
from nt_attention.kernels.select import BACKENDS, choose, explain_spec
from nt_attention.kernels.support import VerifiedSupport, by_documentation

CUDA = torch.device("cuda")

SIZE = CallSize(3, 17.0, 101.0)

SPEC = AttentionSpec(CUDA, torch.bfloat16, 4, 4, 64, 64, 0.125)

CROSS = {"equal_lengths": False, "keyless": False}

BOTH = dict.fromkeys(set(FEATURES) - support.BY_HEAD_DIMS, "both")

STATES = ("both", "forward", "no")

TABLE = VerifiedSupport(
    "an NVIDIA H199",
    {"torch": "2.13.0"},
    {
        "flash_attn_4": {
            "bfloat16": {
                "head dims": {
                    **{"16": "forward", "32": "both", "64": "both", "80": "no", "96": "both", "128": "both"},
                    **{"192/128": "both", "192": "no", "256": "both", "64/128": "no"},
                },
                "features": {**BOTH, "softcap": "forward", "window": "no"},
            },
            "float16": {"head dims": {"64": "forward"}, "features": BOTH},
        },
        "torch_flash": {
            "bfloat16": {"head dims": {"8": "both", "64": "both", "128": "both", "256": "forward"}, "features": BOTH}
        },
        "token_tiled": {
            "bfloat16": {
                "head dims": {
                    **{"16": "both", "64": "both", "128": "both", "256": "forward"},
                    **{"64/128": "both", "128/32": "both"},
                },
                "features": {**BOTH, "alibi": "no", "dropout": "forward"},
            },
            "float32": {"head dims": {"64": "both"}, "features": {"causal": "both"}},
        },
        "torch_efficient": {
            "float32": {"head dims": {"64": "both", "64/32": "both", "192/128": "no"}, "features": BOTH}
        },
    },
)


def call(head_dim=64, value_dim=None, **changes):
    value_dim = head_dim if value_dim is None else value_dim
    return dataclasses.replace(SPEC, head_dim=head_dim, value_dim=value_dim, **changes)


@pytest.fixture
def verified(fake_gpu, monkeypatch):
    """The verified support of this GPU is `TABLE`."""
    monkeypatch.setattr(support, "verified_on", {(9, 0): TABLE}.get)


ANY = {"window_size": (7, 3)}
FP32 = {"dtype": torch.float32}
# The backend, the call, and what of the reason is checked, without gradients and with them; None if it is supported.
CALLS = [
    (flash_attn_2, {}, "was not run", "was not run"),
    (token_tiled, {"dtype": torch.float16}, "torch.float16 is not verified", "torch.float16 is not verified"),
    (flash_attn_4, ANY, "'window' is not verified on", "'window' is not verified with gradients on"),
    (token_tiled, {"alibi": True}, "'alibi' is not verified on", "'alibi' is not verified with gradients on"),
    (token_tiled, FP32 | {"softcap": 3.0}, "'softcap' is not verified", "'softcap' is not verified"),
    (flash_attn_4, {"softcap": 3.0}, None, "'softcap' is not verified with gradients"),
    (token_tiled, {"dropout_p": 0.3}, None, "'dropout' is not verified with gradients"),
    (torch_flash, {"head_dim": 136}, None, "no head dim for 136 is verified with gradients"),
    (token_tiled, {"head_dim": 129}, None, "no head dim for 129 is verified with gradients"),
    (token_tiled, {"value_dim": 200}, None, "no head dim for 64 with values of 200 is verified with gradients"),
    (flash_attn_4, {"head_dim": 65, "dtype": torch.float16}, "no head dim for 65", "no head dim for 65"),
    (torch_efficient, FP32 | {"head_dim": 72}, "no head dim for 72", "no head dim for 72 is verified with gradients"),
]


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize(("backend", "options", "forward", "both"), CALLS)
def test_what_is_not_verified(backend, options, forward, both):
    for needs_grad, words in ((False, forward), (True, both)):
        spec = call(**options, needs_grad=needs_grad)
        reasons = [x for x in support.reasons(backend.BACKEND, spec) if words is None or words in x]
        assert len(reasons) == (words is not None)
        assert all(x.endswith(".") and "on an NVIDIA H199 by `tools/verify_backends.py`" in x for x in reasons)
        dims = support.head_dims(backend.BACKEND, spec)
        assert dims is None if words is not None and "head dim" in words else dims is not None or words is not None
        with by_documentation():
            assert support.reasons(backend.BACKEND, spec) == []


@pytest.mark.usefixtures("verified")
class TestNotSupported:
    def test_all_features_that_failed_are_listed(self):
        spec = call(softcap=3.0, window_size=(7, 3), needs_grad=True)
        message = support.reasons(flash_attn_4.BACKEND, spec)
        assert [line.split(" ")[0] for line in message] == ["'softcap'", "'window'"]

    @pytest.mark.parametrize(("dims", "kv_heads"), [((192, 128), 2), ((160, 96), 1)])
    def test_grouped_heads_at_192_and_128(self, dims, kv_heads):
        (reason,) = support.reasons(flash_attn_4.BACKEND, call(*dims, needs_grad=True, num_kv_heads=kv_heads))
        assert reason.startswith("gradients of grouped heads")
        assert support.reasons(flash_attn_4.BACKEND, call(*dims, num_kv_heads=kv_heads)) == []
        assert support.reasons(flash_attn_4.BACKEND, call(*dims, needs_grad=True)) == []

    def test_auto_selects_no_backend_that_failed(self):
        spec = call(needs_grad=True, window_size=(7, 3))
        assert choose(spec, SIZE).name not in ("flash_attn_4", "flash_attn_2")
        with pytest.raises(ValueError, match=r"flash_attn_4 .* 'window' is not verified with gradients"):
            choose(spec, SIZE, "flash_attn_4")
        explanation = explain_spec(spec, SIZE, "flash_attn_4")
        assert explanation.chosen is None
        assert explanation.reasons["flash_attn_4"] == tuple(support.reasons(flash_attn_4.BACKEND, spec))
        with by_documentation():
            assert choose(spec, SIZE, "flash_attn_4").name == "flash_attn_4"


# The backend, the head dims asked for, and those that run: without gradients (None if it is the same), and with them.
DIMS = [
    *((flash_attn_4, (16, 16), (16, 16), (32, 32)), (flash_attn_4, (7, 13), (16, 16), (32, 32))),
    *((flash_attn_4, (80, 80), (96, 96), (96, 96)), (flash_attn_4, (64, 64), None, (64, 64))),
    *((flash_attn_4, (64, 128), None, (128, 128)), (flash_attn_4, (192, 128), None, (192, 128))),
    *((flash_attn_4, (160, 96), None, (192, 128)), (flash_attn_4, (192, 192), None, (256, 256))),
    *((flash_attn_4, (128, 192), None, (256, 256)), (flash_attn_4, (256, 256), None, (256, 256))),
    *((torch_flash, (8, 8), None, (8, 8)), (torch_flash, (64, 64), None, (64, 64))),  # both must be equal
    *((torch_flash, (7, 61), None, (64, 64)), (torch_flash, (128, 65), None, (128, 128))),
    *((torch_flash, (12, 20), None, (64, 64)), (token_tiled, (7, 13), None, (7, 13))),
    *((token_tiled, (64, 128), None, (64, 128)), (token_tiled, (127, 3), None, (127, 3))),
    (torch_efficient, (61, 7), None, (64, 8)),  # to its own step
]


@pytest.mark.usefixtures("verified")
class TestHeadDims:
    @pytest.mark.parametrize(("backend", "asked", "forward", "both"), DIMS)
    def test_next_verified_head_dims(self, backend, asked, forward, both):
        dtype = torch.float32 if backend is torch_efficient else torch.bfloat16
        for needs_grad, dims in ((False, forward or both), (True, both)):
            spec = call(*asked, needs_grad=needs_grad, dtype=dtype)
            assert support.head_dims(backend.BACKEND, spec) == dims
            assert support.reasons(backend.BACKEND, spec) == []

    def test_pairs_of_head_dims_decide_alone_and_with_gradients_apart(self):
        """No feature "value dim" is verified: FlashAttention-4 runs (192, 128), and not (64, 128)."""
        assert choose(call(192, 128, needs_grad=True), SIZE, "flash_attn_4").name == "flash_attn_4"
        pairs = {"64": "both", "64/32": "forward", "32/64": "no"}
        table = VerifiedSupport("a GPU", {}, {"token_tiled": {"bfloat16": {"head dims": pairs, "features": BOTH}}})

        def dims(*asked, needs_grad):
            return table.head_dims(token_tiled.BACKEND, call(*asked, needs_grad=needs_grad))

        assert dims(64, 32, needs_grad=False) == (64, 32)
        assert dims(50, 30, needs_grad=False) == (50, 30)  # run in the kernel of 64, with narrower values
        assert dims(64, 32, needs_grad=True) == dims(50, 30, needs_grad=True) == (64, 64)
        assert dims(30, 50, needs_grad=False) == (64, 64)  # no pair with wider values is right

    def test_by_documentation_and_on_a_cpu(self):
        with by_documentation():
            assert support.head_dims(flash_attn_4.BACKEND, call(80)) == (80, 80)
            assert support.head_dims(flash_attn_4.BACKEND, call(16, 24, needs_grad=True)) == (16, 24)
            assert support.head_dims(torch_flash.BACKEND, call(20)) == (24, 24)
            assert support.head_dims(torch_flash.BACKEND, call(257)) is None
        assert support.head_dims(token_tiled.BACKEND, call(255, device=torch.device("cpu"))) == (255, 255)


class TestByDocumentation:
    def test_by_documentation_without_verified_support(self, not_verified):
        for backend in (flash_attn_2, flash_attn_4, torch_flash, torch_efficient, token_tiled):
            assert support.reasons(backend.BACKEND, call(needs_grad=True, is_causal=True, **CROSS)) == []
        assert "softcap is not supported" in support.reasons(torch_flash.BACKEND, call(softcap=2.0))[0]
        assert support.head_dims(flash_attn_4.BACKEND, call(80)) == (96, 96)
        assert support.head_dims(flash_attn_4.BACKEND, call(16)) == (32, 32)
        assert support.head_dims(flash_attn_4.BACKEND, call(192, 128)) == (192, 128)
        assert support.head_dims(flash_attn_2.BACKEND, call(80, 20)) == (80, 80)


class TestBasis:
    def test_basis_without_verified_support(self, not_verified):
        assert support.basis(CUDA) == "as documented; not verified on this GPU yet"
        explanation = explain_spec(call(), SIZE)
        assert explanation.basis == support.basis(CUDA)
        first = str(explanation).splitlines()[0]
        assert first.endswith("runs this call. Support: as documented; not verified on this GPU yet.")

    def test_basis_names_the_verified_gpu(self, verified):
        assert support.basis(CUDA) == "verified on an NVIDIA H199"
        assert (
            str(explain_spec(call(), SIZE))
            .splitlines()[0]
            .endswith("runs this call. Support: verified on an NVIDIA H199.")
        )
        with by_documentation():
            assert "as documented" in support.basis(CUDA)


class TestTables:
    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        """A package that contains only tables of verified support."""
        (tmp_path / "verified").mkdir()
        monkeypatch.setattr(support.resources, "files", lambda _: tmp_path)
        support.verified_on.cache_clear()
        yield tmp_path / "verified"
        support.verified_on.cache_clear()

    def test_tables_are_found_by_compute_capability(self, folder, monkeypatch):
        written = {"command": "…", "date": "…", "gpu": TABLE.gpu, "versions": TABLE.versions, "results": TABLE.results}
        (folder / "sm90.json").write_text(json.dumps(written))
        assert support.verified_on((9, 0)) == TABLE
        assert support.verified_on((9, 0)) is support.verified_on((9, 0)), "read anew"
        assert support.verified_on((8, 0)) is None
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        assert support.verified_for(CUDA) == TABLE
        with by_documentation():
            assert support.verified_for(CUDA) is None
        assert support.verified_for(torch.device("cpu")) is None

    def test_tables_are_not_read_on_amd_gpus(self, folder, monkeypatch):
        (folder / "sm90.json").write_text("not read")
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        assert support.verified_for(CUDA) is None


SAVED = sorted((Path(support.__file__).parent / "verified").glob("*"))


def test_saved_tables_are_in_the_package():
    folder = resources.files("nt_attention.kernels") / "verified"
    found = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    assert sorted(found) == [file.name for file in SAVED]
    assert all(name.endswith(".json") for name in found)


@pytest.mark.parametrize("file", SAVED, ids=lambda file: file.name)
def test_saved_table_is_valid(file):
    capability = file.stem.removeprefix("sm")
    assert file.name == f"sm{int(capability)}.json"
    table = support.verified_on((int(capability[:-1]), int(capability[-1])))
    assert table is not None
    assert table.gpu
    assert "torch" in table.versions
    assert json.loads(file.read_text())["command"].startswith("python -m nt_attention check")
    for name, by_dtype in table.results.items():
        backend = BACKENDS[name]
        assert set(by_dtype) <= {str(dtype).removeprefix("torch.") for dtype in backend.dtypes}, name
        for dtype, kinds in by_dtype.items():
            at = (name, dtype)
            assert set(kinds) == {"head dims", "features"}, at
            assert set(kinds["features"]) <= backend.features, at
            assert all(state in STATES for row in kinds.values() for state in row.values()), at
            dims = [dims_of(which) for which in kinds["head dims"]]
            assert all(0 < max(pair) <= backend.head_dims.most for pair in dims), at
            assert all(dim % backend.head_dims.multiple == 0 for pair in dims for dim in pair), at
            assert all(d == v for d, v in dims) or not backend.head_dims.equal, at
            assert set(backend.head_dims.only or ()) <= set(dims), at


@pytest.mark.parametrize("file", SAVED, ids=lambda file: file.name)
def test_verified_gpu_has_a_kernel_for_every_plain_call(file, fake_gpu, monkeypatch):
    capability = file.stem.removeprefix("sm")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (int(capability[:-1]), int(capability[-1])))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (3, 32, 64, 80, 128, 256, 300, 512, 576):
            for options in ({}, {"is_causal": True}, {"num_kv_heads": 2}, {"is_causal": True, **CROSS}):
                spec = call(head_dim, dtype=dtype, needs_grad=True, **options)
                assert choose(spec, SIZE).backward is not None, explain_spec(spec, SIZE)


def test_every_feature_of_every_backend_is_known():
    assert set(FEATURES) >= COMMON
    for name, backend in BACKENDS.items():
        assert backend.features <= set(FEATURES), name
