"""PyTorch's stacks and layers with padded batches, and what each sequence gives by itself."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from parameters import with_random_parameters
from torch import nn

EMBED, HEADS = 20, 2
LENGTHS = {"source": [13, 7, 3, 17, 1], "target": [4, 1, 9, 6, 2]}

# Warnings that PyTorch's own layers give.
IGNORED_WARNINGS = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
]
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


class Loop(nn.Module):
    """Layers that are called one after another."""

    def __init__(self, layer, **options):
        super().__init__()
        self.layers = nn.ModuleList(layer(**options) for _ in range(3))

    def forward(self, x, *memory, **masks):
        for layer in self.layers:
            x = layer(x, *memory, **masks)
        return x


def _layer(layer, **options):
    return layer(EMBED, HEADS, 26, **{"dropout": 0.0, "batch_first": True, "dtype": torch.float64, **options})


def _stack(stack, layer, layers=2, **options):
    norm = nn.LayerNorm(EMBED, dtype=torch.float64)
    return stack(
        _layer(layer, **options), layers, norm, **({"enable_nested_tensor": False} if "En" in repr(stack) else {})
    )


def _transformer(layers=2, **options):
    return nn.Transformer(
        EMBED, HEADS, layers, layers, 26, **{"dropout": 0.0, "batch_first": True, "dtype": torch.float64, **options}
    )


class Kind(NamedTuple):
    """A kind of model.

    Attributes:
        make: makes the model, with options of its layers.
        inputs: the sides in the order of arguments. Outputs have the lengths of the last one, or of the first in a
            decoder.
        paddings: the argument with the padding of each side.
        mask, hint: the arguments with the mask of self-attention, and with whether it is causal.
        packed: how many packed calls are counted.
    """

    make: Any
    inputs: tuple[str, ...]
    paddings: dict[str, str]
    mask: str
    hint: str
    packed: int

    @property
    def side(self):
        """The side of the outputs."""
        return "target" if "target" in self.inputs else "source"


_ENCODER, _DECODER = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
_OF_DECODER = (
    ("target", "source"),
    {"tgt_key_padding_mask": "target", "memory_key_padding_mask": "source"},
    "tgt_mask",
    "tgt_is_causal",
)
_OF_LAYER = ("source",), {"src_key_padding_mask": "source"}, "src_mask", "is_causal"
KINDS = {
    "encoder": Kind(functools.partial(_stack, nn.TransformerEncoder, _ENCODER), *_OF_LAYER[:2], "mask", "is_causal", 1),
    "decoder": Kind(functools.partial(_stack, nn.TransformerDecoder, _DECODER), *_OF_DECODER, 1),
    "transformer": Kind(
        _transformer, ("source", "target"), {"src_key_padding_mask": "source", **_OF_DECODER[1]}, *_OF_DECODER[2:], 1
    ),
    "encoder layer": Kind(functools.partial(_layer, _ENCODER), *_OF_LAYER, 1),
    "encoder layers": Kind(functools.partial(Loop, functools.partial(_layer, _ENCODER)), *_OF_LAYER, 3),
    "decoder layers": Kind(functools.partial(Loop, functools.partial(_layer, _DECODER)), *_OF_DECODER, 3),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, **options):
    return with_random_parameters(KINDS[kind].make(**options))


def padding_of(lengths, side="right"):
    padding = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    if side == "mixed":  # every other row has its padding on the left
        padding[::2] = padding[::2].flip(1)
    return padding


PADDINGS = {side: padding_of(lengths) for side, lengths in LENGTHS.items()}


def additive(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


def causal_mask(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


# Masks of self-attention by its length, whether they come with a hint, and whether attention is causal.
MASKS = {
    "none": (None, False, False),
    "bool": (causal_mask, False, True),
    "float": (lambda length: additive(causal_mask(length)), False, True),
    "hint": (causal_mask, True, True),
    "empty": (lambda length: torch.zeros(length, length, dtype=torch.bool), False, False),
}


def draw(paddings=PADDINGS):
    return {side: torch.randn(*padding.shape, EMBED, dtype=torch.float64) for side, padding in paddings.items()}


def masks_of(kind, paddings=PADDINGS, mask="none"):
    """The arguments with padding masks and with the mask of self-attention."""
    made, has_hint, _ = MASKS[mask]
    options = {name: paddings[side] for name, side in KINDS[kind].paddings.items()}
    if made is not None:
        options[KINDS[kind].mask] = made(paddings[KINDS[kind].side].shape[-1])
    return options | ({KINDS[kind].hint: True} if has_hint else {})


def run(kind, model, rows, **options):
    """Call a model with batches (B, L, E) or sequences (L, E), whatever its order, and return such."""
    inputs = [rows[side] for side in KINDS[kind].inputs]
    attention = next(module for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    if attention.batch_first or inputs[0].dim() == 2:
        return model(*inputs, **options)
    return model(*(x.transpose(0, 1) for x in inputs), **options).transpose(0, 1)


def tokens_and_gradients(kind, model, rows, paddings=PADDINGS, **options):
    """The real tokens of the output, and the gradients of the tokens of all inputs and of the parameters."""
    leaves = {side: rows[side].clone().requires_grad_() for side in KINDS[kind].inputs}
    tokens = run(kind, model, leaves, **options)[~paddings[KINDS[kind].side]]
    grads = torch.autograd.grad(tokens.square().sum(), [*leaves.values(), *model.parameters()])
    of_inputs = [x[~paddings[side]] for x, side in zip(grads, leaves, strict=False)]
    return [tokens, *of_inputs, *grads[len(leaves) :]]


def alone(kind, model, rows, paddings=PADDINGS, causal=False):
    """The same of each sequence by itself, without padding, concatenated or summed up."""
    found = []
    for b in range(len(paddings["source"])):
        one = {side: x[b][~paddings[side][b]] for side, x in rows.items()}
        everywhere = {side: torch.zeros(len(x), dtype=torch.bool) for side, x in one.items()}
        mask = {KINDS[kind].mask: causal_mask(len(one[KINDS[kind].side])) if causal else None}
        found.append(tokens_and_gradients(kind, model, one, everywhere, **mask))
    number = 1 + len(KINDS[kind].inputs)
    tokens, others = [x[:number] for x in found], [x[number:] for x in found]
    return [*map(torch.cat, zip(*tokens, strict=True)), *map(sum, zip(*others, strict=True))]


def nested_of(rows, paddings=PADDINGS, layout=torch.jagged):
    parts = {side: [x[~p] for x, p in zip(rows[side], paddings[side], strict=True)] for side in rows}
    return {side: torch.nested.as_nested_tensor(x, layout=layout) for side, x in parts.items()}


def band(side, width=2):
    length = max(LENGTHS[side])
    return (torch.arange(length)[:, None] - torch.arange(length)).abs() > width
