"""What of the flex backend runs without a GPU: the blocks that it computes."""

import math

import pytest

from nt_attention import SequenceLayout
from nt_attention.kernels.backends import flex
from nt_attention.kernels.masks import Window

LENGTHS, KEY_LENGTHS = [100, 0, 300, 1, 129], [90, 40, 301, 257, 0]


@pytest.mark.parametrize("window", [Window(), Window(right=0), Window(140, 3), Window(0, 0), Window(math.inf, 150)])
@pytest.mark.parametrize("lower_right", [False, True])
def test_blocks_cover_all_visible_keys(window, lower_right):
    queries, keys = (SequenceLayout.from_lengths(x) for x in (LENGTHS, KEY_LENGTHS))
    shift = (keys.lengths - queries.lengths) * lower_right
    count, index = flex._overlapping_blocks(queries, keys, shift, *window)
    same = queries.sequence_ids[:, None] == keys.sequence_ids
    distance = keys.position_ids - (queries.position_ids + shift[queries.sequence_ids])[:, None]
    visible = window.visible(distance)
    visible = same if visible is None else same & visible
    for block in range(count.shape[-1]):
        rows = visible[block * flex.BLOCK : (block + 1) * flex.BLOCK]
        wanted = {int(key) // flex.BLOCK for key in rows.any(0).nonzero()}
        found = set(index[0, 0, block, : int(count[0, 0, block])].tolist())
        assert wanted <= found
        if wanted and window.is_causal and lower_right:
            assert max(found) <= max(wanted) + 1  # of a sequence without keys
