"""The host time of a call with gradients on this GPU, on a batch that the device finishes quickly.

    python benchmarks/host_time.py [--save FILE]
    python benchmarks/host_time.py --models [--save FILE]   a patched BERT and the padded one, also on a CPU

For each backend: a direct call of its kernel, ``varlen_attention`` on packed tensors, and on NestedTensors that are
leaves or the results of a projection; then NestedTensor SDPA. A second table has forward and backward, also of
PyTorch's own ``varlen_attn``, and of an autograd function without any attention, which copies tensors only: its time is
PyTorch's own. It wraps values as PyTorch's operators do, or by its public function. "One thread" is under
``torch.autograd.set_multithreading_enabled(False)``, or else a second thread runs backwards. Times are in µs, medians
over bursts of calls in one run.

With ``--models``, models of 2 and of 6 layers run by turns, padded (sdpa) and patched (``packing="always"``), with a
new mask in each call. From both follows what a layer takes, and what a forward takes once. Each call begins when the
device is idle, and ends when the host has launched everything. On a CPU the attention kernel is replaced by a function
that returns empty tensors.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from by_turns import host_us, show, synchronize
from torch import Tensor
from torch.nested import nested_tensor_from_jagged
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import BertConfig, BertModel

import nt_attention as nta
from nt_attention.functional import plan
from nt_attention.kernels.registry import BACKENDS

LENGTHS = [30, 7, 64, 27]
CALLS = 100
HEADS = 4
FEW_AND_MANY = (2, 6)  # layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--models", action="store_true", help="a patched BERT, for each forward and for each layer")
    options = parser.parse_args()
    if options.models:
        show(models(), options.save)
        return
    layout = nta.SequenceLayout.from_lengths(LENGTHS, device="cuda")
    us = functools.partial(host_us, calls=CALLS)
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: µs of host time, forward with gradients",
        "",
        "| backend | kernel alone | packed | overhead | NestedTensor | overhead | from a projection | overhead |",
        "|---|---|---|---|---|---|---|---|",
    ]
    both = ["", "Forward and backward:", "", "| backend | packed | packed, one thread | NestedTensor | difference |"]
    both.append("|---|---|---|---|---|")
    for name, backend in BACKENDS.items():
        dtype = torch.float32 if name == "torch_efficient" else torch.bfloat16
        if backend.missing() or backend.backward is None or backend.device_type == "cpu":
            continue
        packed = [torch.randn(layout.total, 4, 64, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
        plain = [x.detach() for x in packed]
        nested = [layout.to_nested(x).requires_grad_() for x in plain]
        projected = [layout.to_nested(x) for x in packed]
        call = plan(*packed, layout, backend=name)
        attend = functools.partial(nta.varlen_attention, backend=name)
        raw = us(functools.partial(backend.forward, *plain, call))
        times = [us(functools.partial(attend, *packed, layout)), us(functools.partial(attend, *nested))]
        times.append(us(functools.partial(attend, *projected)))
        cells = " | ".join(f"{t:.0f} | {t - raw:.0f}" for t in times)
        lines.append(f"| {name} | {raw:.0f} | {cells} |")
        a, one_thread = _steps(_with_backward(attend, packed, layout))
        b, _ = _steps(_with_backward(attend, nested))
        both.append(f"| {name} | {a:.0f} | {one_thread:.0f} | {b:.0f} | {b - a:.0f} |")
    offsets, length = layout.cu_seqlens, layout.max_seqlen
    packed = [torch.randn(layout.total, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    stock = _with_backward(varlen_attn, packed, offsets, offsets, length, length)
    a, one_thread = _steps(stock)
    lines += [*both, f"| PyTorch's varlen_attn | {a:.0f} | {one_thread:.0f} | – | – |"]
    nested = [layout.to_nested(x.detach()).requires_grad_() for x in packed]
    a, one_thread = _steps(_with_backward(_NoAttention.apply, packed, lambda values, offsets: values))
    for name, wrap in (("as operators do", _wrap_directly), ("by the public function", nested_tensor_from_jagged)):
        b, _ = _steps(_with_backward(_NoAttention.apply, nested, wrap))
        lines.append(f"| no attention, wrapped {name} | {a:.0f} | {one_thread:.0f} | {b:.0f} | {b - a:.0f} |")
    lines += ["", f"NestedTensor SDPA: {host_us(_nested_sdpa(layout), 20):.0f} µs."]
    show(lines, options.save)


def _with_backward(attend: Callable[..., Any], inputs: list[Tensor], *arguments: Any) -> Callable[[], object]:
    grad = attend(*inputs, *arguments).detach()
    return lambda: torch.autograd.grad(attend(*inputs, *arguments), inputs, grad)


def _steps(step: Callable[[], object]) -> tuple[float, float]:
    """The host time of a forward and backward, and that with the backward in the calling thread."""
    times = host_us(step, 20, 25)  # more calls would fill the device's queue
    with torch.autograd.set_multithreading_enabled(False):
        return times, host_us(step, 20, 25)


class _NoAttention(torch.autograd.Function):
    """Returns the first input, and its gradient for each of three inputs. They are packed, or all NestedTensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, *_, ctx.wrap = inputs
        with torch._C.DisableTorchFunctionSubclass():
            ctx.offsets = query._offsets if query.is_nested else None
            return ctx.wrap(_values(query).clone(), ctx.offsets)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        with torch._C.DisableTorchFunctionSubclass():
            values = _values(grad)
            return (*(ctx.wrap(values.clone(), ctx.offsets) for _ in range(3)), None)


def _values(x: Any) -> Tensor:
    return x._values if x.is_nested else x


def _wrap_directly(values: Tensor, offsets: Tensor) -> Tensor:
    return NestedTensor(values, offsets)


def _nested_sdpa(layout: nta.SequenceLayout) -> Callable[[], torch.Tensor]:
    leaves = [
        torch.nested.nested_tensor_from_jagged(
            torch.randn(layout.total, 4, 64, device="cuda", dtype=torch.bfloat16), layout.offsets
        ).requires_grad_()
        for _ in range(3)
    ]
    return lambda: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves))


def models() -> list[str]:
    """The table of ``--models``. Backwards run in the calling thread, and in a second one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = 32 if device == "cuda" else 8  # of a head
    sizes = {"hidden_size": width * HEADS, "num_attention_heads": HEADS, "intermediate_size": 32, "vocab_size": 100}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ids = torch.randint(1, 100, (len(LENGTHS), max(LENGTHS)), device=device)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long().to(device)
    calls: dict[tuple[str, int], Callable[[bool], list[float]]] = {}
    for layers in FEW_AND_MANY:
        for name in ("padded", "patched"):
            model = BertModel(BertConfig(num_hidden_layers=layers, **sizes, **no_dropout), add_pooling_layer=False)
            model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)
            if name == "patched":
                nta.patch(model, packing="always")
            calls[name, layers] = functools.partial(_host_times, model, ids, mask)
            for with_grad in (True, False) * 3:  # the first batches are compared with padded ones
                calls[name, layers](with_grad)
    if device == "cpu":
        BACKENDS["cpu"] = dataclasses.replace(BACKENDS["cpu"], forward=_empty_forward, backward=_empty_backward)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    lines = [f"{where}, torch {torch.__version__}: µs of host time, patched / padded", ""]
    lines.append("| | 2 layers | 6 layers | ratio | a layer | once |")
    lines.append("|---|---|---|---|---|---|")
    for threads in ("one thread", "two threads"):
        with torch.autograd.set_multithreading_enabled(threads == "two threads"):
            lines += [f"| {what}, {threads} | {row}" for what, row in _rows_of_models(calls).items()]
    return lines


def _rows_of_models(calls: dict[tuple[str, int], Callable[[bool], list[float]]]) -> dict[str, str]:
    times: dict[tuple[str, int], list[list[float]]] = {key: [] for key in calls}
    for _ in range(CALLS + 10):
        for key, call in calls.items():
            times[key].append(call(False) + call(True))
    rows = {}
    few, many = FEW_AND_MANY
    for at, what in enumerate(("forward, no gradients", "forward", "backward")):
        us = {key: statistics.median([1e6 * each[at] for each in found[10:]]) for key, found in times.items()}
        layer, once = {}, {}
        for name in ("patched", "padded"):
            layer[name] = (us[name, many] - us[name, few]) / (many - few)
            once[name] = us[name, few] - few * layer[name]
        pairs = [{name: us[name, layers] for name in layer} for layers in FEW_AND_MANY]
        cells = [f"{pair['patched']:.0f} / {pair['padded']:.0f}" for pair in (*pairs, layer, once)]
        cells.insert(2, f"{us['patched', many] / us['padded', many]:.2f}")
        rows[what] = " | ".join(cells) + " |"
    return rows


def _host_times(model: BertModel, ids: Tensor, mask: Tensor, with_grad: bool) -> list[float]:
    """The host time of a forward in s and, with gradients, that of the backward."""
    times = []
    clock = time.perf_counter if ids.is_cuda else time.thread_time
    batch = {"input_ids": ids, "attention_mask": mask.clone()}
    synchronize()
    began = clock()
    with torch.set_grad_enabled(with_grad):
        out = model(**batch).last_hidden_state
    times.append(clock() - began)
    if with_grad:
        total = out.sum()
        synchronize()
        began = clock()
        total.backward()
        times.append(clock() - began)
        model.zero_grad()
    return times


def _empty_forward(query: Tensor, key: Tensor, value: Tensor, call: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[1], query.shape[0]).T


def _empty_backward(saved: object, query: Tensor, key: Tensor, value: Tensor, call: object) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


if __name__ == "__main__":
    main()
