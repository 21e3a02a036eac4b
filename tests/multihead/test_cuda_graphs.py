"""`VarlenMultiheadAttention(cuda_graphs=True)`. Without a GPU, graphs are fake; see `helpers/cuda_graphs.py`."""

import copy

import pytest
import torch
from cuda_graphs import DEVICE, GPU, assert_same, cuda_graphs  # noqa: F401
from token_tiled_cases import IGNORED_WARNINGS

import nt_attention as nta

pytestmark = [*IGNORED_WARNINGS, pytest.mark.usefixtures("cuda_graphs")]

TOLERANCE = 2e-3 if GPU else 1e-5
BATCHES = ([5, 2, 9], [1], [3, 3, 3, 3, 2], [9, 0, 4], [5, 2, 9])


def pair(**options):
    """A module with graphs, and a copy without them."""
    module = nta.VarlenMultiheadAttention(32, 4, batch_first=True, device=DEVICE, cuda_graphs=True, **options).eval()
    other = copy.deepcopy(module)
    other.graphs = None
    return module, other


def nested_of(lengths, width=32):
    return torch.nested.nested_tensor([torch.randn(n, width) for n in lengths], layout=torch.jagged, device=DEVICE)


OPTIONS = {
    "default": {},
    "grouped": {"num_kv_heads": 2, "head_dim": 16},
    "window": {"window_size": (3, 1), "softcap": 2.0, "scale": 0.3},
    "sinks": {"sinks": True, "alibi": True},
    "rotary": {"rotary": nta.Rotary(), "qk_norm": "rms"},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_tensors(options, causal):
    module, other = pair(**options)
    for lengths in BATCHES:
        layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
        x = torch.randn(layout.total, 32, device=DEVICE)
        with torch.no_grad():
            got, want = (m(x, x, x, layout=layout, is_causal=causal) for m in (module, other))
        assert_same(got[0], want[0], TOLERANCE)
        assert got[1] is want[1] is None
    assert module.graphs.calls == {None: len(BATCHES)}
    assert module.graphs.captured < len(BATCHES)


def test_every_form():
    module, other = pair()
    lengths = [5, 2, 9]
    layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
    nested, rows = nested_of(lengths), torch.randn(layout.total + 3, 32, device=DEVICE)
    padded = torch.randn(3, 11, 32, device=DEVICE)
    padding = (torch.arange(11) >= torch.tensor(lengths)[:, None]).to(DEVICE)
    with torch.inference_mode():
        got, want = (m(nested, nested, nested)[0] for m in (module, other))
        assert_same(got.values(), want.values(), TOLERANCE)
        assert got.offsets() is nested.offsets()
        got, want = (m(rows, rows, rows, layout=layout)[0] for m in (module, other))
        assert_same(got, want, TOLERANCE)
        assert (got[layout.total :] == 0).all()
        tensors = list(torch.randn(16, 32, device=DEVICE).split(lengths))
        for one, two in zip(*(m(tensors, tensors, tensors)[0] for m in (module, other)), strict=True):
            assert_same(one, two, TOLERANCE)
        for options in ({"need_weights": False}, {"need_weights": True}):
            got, want = (m(padded, padded, padded, key_padding_mask=padding, **options) for m in (module, other))
            assert_same(got, want, TOLERANCE)
    assert module.graphs.calls == {None: 4}  # weights need the padded batch


def test_cross_attention():
    module, other = pair()
    for lengths, key_lengths in (([5, 2, 9], [3, 4, 7]), ([1, 0], [2, 5])):
        layout, key_layout = (nta.SequenceLayout.from_lengths(x, device=DEVICE) for x in (lengths, key_lengths))
        x, key = (torch.randn(one.total, 32, device=DEVICE) for one in (layout, key_layout))
        value = torch.randn_like(key)
        for inputs in ((x, key, key), (x, key, value)):
            with torch.no_grad():
                got, want = (m(*inputs, layout=layout, key_layout=key_layout)[0] for m in (module, other))
            assert_same(got, want, TOLERANCE)
    assert module.graphs.calls == {None: 4}


@pytest.mark.parametrize("same", ["query and key", "query and value", "all"])
def test_one_tensor_with_two_layouts(same):
    module, other = pair()
    x, y = torch.randn(2, 8, 32, device=DEVICE).unbind()
    layout, key_layout = (nta.SequenceLayout.from_lengths(n, device=DEVICE) for n in ([2, 6], [5, 3]))
    inputs = {"query and key": (x, x, y), "query and value": (x, y, x), "all": (x, x, x)}[same]
    with torch.no_grad():
        got, want = (m(*inputs, layout=layout, key_layout=key_layout)[0] for m in (module, other))
    assert_same(got, want, TOLERANCE)
    assert module.graphs.calls == {None: 1}


def test_layouts_of_other_numbers_of_sequences():
    module, _ = pair()
    x, y = torch.randn(2, 8, 32, device=DEVICE).unbind()
    layout, key_layout = (nta.SequenceLayout.from_lengths(n, device=DEVICE) for n in ([2, 6, 0], [5, 1, 1, 1]))
    with torch.no_grad(), pytest.raises(ValueError, match="3 sequences and key_layout 4"):
        module(x, y, y, layout=layout, key_layout=key_layout)


def test_reasons():
    module, other = pair()
    layout = nta.SequenceLayout.from_lengths([5, 2, 9], device=DEVICE)
    x = torch.randn(layout.total, 32, device=DEVICE)
    out = module(x, x, x, layout=layout)[0]
    out.sum().backward()
    assert module.in_proj_weight.grad is not None
    with torch.no_grad():
        module.train()(x, x, x, layout=layout)
        module.eval()
        none = nta.SequenceLayout.from_lengths([0, 0], device=DEVICE)
        assert module(x[:0], x[:0], x[:0], layout=none)[0].shape == (0, 32)
        with nta.use_backend("reference"):
            visible = {"mask_mod": lambda b, h, i, j: i >= j}
            got, want = (m(x, x, x, layout=layout, **visible)[0] for m in (module, other))
    assert_same(got, want, TOLERANCE)
    reasons = " ".join(map(str, module.graphs.calls))
    for text in ("gradients are enabled", "training mode", "no tokens", "mask_mod"):
        assert text in reasons
    assert len(module.graphs) == 0


def test_options_that_are_changed_later():
    module, other = pair()
    layout = nta.SequenceLayout.from_lengths([5, 2, 9], device=DEVICE)
    x = torch.randn(layout.total, 32, device=DEVICE)
    with torch.no_grad():
        module(x, x, x, layout=layout)
        rotation = nta.Rotary().of_head_dim(8)
        options = {"softcap": 1.5, "window_size": (2, 2), "scale": 0.1, "alibi": True, "rotation": rotation}
        for count, (name, value) in enumerate(options.items(), 2):
            for each in (module, other):
                setattr(each, name, value)
            assert_same(module(x, x, x, layout=layout)[0], other(x, x, x, layout=layout)[0], TOLERANCE)
            assert module.graphs.captured == count
