"""VarlenMultiheadAttention's parameters: state dicts, from_torch and to_torch, parametrizations, hooks, signature."""

from __future__ import annotations

import ast
import inspect
import io
import pickle

import pytest
import torch
from multihead_cases import (
    EMBED,
    HEADS,
    OPTIONS,
    STOCK,
    assert_same_results,
    call,
    inputs_of,
    make,
    one_at_a_time,
)
from parameters import with_random_parameters
from sweeps import covering
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformer_layers import (
    BATCH,
    KEYS,
    KEYS_PADDED,
    LENGTH,
    MEMORY_PADDED,
    MODES,
    SOME_PADDED,
    as_nested,
    causal,
    close,
    decoder_layer,
    double,
    encoder_layer,
    in_mode,
    pair,
    random_sequences,
    with_our_attention,
)
from transformer_layers import EMBED as LAYER_EMBED
from transformer_layers import HEADS as LAYER_HEADS

from nt_attention import VarlenMultiheadAttention
from nt_attention.modules.rotary import Rotary, ntk, yarn

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")


def test_type_checkers_see_a_call_with_the_signature_of_forward():
    tree = ast.parse(inspect.getsource(inspect.getmodule(VarlenMultiheadAttention)))
    functions = {x.name: x.args for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
    functions["forward"].kwarg = None  # takes what is wrong, for an error
    assert ast.unparse(functions["__call__"]) == ast.unparse(functions["forward"])


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("training", [True, False])
def test_to_torch_and_from_torch_share_parameters_and_options(name, training):
    ours = make(name, dropout=0.3).train(training)
    state = torch.get_rng_state()
    stock = ours.to_torch()
    again = VarlenMultiheadAttention.from_torch(stock, backend="reference")
    assert torch.equal(torch.get_rng_state(), state)
    assert type(stock) is nn.MultiheadAttention
    assert isinstance(again, nn.MultiheadAttention)
    assert again.backend == "reference"
    for other in (stock, again):
        assert other.training == training
        assert list(other.state_dict()) == list(ours.state_dict())
        for (label, a), (_, b) in zip(other.named_parameters(), ours.named_parameters(), strict=True):
            assert a is b, label
        assert type(other.out_proj) is type(nn.MultiheadAttention(2, 2).out_proj)  # which quantization leaves alone
    made = nn.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, "dropout": 0.3} | OPTIONS[name])
    for label, value in vars(made).items():  # those that the constructor of stock gives
        if not label.startswith("_") and label not in ("training", "dropout"):
            assert getattr(ours, label) == value or isinstance(value, torch.Tensor), label
    # False with added keys too, which the encoder layer's fast path would leave out
    assert ours._qkv_same_embed_dim == (stock._qkv_same_embed_dim and not ours._adds_keys)
    assert not again._qkv_same_embed_dim  # the encoder layer's fast path would not ask the named backend
    if not training:
        x, k, v = (torch.randn(2, 7, width, dtype=torch.float64) for width in (EMBED, ours.kdim, ours.vdim))
        k, v = (y.transpose(0, 1) if not ours.batch_first else y for y in (k, v))
        x = x if ours.batch_first else x.transpose(0, 1)
        torch.testing.assert_close(stock(x, k, v), ours(x, k, v))
        torch.testing.assert_close(again(x, k, v), ours(x, k, v))


REFUSED = {
    "parametrized": (lambda m: parametrizations.weight_norm(m, "in_proj_weight"), "has the parameters in_proj_weight"),
    "pruned": (lambda m: prune.random_unstructured(m, "in_proj_weight", 0.5), "has the parameters in_proj_weight"),
    **{
        name: (None, next(x for x in reversed(OPTIONS[name]) if x not in ("num_heads", "backend", "cuda_graphs")))
        for name in OPTIONS
        if name not in (*STOCK, "all", "added keys", "other widths")
    },
}


@covering({"case": REFUSED, "way": ["from_torch", "to_torch"]})
def test_from_torch_and_to_torch_refuse_what_they_would_lose(case, way):
    change, words = REFUSED[case]
    module = make(case) if change is None else make("plain")
    if change is None:
        assert words in repr(module)
    else:
        module = module.to_torch() if way == "from_torch" else module
        change(module)
    with pytest.raises(ValueError, match=words):
        module.to_torch() if way == "to_torch" else VarlenMultiheadAttention.from_torch(module)


def test_state_dict_of_extra_options_and_initial_values():
    d, kv = 7, 21
    assert {name: tuple(x.shape) for name, x in make("added keys").state_dict().items()} == {
        "in_proj_weight": (42 + 2 * kv, EMBED),
        "in_proj_bias": (42 + 2 * kv,),
        "bias_k": (1, 1, kv),
        "bias_v": (1, 1, kv),
        "sinks": (6,),
        "out_proj.weight": (EMBED, 42),
        "out_proj.bias": (EMBED,),
        **{f"{x}_norm.{y}": (d,) for x in "qk" for y in ("weight", "bias")},
    }
    module = VarlenMultiheadAttention(EMBED, HEADS, sinks=True, qk_norm="layer")
    assert not module.sinks.any()
    assert (module.q_norm.weight == 1).all()
    assert module.q_norm.weight is not module.k_norm.weight
    made = VarlenMultiheadAttention(EMBED, HEADS, qk_norm="rms", dtype=torch.bfloat16, device="meta")
    assert {(x.dtype, x.device.type) for x in made.parameters()} == {(torch.bfloat16, "meta")}


def test_state_dicts_load_both_ways():
    for options in ({}, {"bias": False}, {"kdim": 3, "vdim": 5, "add_bias_kv": True}):
        stock, ours = pair(**options)
        assert list(stock.state_dict()) == list(ours.state_dict())
        for assign in (False, True):
            for to, of in ((stock, ours), (ours, stock)):
                with_random_parameters(of)
                to.load_state_dict(of.state_dict(), assign=assign)
                close(dict(to.state_dict()), dict(of.state_dict()))
    stock = nn.Transformer(LAYER_EMBED, LAYER_HEADS, 1, 1, 8)
    ours, buffer = with_our_attention(stock), io.BytesIO()
    assert list(ours.state_dict()) == list(stock.state_dict())
    torch.save(with_random_parameters(ours).state_dict(), buffer)
    buffer.seek(0)
    stock.load_state_dict(torch.load(buffer, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(stock.parameters(), ours.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="in_proj_weight"):
        ours.load_state_dict({k: v for k, v in stock.state_dict().items() if "in_proj_weight" not in k})


@pytest.mark.parametrize("scaling", [ntk(3.0), yarn(3.0, 101), lambda x: x / 2], ids=["ntk", "yarn", "own"])
def test_pickle_of_a_module_with_scaled_rotary(scaling):
    module = VarlenMultiheadAttention(EMBED, HEADS, rotary=Rotary(dims=6, scaling=scaling))
    x = torch.randn(7, EMBED)
    assert torch.equal(pickle.loads(pickle.dumps(module))([x], [x], [x])[0][0], module([x], [x], [x])[0][0])


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


class LowRank(nn.Module):
    """A fixed weight plus the product of two thin matrices, which are trained."""

    def __init__(self, weight):
        super().__init__()
        torch.manual_seed(11)
        self.up, self.down = (nn.Parameter(torch.randn(n, 2).to(weight)) for n in weight.shape)

    def forward(self, weight):
        return weight.detach() + self.up @ self.down.T


PARAMETER_CHANGES = {
    "twice": lambda m: parametrize.register_parametrization(m, "in_proj_weight", Twice()),
    "low-rank-out": lambda m: parametrize.register_parametrization(m.out_proj, "weight", LowRank(m.out_proj.weight)),
    "weight-norm": lambda m: parametrizations.weight_norm(m, "in_proj_weight"),
    "prune": lambda m: prune.l1_unstructured(m, "in_proj_weight", 0.5),
    "prune-bias": lambda m: prune.l1_unstructured(m, "in_proj_bias", 4),
}


@pytest.mark.parametrize("how", PARAMETER_CHANGES)
def test_parametrized_and_pruned_weights_give_what_nn_multihead_attention_gives(how):
    stock, ours = pair(batch_first=True)
    x, key = double(BATCH, LENGTH, LAYER_EMBED), double(BATCH, KEYS, LAYER_EMBED)
    for module in (stock, ours):
        before = module(x, x, x)[0].detach()
        PARAMETER_CHANGES[how](module)
        assert not torch.equal(module(x, x, x)[0], before) or how == "weight-norm"
    assert list(stock.state_dict()) == list(ours.state_dict())
    for arguments in ({}, {"need_weights": False}, {"need_weights": False, "key_padding_mask": KEYS_PADDED}):
        results = []
        for module in (stock, ours):
            out, leaves = module(x, key, key, **arguments)[0], [*module.parameters()]
            # retain_graph: stock does not call out_proj, so the hook that masks its weight does not run again
            grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, retain_graph=True)
            results.append([out, *[g for g in grads if g is not None]])
        close(*results)
    queries = random_sequences([4, 1, 9])
    nested = as_nested(queries, "jagged")
    with torch.no_grad():
        close(ours(nested, nested, nested)[0].values(), torch.cat([stock(q, q, q)[0] for q in queries]))


@pytest.mark.parametrize("how", ["twice", "weight-norm"])
def test_parametrizations_in_encoder_layers_and_their_removal(how):
    stock = encoder_layer()
    ours, x = with_our_attention(stock), double(BATCH, LENGTH, LAYER_EMBED)
    for model in (stock, ours):
        PARAMETER_CHANGES[how](model.self_attn)
    for mode in MODES:
        with in_mode(mode, stock, ours):
            close(ours(x, src_key_padding_mask=SOME_PADDED), stock(x, src_key_padding_mask=SOME_PADDED))
    want = ours(x)
    parametrize.remove_parametrizations(ours.self_attn, "in_proj_weight")
    assert type(ours.self_attn) is VarlenMultiheadAttention
    close(ours(x), want)


def test_from_torch_shares_a_parametrized_out_proj():
    plain = make("plain")
    stock = plain.to_torch()
    parametrizations.weight_norm(stock.out_proj, "weight")
    ours = VarlenMultiheadAttention.from_torch(stock)
    parts, weights = inputs_of(stock, cross=True), {"need_weights": True, "average_attn_weights": False}
    assert_same_results(call("packed", ours, parts, **weights), one_at_a_time(ours, parts), [*stock.parameters()])


@covering(
    {
        "dtypes": [(torch.float32, torch.float64), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
        "inputs": ["self", "key is value", "kdim"],
        "autocast": [False, True],
    }
)
def test_bias_of_another_dtype_than_the_weight(dtypes, inputs, autocast):
    dtype, of_bias = dtypes
    widths = (EMBED, 22, 26) if inputs == "kdim" else (EMBED,) * 3
    stock = nn.MultiheadAttention(EMBED, HEADS, kdim=widths[1], vdim=widths[2], batch_first=True, dtype=dtype)
    stock.in_proj_bias = nn.Parameter(torch.randn_like(stock.in_proj_bias).to(of_bias))
    ours = VarlenMultiheadAttention.from_torch(stock)
    query, key, value = (torch.randn(2, 7, width).to(dtype).requires_grad_() for width in widths)
    tensors = {"self": (query,) * 3, "key is value": (query, key, key), "kdim": (query, key, value)}[inputs]
    padding = torch.arange(7) >= torch.tensor([[5], [7]])
    results = []
    for module in (stock, ours):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            tokens = module(*tensors, key_padding_mask=padding, need_weights=False)[0][~padding]
        leaves = [*dict.fromkeys(tensors), *stock.parameters()]
        results.append([tokens, *torch.autograd.grad(tokens.float().square().sum(), leaves)])
    narrow = autocast or torch.bfloat16 in dtypes
    for want, got in zip(*results, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).norm() < (0.03 if narrow else 1e-5) * want.norm()


def test_forward_hooks_see_the_arguments_and_results_of_nn_multihead_attention():
    x, memory = double(BATCH, LENGTH, LAYER_EMBED), double(BATCH, KEYS, LAYER_EMBED)
    masks = {"tgt_mask": causal(LENGTH), "memory_key_padding_mask": MEMORY_PADDED}
    for stock, inputs, names, options in (
        (encoder_layer(), (x,), ["self_attn"], {"src_key_padding_mask": SOME_PADDED}),
        (encoder_layer(), (x,), ["self_attn"], {"src_mask": causal(LENGTH), "is_causal": True}),
        (decoder_layer(), (x, memory), ["self_attn", "multihead_attn"], masks),
    ):
        told = []
        for model in (stock, with_our_attention(stock)):
            seen = []
            for name in names:
                attention = model.get_submodule(name)
                attention.register_forward_pre_hook(lambda _, *given, seen=seen: seen.append(given), with_kwargs=True)
                attention.register_forward_hook(lambda _, *given, seen=seen: seen.append(given), with_kwargs=True)
            model.train()(*inputs, **options)
            assert len(seen) == 2 * len(names)
            assert all(isinstance(given[-1], tuple) and len(given[-1]) == 2 for given in seen[1::2])
            told.append(seen)
        close(*told)


@pytest.mark.parametrize("padding", [None, SOME_PADDED], ids=["whole", "padded"])
def test_backward_hooks_change_no_result(padding):
    module, grads = pair(batch_first=True)[1], []
    leaf = double(BATCH, LENGTH, LAYER_EMBED, requires_grad=True)

    def run():
        out = module(leaf, leaf, leaf, need_weights=False, key_padding_mask=padding)[0]
        return out, *torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])

    before = run()
    module.register_full_backward_hook(lambda module, grad_in, grad_out: grads.append((grad_in, grad_out)))
    close(run(), before)
    assert len(grads) == 1
