"""The handle of a patch: it lists the changes to a model, counts the model's calls, and undoes the patch."""

from __future__ import annotations

import html
import re
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal

import torch
from torch import nn

from .._warnings import warn
from ..compiler import is_compiling, outside_of_graphs
from ..graphs.cache import CapturedCalls, CudaGraphs
from ..graphs.policy import HostWaits
from .forwards import CONTINUES_FROM_CACHE, WeakReference

OnFallback = Literal["warn", "raise", "silent"]
CheckMode = Literal["first", "always", "never"]


class _Counting(threading.local):
    """Whether calls of this thread are counted."""

    is_on = True


_counting = _Counting()


@contextmanager
def counting_nothing() -> Iterator[None]:
    """A context in which calls of this thread are not counted, and give no warnings."""
    before, _counting.is_on = _counting.is_on, False
    try:
        yield
    finally:
        _counting.is_on = before


class PrefixCounts:
    """What `shared_prefixes` saved.

    Attributes:
        calls: reason → the number of packed calls of base models that shared nothing for this reason. None counts those
            that did.
        tokens, computed: of these, the number of tokens in all rows, and of those that were computed.
        models: the number of base models that can share.
        left: why others can't.
    """

    def __init__(self) -> None:
        self.calls: Counter[str | None] = Counter()
        self.tokens: int = 0
        self.computed: int = 0
        self.models: int = 0
        self.left: list[str] = []

    @outside_of_graphs
    def add(self, reason: str | None, tokens: int = 0, computed: int = 0) -> None:
        """Count a call."""
        if not _counting.is_on:
            return
        with _lock:
            self.calls[reason] += 1
            self.tokens += tokens
            self.computed += computed

    def add_model(self, model: nn.Module, reason: str | None) -> bool:
        """Note a model, and why it can't share. Returns whether it can."""
        self.models += reason is None
        if reason is not None:
            self.left.append(f"{type(model).__name__}: {reason.rstrip('.')}.")
        return reason is None

    def __str__(self) -> str:
        counts = [f"{count} {'shared' if why is None else f'did not: {why}'}" for why, count in self.calls.items()]
        share = f"{self.computed} of {self.tokens} tokens were computed"
        return "\n  ".join([f"shared prefixes: {share}", *counts])


class Counts:
    """How the calls of a model ran. All of it is known to the host, so counting never waits for a device.

    Attributes:
        calls: reason → the number of calls that did not run packed for this reason. The key None counts packed calls.
        positions, tokens: of the packed calls, the number of positions in the padded batches, and of those that are
            tokens. The others were not computed. Calls of an `nn.MultiheadAttention` by itself are not in them.
        compared: the number of calls that were compared with the padded run.
        largest_difference: the largest relative difference between them.
        notes: text → the number of packed calls about which it says something: in what their result differs from that
            of the padded run, or what computes padding outside of them.
        waits: in how many calls of a Hugging Face model the GPU waits for the host, measured in some of the first
            ones: `waits.waits` of `waits.calls`.

    Example:
        >>> import torch, nt_attention as nta
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
        >>> handle = nta.patch(model)
        >>> out = model(torch.full((2, 3), 7), attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))
        >>> handle.counts
        1 call ran packed: 5 tokens in 6 positions, pad ratio 1.20 (17% skipped)
        first batch compared with the padded run: largest difference ...
        >>> round(handle.counts.pad_ratio, 2)
        1.2
    """

    __module__ = "nt_attention"

    def __init__(self) -> None:
        self.calls: Counter[str | None] = Counter()
        self.positions: int = 0
        self.tokens: int = 0
        self.compared: int = 0
        self.largest_difference: float = 0.0
        self.notes: Counter[str] = Counter()
        self.waits = HostWaits()
        self._warned: set[str] = set()

    @property
    def pad_ratio(self) -> float:
        """The number of positions for each token; 1 before the first packed call."""
        return self.positions / self.tokens if self.tokens else 1.0

    def add(self, reason: str | None, positions: int = 0, tokens: int = 0, warns: bool = False) -> bool:
        """Count a call. Returns whether to warn: if `warns`, for the first call with a reason."""
        if not _counting.is_on:
            return False
        with nullcontext() if is_compiling() else _lock:  # a graph can't hold a lock
            self.calls[reason] += 1
            self.positions += positions
            self.tokens += tokens
            is_new = warns and reason not in self._warned
            if is_new:
                self._warned.add(str(reason))
        return is_new

    @outside_of_graphs
    def note(self, text: str) -> bool:
        """Count a packed call with a note. Returns whether it is the first one with this note."""
        if not _counting.is_on:
            return False
        with _lock:
            self.notes[text] += 1
            return self.notes[text] == 1

    def compare(self, difference: float) -> None:
        """Count a call that was compared with the padded run, and differs from it by rounding."""
        with _lock:
            self.compared += 1
            self.largest_difference = max(self.largest_difference, difference)

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """How calls ran, a line for each reason, and one for each note."""
        with _lock:
            calls, notes = dict(self.calls), dict(self.notes)
        sizes = f": {self.tokens} tokens in {self.positions} positions" if self.positions else ""
        sizes += f", pad ratio {self.pad_ratio:.2f} ({1 - 1 / self.pad_ratio:.0%} skipped)" if sizes else ""
        how = {why: f"did not run packed: {why}" for why in calls} | {None: f"ran packed{sizes}"}
        counted = [(n, how[why]) for why, n in calls.items()] + [(n, text) for text, n in notes.items()]
        lines = [f"{n} call{'s' if n > 1 else ''} {text}" for n, text in counted] or ["no calls yet"]
        if self.compared:
            batches = f"first {self.compared} batches" if self.compared > 1 else "first batch"
            lines.append(f"{batches} compared with the padded run: largest difference {self.largest_difference:.0g}")
        return lines if self.waits.advice is None else [*lines, self.waits.advice]


class NotPackedWarning(UserWarning):
    """A call of a patched model ran padded, or its result differs from that of the padded run. The message says why.

    Example:
        >>> import warnings
        >>> import nt_attention as nta
        >>> warnings.filterwarnings("ignore", category=nta.NotPackedWarning)
    """

    __module__ = "nt_attention"  # its public place


class NotPackedError(ValueError):
    """A call can't run packed, and the model was patched with `on_fallback="raise"`. The message says why.

    Example:
        >>> import torch, nt_attention as nta
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> handle = nta.patch(encoder, on_fallback="raise")
        >>> padding = torch.tensor([[False, False, False], [False, True, True]])
        >>> encoder(torch.randn(2, 3, 16), mask=torch.eye(3, dtype=torch.bool), src_key_padding_mask=padding)
        Traceback (most recent call last):
        nt_attention.NotPackedError: this call can't run packed: mask is neither None nor causal. ...
    """

    __module__ = "nt_attention"


# Held while a handle counts a call. Handles share it, because they are copied and pickled with their models.
_lock = threading.Lock()


_PUBLIC = ("active", "calls", "changed", "counts", "graphs", "layers", "left", "mesh", "remove")


class PatchHandle:
    """The result of `patch`: what was changed in a model, how its calls ran, and `remove()` to undo the patch.

    Print it to see all of this. As a context manager it calls `remove()` at the end of the `with` block.

    Attributes:
        changed: module name → what was changed. The model itself has the name "model".
        layers: module name → the attention layer that `nt_attention` now runs.
        left: module name → why the module was not changed.
        calls: reason → the number of calls that did not run packed for this reason. The key None counts packed calls.
        counts: these calls, and how much padding was not computed, as `Counts`.
        active: False after `remove()`.
        graphs: the CUDA graphs, or None without `cuda_graphs`. `graphs.calls` counts the calls that could run as
            graphs: those that did under None, and others under the reason. `len(graphs)` is the number of graphs,
            `graphs.captured` the number of captures, and `graphs.memory` the bytes of their inputs and outputs.
        mesh: the mesh over whose ranks the tokens are divided, or None.
        prefixes: what shared prefixes saved, a `PrefixCounts`; None without `shared_prefixes`.

    Example:
        >>> import torch, nt_attention as nta
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> handle = nta.patch(encoder)
        >>> padding = torch.tensor([[False, False, False], [False, True, True]])
        >>> out = encoder(torch.randn(2, 3, 16), src_key_padding_mask=padding)
        >>> print(handle)
        nt_attention.patch of TransformerEncoder:
          model: nn.TransformerEncoder of 1 layer, packed at the entry, padded at the exit
          1 call ran packed: 4 tokens in 6 positions, pad ratio 1.50 (33% skipped)
        >>> handle.remove()
    """

    __module__ = "nt_attention"

    def __init__(
        self,
        model: str,
        on_fallback: OnFallback = "warn",
        cuda_graphs: CudaGraphs = False,
        mesh: Any = None,
        need_weights: bool = True,
        shared_prefixes: bool = False,
        counts: Counts | None = None,
        check: CheckMode = "first",
    ) -> None:
        self.changed: dict[str, str] = {}
        self.layers: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.counts: Counts = counts or Counts()
        self.active: bool = True
        self.is_automatic = False  # whether `patch_all` has made it
        self.on_fallback = on_fallback
        self.graphs: CapturedCalls | None = CapturedCalls.of_option(cuda_graphs)
        self.mesh = mesh
        self.need_weights = need_weights
        self.check = check
        self.prefixes: PrefixCounts | None = PrefixCounts() if shared_prefixes else None
        # Only used by patch(): each replaced module → its replacement, and the names of its parameters before.
        self.replacements: dict[nn.Module, tuple[Any, dict[str, bool]]] = {}
        self.made_for: tuple[WeakReference, tuple[Any, ...]] | None = None  # the model, and the options of `patch`
        self._model = model
        self._undo: list[tuple[WeakReference, Callable[..., None], tuple[Any, ...]]] = []

    @property
    def calls(self) -> Counter[str | None]:
        """The number of calls by the reason why they did not run packed."""
        return self.counts.calls

    def remove(self) -> None:
        """Restore the original model. Later calls do nothing.

        Example:
            >>> import torch, nt_attention as nta
            >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            >>> encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
            >>> handle = nta.patch(encoder)
            >>> handle.remove()
            >>> type(encoder.layers[0].self_attn).__name__
            'MultiheadAttention'
        """
        self.active = False
        self.replacements.clear()
        if self.graphs is not None:
            self.graphs.clear()
        while self._undo:
            reference, undo, args = self._undo.pop()
            if (changed := reference()) is not None:
                undo(changed, *args)

    def __dir__(self) -> list[str]:
        """What users read. The other methods are for the code that changes models and runs their calls."""
        return [*_PUBLIC, *[name for name in super().__dir__() if name.startswith("__")]]

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def _title(self) -> str:
        return f"nt_attention.patch of {self._model}{'' if self.active else ' (removed)'}"

    def __repr__(self) -> str:
        lines = [f"{self._title}:"]
        lines += [f"  {name}: {description}" for name, description in self.changed.items()]
        lines += [f"    {names}: {description}" for names, description in _in_ranges(self.layers)]
        lines += [f"  {name}: not changed, {reason}" for name, reason in self.left.items()]
        return "\n".join(wrap_lines([*lines, *(f"  {line}" for line in self._lines_of_calls())]))

    def _lines_of_calls(self) -> list[str]:
        """How calls ran, with CUDA graphs and shared prefixes."""
        lines = self.counts.lines()
        if self.graphs is not None:
            megabytes = self.graphs.memory / 2**20
            lines.append(f"CUDA graphs: {len(self.graphs)}, inputs and outputs {megabytes:.1f} MiB")
            lines += [
                f"  {count} call{'s' if count > 1 else ''} {'ran as a graph' if why is None else f'did not: {why}'}"
                for why, count in self.graphs.counted().items()
            ]
        return lines if self.prefixes is None else [*lines, *str(self.prefixes).splitlines()]

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        left = [(name, f"not changed, {reason}") for name, reason in self.left.items()]
        modules = [*self.changed.items(), *_in_ranges(self.layers), *left]
        cell = '<td style="text-align: left">'
        rows = [f"{cell}{html.escape(name)}</td>{cell}{html.escape(text)}</td>" for name, text in modules]
        rows += [f"{cell}calls</td>{cell}{html.escape(line)}</td>" for line in self._lines_of_calls()]
        return f"<b>{html.escape(self._title)}</b><table><tr>{'</tr><tr>'.join(rows)}</tr></table>"

    def is_patch_of(self, model: nn.Module, options: tuple[Any, ...] | None = None) -> bool:
        """Whether `patch` has made this handle for this model, with these options or any."""
        if not self.active or self.made_for is None or self.made_for[0]() is not model:
            return False
        return options is None or self.made_for[1] == options

    # The methods of `forwards.Handle`. A name may begin with a dot, because the name of a child is f"{parent}.{path}".

    def change(self, name: str, description: str) -> None:
        """Describe what was changed in a module."""
        self.changed[name.removeprefix(".") or "model"] = description

    def change_layers(self, name: str, layers: dict[str, str]) -> None:
        """Describe the attention layers of a module. The keys of `layers` are paths in the module."""
        self.layers.update({f"{name}.{path}".removeprefix("."): kind for path, kind in layers.items()})

    def skip(self, name: str, reason: str) -> None:
        """Say why a module was not changed."""
        self.left[name.removeprefix(".") or "model"] = reason

    def on_remove(self, changed: Any, undo: Callable[..., None], *args: Any) -> None:
        """Make `remove` call `undo(changed, *args)`, if `changed` still exists, in reverse order of these calls.

        `changed` is a module or this handle. Modules refer to the handle, so `args` must refer to neither: the gc alone
        would free the model.
        """
        self._undo.append((WeakReference(changed), undo, args))

    def count(self, reason: str | None, positions: int = 0, tokens: int = 0) -> None:
        """Count a call: with the reason why it did not run packed, or with None and its sizes if it did."""
        self.counts.add(reason, positions, tokens)

    def fall_back(self, reason: str, what: str = "this call", advice: str = "") -> None:
        """Count a call that falls back to the padded forward. Then do what `on_fallback` says.

        Without gradients, a call that continues from a cache is generation, which nobody expects to be packed. So it
        gives no warning.

        Args:
            reason: why it falls back.
            what: the part that falls back, which begins the message.
            advice: a sentence that ends the message.

        Raises:
            NotPackedError: the model was patched with `on_fallback="raise"`.
        """
        is_quiet = reason == CONTINUES_FROM_CACHE and not torch.is_grad_enabled()
        warns = self.counts.add(reason, warns=self.on_fallback == "warn" and not is_quiet)
        if self.on_fallback == "raise":
            hint = 'With on_fallback="warn" it runs padded, as before the patch.'
            raise NotPackedError(f"{what} can't run packed: {reason}. {hint} {advice}".rstrip())
        if warns:
            try:
                warn(f"{what} runs padded, as before the patch: {reason}. {advice}".rstrip(), NotPackedWarning)
            except NotPackedWarning:  # the filters make warnings errors
                if not self.is_automatic:
                    raise

    def note(self, text: str) -> None:
        """Say something about a packed call in `print(handle)`."""
        self.counts.note(text)

    def advise(self) -> None:
        """Say once that the GPU waits for the host, if it does."""
        advice = self.counts.waits.news()
        if advice is not None and self.on_fallback != "silent":
            with suppress(UserWarning):  # if the filters make warnings errors: advice does not stop a program
                warn(advice)

    def differ(self, difference: str) -> None:
        """Count a packed call whose result is not that of the padded run. Then do what `on_fallback` says.

        Raises:
            NotPackedError: the model was patched with `on_fallback="raise"`.
        """
        if self.on_fallback == "raise":
            hint = 'With on_fallback="warn" it runs packed.'
            raise NotPackedError(f"a packed call would differ from the padded one: {difference}. {hint}")
        if self.counts.note(f"gave another result than a padded one: {difference}") and self.on_fallback == "warn":
            warn(f"the result differs from that of the padded run: {difference}.", NotPackedWarning)


def wrap_lines(lines: list[str]) -> list[str]:
    """Lines of at most 100 characters. The rest of a longer one is indented by 4 more."""
    wrapped = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        wrapper = textwrap.TextWrapper(100, indent, f"{indent}    ", break_on_hyphens=False, break_long_words=False)
        wrapped += wrapper.wrap(line.lstrip())
    return wrapped


def _in_ranges(layers: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Combine layers whose names only differ in numbers, and their descriptions."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, description in layers.items():
        groups.setdefault((re.sub(r"\d+", "…", name), description), []).append(name)
    for (_, description), names in groups.items():
        yield (f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0]), description
