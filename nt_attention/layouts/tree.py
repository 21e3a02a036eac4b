"""`TreeLayout`: a packed batch in which sequences share prefixes, and each shared token is there once.

Dimensions: S segments, T rows of the tree, B sequences, R rows of all sequences, with a shared prefix in each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from ..compiler import check_readable, is_compiling
from ..torch_private import forward_ad_level, is_legacy_mapped, is_transformed
from .cache import Cache, copy_of, creating_cached_tensors, on_host, to_device
from .protocol import Layout
from .sequence import SequenceLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .cache import Ints

BLOCK = 128  # rows of the blocks in which kernels apply the mask of a tree: those of the tiles of FlashAttention-4


class TreeLayout(Layout):
    """Sequences that share prefixes, as a tree of segments. Tokens of a shared prefix are stored and computed once.

    A segment is a piece of a sequence. It continues its parent, and several segments may continue the same one. The
    segments are in depth-first order: each comes after its parent, and all that continue a segment follow it without a
    gap. A sequence is the path from a root to a segment that has no children. So a sequence that ends where others go
    on has an empty segment as its last one. `varlen_attention` takes a `TreeLayout` as `layout`, with `is_causal=True`.

    Args:
        lengths: (S,) integers, the number of tokens of each segment. 0 is allowed.
        parents: (S,) integers, the index of the segment that each segment continues; −1 for a root.
        device: the device of the layout. By default that of `lengths`, if it is a tensor, else the CPU.

    Attributes:
        total: T, the number of tokens of all segments.
        batch_size: B, the number of sequences, in the order of their last segments.
        max_seqlen: the length of the longest sequence.
        segments: the layout of the segments, as sequences of their own.
        paths: the layout of the keys of each segment: the tokens of all segments before it on its path, and its own.
        sequences: the layout of all sequences, R tokens.
        offsets, cu_seqlens, lengths, sequence_ids: those of the segments.
        parents: the index of the segment that each segment continues; −1 for a root.
        end: (T,) int64. A token at row i sees a token at row j exactly if `j <= i < end[j]`.

    Raises:
        TypeError: an argument is not a list or tensor of integers.
        ValueError: a length is negative, or the segments are not in depth-first order.

    Example:
        >>> import torch, nt_attention as nta
        >>> tree = nta.TreeLayout([3, 2, 1], [-1, 0, 0])  # one prompt of 3 tokens and two answers
        >>> tree.position_ids, tree.sequences.lengths
        (tensor([0, 1, 2, 3, 4, 3]), tensor([5, 4]))
        >>> tree.end
        tensor([6, 6, 6, 5, 5, 6])
        >>> query, key, value = torch.randn(3, tree.total, 4, 8).unbind()
        >>> nta.varlen_attention(query, key, value, tree, is_causal=True).shape
        torch.Size([6, 4, 8])
    """

    total: int
    batch_size: int
    max_seqlen: int
    min_seqlen: int
    sum_of_squares: int
    device: torch.device
    segments: SequenceLayout
    paths: SequenceLayout
    sequences: SequenceLayout
    keys: Copies

    def __init__(
        self, lengths: Sequence[int] | Tensor, parents: Sequence[int] | Tensor, device: torch.device | str | None = None
    ) -> None:
        if device is None:
            device = lengths.device if isinstance(lengths, Tensor) else "cpu"
        self._set(_integers("lengths", lengths), _integers("parents", parents), torch.device(device))

    def _set(self, lengths: Ints, parents: Ints, device: torch.device, order: Ints | None = None) -> None:
        """`order`: (B,) the sequences in the order in which they should be; by default that of their last segments."""
        before, ends = _walk(lengths, parents)
        leaves = np.setdiff1d(np.arange(len(lengths)), parents)
        leaves = leaves if order is None else leaves[order.argsort()]
        self._numbers = lengths, parents, order
        self.segments = SequenceLayout.from_lengths(torch.from_numpy(lengths), device=device)
        self.device = device = self.segments.offsets.device  # "cuda" is "cuda:0" now
        self.total = int(lengths.sum())
        self.paths = SequenceLayout.from_lengths(torch.from_numpy(before + lengths), device=device)
        self.sequences = SequenceLayout.from_lengths(torch.from_numpy((before + lengths)[leaves]), device=device)
        self.batch_size, self.max_seqlen = self.sequences.batch_size, self.sequences.max_seqlen
        self.min_seqlen, self.sum_of_squares = self.sequences.min_seqlen, self.sequences.sum_of_squares
        rows = _rows_of_paths(lengths, parents)
        self.keys = Copies.of(rows, self.total, device)
        self._tokens = Copies.of([rows[leaf] for leaf in leaves], self.total, device)
        self._first = to_device(_first_copies(lengths, parents, before, leaves), device)
        positions = np.arange(self.total) + (before + lengths - lengths.cumsum()).repeat(lengths)
        self._positions, self._ends = to_device(positions, device), ends
        self.cache = Cache(device)

    @classmethod
    def from_prefixes(
        cls, tokens: Tensor, layout: SequenceLayout, min_shared: int = 32, *, sort: bool = False
    ) -> TreeLayout:
        """Find the prefixes that sequences share with their neighbors. Copies the tokens to the host, which syncs once.

        Args:
            tokens: (T,) integers, packed. Sequences share a prefix if these are equal.
            layout: the sequences.
            min_shared: shorter prefixes are not shared.
            sort: first sort the sequences by their tokens. Else only neighbors share prefixes.

        Returns:
            The tree. Its `sequences` have the lengths of `layout`, in the same order. `collapse(tokens)` has the tokens
            of the tree.

        Raises:
            TypeError: `layout` is not a SequenceLayout.
            ValueError: `tokens` is not (T,), or `min_shared` is below 1.

        Example:
            >>> import torch, nt_attention as nta
            >>> tokens = torch.tensor([5, 6, 7, 5, 6, 8, 9])
            >>> tree = nta.TreeLayout.from_prefixes(tokens, nta.SequenceLayout.from_lengths([3, 4]), min_shared=2)
            >>> tree.segments.lengths, tree.collapse(tokens)
            (tensor([2, 1, 2]), tensor([5, 6, 7, 8, 9]))
        """
        if not isinstance(layout, SequenceLayout):
            raise TypeError(f"layout must be a SequenceLayout, got {type(layout).__name__}.")
        _check_tensor(tokens, "tokens")
        if tokens.dim() != 1 or tokens.is_floating_point():
            raise ValueError(f"tokens must be (T,) integers, got shape {tuple(tokens.shape)} and {tokens.dtype}.")
        if not isinstance(min_shared, int) or min_shared < 1:
            raise ValueError(f"min_shared must be an integer of at least 1, got {min_shared!r}.")
        layout.check_rows(tokens, "tokens")
        check_readable(tokens, "tokens")
        order, shared = _neighbors(tokens[: layout.total], layout, sort)
        lengths = np.diff(on_host(layout.host))[order]
        tree = cls.__new__(cls)
        tree._set(*_segments_of(lengths, np.where(shared < min_shared, 0, shared)), layout.device, order)
        return tree

    @property
    def parents(self) -> list[int]:
        """The index of the segment that each segment continues; −1 for a root."""
        numbers: list[int] = self._numbers[1].tolist()
        return numbers

    @property
    def position_ids(self) -> Tensor:
        """(T,) int64, the position of each token in its sequences, from 0."""
        return copy_of(self._positions)

    @property
    def end(self) -> Tensor:
        """(T,) int64, the row after the last token that sees a token."""
        return to_device(self._ends.repeat(self._numbers[0]), self.device)

    def expand(self, values: Tensor) -> Tensor:
        """The rows of all sequences: (T, …) → (R, …), as `sequences` has them.

        The gradient of a shared row is the sum over the sequences that have it.

        Example:
            >>> import torch, nt_attention as nta
            >>> nta.TreeLayout([2, 1, 1], [-1, 0, 0]).expand(torch.tensor([7, 8, 9, 5]))
            tensor([7, 8, 9, 7, 8, 5])
        """
        _check_tensor(values, "values")
        self.check_rows(values, "values")
        return self._tokens.expand(values)

    def collapse(self, values: Tensor) -> Tensor:
        """The rows of the tree: (R, …) → (T, …). Of a shared row, that of the first sequence, which gets its gradient.

        Example:
            >>> import torch, nt_attention as nta
            >>> nta.TreeLayout([2, 1, 1], [-1, 0, 0]).collapse(torch.tensor([7, 8, 9, 7, 8, 5]))
            tensor([7, 8, 9, 5])
        """
        _check_tensor(values, "values")
        self.sequences.check_rows(values, "values")
        return values.index_select(0, self._first)

    def expand_keys(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value (T, G, D), as `paths` has them."""
        expanded = self.keys.expand(key)
        return expanded, expanded if value is key else self.keys.expand(value)

    def levels(self) -> list[tuple[SequenceLayout, SequenceLayout]]:
        """The queries and keys of the calls, without a mask, in which each token sees the segments before its own.

        In call d these are the segments of depth d, from 0. Their rows are the keys of a sequence, and the rows of all
        that continue them its queries. Other rows are in sequences without keys, or without queries.
        """
        return self.cached("levels", self._levels)

    def _levels(self) -> list[tuple[SequenceLayout, SequenceLayout]]:
        lengths, parents, _ = self._numbers
        ends = lengths.cumsum()
        depths = np.zeros_like(lengths)
        for segment, parent in enumerate(parents):
            depths[segment] = depths[parent] + 1 if parent >= 0 else 0
        levels = []
        is_shared = (lengths > 0) & (self._ends > ends)
        for depth in np.unique(depths[is_shared]):
            queries, keys, row, key_row = list[int](), list[int](), 0, 0
            for segment in (is_shared & (depths == depth)).nonzero()[0]:
                end = int(ends[segment])
                begin, last = end - int(lengths[segment]), int(self._ends[segment])
                queries += [end - row, 0, last - end]
                keys += [0, begin - key_row, end - begin]
                row, key_row = last, end
            queries += [self.total - row, 0]
            keys += [0, self.total - key_row]
            lengths_of_both = np.array([queries, keys])
            lengths_of_both = lengths_of_both[:, lengths_of_both.any(0)]
            of_queries, of_keys = (SequenceLayout.of_numbers(x, self.device) for x in lengths_of_both)
            levels.append((of_queries, of_keys))
        return levels

    def blocks(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """(M, M) each: the blocks of `BLOCK` queries and keys in which some pairs are visible, and in which all are.

        The first has no blocks of the second.
        """
        return self.cached("blocks", self._blocks)

    def _blocks(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        first = np.arange(0, self.total, BLOCK)
        last = np.minimum(first + BLOCK, self.total) - 1
        ends = self._ends.repeat(self._numbers[0])
        latest, earliest = np.maximum.reduceat(ends, first), np.minimum.reduceat(ends, first)
        visible = (first <= last[:, None]) & (latest > first[:, None])
        full = (last <= first[:, None]) & (earliest > last[:, None])
        return visible & ~full, full

    @property
    def operator_offsets(self) -> Tensor:
        return self.segments.operator_offsets

    def with_lengths(self, name: str) -> NoReturn:
        raise ValueError(
            f"{name} can't have a TreeLayout: repeat the prefixes with tree.expand, and pass tree.sequences."
        )

    def extended(self, extra: int) -> NoReturn:
        self.with_lengths("a call that adds keys (add_bias_kv, add_zero_attn)")

    @property
    def device_offsets(self) -> Tensor:
        return self.segments.device_offsets

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """The segment of each of N rows, and its position from the root."""
        positions = torch.nn.functional.pad(self._positions, (0, max(0, rows - self.total)))
        return self.segments.locate_rows(rows)[0], positions[:rows]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (*self._numbers, self.device)

    def __repr__(self) -> str:
        sizes = f"{self.batch_size} sequences, {self.sequences.total} tokens in {self.total} rows"
        return f"TreeLayout({sizes}, {self.segments.batch_size} segments, on {self.device})"


class Copies:
    """Rows that are repeated: `index` (R,) names the row of T that each is a copy of.

    `order` (R,) sorts the copies by their row, and `counts` (T,) is the number of copies of each.
    """

    index: Tensor
    order: Tensor
    counts: Tensor

    def __init__(self, index: Tensor, order: Tensor, counts: Tensor) -> None:
        self.index, self.order, self.counts = index, order, counts

    @classmethod
    def of(cls, pieces: Sequence[Ints], total: int, device: torch.device) -> Copies:
        index = to_device(_join(pieces), device)
        with creating_cached_tensors():
            counts = torch.zeros(total, dtype=torch.int64, device=device).index_add_(0, index, torch.ones_like(index))
            return cls(index, index.argsort(stable=True), counts)

    def expand(self, values: Tensor) -> Tensor:
        plain = not (values.requires_grad and torch.is_grad_enabled())
        if plain or is_transformed() or forward_ad_level() >= 0:  # `_Expand` has neither vmap nor jvp
            return values.index_select(0, self.index)
        return cast(Tensor, _Expand.apply(values, self.index, self.order, self.counts))

    def add(self, copies: Tensor, rows: int) -> Tensor:
        """(R, …) → (rows, …), the sum of the copies of each row, and 0 after row T. Always in the same order."""
        if not is_compiling() and is_legacy_mapped(copies):  # a batch, for which what follows has no rule
            return copies.new_zeros(rows, *copies.shape[1:]).index_add(0, self.index, copies)
        ordered = copies.index_select(0, self.order)
        exact = ordered.float() if ordered.dtype in (torch.float16, torch.bfloat16) else ordered
        added = torch.segment_reduce(exact, "sum", lengths=self.counts, axis=0, unsafe=True).to(copies.dtype)
        return torch.cat([added, added.new_zeros(rows - len(self.counts), *copies.shape[1:])])


class _Expand(torch.autograd.Function):
    """Repeats rows. The gradient adds the copies in a fixed order, which `index_add_` does not do on a GPU."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, order: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(index, order, counts)
        ctx.rows = values.shape[0]
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Add.apply(grad, *ctx.saved_tensors, ctx.rows), None, None, None


class _Add(torch.autograd.Function):
    """The gradient of `_Expand`, whose own gradient is `_Expand`."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, index: Tensor, order: Tensor, counts: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(index, order, counts)
        return Copies(index, order, counts).add(grad, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Expand.apply(grad, *ctx.saved_tensors), None, None, None, None


def _restore(lengths: Ints, parents: Ints, order: Ints | None, device: torch.device) -> TreeLayout:
    """A tree from a pickle."""
    tree = TreeLayout.__new__(TreeLayout)
    tree._set(lengths, parents, device, order)
    return tree


def _join(pieces: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *pieces])


def _check_tensor(values: object, name: str) -> None:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(values).__name__}.")


def _integers(name: str, values: Sequence[int] | Tensor) -> Ints:
    if isinstance(values, Tensor):
        check_readable(values, name)
    numbers = on_host(values) if isinstance(values, Tensor) else np.array(values)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise TypeError(f"{name} must be one integer for each segment, got {values!r}.")
    return numbers.astype(np.int64)


def _walk(lengths: Ints, parents: Ints) -> tuple[Ints, Ints]:
    """The number of tokens before each segment on its path, and the row after the last one of its descendants."""
    if len(lengths) != len(parents):
        raise ValueError(
            f"there are {len(lengths)} lengths and {len(parents)} parents: pass one of each for a segment."
        )
    if (lengths < 0).any():
        raise ValueError(f"lengths[{int(lengths.argmin())}] is {lengths.min()}: lengths must be 0 or greater.")
    before, ends, path = np.zeros_like(lengths), lengths.cumsum(), list[int]()
    for segment, parent in enumerate(parents.tolist()):
        while path and path[-1] != parent:
            path.pop()
        if not path and parent != -1:
            raise ValueError(
                f"parents[{segment}] is {parent}, but segment {segment} must continue the segment before it or one on "
                "its path, or be a root (-1): pass the segments in depth-first order."
            )
        before[segment] = before[parent] + lengths[parent] if path else 0
        path.append(segment)
    for segment in range(len(parents) - 1, -1, -1):
        if parents[segment] >= 0:
            ends[parents[segment]] = max(ends[parents[segment]], ends[segment])
    return before, ends


def _rows_of_paths(lengths: Ints, parents: Ints) -> list[Ints]:
    """The rows of each segment and of all before it on its path."""
    rows: list[Ints] = []
    for parent, length, end in zip(parents, lengths, lengths.cumsum(), strict=True):
        last = np.arange(end - length, end)
        rows.append(last if parent < 0 else np.concatenate([rows[parent], last]))
    return rows


def _first_copies(lengths: Ints, parents: Ints, before: Ints, leaves: Ints) -> Ints:
    """(T,) of each row of the tree, its first copy among the rows of all sequences, which end with `leaves`."""
    first = np.full(len(lengths), len(leaves))
    first[leaves] = np.arange(len(leaves))
    for segment in range(len(parents) - 1, -1, -1):
        if parents[segment] >= 0:
            first[parents[segment]] = min(first[parents[segment]], first[segment])
    of_sequences = (before + lengths)[leaves]
    starts = of_sequences.cumsum() - of_sequences
    shift = starts[first] + before - (lengths.cumsum() - lengths) if len(lengths) else first
    return np.arange(lengths.sum()) + shift.repeat(lengths)


def _neighbors(tokens: Tensor, layout: SequenceLayout, sort: bool) -> tuple[Ints, Ints]:
    """(B,) the sequences in an order, and (B − 1,) how many first tokens each shares with the one after it. Syncs once.

    If sorted, each sequence is next to one with which it shares as much as with any other.
    """
    numbers, offsets = on_host(tokens), on_host(layout.host)
    rows = [numbers[a:b] for a, b in itertools.pairwise(offsets.tolist())]
    order = np.arange(len(rows))
    if sort:  # by the bytes of the tokens: any order does in which the first token that differs decides
        order = np.array(sorted(order, key=[row.tobytes() for row in rows].__getitem__), np.int64)
    shared = [_common(rows[a], rows[b]) for a, b in itertools.pairwise(order)]
    return order, np.array(shared, np.int64)


def _common(row: Ints, other: Ints) -> int:
    """How many first tokens two sequences share."""
    length = min(len(row), len(other))
    differs = row[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _segments_of(lengths: Ints, shared: Ints) -> tuple[Ints, Ints]:
    """Lengths and parents of the segments of sequences, if each shares `shared` (B − 1,) tokens with the next one."""
    sizes: list[int] = []
    parents: list[int] = []
    # Sequences from `first` to before `last`, which share their first `depth` tokens: those of segment `parent`.
    todo = [(0, len(lengths), 0, -1)]
    while todo:
        first, last, depth, parent = todo.pop()
        inside = shared[first : last - 1]
        cuts = [first, *(first + 1 + (inside <= depth).nonzero()[0]), last]
        groups = [(int(a), int(b)) for a, b in itertools.pairwise(cuts) if a < b]
        if len(groups) > 1:
            todo += [(a, b, depth, parent) for a, b in reversed(groups)]
        elif groups:
            reach = int(inside.min()) if last - first > 1 else int(lengths[first])
            sizes.append(reach - depth)
            parents.append(parent)
            if last - first > 1:
                todo.append((first, last, reach, len(sizes) - 1))
    return np.array(sizes, np.int64), np.array(parents, np.int64)
