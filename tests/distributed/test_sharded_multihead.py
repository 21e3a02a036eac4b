"""`VarlenMultiheadAttention` with a `ShardedLayout`: outputs and all gradients, against one process."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from processes import run_in_processes
from ranks import mesh_of_all
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import nt_attention as nta

E, H = 24, 6
LENGTHS, KEY_LENGTHS = [23, 1, 0, 5, 40], [11, 3, 7, 0, 29]
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)

OPTIONS = {
    "fused": {},
    "separate": {"kdim": 10, "vdim": 14, "bias": False},
    "grouped": {"num_kv_heads": 2, "head_dim": 5, "sinks": True, "softcap": 2.0},
    "window": {"window_size": (7, 0), "scale": 0.7},
    "two_sided_window": {"window_size": (3, 4)},
    "rotary": {"rotary": nta.Rotary(), "qk_norm": "rms", "num_kv_heads": 3},
    "rotary_and_alibi": {"rotary": nta.Rotary(dims=2, interleaved=True), "alibi": True},
}


def make(**options):
    torch.manual_seed(1)
    attention = nta.VarlenMultiheadAttention(E, H, dtype=torch.float64, **options)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attention


def inputs_of(attention, lengths, key_lengths=None):
    """Packed query, key and value. They are one tensor if they have one layout and one width."""
    torch.manual_seed(2)
    query = torch.randn(sum(lengths), E, dtype=torch.float64)
    if key_lengths is None and attention.kdim == attention.vdim == E:
        return query, query, query
    total = sum(lengths if key_lengths is None else key_lengths)
    key, value = (torch.randn(total, width, dtype=torch.float64) for width in (attention.kdim, attention.vdim))
    return query, key, value if attention.kdim != attention.vdim else key


def as_packed(sharded, x):
    return sharded.local(x)


def as_nested(sharded, x):
    return sharded.local(sharded.layout.to_nested(x))


def as_dtensor(sharded, x):
    stride = x.stride()
    return DTensor.from_local(sharded.local(x), sharded.mesh, [Shard(0)], run_check=False, shape=x.shape, stride=stride)


def results(attention, tensors, call, parallel=None):
    """The output, and the gradients of the different inputs and of all parameters."""
    leaves = {id(x): x.clone().requires_grad_() for x in tensors}
    out = call(parallel or attention, *[leaves[id(x)] for x in tensors])
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return out.detach(), [x.grad for x in leaves.values()], [p.grad for p in attention.parameters()]


def check(options, form, lengths, key_lengths=None, mesh=None, **masks):
    mesh = mesh or mesh_of_all()
    attention = make(**options)
    tensors = inputs_of(attention, lengths, key_lengths)
    layout = nta.SequenceLayout.from_lengths(lengths)
    key_layout = None if key_lengths is None else nta.SequenceLayout.from_lengths(key_lengths)

    def in_one_process(module, *given):
        return module(*given, layout=layout, key_layout=key_layout, **masks)[0]

    def on_each_rank(module, *given):
        sharded = layout.shard(mesh)
        key_sharded = None if key_layout is None else key_layout.shard(mesh)
        layouts = (sharded, key_sharded or sharded, key_sharded or sharded)
        local = {id(x): form(each, x) for x, each in zip(given, layouts, strict=True)}
        out, weights = module(*[local[id(x)] for x in given], layout=sharded, key_layout=key_sharded, **masks)
        assert weights is None
        assert type(out) is type(local[id(given[0])])
        gathered = sharded.gather(out)
        return gathered.values() if form is as_nested else gathered

    out, grads, of_parameters = results(attention, tensors, in_one_process)
    attention.zero_grad()
    found, local_grads, local_of_parameters = results(attention, tensors, on_each_rank)
    close(found, out)
    for one, other in zip([*local_grads, *local_of_parameters], [*grads, *of_parameters], strict=True):
        dist.all_reduce(one, group=mesh.get_group())
        close(one, other)


def mask_mod(b, h, i, j):
    return (i + j + h + b) % 3 > 0


def score_mod(score, b, h, i, j):
    return score * (h + 1) + b - j


def check_forms(options, lengths, **more):
    for form in (as_packed, as_nested, as_dtensor):
        check(options, form, lengths, **more)


@pytest.mark.parametrize("name", OPTIONS)
def test_self_attention(name):
    """One option with mods."""
    more = {"mask_mod": mask_mod, "score_mod": score_mod} if name == "separate" else {}
    world, is_causal = 4 if name == "rotary" else 2, name not in ("fused", "two_sided_window")
    run_in_processes(world, functools.partial(check_forms, OPTIONS[name], LENGTHS, is_causal=is_causal, **more))


@pytest.mark.parametrize(("name", "is_causal"), [("separate", False), ("grouped", True), ("rotary", False)])
def test_cross_attention(name, is_causal):
    more = {"key_lengths": KEY_LENGTHS, "is_causal": is_causal}
    run_in_processes(2, functools.partial(check_forms, OPTIONS[name], LENGTHS, **more))


@pytest.mark.parametrize("lengths", [[0, 1], [0, 0]])
def test_a_rank_without_tokens(lengths):
    for name in ("separate", "rotary"):
        run_in_processes(2, functools.partial(check_forms, OPTIONS[name], lengths, is_causal=True))


def check_changes_in_place():
    attention, layout = make(), nta.SequenceLayout.from_lengths(LENGTHS)
    sharded = layout.shard(mesh_of_all())
    for form, is_grown in itertools.product((as_packed, as_nested, as_dtensor), (False, True)):
        x = form(sharded, torch.randn(layout.total, E, dtype=torch.float64))
        x = x * 1 if is_grown else x.requires_grad_()
        out = attention(x, x, x, layout=sharded, is_causal=True)[0]
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    query = sharded.local(torch.randn(layout.total, E, dtype=torch.float64))  # only the key is a DTensor
    key = as_dtensor(sharded, torch.randn(layout.total, E, dtype=torch.float64))
    out = attention(query, key, key, layout=sharded)[0]
    key.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_changes_in_place():
    run_in_processes(2, check_changes_in_place)


def check_modes():
    """Tables of rotary that were made in inference mode are used in training; a graph breaks at the call."""
    attention = make(**OPTIONS["rotary"])
    sharded = nta.SequenceLayout.from_lengths(LENGTHS).shard(mesh_of_all())
    x = torch.randn(sum(LENGTHS), E, dtype=torch.float64)
    for form in (as_packed, as_nested):
        with torch.inference_mode():
            position_ids = sharded.position_ids
            local = form(sharded, x)
            expected = sharded.gather(attention(local, local, local, layout=sharded, is_causal=True)[0])
        nn.Embedding(100, 3)(position_ids).sum().backward()
        local = form(sharded, x)
        for module in (attention, torch.compile(attention, backend="aot_eager")):
            out = module(local, local, local, layout=sharded, is_causal=True)[0]
            found = sharded.gather(out)
            if form is as_nested:
                close(found.values(), expected.values())
                assert out._offsets is local._offsets
                out = out.values()
            else:
                close(found, expected)
            attention.zero_grad()
            out.sum().backward()
            gradients = [p.grad.clone() for p in attention.parameters()]
            if module is attention:
                eager = gradients
            else:
                close(gradients, eager)


def test_inference_mode_and_compiled_functions():
    run_in_processes(2, check_modes)


def check_errors():
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    sharded = layout.shard(mesh_of_all())
    x = torch.randn(sharded.total, E, dtype=torch.float64)
    whole = torch.randn(layout.total, E, dtype=torch.float64)
    piece = as_nested(sharded, whole)
    replicated = DTensor.from_local(whole, mesh_of_all(), [Replicate()])

    def attend(*given, module=None, **more):
        query, key, value = given if len(given) == 3 else given * 3
        return (module or make())(query, key, value, **{"layout": sharded, **more})

    for match, error, call in (
        ("return attention weights: pass need_weights=False", ValueError, lambda: attend(x, need_weights=True)),
        ("pass is_causal, mask_mod or score_mod", ValueError, lambda: attend(x, attn_mask=torch.zeros(40, 40))),
        ("pass is_causal, mask_mod", ValueError, lambda: attend(x, attn_mask=torch.zeros(40, 40), is_causal=True)),
        ("leave out key_padding_mask", ValueError, lambda: attend(x, key_padding_mask=torch.zeros(5, 40).bool())),
        ("set dropout to 0, or call eval", ValueError, lambda: attend(x, module=make(dropout=0.1))),
        ("add_bias_kv or add_zero_attn is not", ValueError, lambda: attend(x, module=make(add_bias_kv=True))),
        ("add_bias_kv or add_zero_attn is not", ValueError, lambda: attend(x, module=make(add_zero_attn=True))),
        ("cuda_graphs is not supported", ValueError, lambda: attend(x, module=make(cuda_graphs=True))),
        ("lists of tensors are not supported", ValueError, lambda: attend([x])),
        ("must have the .* rows of rank", ValueError, lambda: attend(whole)),
        ("must be .tokens, features.", ValueError, lambda: attend(x.unsqueeze(1))),
        ("must have 24 features", ValueError, lambda: attend(x[:, :5])),
        ("a DTensor must be Shard", ValueError, lambda: attend(replicated)),
        ("must have the lengths of the pieces of rank", ValueError, lambda: attend(layout.to_nested(whole))),
        ("must be three NestedTensors", TypeError, lambda: attend(piece, piece, x)),
        ("key is NoneType", TypeError, lambda: attend(x, None, x)),
        ("key_layout must be a ShardedLayout too", TypeError, lambda: attend(x, key_layout=layout)),
        ("key_layout must be a SequenceLayout", TypeError, lambda: attend(x, layout=layout, key_layout=sharded)),
        ("pass both layouts", ValueError, lambda: attend(x, layout=None, key_layout=sharded)),
    ):
        with pytest.raises(error, match=match):
            call()
    attend(x, module=make(dropout=0.1).eval())  # no dropout here


def test_errors():
    run_in_processes(2, check_errors)
