"""`PagedLayout`: the rows of a pool in which the keys of each sequence are stored.

Dimensions: B sequences, P pages of a sequence, S keys of all sequences, N rows of a pool, G key heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..compiler import can_be_read
from .sequence import SequenceLayout

_INDICES = (torch.int32, torch.int64)


class PagedLayout:
    """Where the keys of each sequence are stored in a pool, such as a cache for generation.

    Key j of sequence b is row `first_row[b, j // page_size] + j % page_size` of the pool, in 64 bits. `first_row` is
    `block_table * page_size`, or the start of a slot. Sequences may share pages. `varlen_attention` takes a
    `PagedLayout` in place of `key_layout`, and the pools in place of key and value.

    The host never reads tensors on a GPU. So lengths and tables may be changed in place between calls, and between
    replays of a CUDA graph: each call uses the values of that moment. A length that is negative or exceeds
    `max_seqlen` or the pages of the sequence, or a page outside of the pool, raises an error on a CPU. On a GPU, the
    results of that sequence are NaN. For a wrong page, only those of queries that would read it are sure to be NaN. The
    others are right or NaN. Entries of the table after the pages that a sequence uses are not read. Backends that
    gather the keys read the lengths on the host.

    Pools must be contiguous in their last dimension. A `PagedLayout` is for inference: `varlen_attention` raises an
    error if query, key or value needs a gradient. Under autocast, only the query is cast, to the dtype of the pools.

    Args:
        block_table: (B, P) int32 or int64, the pages of each sequence, in their order. A page is an index of the pool's
            first dimension.
        lengths: (B,) int32 or int64, the number of keys of each sequence, on the same device.
        page_size: the number of rows of a page.
        max_seqlen: an upper bound of the lengths. The default is P · page_size, and so is the largest bound: a larger
            one becomes this number. A smaller bound saves memory.

    Attributes:
        table: the block table, the starts of slots, or the indices that were passed.
        page_size: the number of rows of a page; `max_seqlen` for slots.
        max_seqlen: the bound of the lengths.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes or devices do not fit, or a bound is invalid.

    Example:
        >>> import torch, nt_attention as nta
        >>> pool = torch.randn(8, 4, 2, 16)  # 8 pages of 4 rows, 2 heads
        >>> table = torch.tensor([[5, 1], [2, 0]])
        >>> paged = nta.PagedLayout(table, torch.tensor([6, 3]), page_size=4)
        >>> paged.max_seqlen
        8
        >>> layout = nta.SequenceLayout.from_lengths([1, 1])  # one new query for each sequence
        >>> query = torch.randn(2, 4, 16)
        >>> nta.varlen_attention(query, pool, pool, layout, paged, is_causal=True).shape
        torch.Size([2, 4, 16])
    """

    knows_lengths = False
    min_seqlen = 0
    padded_length = None

    def __init__(self, block_table: Tensor, lengths: Tensor, page_size: int, max_seqlen: int | None = None) -> None:
        _check_indices("block_table", block_table, 2, "(B, P), the pages of each sequence")
        _check_indices("lengths", lengths, 1, "(B,), the number of keys of each sequence")
        _check_count("page_size", page_size, 1)
        self._set(block_table, None, lengths, page_size, block_table.shape[1] * page_size, max_seqlen)

    @classmethod
    def from_slots(cls, starts: Tensor, lengths: Tensor, max_seqlen: int) -> PagedLayout:
        """Create the layout of keys that are in one piece for each sequence, as with torch's `seqused_k`.

        Args:
            starts: (B,) int32 or int64, the row of the pool at which each sequence begins.
            lengths: (B,) int32 or int64, the number of keys of each sequence.
            max_seqlen: an upper bound of the lengths.

        Returns:
            The layout. Pools are (N, G, D).

        Raises:
            ValueError: as for `PagedLayout`.

        Example:
            >>> import torch, nt_attention as nta
            >>> paged = nta.PagedLayout.from_slots(torch.tensor([0, 100]), torch.tensor([60, 3]), max_seqlen=100)
            >>> paged.rows(torch.tensor([0, 1, 1]), torch.tensor([59, 0, 2]))
            tensor([ 59, 100, 102])
        """
        _check_indices("starts", starts, 1, "(B,), the first row of each sequence")
        _check_indices("lengths", lengths, 1, "(B,), the number of keys of each sequence")
        _check_count("max_seqlen", max_seqlen, 0)
        self = cls.__new__(cls)
        self._set(starts.unsqueeze(1), None, lengths, None, max_seqlen, max_seqlen)
        return self

    @classmethod
    def from_indices(
        cls,
        indices: Tensor,
        offsets: Tensor,
        lengths: Tensor | None = None,
        page_size: int = 1,
        max_seqlen: int | None = None,
    ) -> PagedLayout:
        """Create a layout from the concatenated pages of all sequences, as FlashInfer and transformers pass them.

        Args:
            indices: (K,) int32 or int64, the pages of all sequences. With page size 1, these are rows.
            offsets: (B+1,) int32 or int64. Sequence b has the pages `indices[offsets[b]:offsets[b + 1]]`.
            lengths: (B,) int32 or int64. With page size 1 the default is the number of pages. Needed above, because the
                last page of a sequence may not be full.
            page_size: the number of rows of a page.
            max_seqlen: an upper bound of the lengths. The default is K · page_size, and so is the largest bound.

        Returns:
            The layout.

        Raises:
            ValueError: as for `PagedLayout`, or `lengths` is missing.

        Example:
            >>> import torch, nt_attention as nta
            >>> paged = nta.PagedLayout.from_indices(torch.tensor([7, 3, 4]), torch.tensor([0, 1, 3]))
            >>> paged.lengths
            tensor([1, 2])
        """
        _check_indices("indices", indices, 1, "(K,), the pages of all sequences")
        _check_indices("offsets", offsets, 1, "(B+1,), where the pages of each sequence begin")
        _check_count("page_size", page_size, 1)
        if offsets.shape[0] == 0:
            raise ValueError("offsets must be (B+1,), with 0 first, got no element.")
        if lengths is None and page_size > 1:
            raise ValueError(
                f"lengths are needed with page_size={page_size}: the last page of a sequence may not be full."
            )
        if lengths is not None:
            _check_indices("lengths", lengths, 1, "(B,), the number of keys of each sequence")
        self = cls.__new__(cls)
        self._set(indices, offsets, lengths, page_size, indices.shape[0] * page_size, max_seqlen)
        return self

    def _set(
        self,
        table: Tensor,
        table_offsets: Tensor | None,
        lengths: Tensor | None,
        page_size: int | None,
        capacity: int,
        max_seqlen: int | None,
    ) -> None:
        """`page_size` is None for slots, whose entries are rows."""
        if max_seqlen is not None:
            _check_count("max_seqlen", max_seqlen, 0)
        self.table: Tensor = table.detach()
        self.table_offsets: Tensor | None = None if table_offsets is None else table_offsets.detach()
        self.given_lengths: Tensor | None = None if lengths is None else lengths.detach()
        self.max_seqlen: int = capacity if max_seqlen is None else min(max_seqlen, capacity)
        self.page_size: int = max(1, self.max_seqlen) if page_size is None else page_size
        self.has_slots: bool = page_size is None
        batch = table.shape[0] if table_offsets is None else table_offsets.shape[0] - 1
        self.batch_size: int = batch
        for name, x, size in (("lengths", lengths, batch), ("offsets", table_offsets, batch + 1)):
            if x is not None and (x.device != table.device or x.shape[0] != size):
                raise ValueError(
                    f"{name} must be ({size},) on {table.device}, like the table of pages, got {tuple(x.shape)} on "
                    f"{x.device}."
                )

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.table.device

    @property
    def lengths(self) -> Tensor:
        """(B,) the number of keys of each sequence, as it is now."""
        if self.given_lengths is None:
            assert self.table_offsets is not None
            return self.table_offsets.diff()
        return self.given_lengths

    @property
    def total(self) -> int:
        """An upper bound of the number of keys."""
        return self.batch_size * self.max_seqlen

    def __repr__(self) -> str:
        pages = "slots" if self.has_slots else f"pages of {self.page_size}"
        return f"PagedLayout({self.batch_size} sequences of at most {self.max_seqlen} keys, {pages}, on {self.device})"

    def rows(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """The rows of the pool for keys. Needs no sync. Use it to write new keys into a pool.

        Args:
            sequences: integers of any shape, the index of each key's sequence.
            positions: integers of the same shape, the position of each key in its sequence. It may be beyond the
                sequence's length, if the table has a page for it.

        Returns:
            int64 rows, of the same shape. A pool of pages (pages, page_size, …) has them after `flatten(0, 1)`.

        Raises:
            ValueError: on a CPU, a position is negative or has no page, or a page is negative. On a GPU such rows are
                undefined.

        Example:
            >>> import torch, nt_attention as nta
            >>> paged = nta.PagedLayout(torch.tensor([[5, 1], [2, 0]]), torch.tensor([6, 3]), page_size=4)
            >>> paged.rows(torch.tensor([0, 0, 1]), torch.tensor([0, 5, 3]))
            tensor([20,  5, 11])
        """
        page, row = positions // self.page_size, positions % self.page_size
        is_checked = self.device.type == "cpu" and can_be_read(positions) and can_be_read(self.table)
        if is_checked and positions.numel():
            self._check_positions(sequences, positions)
        if self.table_offsets is None:
            entries = self.table[sequences, page]
        else:
            entries = self.table[self.table_offsets[sequences] + page]
        unit = 1 if self.has_slots else self.page_size
        entries = entries.long().clamp(max=2**62 // unit)  # so that rows do not overflow
        if is_checked and bool((entries < 0).any()):
            raise ValueError(f"the table has the page {int(entries.min())} for a key: pass pages from 0 on.")
        return entries * unit + row

    def _check_positions(self, sequences: Tensor, positions: Tensor) -> None:
        capacity = self.capacities
        most = capacity if isinstance(capacity, int) else capacity[sequences]
        wrong = (positions < 0) | (positions >= most)
        if bool(wrong.any()):
            where = wrong.flatten().nonzero()[0]
            sequence, position = (int(x.expand_as(wrong).flatten()[where]) for x in (sequences, positions))
            raise ValueError(
                f"sequence {sequence} has no page for the position {position}: pass positions from 0 to "
                f"{int(most.expand_as(wrong).flatten()[where]) - 1 if isinstance(most, Tensor) else most - 1}."
            )

    @property
    def capacities(self) -> int | Tensor:
        """The number of keys for which a sequence has pages: (B,) if the layout was made from indices.

        −1 if the offsets of a sequence are outside of the indices.
        """
        if self.table_offsets is None:
            return self.max_seqlen if self.has_slots else self.table.shape[1] * self.page_size
        begin, end = self.table_offsets[:-1], self.table_offsets[1:]
        is_inside = (begin >= 0) & (begin <= end) & (end <= self.table.shape[0])
        return torch.where(is_inside, (end - begin) * self.page_size, -1)

    @property
    def checked_lengths(self) -> Tensor:
        """(B,) the lengths; −1 for sequences that have fewer pages. The host reads nothing."""
        capacity = self.capacities
        return self.lengths if isinstance(capacity, int) else self.lengths.where(self.lengths <= capacity, -1)

    def gather(self, *pools: Tensor) -> tuple[SequenceLayout, tuple[Tensor, ...]]:
        """Copy the keys of all sequences from pools into packed tensors. Syncs twice, and twice for each pool.

        Args:
            *pools: (pages, page_size, G, D), or (N, G, D).

        Returns:
            The layout of the keys, and a packed tensor (S, G, D) for each pool.

        Raises:
            ValueError: a length exceeds `max_seqlen` or the pages of the sequence, a page is outside of a pool, or a
                pool has a wrong shape or device.

        Example:
            >>> import torch, nt_attention as nta
            >>> paged = nta.PagedLayout(torch.tensor([[1], [0]]), torch.tensor([1, 2]), page_size=2)
            >>> layout, (keys,) = paged.gather(torch.arange(4.0).view(2, 2, 1, 1))
            >>> layout.lengths, keys.flatten()
            (tensor([1, 2]), tensor([2., 0., 1.]))
        """
        for i, pool in enumerate(pools):
            self._check_pool(f"pool {i}", pool)
        layout = self.read_lengths()
        index = self.rows(*layout.locate_rows(layout.total))
        return layout, tuple([self._select(pool, index) for pool in pools])

    def read_lengths(self) -> SequenceLayout:
        """The layout of the gathered keys. Reads the lengths, which syncs.

        Raises:
            ValueError: a length is negative, or exceeds `max_seqlen` or the pages of the sequence.
        """
        lengths, capacity = self.lengths.to("cpu", torch.int64), self.capacities
        if isinstance(capacity, Tensor):
            capacity = capacity.to("cpu", torch.int64)
            if bool((lengths > capacity).any()):
                b = int((lengths > capacity).nonzero()[0])
                raise ValueError(
                    f"sequence {b} has {int(lengths[b])} keys, but its offsets give it pages for {int(capacity[b])}: "
                    f"pass offsets from 0 to {self.table.shape[0]}, with a page for each key."
                )
        wrong = (lengths < 0) | (lengths > self.max_seqlen)
        if bool(wrong.any()):
            b = int(wrong.nonzero()[0])
            raise ValueError(
                f"length {int(lengths[b])} of sequence {b} must be from 0 to max_seqlen={self.max_seqlen}."
            )
        return SequenceLayout.from_lengths(lengths, device=self.device)

    def _select(self, pool: Tensor, index: Tensor) -> Tensor:
        """The rows `index` of a pool."""
        self.check_rows(index, pool)
        if pool.dim() == 4:
            return pool[index // self.page_size, index % self.page_size]
        return pool.index_select(0, index)

    def check_rows(self, index: Tensor, pool: Tensor) -> None:
        """Check that a pool has these rows. Syncs.

        Raises:
            ValueError: it does not.
        """
        rows = pool.shape[0] * self.page_size if pool.dim() == 4 else pool.shape[0]
        if index.numel() and not 0 <= int(index.amin()) <= int(index.amax()) < rows:
            raise ValueError(
                f"the table has rows from {int(index.amin())} to {int(index.amax())}, but the pool {tuple(pool.shape)} "
                f"has {rows} rows: pass pages of this pool."
            )

    def check_keys(self, key: Tensor, value: Tensor) -> None:
        """Check pools.

        Raises:
            ValueError: a pool is not (pages, page_size, G, D) or (N, G, D), or is on another device, or key and value
                differ.
        """
        for name, x in (("key", key), ("value", value)):
            self._check_pool(name, x)
            if x.shape[-1] > 1 and x.stride(-1) != 1:
                raise ValueError(f"{name} must be contiguous in its last dimension, got the strides {x.stride()}.")
        if key.shape[:-2] != value.shape[:-2]:
            raise ValueError(f"key and value must have the same rows, got {tuple(key.shape)} and {tuple(value.shape)}.")

    def _check_pool(self, name: str, pool: Tensor) -> None:
        if pool.dim() not in (3, 4) or (pool.dim() == 4 and (self.has_slots or pool.shape[1] != self.page_size)):
            fitting = "(N, G, D) for slots" if self.has_slots else f"(pages, {self.page_size}, G, D) or (N, G, D)"
            raise ValueError(f"{name} must be a pool {fitting}, got {tuple(pool.shape)}.")
        if pool.device != self.device:
            raise ValueError(f"{name} is on {pool.device} and its PagedLayout on {self.device}.")


def merge_pages(pool: Tensor) -> Tensor | None:
    """A view of a pool (pages, page_size, …) as rows (N, …); None if that needs a copy."""
    pages, size = pool.shape[:2]
    if pages > 1 < size and pool.stride(0) != size * pool.stride(1):
        return None
    return pool.flatten(0, 1)


def _check_indices(name: str, x: object, dims: int, meaning: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor {meaning}, got {type(x).__name__}.")
    if x.is_nested or x.dim() != dims or x.dtype not in _INDICES:
        shape = "nested" if x.is_nested else tuple(x.shape)
        raise ValueError(f"{name} must be {meaning}, int32 or int64, got {shape} of {x.dtype}.")


def _check_count(name: str, value: object, least: int) -> None:
    is_integer = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not is_integer or not least <= value < 2**31:  # type: ignore[operator]
        raise ValueError(f"{name} must be an integer from {least} to 2³¹ − 1, got {value!r}.")
