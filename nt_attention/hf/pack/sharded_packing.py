"""A packed row whose tokens are divided over the ranks of a mesh (context parallelism).

Every rank gets the same padded batch. It packs the batch, runs the model on its own tokens, and gathers the outputs, so
that all ranks return the same. The gradients on all ranks then have this rule: their mean over the ranks is the
gradient of one device. FSDP and DDP take the mean.

Dimensions: B rows, L positions in a padded row, T tokens, N tokens of this rank, P ranks.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...compiler import outside_of_graphs
from .. import families
from ..plan import Head, Plan
from ..route.packed_mask import bypass_mask
from .packing import Packing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def why_not_sharded(plan: Plan, needs_row: bool, is_routed: bool) -> str | None:
    """Why the tokens of a model can't be divided over ranks, or None. The arguments are those of `PackedCall`."""
    if plan.mask is not None or not is_routed:
        return "its own attention code needs all tokens of a sequence on one rank"
    if plan.mixing:
        return "it keeps a state along the row"
    if needs_row:
        return "it counts positions along the row, or scales them by the length of sequences"
    return None


def why_call_not_sharded(model: nn.Module, head: Head | None, arguments: dict[str, Any]) -> str | None:
    """Why a call can't be divided over ranks, or None."""
    to_keep = arguments.get("logits_to_keep", 0)
    if not (isinstance(to_keep, int) and to_keep == 0):
        return "it asks for the logits of some tokens, and each rank has other tokens"
    if head == "next token" and "labels" in arguments and not _passes_arguments_to_loss(cast(Any, type(model))):
        return "its loss shifts labels by itself"
    return None


@dataclass(frozen=True, kw_only=True)
class ShardedPacking(Packing):
    """The packing of a batch, and the tokens of this rank. Packed rows are (1, N, …).

    Attributes:
        whole: the packing of all tokens. Its packed rows are (1, T, …).
        sharded: the `ShardedLayout`.
    """

    whole: Packing
    sharded: Any

    @classmethod
    def of_mesh(cls, packing: Packing, mesh: Any, is_causal: bool) -> ShardedPacking:
        """Divide the tokens of a packing over a mesh. With `is_causal`, work is balanced for a causal mask."""
        sharded = packing.layout.shard(mesh, is_causal=is_causal)
        fields = {name: getattr(packing, name) for name in Packing.__dataclass_fields__}
        return cls(**fields, whole=packing, sharded=sharded)

    @property
    def token_shape(self) -> tuple[int, int]:
        return 1, self.sharded.total

    @property
    def saves_nothing(self) -> bool:
        """False: each rank runs fewer tokens than the batch has, also without padding."""
        return False

    def first_tokens(self, packed: Tensor) -> Tensor:
        return self.whole.first_tokens(self._gather(packed))

    def pad_with_nearest(self, packed: Tensor) -> Tensor:
        return self.whole.pad_with_nearest(self._gather(packed))

    def pad(self, packed: Tensor, value: float = 0.0) -> Tensor:
        return self.whole.pad(self._gather(packed), value)

    def unpad(self, gradient: Tensor) -> Tensor:
        packed = self.whole.pack(gradient)
        return self.sharded.sum_gradients(packed[0]).unsqueeze(0)

    def tokens_of(self, packed: Tensor) -> tuple[Tensor, Any]:
        return packed[0], self.sharded

    def shard_inputs(
        self, model: nn.Module, head: Head | None, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], Tensor | None]:
        """The arguments of the original forward for the tokens of this rank, and the share of this rank in the loss.

        `arguments` are those for the packed row (1, T). The share is None if the loss is that of all tokens.
        """
        arguments, share = dict(arguments), None
        if "labels" in arguments and head in ("token", "next token"):
            share = self._cut_labels(model, head, arguments)
        for name in families.TOKEN_INPUTS & arguments.keys():
            if arguments[name].shape[:2] == (1, self.layout.total):
                arguments[name] = self._local(arguments[name], 1)
        arguments["position_ids"] = self._local(arguments["position_ids"], -1)
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            arguments[name] = self.sharded.handle
        arguments["attention_mask"] = bypass_mask(self.sharded)
        return arguments, share

    def _cut_labels(self, model: nn.Module, head: Head, arguments: dict[str, Any]) -> Tensor:
        """Replace labels by those of this rank, and return the share of this rank in the loss.

        The loss of a rank is the mean over its labels. The loss of the batch is the sum over the ranks of loss · share.
        The share is the number of labels of the rank over the number of all labels, or over `num_items_in_batch`. A
        rank without labels has the share 0. It gets one label, because the mean over no labels is NaN. The share is NaN
        if no rank has labels.
        """
        takes_arguments = _passes_arguments_to_loss(cast(Any, type(model)))
        ignored = arguments.get("ignore_index", -100) if takes_arguments else -100
        shifted = arguments.get("shift_labels")
        labels = arguments["labels"] if shifted is None else shifted
        if head == "next token" and shifted is None:
            labels = nn.functional.pad(labels[:, 1:], (0, 1), value=ignored)
        local = self._local(labels, 1)
        count, total = ((x != ignored).sum() for x in (local, labels))
        items = arguments.pop("num_items_in_batch", None)
        if items is not None and takes_arguments:
            total = torch.as_tensor(items, device=total.device)
        is_first = torch.arange(local.shape[1], device=local.device) == 0
        arguments["labels"] = torch.where((count == 0) & is_first, int(ignored == 0), local)
        if head == "next token" or shifted is not None:
            arguments["shift_labels"] = arguments["labels"]
        return count.double() / total

    def _local(self, x: Tensor, dim: int) -> Tensor:
        return x.index_select(dim, self.sharded.rows)

    def _gather(self, packed: Tensor) -> Tensor:
        """(1, N, …) → (1, T, …) on all ranks."""
        whole: Tensor = self.sharded.gather(packed[0], sum_gradients=True)
        return whole.unsqueeze(0)


@outside_of_graphs
def add_losses(loss: Tensor, share: Tensor, sharded: Any) -> Tensor:
    """The loss of all ranks, from the mean loss of each rank and its share. A collective.

    If the share is NaN, so is the result, and its gradient is 0.
    """
    added: Tensor = _Sum.apply(loss * share.nan_to_num(0.0).to(loss.dtype), sharded)
    return added.masked_fill(share.isnan(), torch.nan)


def check_same_batch(inputs: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Check that all ranks of a mesh have the same tensors, of any shapes and dtypes. A collective, and a sync.

    Raises:
        ValueError: a rank has other tensors. All ranks raise it.
    """
    digest = torch.zeros((), dtype=torch.int64, device=mesh.device_type)
    for name in sorted(inputs):
        if isinstance(x := inputs[name], Tensor):
            values = x.detach().double().view(torch.int64) if x.is_floating_point() else x.long()
            values = values.flatten()
            positions = torch.arange(1, values.numel() + 1, device=x.device)
            content = (values * positions).sum() + sum(n * (i + 1) for i, n in enumerate(x.shape))
            digest = digest * 1_000_003 + content
    both = torch.stack([digest, -digest])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.get_group())
    if both.sum().item() != 0:
        raise ValueError(
            "the ranks of mesh= have different batches, but must have the same: check that the data set and its order "
            "do not depend on the rank, and that a sampler divides the data over the other dimensions of the mesh "
            'only. With accelerate, pass {"dispatch_batches": False} for an IterableDataset.'
        )


@functools.lru_cache(64)
def _passes_arguments_to_loss(cls: Any) -> bool:
    """Whether the forward of a class calls the loss function of transformers with its other arguments.

    Then the loss takes `shift_labels`, `num_items_in_batch` and `ignore_index`.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))
    except (OSError, TypeError):
        return False
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    return any(call.func.attr == "loss_function" and any(x.arg is None for x in call.keywords) for call in calls)  # type: ignore[attr-defined]


class _Sum(torch.autograd.Function):
    """The sum over the ranks. Its gradient is added over the ranks, and is equal on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharded: Any) -> Tensor:
        ctx.group = sharded.group
        total = x.detach().clone()
        dist.all_reduce(total, group=sharded.group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
