"""`estimate`: whether `patch` would make a model faster on some batches, measured on this machine."""

from __future__ import annotations

import inspect
import operator
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from ._patch import patch
from .graphs.module_state import Snapshot
from .patching.forwards import CALL_REMOVE_FIRST, active_handles

__all__ = ["Estimate", "estimate"]

MOST_BATCHES = 1000  # that are read
_MEASURED = 5  # of these
_ROUNDS = 10  # of calls with each, before the patch, as many after it, and with the patch
_NO_GAIN = 1.05  # a smaller speedup may be noise
_DRIFT = 0.2  # more than this between two measurements of the same calls is noise of other programs
_PADDING_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")  # True or −inf at padding

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Estimate:
    """What `patch` would change for some batches. `print` shows it as a short report.

    Attributes:
        model: the class of the model.
        training: whether forward and backward were measured, and not the forward alone.
        batches: the number of batches that were read.
        positions, tokens: the number of positions in these batches, and of those that are tokens.
        sorted_positions: the number of positions if all rows were sorted by length, with as many rows in each batch.
        measured: the number of batches that were measured.
        padded_ms, packed_ms: the mean wall-clock time of these batches, in ms, without and with the patch. None if
            `patch` refuses the model.
        drift: the time without the patch after it, over that before it. Far from 1 if other programs run meanwhile.
        padded_bytes, packed_bytes: the peak of memory on a CUDA device, with the model. None on other devices.
        padded_because: reason → the share of calls that ran padded for it, with the patch. Empty if all ran packed.
        refused: why `patch` refuses the model, or None.
    """

    __module__ = "nt_attention"

    model: str
    training: bool
    batches: int
    positions: int
    tokens: int
    sorted_positions: int
    measured: int = 0
    padded_ms: float | None = None
    packed_ms: float | None = None
    drift: float = 1.0
    padded_bytes: int | None = None
    packed_bytes: int | None = None
    padded_because: dict[str, float] = field(default_factory=dict)
    refused: str | None = None

    @property
    def pad_ratio(self) -> float:
        """The number of positions for each token."""
        return self.positions / self.tokens

    @property
    def speedup(self) -> float | None:
        """The time without the patch over the time with it. None if `patch` refuses the model."""
        return None if self.padded_ms is None or self.packed_ms is None else self.padded_ms / self.packed_ms

    def __str__(self) -> str:
        how, s = "forward and backward" if self.training else "forward", "es" if self.batches > 1 else ""
        lines = [
            f"nt_attention.estimate of {self.model}, {how}:",
            f"{self.batches} batch{s}: {self.tokens} tokens in {self.positions} positions, "
            f"pad ratio {self.pad_ratio:.2f}",
        ]
        if self.sorted_positions < self.positions:
            is_alike = self.sorted_positions - self.tokens < 0.1 * (self.positions - self.tokens)
            end = ", so this alone saves about as much" if is_alike else ""
            lines.append(f"if rows were sorted by length: pad ratio {self.sorted_positions / self.tokens:.2f}{end}")
        lines += [f"{share:.0%} of the calls ran padded: {why}" for why, share in self.padded_because.items()]
        if self.refused is not None:
            lines.append(f"not measured: {self.refused}")
        if self.speedup is not None:
            times = f"{self.padded_ms:.1f} ms a batch padded, {self.packed_ms:.1f} ms packed"
            lines.append(f"measured with {self.measured} of them: {times}")
            if self.padded_bytes is not None and self.packed_bytes is not None:
                gib = self.padded_bytes / 2**30, self.packed_bytes / 2**30
                lines.append(f"peak memory: {gib[0]:.2f} GiB padded, {gib[1]:.2f} GiB packed")
            gains = self.speedup >= _NO_GAIN and sum(self.padded_because.values()) < 1
            lines.append(f"expected speedup: {self.speedup:.2f}{'' if gains else ', so patch would not help'}")
            if abs(self.drift - 1) > _DRIFT:
                lines.append(f"measure again: the padded calls took {self.drift:.2f} × as long at the end as before")
        return "\n  ".join(lines)


def estimate(
    model: nn.Module,
    batches: Iterable[Batch | Sequence[int]],
    *,
    training: bool | None = None,
    seconds: float = 20.0,
    **options: Any,
) -> Estimate:
    """Measure whether `patch` would make a model faster on these batches, on the device of the model.

    Reads the first 1,000 batches, and counts their tokens and positions. Runs up to five of them, drawn at random,
    without the patch, with it, and without it again, and takes the median time of each. The patch is then removed. The
    mode of the model, its buffers and gradients, and the random numbers of torch are as before.

    Args:
        model: a module that `patch` takes, and that is not patched.
        batches: the padded batches of the model: a `DataLoader`, or any iterable of dicts of its arguments with an
            `attention_mask` (B, L), or a `src_key_padding_mask` (B, L) for modules of `torch.nn`. Or lists of lengths,
            one for each batch: for a model with `input_ids`, which are drawn at random.
        training: True measures forward and backward in training mode, False the forward in evaluation mode; by
            default, in the mode of the model. The backward is that of the first output with a gradient: the loss, if
            the batches have labels.
        seconds: about how long to measure. At least one batch runs five times.
        options: of `patch`, such as `shared_prefixes=True`.

    Returns:
        An `Estimate`. If `patch` refuses the model, nothing is measured, and `refused` has the reason.

    Raises:
        TypeError: the model is not a module.
        ValueError: the model is patched. Or there are no batches, or one has no padding mask. Or a length is more than
            the model takes, or it does not take `input_ids` alone. Or no output has a gradient, in training. Or
            `seconds` is not greater than 0.

    Example:
        >>> import nt_attention as nta
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> print(nta.estimate(BertModel(config).eval(), [[100, 3, 8, 5], [40, 20, 2, 30]]))
        nt_attention.estimate of BertModel, forward:
          2 batches: 208 tokens in 560 positions, pad ratio 2.69
          if rows were sorted by length: pad ratio 2.08
          measured with 2 of them: ... ms a batch padded, ... ms packed
          expected speedup: ...
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    if list(active_handles(model)):
        raise ValueError(f"estimate compares with the model as it is without a patch: {CALL_REMOVE_FIRST}")
    if not seconds > 0:
        raise ValueError(f"seconds must be greater than 0, got {seconds!r}.")
    training, options = model.training if training is None else training, {"on_fallback": "silent", **options}
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    before = Snapshot(model)
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        try:
            counts, sample = _read(model, batches)
            try:
                patch(model, **options).remove()
            except ValueError as error:
                return Estimate(type(model).__name__, training, *counts, refused=str(error))
            if training != model.training:
                model.train(training)
            sample = [{k: x.to(device) if isinstance(x, Tensor) else x for k, x in batch.items()} for batch in sample]
            measured = _measure(model, sample, training, seconds, device, options)
            return Estimate(type(model).__name__, training, *counts, **measured)
        finally:
            with torch.no_grad():
                before.restore()


def _read(model: nn.Module, batches: Iterable[Any]) -> tuple[tuple[int, int, int, int], list[Batch]]:
    """The numbers of batches, positions, tokens and sorted positions; and a sample of the batches."""
    rows: list[list[tuple[int, ...]]] = []  # for each batch, the lengths of each row under each mask
    positions, sample, draw = 0, list[Batch](), random.Random(0)
    for each in islice(batches, MOST_BATCHES):
        batch = each if isinstance(each, Mapping) else _batch_of_lengths(model, each)
        masks = _token_masks(batch)
        rows.append(list(zip(*[mask.sum(1).tolist() for mask in masks], strict=True)))
        positions += sum(mask.numel() for mask in masks)
        if len(sample) < _MEASURED:
            sample.append(batch)
        elif (place := draw.randrange(len(rows))) < _MEASURED:
            sample[place] = batch
    ordered = sorted((row for batch in rows for row in batch), reverse=True)
    if not any(map(any, ordered)):
        raise ValueError("batches has no tokens: pass at least one batch. An iterator is empty after its first use.")
    left = iter(ordered)  # each batch gets as many rows as it has, and is as long as its longest
    longest = [list(map(max, zip(*islice(left, len(batch)), strict=True))) for batch in rows]
    sorted_positions = sum(len(batch) * sum(sizes) for batch, sizes in zip(rows, longest, strict=True))
    return (len(rows), positions, sum(map(sum, ordered)), sorted_positions), sample


def _token_masks(batch: Batch) -> list[Tensor]:
    """The masks of a batch, (B, L), True at tokens. An encoder-decoder has two."""
    masks = {name: x for name, x in batch.items() if isinstance(x, Tensor) and x.dim() == 2}
    tokens = [x != 0 for name, x in masks.items() if name.endswith("attention_mask")]
    tokens += [x == 0 for name, x in masks.items() if name in _PADDING_MASKS]
    if not tokens:
        raise ValueError(f"each batch must have an attention_mask (B, L), got one with {', '.join(batch)}.")
    return tokens


def _batch_of_lengths(model: nn.Module, lengths: Any) -> Batch:
    """A padded batch with rows of these lengths, of random tokens."""
    try:
        numbers = list(map(operator.index, lengths))
    except TypeError:
        numbers = []
    if min(numbers, default=0) < 1:
        needed = "a dict of the model's arguments, or a list of lengths of 1 or more"
        raise ValueError(f"each batch must be {needed}, got {type(lengths).__name__} {str(lengths)[:100]}.")
    config: Any = getattr(model, "config", None)
    text: Any = config and config.get_text_config()
    takes_ids = "input_ids" in inspect.signature(model.forward).parameters and hasattr(text, "vocab_size")
    if not takes_ids or config.is_encoder_decoder:
        only = "lists of lengths are for Hugging Face models that take input_ids alone"
        raise ValueError(f"{only}, not for {type(model).__name__}: pass its padded batches as dicts.")
    most, pad = getattr(text, "max_position_embeddings", None), getattr(config, "pad_token_id", None)
    if most is not None and max(numbers) > most:
        raise ValueError(f"the model has {most} positions, got a length of {max(numbers)}: pass what it gets, cut.")
    mask = torch.arange(max(numbers)) < torch.tensor(numbers)[:, None]
    ids = torch.randint(text.vocab_size, mask.shape)
    ids[ids == pad] = 1 if pad == 0 else 0  # some models count positions by this id
    return {"input_ids": ids.masked_fill(~mask, pad or 0), "attention_mask": mask.long()}


def _measure(
    model: nn.Module, batches: list[Batch], training: bool, seconds: float, device: torch.device, options: Any
) -> dict[str, Any]:
    """The measured fields of an `Estimate`."""

    def time_rounds(seconds: float) -> tuple[list[list[float]], int | None]:
        """The times of rounds of all batches, in ms, and the peak of memory on a CUDA device."""
        rounds: list[list[float]] = []
        end = time.perf_counter() + seconds
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        while not rounds or (len(rounds) < _ROUNDS and time.perf_counter() <= end):
            rounds.append([_time_step(model, batch, training, device) for batch in measured])
        return rounds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None

    end = time.perf_counter() + seconds / 4
    measured = []
    for batch in batches:
        _time_step(model, batch, training, device)
        measured.append(batch)
        if time.perf_counter() > end:
            break
    before, padded_bytes = time_rounds(seconds / 8)
    with patch(model, **options) as handle:
        for batch in measured:
            _time_step(model, batch, training, device)
        packed, packed_bytes = time_rounds(seconds / 4)
    calls = handle.calls
    after, _ = time_rounds(seconds / 8)
    return {
        "measured": len(measured),
        "padded_ms": _typical(before + after),
        "packed_ms": _typical(packed),
        "drift": _typical(after) / _typical(before),
        "padded_bytes": padded_bytes,
        "packed_bytes": packed_bytes,
        "padded_because": {why: n / calls.total() for why, n in calls.items() if why is not None},
    }


def _typical(rounds: list[list[float]]) -> float:
    """The mean of the median time of each batch."""
    return mean(map(median, zip(*rounds, strict=True)))


def _time_step(model: nn.Module, batch: Batch, training: bool, device: torch.device) -> float:
    """The ms of the forward, or of forward and backward. Gradients are returned and freed, so no `grad` changes."""
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else lambda _: None
    synchronize(device)
    began = time.perf_counter()
    with torch.set_grad_enabled(training):
        out = model(**batch)
    if training:
        outputs = [out] if isinstance(out, Tensor) else list(out.values() if isinstance(out, Mapping) else out)
        differentiable = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
        if not differentiable:
            raise ValueError(f"no output of {type(model).__name__} has a gradient: pass training=False.")
        parameters = [x for x in model.parameters() if x.requires_grad]
        torch.autograd.grad(differentiable[0].mean(), parameters, allow_unused=True)
    del out
    synchronize(device)
    return 1e3 * (time.perf_counter() - began)
