"""Batches of equal work for padding-free training: as many tokens in each, not as many rows."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

__all__ = ["TokenBudgetSampler"]

# Into how many parts a factor of 2 of lengths is divided. Examples of one part are in random order. Where examples do
# not fit in a loose order, a finer one is tried.
LOOSE, FINE, SORTED = 2, 16, 0  # 0: sorted by length


class TokenBudgetSampler(Sampler[list[int]]):
    """A batch sampler whose batches have about equally many tokens, and at most ``max_tokens``.

    In each epoch, examples of similar lengths are shuffled, and dealt out from long to short, each to the batch with
    the fewest tokens. Every example is in one batch of one rank. The number of batches is the same in all epochs and
    on all ranks. Ranks do not communicate.

    Args:
        lengths: tokens of each example, N integers. For another measure of work, pass that, with its budget.
        max_tokens: the largest number of tokens in a batch. An example with more tokens is a batch alone.
        seed: of the random order, at least 0.
        rank: which rank's batches, 0 ≤ rank < world_size. Only needed with data parallelism.
        world_size: the number of ranks that get batches of their own.

    Raises:
        ValueError: for lengths that are no integers ≥ 1; if there are too few examples for all ranks; without ``rank``
            and ``world_size``, if torch.distributed has several ranks.

    Example:
        ```python
        import nt_attention as nta
        from torch.utils.data import DataLoader

        dataset = [[7] * n for n in (5, 90, 31, 12, 64, 8, 77, 20)]  # token ids
        sampler = nta.data.TokenBudgetSampler([len(ids) for ids in dataset], max_tokens=128)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=list)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in loader:
                assert sum(len(ids) for ids in batch) <= 128
        ```
    """

    lengths: NDArray[np.integer[Any]]
    max_tokens: int
    seed: int
    rank: int
    world_size: int
    epoch: int

    def __init__(
        self, lengths: ArrayLike, max_tokens: int, seed: int = 0, rank: int | None = None, world_size: int | None = None
    ) -> None:
        self.lengths = np.asarray(lengths)
        if self.lengths.ndim != 1 or self.lengths.dtype.kind not in "iu" or (self.lengths < 1).any():
            raise ValueError(f"lengths are {self.lengths}: pass (N,) integers, each at least 1.")
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}: pass the number of tokens in a batch.")
        if rank is None and world_size is None and (not dist.is_initialized() or dist.get_world_size() == 1):
            rank, world_size = 0, 1
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: pass both, from torch.distributed.")
        self.max_tokens, self.seed, self.rank, self.world_size = max_tokens, seed, rank, world_size
        self.epoch = 0
        self._yielded = self._start = 0  # batches of this epoch; where the next iteration begins
        self._batches = self._count()

    def __len__(self) -> int:
        """The number of batches of this rank, in every epoch."""
        return self._batches // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng((self.seed, self.epoch))
        start, self._start = self._start, 0
        for number, step in enumerate(self._steps(rng)[start:], start + 1):
            self._yielded = number
            yield step[self.rank]

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch, before it begins. The epoch of a loaded state goes on where it was."""
        if epoch != self.epoch:
            self.epoch, self._yielded, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its batches were yielded, and the arguments, for all ranks.

        A DataLoader with workers asks for batches ahead of time. There, use torchdata's StatefulDataLoader, or replace
        ``"yielded"`` by the number of batches that you trained on.
        """
        return {"epoch": self.epoch, "yielded": self._yielded, **self._arguments()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch of ``state``. A state of other arguments raises a ValueError."""
        for name, value in self._arguments().items():
            if state[name] != value:
                raise ValueError(f"The state has {name}={state[name]}, this sampler {value}: make it as it was.")
        self.epoch = state["epoch"]
        self._yielded = self._start = state["yielded"]

    @property
    def batch_size(self) -> int:
        # accelerate reads this when it is about to divide the batches over ranks once more, which would lose some
        raise ValueError(
            "The batches of a TokenBudgetSampler are already divided over the ranks. Pass the loader to accelerate's "
            "prepare_data_loader(loader, device, num_processes=1, process_index=0, put_on_device=True), not to prepare."
        )

    def _arguments(self) -> dict[str, int]:
        shared = {"seed": self.seed, "max_tokens": self.max_tokens, "world_size": self.world_size}
        return shared | {"examples": len(self.lengths), "tokens": int(self.lengths.sum())}

    def _count(self) -> int:
        """A number of batches, of all ranks together, with which the examples fit in every epoch."""
        ranks, rng = self.world_size, np.random.default_rng(self.seed)
        orders = [self._order(rng, parts) for parts in (SORTED, FINE)]
        most = len(self.lengths) // ranks * ranks
        batches = max(1, math.ceil(np.minimum(self.lengths, self.max_tokens).sum() / self.max_tokens))
        while (batches := math.ceil(batches / ranks) * ranks) <= most:
            left_over = max(self._deal(order, batches)[1] for order in orders)
            if not left_over:
                return batches
            more = math.ceil(
                max(left_over / self.max_tokens / 4, batches / 1000)
            )  # a larger step takes fewer tries, but leaves batches less full
            batches = min(batches + more, most) if batches < most else most + 1
        raise ValueError(
            f"{len(self.lengths)} examples are too few for as many batches of {self.max_tokens} tokens on each of "
            f"{ranks} ranks: pass more examples, or a larger max_tokens."
        )

    def _order(self, rng: np.random.Generator, parts: int) -> list[int]:
        """All examples from long to short, in random order where lengths are in the same part."""
        key = np.floor(parts * np.log2(self.lengths)) if parts else self.lengths
        return np.lexsort((rng.random(len(key)), -key.astype(np.int64))).tolist()

    def _deal(self, order: list[int], batches: int) -> tuple[list[tuple[int, list[int]]], float]:
        """Deal out examples, each to the batch with the fewest tokens: (tokens, examples) and the tokens left over."""
        lengths: list[int] = self.lengths.tolist()
        members: list[list[int]] = [[] for _ in range(batches)]
        heap = [(0, 0, batch) for batch in range(batches)]  # tokens, rows, batch
        for done, example in enumerate(order):
            tokens, rows, batch = heap[0]
            if rows and tokens + lengths[example] > self.max_tokens:
                return [], float(np.minimum(self.lengths[order[done:]], self.max_tokens).sum())
            members[batch].append(example)
            heapq.heapreplace(heap, (tokens + lengths[example], rows + 1, batch))
        return [(tokens, members[batch]) for tokens, _, batch in heap], 0.0

    def _steps(self, rng: np.random.Generator) -> list[list[list[int]]]:
        """The batches of all ranks, step by step. Those of one step have nearly the same number of tokens."""
        for parts in (LOOSE, FINE, FINE, FINE, SORTED):
            batches, left_over = self._deal(self._order(rng, parts), self._batches)
            if not left_over:
                break
        assert not left_over, "_count has tried the last order"
        batches = sorted(batches)
        steps = [batches[i : i + self.world_size] for i in range(0, len(batches), self.world_size)]
        return [[steps[i][j][1] for j in rng.permutation(self.world_size)] for i in rng.permutation(len(steps))]
