"""transformers' Trainer for a model whose batches are divided over the ranks of a mesh (`patch(model, mesh=...)`).

Trainer's own context parallelism cuts the batch before the model sees it, and takes sdpa only. Here the model divides
the batch: all ranks of a context parallel group pass the same batch and get the same loss. So Trainer has to treat
these ranks as it treats those of tensor parallelism, which pass the same batch too.

Dimensions: P ranks of a context parallel group, W ranks of all groups, B rows of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import transformers
from accelerate.utils import DistributedType, recursively_apply  # type: ignore[import-untyped]
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import IterableDataset
from transformers import Trainer

from ..patching.forwards import active_handles
from .pack.sharded_packing import check_same_batch
from .transformers_private import TrainerOverrides, keep_masks, scales_losses_by_tp_size, set_mesh

__all__ = ["ShardedTrainer", "ShardedTrainerMixin"]

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


if not scales_losses_by_tp_size(Trainer):  # losses would be scaled wrongly
    raise ImportError(
        f"nt_attention.hf.trainer does not work with transformers {transformers.__version__}: its Trainer does not "
        "ask get_tp_size() how many ranks pass the same batch. Install transformers 5.23."
    )


class ShardedTrainerMixin(TrainerOverrides, _Base):
    """Makes a subclass of transformers' Trainer take a model with `patch(model, mesh=...)`.

    Use it as the first base class: `class MyTrainer(ShardedTrainerMixin, SFTTrainer): ...`. See `ShardedTrainer`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mesh = self.context_mesh
        _check_arguments(self, mesh)
        accelerator: Any = self.accelerator
        keep_masks(accelerator)
        if accelerator.torch_device_mesh is None:  # from this mesh, accelerate reads which ranks get the same batch
            shape = (dist.get_world_size() // mesh.size(), mesh.size())
            both = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("dp_replicate", "cp"))
            set_mesh(accelerator, both)

    @property
    def context_mesh(self) -> DeviceMesh:
        """The mesh of the patch: the ranks over which a batch is divided.

        Raises:
            ValueError: the model is not patched with a mesh.
        """
        model: Any = self.model
        mesh = next((handle.mesh for handle in active_handles(model) if handle.mesh is not None), None)
        if mesh is None:
            raise ValueError(
                f'{type(model).__name__} is not patched with a mesh: call nta.patch(model, mesh=mesh["cp"]) before you '
                "make the trainer."
            )
        return mesh

    # What Trainer asks about the ranks: those of the mesh pass the same batch, and a batch counts once for all of them.

    def get_tp_size(self) -> int:
        """The number of ranks that pass the same batch."""
        return super().get_tp_size() * self.context_mesh.size()

    def get_cp_size(self) -> int:
        """1: no rank passes a part of a batch."""
        return 1

    def check_inputs(self, inputs: dict[str, Any]) -> None:
        """Compare the inputs with those of the other ranks. Syncs with the device."""
        check_same_batch(inputs, self.context_mesh)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """The floating-point operations of this rank. Trainer adds them over all ranks."""
        return int(super().floating_point_ops(inputs)) // self.context_mesh.size()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The loop of evaluation and prediction, in which a batch counts once for all ranks that pass it."""
        self.gather_function = self._gather_batches
        return super().evaluation_loop(*args, **kwargs)

    def _gather_batches(self, values: Any) -> Any:
        """`gather_for_metrics` of accelerate, with the values of one rank for each batch."""
        state = self.accelerator.gradient_state
        rows = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        size = self.context_mesh.size()

        def once(x: Tensor) -> Tensor:  # (W · B, …) → (W / P · B, …)
            batch = x.shape[0] // dist.get_world_size()
            return rearrange(x, "(n rank row) ... -> n rank row ...", rank=size, row=batch)[:, 0].flatten(0, 1)[:rows]

        return recursively_apply(once, self.accelerator.gather(values))


class ShardedTrainer(ShardedTrainerMixin, Trainer):
    """transformers' Trainer for a model whose batches are divided over several ranks (context parallelism).

    Patch the model first, then make the trainer. The ranks of `mesh` pass the same batches, and other ranks pass
    others. Losses, metrics and saved models are those of one device with the same total batch size.

    There are two ways to run it:

    - FSDP2 and `ParallelismConfig`, on GPUs: pass `parallelism_config=ParallelismConfig(cp_size=2)` and FSDP2 options
      in `TrainingArguments`, and patch with `parallelism_config.get_device_mesh("cuda")["cp"]`.
    - DDP: without a `ParallelismConfig`, on GPUs or CPUs. Patch with a mesh whose ranks are neighbours, such as
      `init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "cp"))["cp"]`.

    Each batch is compared over the ranks of the mesh, with one collective and one sync with the device.

    Raises:
        ValueError: the model is not patched with a mesh, a batch is not the same on all ranks of the mesh, or an option
            does not work with a mesh (the message has the reason).

    Example:
        >>> import tempfile, torch, nt_attention as nta
        >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
        >>> from nt_attention.hf.trainer import ShardedTrainer
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1,
        ...     intermediate_size=48, num_attention_heads=4, bos_token_id=None, eos_token_id=None))
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> handle = nta.patch(model, mesh=mesh["cp"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = ShardedTrainer(model, TrainingArguments(folder, use_cpu=True, report_to=[]))
        >>> trainer.context_mesh.size()
        1
        >>> torch.distributed.destroy_process_group()
    """


def _check_arguments(trainer: Any, mesh: DeviceMesh) -> None:
    """Raise an error for what does not work with a mesh."""
    accelerator, arguments = trainer.accelerator, trainer.args
    config, size = accelerator.parallelism_config, mesh.size()
    if accelerator.num_processes != dist.get_world_size():
        raise ValueError(
            f"accelerate sees {accelerator.num_processes} processes, but the process group has "
            f"{dist.get_world_size()}: start the program with torchrun or accelerate launch."
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError("DeepSpeed does not work with a model that is patched with a mesh: use FSDP2 or DDP.")
    if arguments.n_gpu > 1:
        raise ValueError(f"one process has {arguments.n_gpu} GPUs: start one process for each GPU, with torchrun.")
    if not arguments.average_tokens_across_devices:
        raise ValueError("average_tokens_across_devices=False does not work with a mesh: leave it out.")
    if arguments.eval_use_gather_object:
        raise ValueError("eval_use_gather_object=True does not work with a mesh: leave it out.")
    has_stream = isinstance(trainer.train_dataset, IterableDataset)
    if accelerator.dispatch_batches or (has_stream and accelerator.dispatch_batches is None):
        raise ValueError(
            "accelerate would divide the rows of a batch over all ranks: pass "
            'accelerator_config={"dispatch_batches": False}.'
        )
    if config is not None and max(config.tp_size, config.sp_size) > 1:
        raise ValueError(
            f"tp_size={config.tp_size} and sp_size={config.sp_size} do not work with a mesh: pass cp_size={size} alone."
        )
    if config is not None and config.cp_size != size:
        raise ValueError(
            f"ParallelismConfig has cp_size={config.cp_size}, but the model is patched with a mesh of {size} ranks: "
            f"pass cp_size={size}."
        )
    if config is None and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(f"FSDP needs parallelism_config=ParallelismConfig(cp_size={size}) in TrainingArguments.")
    first = dist.get_rank() // size * size
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(first, first + size)):
        raise ValueError(
            f"the mesh of the patch has the ranks {ranks}, but must have neighbours, such as "
            f"{list(range(first, first + size))}: make the context parallel dimension the last of the mesh."
        )
