"""What ``bench`` and ``check`` run on the same tensors: our backends, padded SDPA and NestedTensor SDPA.

Dimensions: B sequences, L and S the longest of queries and of keys, T query tokens, S key tokens, H query heads and G
key heads, D and Dv the head dims of keys and of values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..functional import explain, plan, varlen_attention
from ..kernels import cost_model
from ..kernels.call_size import CallSize
from ..kernels.masks import Window, distances
from ..layouts.known import SequenceLayout
from .workloads import Workload

PADDED, NESTED = "padded SDPA", "NestedTensor SDPA"
MAX_PADDING = 16  # padded tokens for each real one
MAX_SEQUENCES = 16384  # on a GPU, SDPA's backward in torch 2.11 reads invalid memory with 32768 padded sequences


class NotSupportedError(Exception):
    """An implementation can't run a call. The message says why."""


@dataclass(frozen=True)
class CaseInputs:
    """The arguments of ``varlen_attention``, and the gradient of its output."""

    layout: Any
    key_layout: Any  # the same object for self-attention
    qkv: tuple[Tensor, Tensor, Tensor]  # (T, H, D), (S, G, D) and (S, G, Dv)
    grad: Tensor  # (T, H, Dv)
    options: dict[str, Any]

    @classmethod
    def random(cls, workload: Workload, device: torch.device, dtype: torch.dtype, past_end: int = 0) -> CaseInputs:
        """Standard normal tensors with a fixed seed, and ``past_end`` rows of NaN after the last sequence."""
        layout = SequenceLayout.from_lengths(workload.lengths, device=device)
        keys = workload.key_lengths
        key_layout = layout if keys is None else SequenceLayout.from_lengths(keys, device=device)
        generator = torch.Generator(device).manual_seed(7)

        def normal(rows: int, heads: int, width: int) -> Tensor:
            x = torch.randn(rows, heads, width, generator=generator, device=device).to(dtype)
            return torch.cat([x, x.new_full((past_end, heads, width), torch.nan)])

        heads, kv_heads, width = workload.heads, workload.kv_heads, workload.value_dim or workload.head_dim
        query = normal(layout.total, heads, workload.head_dim)
        key, value = (normal(key_layout.total, kv_heads, dim) for dim in (workload.head_dim, width))
        return cls(layout, key_layout, (query, key, value), normal(layout.total, heads, width), workload.options)

    @property
    def window(self) -> Window:
        """The window of visible keys, causality included."""
        return Window.of(self.options.get("window_size", (-1, -1)), self.options.get("is_causal", False))

    def counts(self, backward: bool) -> tuple[float, ...]:
        """The numbers in which the expected time of the call is linear."""
        q, k, v = (x.detach().requires_grad_(backward) for x in self.qkv)
        options = {name: x for name, x in self.options.items() if name != "sinks"}
        call = plan(q, k, v, self.layout, self.key_layout, backend="reference", **options).call
        return cost_model.counts(call.spec, CallSize.of(call))

    def cast(self, dtype: torch.dtype) -> CaseInputs:
        """In another dtype, without NaN, and without the options that do not change the result."""
        options = {name: x for name, x in self.options.items() if name not in ("deterministic", "batch_invariant")}
        if relative := options.get("relative"):
            options["relative"] = relative.with_tensors([x.to(dtype).nan_to_num() for x in relative.tensors])
        q, k, v, grad = (x.to(dtype).nan_to_num() for x in (*self.qkv, self.grad))
        return dataclasses.replace(self, qkv=(q, k, v), grad=grad, options=options)

    def select(self, sequences: Sequence[int]) -> tuple[Tensor, CaseInputs]:
        """The indices of the rows of some sequences, and self-attention on these sequences."""
        starts, device = self.layout.host_offsets.tolist(), self.grad.device
        parts = [torch.arange(starts[b], starts[b + 1], device=device) for b in sequences]
        rows, layout = torch.cat(parts), SequenceLayout.from_lengths(list(map(len, parts)), device=device)
        q, k, v, grad = (x[rows] for x in (*self.qkv, self.grad))
        return rows, CaseInputs(layout, layout, (q, k, v), grad, self.options)


@dataclass(frozen=True)
class PreparedCall:
    """An implementation on some inputs, with tensors in its own form."""

    attention: Callable[[], Tensor]  # the timed part
    leaves: tuple[Tensor, ...]  # query, key, value and relative biases, which require gradients
    grad: Tensor  # of the output
    pack: Callable[[Tensor], Tensor] = lambda x: x  # from its own form to packed rows
    repeats: int = 1  # how often key heads are repeated in the leaves
    chosen: str | None = None  # the backend that runs
    biases: tuple[str, ...] = ()  # the names of the relative biases

    @torch.no_grad()
    def forward(self) -> Tensor:
        return self.attention()

    def both(self) -> tuple[Tensor, ...]:
        """out and the gradients of the leaves."""
        out = self.attention()
        return out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)

    def results(self, backward: bool) -> dict[str, Tensor]:
        """Packed rows: out and, with ``backward``, the gradients dq, dk and dv, and those of relative biases."""
        if not backward:
            return {"out": self.pack(self.forward())}
        out, dq, dk, dv, *of_biases = map(self.pack, self.both())
        dk, dv = (x.unflatten(1, (-1, self.repeats)).sum(2) for x in (dk, dv))
        return {"out": out, "dq": dq, "dk": dk, "dv": dv} | dict(zip(self.biases, of_biases, strict=True))


# (inputs, whether gradients are needed) → the call; raises NotSupportedError
Implementation = Callable[[CaseInputs, bool], PreparedCall]


def implementations(backends: Iterable[str]) -> dict[str, Implementation]:
    """The implementations by name: these backends ("auto" included), then those of torch."""
    return {**{name: functools.partial(backend, name) for name in backends}, PADDED: padded, NESTED: nested}


def backend(name: str, inputs: CaseInputs, backward: bool) -> PreparedCall:
    """``varlen_attention(backend=name)``, if it can run the inputs."""
    q, k, v = (x.detach().requires_grad_(backward) for x in inputs.qkv)
    explanation = explain(q, k, v, inputs.layout, inputs.key_layout, backend=name, **inputs.options)
    if explanation.chosen is None:
        reasons = explanation.reasons if name == "auto" else {name: explanation.reasons[name]}
        raise NotSupportedError(" ".join(f"{other}: {' '.join(each)}" for other, each in reasons.items() if each))
    return dataclasses.replace(attention(name, inputs), chosen=explanation.chosen)


def attention(name: str, inputs: CaseInputs) -> PreparedCall:
    """``varlen_attention(backend=name)``."""
    options, relative = dict(inputs.options), inputs.options.get("relative")
    given = (*inputs.qkv, *(relative.tensors if relative else ()))
    leaves = q, k, v, *biases = tuple(x.detach().clone().requires_grad_() for x in given)
    if relative:
        options["relative"] = relative.with_tensors(biases)
    attend = functools.partial(varlen_attention, q, k, v, inputs.layout, inputs.key_layout, backend=name, **options)
    return PreparedCall(attend, leaves, inputs.grad.nan_to_num(), biases=relative.terms if relative else ())


def padded(inputs: CaseInputs, backward: bool) -> PreparedCall:
    """SDPA on padded query (B, H, L, D), key (B, G, L, D) and value (B, G, L, Dv), with a mask if one is needed.

    It is exact without a mask if nothing is padded, or if it is causal, since padding follows the real tokens. Key
    heads are repeated with a mask, as transformers does it, and passed with ``enable_gqa`` without one.
    """
    layout, window, (q, k, _) = inputs.layout, inputs.window, inputs.qkv
    tokens, group = layout.batch_size * layout.max_seqlen, q.shape[1] // k.shape[1]
    if inputs.options.get("softcap"):
        raise NotSupportedError("SDPA has no softcap.")
    if tokens > MAX_PADDING * layout.total:
        raise NotSupportedError(f"{tokens} padded tokens for {layout.total} real ones.")
    if inputs.grad.is_cuda and layout.batch_size > MAX_SEQUENCES:
        raise NotSupportedError(f"SDPA reads invalid memory with {layout.batch_size} padded sequences.")
    has_mask = not (window.is_causal or (window.is_open and layout.min_seqlen == layout.max_seqlen))
    mask = padding_mask(inputs) if has_mask else None
    q, k, v, grad = (layout.pad(x.detach()).transpose(1, 2) for x in (*inputs.qkv, inputs.grad))
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    options: dict[str, Any] = {"attn_mask": mask, "scale": inputs.options.get("scale")}
    options |= {"is_causal": not has_mask and window.is_causal, "enable_gqa": not has_mask and group > 1}

    def attend() -> Tensor:
        key, value = (x.repeat_interleave(group, 1) if has_mask and group > 1 else x for x in (k, v))
        return F.scaled_dot_product_attention(q, key, value, **options)

    return PreparedCall(attend, leaves, grad, lambda x: layout.pack(x.transpose(1, 2)))


def padding_mask(inputs: CaseInputs) -> Tensor:
    """The visible keys: (B, 1, 1, L), or (B, 1, L, L) with a window. Padded queries see all real keys."""
    longest, device = inputs.layout.max_seqlen, inputs.grad.device
    real = torch.arange(longest, device=device) < inputs.layout.lengths[:, None, None]
    visible = inputs.window.visible(distances(longest, longest, 0, device))
    return (real if visible is None else real & (visible | ~real.mT)).unsqueeze(1)


def nested(inputs: CaseInputs, backward: bool) -> PreparedCall:
    """SDPA on three NestedTensors (B, j, H, D). Key heads are repeated before the timed part, in favor of SDPA."""
    layout, is_causal, (q, k, v) = inputs.layout, inputs.window.is_causal, inputs.qkv
    if inputs.options.get("softcap") or not (inputs.window.is_open or is_causal):
        raise NotSupportedError("SDPA on NestedTensors has no softcap and no window.")
    if is_causal and not (inputs.grad.is_cuda and layout.min_seqlen):
        raise NotSupportedError("SDPA on NestedTensors has no causal mask on a CPU or for sequences without tokens.")

    group = q.shape[1] // k.shape[1]
    plain = q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    leaves = [layout.to_nested(x).detach().requires_grad_() for x in plain]

    def attend() -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in leaves)
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal).transpose(1, 2)

    grad = layout.to_nested(inputs.grad).detach()
    return PreparedCall(attend, tuple(leaves), grad, lambda x: x.values(), repeats=group)
