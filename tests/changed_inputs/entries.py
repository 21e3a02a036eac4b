"""The public entry points, each with the same program of stock PyTorch operations and the expected rows.

Dimensions: B sequences, T query tokens, S key tokens, H heads, D head dim, E embed dim.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import oracle
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nt_attention as nta
from nt_attention import SequenceLayout, VarlenMultiheadAttention, varlen_attention

from .forms import (
    BOUNDED,
    CARRIERS,
    MASKS,
    PADDED_LENGTH,
    Carrier,
    Form,
    Jagged,
    Lengths,
    Listed,
    Padded,
    Transposed,
    ends,
)

HEADS, HEAD_DIM = 3, 5
EMBED = HEADS * HEAD_DIM
Parts = list[Tensor]
Batch = dict[str, Parts]


@dataclass
class Subject:
    """One of the two programs.

    Attributes:
        function: from the parts of every input, and for each side (queries, keys) the carrier's tensor and its layout
            (None where the entry makes it), to the parts of every output.
        module: whose parameters take part, if any.
    """

    function: Callable[[Batch, list[Tensor], list[SequenceLayout | None]], Batch]
    module: nn.Module | None = None

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {} if self.module is None else dict(self.module.named_parameters())


@dataclass(frozen=True)
class Entry:
    """
    Attributes:
        inputs: by name, the side (0 queries, 1 keys) whose lengths it has, and the shape of one token.
        form: of the inputs.
        outputs: by name, its form.
        ours, stock: from the backend's name, or that of the way it is written, to the program.
        truth: from rows (float64), lengths of both sides and parameters to rows; by ``meaning``, equal programs share.
        carrier: the tensor that gives the lengths; None if the input itself gives them.
        inside: whether the layout is made inside of the function, from the carrier's tensor.
    """

    name: str
    meaning: str
    inputs: Mapping[str, tuple[int, tuple[int, ...]]]
    outputs: Mapping[str, type[Form]]
    form: type[Form]
    ours: Callable[[str], Subject]
    stock: Callable[[str], Subject]
    truth: Callable[[dict[str, Tensor], tuple[Lengths, Lengths], dict[str, Tensor]], dict[str, Tensor]]
    carrier: Carrier | None
    inside: bool = False
    carries: bool = True  # whether the tensor of the carrier is an argument of the function
    ways: tuple[str, ...] = ("sdpa",)  # of writing the stock program, which may raise in any of them
    backends: tuple[str, ...] = ("auto", "cpu", "reference")
    tolerance: float = 1e-7
    only_lengths: bool = False  # whether another entry tests changes of values

    @property
    def sides(self) -> int:
        return 1 + max(side for side, _ in self.inputs.values())

    @property
    def outside(self) -> bool:
        """Whether it takes a layout, made before the call."""
        masked = self.form is Padded and not self.meaning.startswith("rows")
        return self.carries and not self.inside and self.carrier is not None and not masked

    @property
    def self_attention(self) -> bool:
        return len(self.inputs) == 3 and self.sides == 1


# ---- varlen_attention


def stock_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, key_offsets: Tensor, causal: bool, way: str = "sdpa"
) -> tuple[Tensor, Tensor]:
    """Packed attention by stock operations and a mask that keeps the sequences apart, with its log-sum-exp.

    What is saved for the backward pass differs by ``way``: "sdpa" saves the inputs and the output where its kernel
    takes the strides, "contiguous" saves the output whatever the strides, "matmul" saves the inputs themselves.
    """
    if way == "contiguous":
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    rows, keys = (torch.arange(x.shape[0]) for x in (query, key))
    own, other = (
        torch.searchsorted(x.to(torch.int64), at, right=True) for x, at in ((offsets, rows), (key_offsets, keys))
    )
    seen = own[:, None] == other[None, :]
    if causal:
        seen = seen & (keys[None, :] <= rows[:, None])
    bias = torch.where(seen, 0.0, -torch.inf).to(query.dtype)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    scores = q.squeeze(0) @ k.squeeze(0).transpose(-1, -2) * HEAD_DIM**-0.5 + bias
    if way == "matmul":
        out = scores.softmax(-1) @ v.squeeze(0)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).squeeze(0)
    out = out.transpose(0, 1)
    return out, scores.logsumexp(-1).transpose(0, 1)


def _varlen_ours(
    form: type[Form], options: dict[str, Any], lse: bool, carrier: Carrier | None, backend: str
) -> Subject:
    def function(batch: Batch, tensors: list[Tensor], layouts: list[SequenceLayout | None]) -> Batch:
        q, k, v = (batch[name][0] for name in "qkv")
        if carrier is not None:
            layouts = [carrier.layout(x) if y is None else y for x, y in zip(tensors, layouts, strict=True)]
        found = varlen_attention(q, k, v, *layouts, backend=backend, return_lse=lse, **options)
        return {"out": [found[0]], "lse": [found[1]]} if lse else {"out": [found]}

    return Subject(function)


def _varlen_stock(form: type[Form], causal: bool, lse: bool, carrier: Carrier | None, way: str) -> Subject:
    def function(batch: Batch, tensors: list[Tensor], layouts: list[SequenceLayout | None]) -> Batch:
        q, k, v = (batch[name][0] for name in "qkv")
        if carrier is not None:
            offsets = [carrier.offsets(x) for x in tensors]
            out, sums = stock_attention(q, k, v, offsets[0], offsets[-1], causal, way)
            return {"out": [out], "lse": [sums]} if lse else {"out": [out]}
        own, other = q.offsets(), k.offsets()
        rows = (form.rows([x], ()) for x in (q, k, v))
        out, sums = stock_attention(*rows, own, other, causal, way)
        outs = form.wrap(out, (), own)
        return {"out": outs, "lse": Jagged.wrap(sums, (), own)} if lse else {"out": outs}

    return Subject(function)


def _varlen_truth(
    kind: str, rows: dict[str, Tensor], lengths: tuple[Lengths, Lengths], _: dict[str, Tensor]
) -> dict[str, Tensor]:
    own, other = lengths
    other = other if kind == "cross" else own
    out, sums = oracle.attention(rows["q"], rows["k"], rows["v"], own, other, is_causal=kind != "cross")
    return {"out": out, "lse": sums} if kind == "lse" else {"out": out}


def varlen(
    label: str, form: type[Form], kind: str, carrier: Carrier | None = None, inside: bool = False, **fields: Any
) -> Entry:
    causal, lse = kind != "cross", kind == "lse"
    token, side = (HEADS, HEAD_DIM), 1 if kind == "cross" else 0
    outputs = {"out": form} | ({"lse": Form if form is Form else Jagged} if lse else {})
    return Entry(
        name=f"varlen_attention/{label}/{kind}",
        meaning=f"varlen {kind}",
        inputs={"q": (0, token), "k": (side, token), "v": (side, token)},
        outputs=outputs,
        form=form,
        ours=functools.partial(_varlen_ours, form, {"is_causal": True} if causal else {}, lse, carrier),
        stock=functools.partial(_varlen_stock, form, causal, lse, carrier),
        truth=functools.partial(_varlen_truth, kind),
        carrier=carrier or CARRIERS["from_offsets"],
        inside=inside,
        carries=carrier is not None,
        ways=("sdpa", "contiguous", "matmul"),
        **fields,
    )


# ---- VarlenMultiheadAttention


def scrambled(module: nn.Module) -> nn.Module:
    """With parameters that are nowhere constant: fresh biases are 0 and would hide mistakes."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module


@functools.cache
def stock_module(kind: str) -> nn.Module:
    """The module that both programs run a copy of, in float64."""
    torch.manual_seed(11)
    if kind == "attention":
        return scrambled(nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64))
    if kind in ("encoder", "layer"):
        layer = nn.TransformerEncoderLayer(EMBED, HEADS, 17, 0.0, batch_first=True, dtype=torch.float64)
        if kind == "layer":
            return scrambled(nn.ModuleDict({"layer": layer}))
        return scrambled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    import transformers

    sizes = {"vocab_size": 13, "hidden_size": 18, "num_attention_heads": 3, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 17, "max_position_embeddings": 19, "pad_token_id": 0}
    if kind == "bert":
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config: Any = transformers.BertConfig(**sizes, **dropout)
        model = transformers.BertModel._from_config(config, attn_implementation="eager", add_pooling_layer=False)
    else:
        config = transformers.LlamaConfig(**sizes, use_cache=False)
        model = transformers.LlamaModel._from_config(config, attn_implementation="eager")
    return scrambled(model.double())


def _call_attention(module: nn.Module, x: Any, **more: Any) -> Any:
    return module(x, x, x, need_weights=False, **more)[0]


def _module_ours(form: type[Form], carrier: Carrier | None, backend: str) -> Subject:
    module = VarlenMultiheadAttention.from_torch(copy.deepcopy(stock_module("attention")), backend=backend)

    def function(batch: Batch, tensors: list[Tensor], layouts: list[SequenceLayout | None]) -> Batch:
        parts = batch["x"]
        if form is Listed:
            return {"out": list(_call_attention(module, parts))}
        if form is Padded:
            return {"out": [_call_attention(module, parts[0], key_padding_mask=tensors[0])]}
        if carrier is None:
            return {"out": [_call_attention(module, parts[0])]}
        layout = carrier.layout(tensors[0]) if layouts[0] is None else layouts[0]
        return {"out": [_call_attention(module, parts[0], layout=layout)]}

    return Subject(function, module)


class ByHand(nn.MultiheadAttention):
    """nn.MultiheadAttention written as F.linear and scaled_dot_product_attention on (B, L, E): saves what comes in."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any = None, **more: Any) -> Any:
        q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, HEADS, -1)).unbind(2)
        bias = key_padding_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.where(bias, -torch.inf, 0.0).to(q.dtype)
        bias = None if bias is None else bias[:, None, None, :]
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


def _by_hand(module: nn.Module) -> None:
    for inner in module.modules():
        if type(inner) is nn.MultiheadAttention:
            inner.__class__ = ByHand


def _module_stock(form: type[Form], carrier: Carrier | None, way: str) -> Subject:
    module: Any = copy.deepcopy(stock_module("attention"))
    if way == "by hand":
        _by_hand(module)

    def function(batch: Batch, tensors: list[Tensor], layouts: list[SequenceLayout | None]) -> Batch:
        parts = batch["x"]
        if form is Padded:
            return {"out": [_call_attention(module, parts[0], key_padding_mask=tensors[0])]}
        lengths = tuple(len(x) for x in parts) if form is Listed else ()
        if form is Listed:
            offsets = torch.tensor(ends(lengths))
        else:
            offsets = parts[0].offsets() if carrier is None else carrier.offsets(tensors[0])
        x = form.rows(parts, lengths)
        q, k, v = F.linear(x, module.in_proj_weight, module.in_proj_bias).unflatten(-1, (3, HEADS, -1)).unbind(1)
        out = module.out_proj(stock_attention(q, k, v, offsets, offsets, False)[0].flatten(1))
        return {"out": form.wrap(out, lengths, offsets)}

    return Subject(function, module)


def _alone(
    kind: str, rows: dict[str, Tensor], lengths: tuple[Lengths, Lengths], parameters: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The stock module on one sequence after the other."""
    module, outs = stock_module(kind), []
    for begin, end in itertools.pairwise(ends(lengths[0])):
        x = rows["x"][begin:end].unsqueeze(0)
        if kind == "attention":
            found = torch.func.functional_call(module, parameters, (x, x, x), {"need_weights": False})[0]
        elif kind in ("bert", "llama"):
            found = torch.func.functional_call(module, parameters, (), {"inputs_embeds": x}).last_hidden_state
        elif kind == "layer":
            inner = {name.removeprefix("layer."): p for name, p in parameters.items()}
            found = torch.func.functional_call(module.layer, inner, (x,))
        else:
            found = torch.func.functional_call(module, parameters, (x,))
        outs.append(found.squeeze(0))
    return {"out": torch.cat(outs)}


def module(label: str, form: type[Form], carrier: Carrier | None = None, inside: bool = False, **fields: Any) -> Entry:
    own = form in (Jagged, Listed)  # lengths come with the input
    return Entry(
        name=f"VarlenMultiheadAttention/{label}",
        meaning="attention",
        inputs={"x": (0, (EMBED,))},
        outputs={"out": form},
        form=form,
        ours=functools.partial(_module_ours, form, None if own else carrier),
        stock=functools.partial(_module_stock, form, None if own else carrier),
        truth=functools.partial(_alone, "attention"),
        carrier=None if form is Listed else carrier or CARRIERS["from_offsets"],
        inside=inside,
        carries=not own,
        ways=("sdpa", "by hand") if form is Padded else ("sdpa",),
        **fields,
    )


# ---- patch


def _patched(kind: str, form: type[Form], backend: str) -> Subject:
    model: Any = copy.deepcopy(stock_module(kind))
    nta.patch(model)
    return _model(kind, form, model)


def _unpatched(kind: str, form: type[Form], way: str) -> Subject:
    model = copy.deepcopy(stock_module(kind))
    if way == "by hand":
        _by_hand(model)
    return _model(kind, form, model)


def _model(kind: str, form: type[Form], model: Any) -> Subject:
    def function(batch: Batch, tensors: list[Tensor], layouts: list[SequenceLayout | None]) -> Batch:
        x = batch["x"][0]
        if kind in ("bert", "llama"):
            return {"out": [model(inputs_embeds=x, attention_mask=tensors[0]).last_hidden_state]}
        call = model.layer if kind == "layer" else model
        return {"out": [call(x, src_key_padding_mask=tensors[0]) if form is Padded else call(x)]}

    return Subject(function, model)


def patched(kind: str, form: type[Form], carrier: Carrier | None = None, **fields: Any) -> Entry:
    label = {"encoder": "nn.TransformerEncoder", "layer": "nn.TransformerEncoderLayer"}.get(kind, kind)
    return Entry(
        name=f"patch/{label}/{'padded' if form is Padded else 'nested'}",
        meaning=kind,
        inputs={"x": (0, (EMBED if kind in ("encoder", "layer") else 18,))},
        outputs={"out": form},
        form=form,
        ours=functools.partial(_patched, kind, form),
        stock=functools.partial(_unpatched, kind, form),
        truth=functools.partial(_alone, kind),
        carrier=carrier or CARRIERS["from_offsets"],
        carries=carrier is not None,
        ways=("sdpa", "by hand") if form is Padded and kind in ("encoder", "layer") else ("sdpa",),
        backends=("auto",),
        tolerance=1e-4 if kind == "llama" else 1e-7,  # its rotary tables and norms are float32
        **fields,
    )


# ---- SequenceLayout


def _rearranged(which: str, form: type[Form], carrier: Carrier, backend: str) -> Subject:
    def function(batch: Batch, tensors: list[Tensor], layouts: list[SequenceLayout | None]) -> Batch:
        x = batch["x"][0]
        layout = carrier.layout(tensors[0]) if layouts[0] is None else layouts[0]
        return {"out": [getattr(layout, which)(x)]}

    return Subject(function)


def _rearranged_by_stock(which: str, form: type[Form], carrier: Carrier, way: str) -> Subject:
    def function(batch: Batch, tensors: list[Tensor], layouts: list[SequenceLayout | None]) -> Batch:
        x, offsets = batch["x"][0], carrier.offsets(tensors[0]).to(torch.int64)
        if which == "to_nested":
            return {"out": Jagged.wrap(x, (), offsets)}
        batch_size, rows = offsets.shape[0] - 1, int(offsets[-1])
        own = torch.searchsorted(offsets, torch.arange(rows), right=True) - 1
        at = torch.arange(rows) - offsets[own]
        if which == "pack":
            return {"out": [x[own, at]]}
        longest = int(offsets.diff().max()) if carrier is not CARRIERS["from_attention_mask"] else PADDED_LENGTH
        return {"out": [x.new_zeros(batch_size, longest, *x.shape[1:]).index_put((own, at), x)]}

    return Subject(function)


def _same_rows(
    which: str, rows: dict[str, Tensor], lengths: tuple[Lengths, Lengths], parameters: dict[str, Tensor]
) -> dict[str, Tensor]:
    return {"out": rows["x"] if which == "to_nested" else rows["x"] * 1.0}


def rearranged(which: str, carrier: str, inside: bool = False, **fields: Any) -> Entry:
    form = Padded if which == "pack" else Form
    gives_lengths = (CARRIERS | BOUNDED)[carrier]
    return Entry(
        name=f"SequenceLayout.{which}/{carrier}",
        meaning="rows in a view" if which == "to_nested" else "rows",
        inputs={"x": (0, (EMBED,))},
        outputs={"out": {"pack": Form, "pad": Padded, "to_nested": Jagged}[which]},
        form=form,
        ours=functools.partial(_rearranged, which, form, gives_lengths),
        stock=functools.partial(_rearranged_by_stock, which, form, gives_lengths),
        truth=functools.partial(_same_rows, which),
        carrier=gives_lengths,
        inside=inside,
        backends=("auto",),
        **fields,
    )


def _entries() -> list[Entry]:
    packed = [varlen("packed", Form, kind, CARRIERS["from_offsets"]) for kind in ("self", "cross", "lse")]
    nested = [varlen("nested", Jagged, kind) for kind in ("self", "cross", "lse")]
    transposed = [varlen("transposed", Transposed, kind) for kind in ("self", "cross", "lse")]
    constructors = [
        varlen(f"{name}, {'in' if inside else 'out'}side", Form, "self", carrier, inside, only_lengths=True)
        for (name, carrier), inside in itertools.product(CARRIERS.items(), (True, False))
    ]
    modules = [
        module("nested", Jagged),
        module("packed", Form, CARRIERS["from_offsets"]),
        module("packed, from_offsets inside", Form, CARRIERS["from_offsets"], inside=True),
        module("list", Listed),
        module("padded", Padded, MASKS["key_padding_mask"]),
    ]
    models = [
        patched("encoder", Padded, MASKS["key_padding_mask"]),
        patched("encoder", Jagged),
        patched("layer", Padded, MASKS["key_padding_mask"]),
        patched("layer", Jagged),
        patched("bert", Padded, MASKS["attention_mask"]),
        patched("llama", Padded, MASKS["attention_mask"]),
    ]
    layouts = [
        rearranged(which, carrier)
        for which, carrier in itertools.product(
            ("pack", "pad", "to_nested"),
            ("from_offsets", "from_offsets-bound", "from_offsets-row", "from_lengths", "from_attention_mask"),
        )
    ]
    layouts += [rearranged(which, carrier) for which, carrier in itertools.product(("pack", "pad"), BOUNDED)]
    return [*packed, *nested, *transposed, *constructors, *modules, *models, *layouts]


ENTRIES = {entry.name: entry for entry in _entries()}
