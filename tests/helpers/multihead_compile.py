"""Ragged batches in the three forms that a graph takes, and residual layers to compile over them.

The forms: jagged NestedTensors; packed rows and a SequenceLayout; packed rows and offsets, from which the graph makes
the layout. Dimensions: T rows, B sequences, E embed dim, H heads.
"""

import contextlib
import dataclasses
import itertools

import pytest
import torch
from parameters import with_random_parameters
from torch import nn

from nt_attention import SequenceLayout, VarlenMultiheadAttention
from nt_attention.modules.rotary import Rotary

EMBED, HEADS = 36, 6
LENGTHS, KEY_LENGTHS = [5, 1, 17, 3], [2, 7, 13, 4]
FORMS = ["nested", "layout", "offsets"]
slow_backend = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
MODES = {"train": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
POSITIONS = {"rotary": Rotary(dims=4), "alibi": True, "window_size": (5, 3), "num_kv_heads": 2, "qk_norm": "rms"}
ADDED = {"add_bias_kv": True, "add_zero_attn": True, "bias": False, "sinks": True, "rotary": Rotary()}


def make(dtype=torch.float64, **options):
    return with_random_parameters(VarlenMultiheadAttention(EMBED, HEADS, batch_first=True, dtype=dtype, **options))


def offsets_of(lengths, dtype=torch.int64):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def in_form(form, rows, lengths):
    """The batch as two arguments: the tokens, and a layout, offsets or, for NestedTensors, None."""
    if form == "layout":
        return rows, SequenceLayout.from_lengths(lengths)
    if form == "offsets":
        return rows, offsets_of(lengths)
    extremes = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}
    return torch.nested.nested_tensor_from_jagged(rows, offsets_of(lengths), **extremes), None


def as_layout(place):
    return SequenceLayout.from_offsets(place) if isinstance(place, torch.Tensor) else place


class Residual(nn.Module):
    """``x + attention(x, …)``, for each form."""

    def __init__(self, attention, causal=False):
        super().__init__()
        self.attention, self.causal = attention, causal

    def forward(self, x, place=None, memory=None, memory_place=None):
        keys = x if memory is None else memory
        layouts = {"layout": as_layout(place), "key_layout": as_layout(memory_place)}
        return x + self.attention(x, keys, keys, is_causal=self.causal, **layouts)[0]


class Stack(nn.ModuleList):
    """Residual layers over the same memory, if any."""

    def forward(self, x, *more):
        for layer in self:
            x = layer(x, *more)
        return x


@dataclasses.dataclass
class Batch:
    """Rows (T, E) of a ragged batch, and of its keys; the same in each call."""

    lengths: list[int]
    key_lengths: list[int] | None = None
    dtype: torch.dtype = torch.float64
    past: int = 0  # rows past the end

    def __post_init__(self):
        both = (self.lengths, self.key_lengths or [])
        self.rows, self.keys = (torch.randn(sum(x) + self.past, EMBED, dtype=self.dtype) for x in both)

    def results(self, function, form, parameters=(), mode="train"):
        """The output's rows and, in training, the gradients of all rows and parameters."""
        parameters, train = list(parameters), mode == "train"
        with MODES[mode]():
            rows, keys = (x.clone().requires_grad_(train) for x in (self.rows, self.keys))
            leaves = [rows] if self.key_lengths is None else [rows, keys]
            arguments = in_form(form, rows, self.lengths)
            if self.key_lengths is not None:
                arguments += in_form(form, keys, self.key_lengths)
            out = function(*arguments)
            if form == "nested":
                out = (out + arguments[0]).values()
            return [out, *(gradients(out, [*leaves, *parameters]) if train else ())]


def gradients(out, leaves):
    """With ``backward``, because reentrant checkpoints need it."""
    for leaf in leaves:
        leaf.grad = None
    weighted_sum(out).backward()
    return [leaf.grad for leaf in leaves]


def weighted_sum(out):
    """A sum in which every element has a different weight."""
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


def close(got, want, tolerance=1e-10):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, **{"fullgraph": True, **options})
