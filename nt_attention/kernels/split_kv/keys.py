"""Where the `split_kv` kernels find keys: in a pool, or packed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...layouts.paged import PagedLayout
from ...layouts.protocol import Layout
from ..bounds import Checked

NO_LIMIT = 2**31 - 1


class Keys(NamedTuple):
    """Where keys are stored, as the kernels read it. `page` is 0 if the keys of a sequence are in one piece."""

    table: Tensor
    table_offsets: Tensor | None
    lengths: Tensor
    page: int
    max_seqlen: int

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0]

    def select(self, first: int, last: int) -> Keys:
        """Those of the sequences from `first` to before `last`."""
        if self.table_offsets is None:
            return self._replace(table=self.table[first:last], lengths=self.lengths[first:last])
        return self._replace(table_offsets=self.table_offsets[first : last + 1], lengths=self.lengths[first:last])

    @classmethod
    def in_pool(cls, paged: PagedLayout) -> Keys:
        table = paged.table if paged.table.stride(-1) == 1 else paged.table.contiguous()
        page = 0 if paged.has_slots else paged.page_size
        offsets = None if paged.table_offsets is None else paged.table_offsets.contiguous()
        return cls(table, offsets, paged.checked_lengths.contiguous(), page, paged.max_seqlen)

    @classmethod
    def packed(cls, layout: Layout, checked: Checked | None) -> Keys:
        offsets = layout.device_offsets if checked is None else checked.key_cu_seqlens
        lengths = layout.cached_lengths if checked is None else offsets.diff()
        return cls(offsets[:-1].unsqueeze(1), None, lengths, 0, layout.max_seqlen)
