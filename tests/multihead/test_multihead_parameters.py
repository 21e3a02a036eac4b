"""VarlenMultiheadAttention's parameters: state_dict, from_torch and to_torch, copies, initial values."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle

import pytest
import torch
from multihead_ragged import (
    EMBED,
    EXTRA_OPTIONS,
    HEADS,
    STOCK_OPTIONS,
    assert_same_results,
    call,
    inputs_of,
    make_with_options,
    one_at_a_time,
    pair,
)
from parameters import with_random_parameters
from sweeps import covering
from torch import nn
from torch.nn.utils import parametrizations, prune

import nt_attention as nta
from nt_attention.modules.rotary import Rotary, ntk, yarn

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")


def test_type_checkers_see_a_call_with_the_signature_of_forward():
    tree = ast.parse(inspect.getsource(inspect.getmodule(nta.VarlenMultiheadAttention)))
    functions = {x.name: x.args for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
    functions["forward"].kwarg = None  # takes what is wrong, for an error
    assert ast.unparse(functions["__call__"]) == ast.unparse(functions["forward"])


@pytest.mark.parametrize(
    "options",
    [*STOCK_OPTIONS.values(), {"kdim": 22, "vdim": 26, "dropout": 0.3}, {"batch_first": False, "dtype": torch.float32}],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("training", [True, False])
def test_to_torch_and_from_torch_share_parameters_and_options(options, training):
    options = {"batch_first": True, "dtype": torch.float64, **options}
    ours = with_random_parameters(nta.VarlenMultiheadAttention(EMBED, HEADS, **options)).train(training)
    stock = ours.to_torch()
    again = nta.VarlenMultiheadAttention.from_torch(stock, backend="reference")
    assert type(stock) is nn.MultiheadAttention
    assert again.backend == "reference"
    for other in (stock, again):
        assert other.training == training
        assert list(other.state_dict()) == list(ours.state_dict())
        for (name, a), (_, b) in zip(other.named_parameters(), ours.named_parameters(), strict=True):
            assert a is b, name
        for name in ("dropout", "batch_first", "kdim", "vdim", "add_zero_attn"):
            assert getattr(other, name) == getattr(ours, name), name
    # False with added keys too, which the encoder layer's fast path would leave out
    assert ours._qkv_same_embed_dim == (stock._qkv_same_embed_dim and not ours._adds_keys)
    assert not again._qkv_same_embed_dim  # the encoder layer's fast path would not ask the named backend
    x = torch.randn(2, 7, EMBED, dtype=options["dtype"])
    k, v = (torch.randn(2, 7, width, dtype=options["dtype"]) for width in (ours.kdim, ours.vdim))
    if not training:
        torch.testing.assert_close(stock(x, k, v), ours(x, k, v))
        torch.testing.assert_close(again(x, k, v), ours(x, k, v))


def test_from_torch_shares_a_parametrized_out_proj():
    stock, _ = pair()
    parametrizations.weight_norm(stock.out_proj, "weight")
    ours = nta.VarlenMultiheadAttention.from_torch(stock)
    parts = inputs_of(stock, cross=True)
    assert_same_results(
        call("packed", ours, parts, need_weights=True, average_attn_weights=False),
        one_at_a_time(stock, parts),
        [*stock.parameters()],
    )


@pytest.mark.parametrize("make", ["parametrized", "pruned"])
@pytest.mark.parametrize("way", ["from_torch", "to_torch"])
def test_from_torch_and_to_torch_refuse_parametrized_and_pruned_parameters(make, way):
    kind = nn.MultiheadAttention if way == "from_torch" else nta.VarlenMultiheadAttention
    module = kind(EMBED, HEADS)
    if make == "parametrized":
        parametrizations.weight_norm(module, "in_proj_weight")
    else:
        prune.random_unstructured(module, "in_proj_weight", 0.5)
    with pytest.raises(ValueError, match=r"only one of the two modules has the parameters in_proj_weight"):
        nta.VarlenMultiheadAttention.from_torch(module) if way == "from_torch" else module.to_torch()


@pytest.mark.parametrize("name", sorted(EXTRA_OPTIONS.keys() - {"all", "added keys", "other widths"}))
@pytest.mark.parametrize("way", ["from_torch", "to_torch"])
def test_from_torch_and_to_torch_refuse_extra_options(name, way):
    module = make_with_options(name)
    option = next(x for x in reversed(EXTRA_OPTIONS[name]) if x != "num_heads")
    assert option in repr(module)
    with pytest.raises(ValueError, match=option):
        module.to_torch() if way == "to_torch" else nta.VarlenMultiheadAttention.from_torch(module)


def test_state_dict_of_extra_options():
    module = make_with_options("added keys")
    d, kv = 7, 21
    assert {name: tuple(x.shape) for name, x in module.state_dict().items()} == {
        "in_proj_weight": (42 + 2 * kv, EMBED),
        "in_proj_bias": (42 + 2 * kv,),
        "bias_k": (1, 1, kv),
        "bias_v": (1, 1, kv),
        "sinks": (6,),
        "out_proj.weight": (EMBED, 42),
        "out_proj.bias": (EMBED,),
        **{f"{x}_norm.{y}": (d,) for x in "qk" for y in ("weight", "bias")},
    }
    assert set(make_with_options("rms").state_dict()) - set(pair()[0].state_dict()) == {
        "q_norm.weight",
        "k_norm.weight",
    }
    twin = make_with_options("added keys")
    twin.load_state_dict(module.state_dict())
    parts = inputs_of(module, cross=True)
    torch.testing.assert_close(call("packed", twin, parts), call("packed", module, parts))


def test_initial_norms_and_sinks():
    module = nta.VarlenMultiheadAttention(EMBED, HEADS, sinks=True, qk_norm="layer")
    assert not module.sinks.any()
    assert (module.q_norm.weight == 1).all()
    assert module.q_norm.weight is not module.k_norm.weight
    made = nta.VarlenMultiheadAttention(EMBED, HEADS, qk_norm="rms", dtype=torch.bfloat16, device="meta")
    assert {(x.dtype, x.device.type) for x in made.parameters()} == {(torch.bfloat16, "meta")}


@covering({"name": EXTRA_OPTIONS, "how": ["pickle", "deepcopy"]})
def test_copies_have_their_own_parameters_and_the_same_results(name, how):
    module = make_with_options(name)
    parts = inputs_of(module, cross=False)
    want = call("jagged", module, parts, need_weights=True)  # before, so that whatever is kept is copied too
    twin = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    assert {id(x) for x in twin.parameters()}.isdisjoint(id(x) for x in module.parameters())
    torch.testing.assert_close(call("jagged", twin, parts, need_weights=True), want, rtol=0, atol=0)


@pytest.mark.parametrize("scaling", [ntk(3.0), yarn(3.0, 101), lambda x: x / 2], ids=["ntk", "yarn", "own"])
def test_pickle_of_a_module_with_scaled_rotary(scaling):
    module = nta.VarlenMultiheadAttention(EMBED, HEADS, rotary=Rotary(dims=6, scaling=scaling))
    x = torch.randn(7, EMBED)
    assert torch.equal(pickle.loads(pickle.dumps(module))([x], [x], [x])[0][0], module([x], [x], [x])[0][0])
