"""Tensor parallelism of `VarlenMultiheadAttention`: each rank computes some of the heads, for all tokens.

As in Megatron-LM (Shoeybi et al. 2019), the projections of queries, keys and values are divided by rows, and `out_proj`
by columns. The outputs of the ranks are summed. Queries and keys stay together: with H query heads and G key heads on P
ranks, rank r has the query heads r · H/P … (r + 1) · H/P − 1 and the key heads r · G/P … (r + 1) · G/P − 1.

Parameters that are fused in one tensor, [q; k; v], become three parameters, because the rows of a rank's heads are not
contiguous in the fused tensor, and a `DTensor` has contiguous rows on each rank. `state_dict` fuses them again.

Dimensions: B sequences, L and S padded lengths of queries and keys, E embed dim, H query heads, G key heads, D head
dim, P ranks.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..modules.config import AttentionConfig
from ..modules.inputs import Inputs, Masks
from ..modules.multihead import VarlenMultiheadAttention
from ..torch_private import parameters_of
from .dtensor import check_in_backward, from_local
from .mesh import check_mesh
from .mods import shift_heads

_WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_BIASES = ("q_proj_bias", "k_proj_bias", "v_proj_bias")
# Name in the state_dict → names of the parameters that hold its rows.
_PARTS = {"in_proj_weight": _WEIGHTS, "in_proj_bias": _BIASES}
_DIVIDED = {
    **dict.fromkeys((*_WEIGHTS, *_BIASES, "sinks"), Shard(0)),
    **dict.fromkeys(("bias_k", "bias_v"), Shard(2)),
}


class HeadParallel(ParallelStyle):
    """Divides the heads of a `VarlenMultiheadAttention` over the ranks of a mesh, for `parallelize_module`.

    The parameters become `DTensor`s. Inputs must be equal on all ranks of the mesh, in any form that the module takes.
    Gradients of inputs and parameters are those of one process. `state_dict()` has the names, shapes and values of the
    module before, and `load_state_dict()` takes such a state_dict. Both communicate, so call them on all ranks.

    Make the optimizer after it, and apply `fully_shard` after it. Parameters that were fused have new names:
    `in_proj_weight` is `q_proj_weight`, `k_proj_weight` and `v_proj_weight`, and `in_proj_bias` is `q_proj_bias`,
    `k_proj_bias` and `v_proj_bias`. A checkpoint of an optimizer has these names, for any number of ranks.

    Args:
        output_layout: `Replicate()`, so that each rank gets the whole output, or `Shard(dim)`: each rank gets a part of
            dimension `dim` of the output, as `torch.chunk` divides it. `Shard` is for packed and padded inputs.
        use_local_output: whether the output is a tensor of this rank. If not, it is a `DTensor` with `output_layout`.

    Raises:
        TypeError: `output_layout` is neither `Replicate` nor `Shard`, or the module is not a
            `VarlenMultiheadAttention`.
        ValueError: the module can't be divided, when `parallelize_module` is called.

    Example:
        >>> import torch, torch.distributed as dist, nt_attention as nta
        >>> from nt_attention.distributed import HeadParallel
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> model = torch.nn.ModuleDict({"attn": nta.VarlenMultiheadAttention(64, 8)})
        >>> model = parallelize_module(model, mesh["tp"], {"attn": HeadParallel()})
        >>> layout, x = nta.SequenceLayout.from_lengths([2, 5]), torch.randn(7, 64)
        >>> model["attn"](x, x, x, layout=layout)[0].shape
        torch.Size([7, 64])
        >>> dist.destroy_process_group()
    """

    def __init__(self, *, output_layout: Placement | None = None, use_local_output: bool = True) -> None:
        super().__init__()
        output_layout = Replicate() if output_layout is None else output_layout
        if not isinstance(output_layout, (Replicate, Shard)):
            raise TypeError(f"output_layout must be Replicate() or Shard(dim), got {output_layout!r}.")
        self.output_layout = output_layout
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Divide `module` in place. `parallelize_module` calls this."""
        attention = _check_module(module)
        _check_division(attention, device_mesh)
        place = functools.partial(_place, mesh=device_mesh, source=self.src_data_rank)
        counts = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        widths = [count * attention.head_dim for count in counts]
        for name, parts in _PARTS.items():
            fused = getattr(attention, name)
            if fused is None:
                continue
            for part, rows in zip(parts, fused.detach().split(widths), strict=True):
                attention.register_parameter(part, nn.Parameter(rows, fused.requires_grad))
            attention.register_parameter(name, None)
        for name, placement in _DIVIDED.items():
            place(attention, name, placement)
        place(attention.out_proj, "weight", Shard(1))
        place(attention.out_proj, "bias", Replicate())
        norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        for owner in (owner for norm in norms for owner in norm.modules()):
            for name in list(parameters_of(owner)):
                place(owner, name, Replicate())
        attention.__class__ = HeadParallelAttention
        attention.out_proj.__class__ = _SummedLinear
        parallel = cast(HeadParallelAttention, attention)
        parallel.output_layout, parallel.use_local_output = self.output_layout, self.use_local_output
        parallel.out_proj.adds_up = isinstance(self.output_layout, Replicate)
        return parallel


class HeadParallelAttention(VarlenMultiheadAttention):
    """A `VarlenMultiheadAttention` whose heads are divided over ranks. `HeadParallel` makes it.

    `num_heads` and `num_kv_heads` count the heads of all ranks.

    Attributes:
        output_layout, use_local_output: as in `HeadParallel`.
        q_proj_weight, k_proj_weight, v_proj_weight: (H·D, E) and (G·D, kdim or vdim), on each rank the rows of its
            heads. `in_proj_weight` is None.
        q_proj_bias, k_proj_bias, v_proj_bias: (H·D,) and (G·D,) in the same way, or None.
    """

    out_proj: _SummedLinear
    output_layout: Replicate | Shard
    use_local_output: bool

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor | None]:
        """Compute attention as `VarlenMultiheadAttention.forward` does, whose arguments and results are the same.

        Tensors may be `DTensor`s on the mesh of the parameters, with any placement. The output is as `HeadParallel`
        describes it. Weights are those of all heads, on all ranks.

        Raises:
            ValueError: the inputs do not match, a `DTensor` is on another mesh, or the output is to be a `Shard` or a
                `DTensor`, and the inputs are NestedTensors or lists.
            RuntimeError: the parameters are sharded by `fully_shard`, because the call did not go through its module.
        """
        mesh, given = self._mesh, (*args, *kwargs.values())
        args, kwargs = _to_local((args, kwargs), mesh)
        out, weights = super().forward(*args, **kwargs)
        if isinstance(out, Tensor) and not out.is_nested:
            check_in_backward(out, given)
        is_whole, layout = isinstance(self.output_layout, Replicate), self.output_layout
        if is_whole and self.use_local_output:
            return out, weights
        if not isinstance(out, Tensor) or out.is_nested:
            raise ValueError(
                "NestedTensors and lists can't be divided or be a DTensor: use HeadParallel() without arguments, or "
                "pass packed tensors and a layout."
            )
        shape = out.shape
        if isinstance(layout, Shard):
            if not -out.dim() <= layout.dim < out.dim():
                raise ValueError(f"output_layout is {layout}, but the output has {out.dim()} dimensions.")
            layout = Shard(layout.dim % out.dim())
            out = _SumAndDivide.apply(out, mesh, layout)
        if not self.use_local_output:
            out = from_local(out, mesh, layout, shape)
        return out, weights

    @property
    def _mesh(self) -> DeviceMesh:
        """The mesh of the ranks. It is read from a parameter, so that the module can be copied."""
        mesh = cast(DTensor, self.q_proj_weight).device_mesh
        if mesh.ndim != 1:
            raise RuntimeError(
                "the parameters are sharded by fully_shard: call the module that fully_shard was applied to."
            )
        return mesh

    @property
    def _own_heads(self) -> slice:
        """The query heads of this rank."""
        mesh = self._mesh
        count = self.num_heads // mesh.size()
        return slice(mesh.get_local_rank() * count, (mesh.get_local_rank() + 1) * count)

    def _attend(
        self, inputs: Inputs, attention: Callable[..., tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs (…, E), summed over the ranks unless they are divided later, and weights of all heads or None."""
        mesh = self._mesh
        inputs = inputs._replace(masks=self._own_masks(inputs))
        is_random = self.training and self.dropout > 0
        with _own_random_numbers(inputs.query.device, mesh) if is_random else contextlib.nullcontext():
            out, weights = super()._attend(inputs, attention)
        weights = None if weights is None else cast(Tensor, _GatherOutputs.apply(weights, mesh))
        for x in (out, weights):
            if x is not None:
                check_in_backward(x, self.parameters())
        return out, weights

    def _project(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs (…, E) → the heads of this rank: q (…, H/P, D), k and v (…, G/P, D)."""
        mesh = self._mesh
        different = {id(x): _SumGradients.apply(x, mesh) for x in inputs[:3]}
        tensors = [different[id(x)] for x in inputs[:3]]
        weights = [_local(getattr(self, name)) for name in _WEIGHTS]
        biases = [_local(getattr(self, name, None)) for name in _BIASES]
        parts = map(F.linear, tensors, cast("list[Tensor]", weights), biases)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _normalize(self.q_norm, q, mesh), _normalize(self.k_norm, k, mesh)
        if self.rotation is not None:
            positions, key_positions = inputs.positions
            q, k = self.rotation.rotate(q, positions), self.rotation.rotate(k, key_positions)
        return q, k, v

    def _config(self) -> AttentionConfig:
        config, own = super()._config(), self._own_heads
        options = {**config.options, "sinks": _local(self.sinks)}
        if self.alibi:
            options["alibi_slopes"] = config.options["alibi_slopes"][own]
        return AttentionConfig(options, _local(config.bias_k), _local(config.bias_v), config.add_zero_attn)

    def _own_masks(self, inputs: Inputs) -> Masks:
        """The masks for the heads of this rank.

        Raises:
            ValueError: `attn_mask` does not have the heads of all ranks, or a gradient would be that of this rank only.
        """
        masks, mesh, heads, own = inputs.masks, self._mesh, self.num_heads, self._own_heads

        def sum_gradients(mask: Tensor) -> Tensor:
            return cast(Tensor, _SumGradients.apply(mask, mesh)) if mask.requires_grad else mask

        def of_own_heads(mask: Tensor, batch: int) -> Tensor:
            if mask.dim() != 3:
                return sum_gradients(mask)
            if mask.shape[0] != batch * heads:
                raise ValueError(
                    f"attn_mask must have {batch * heads} rows of scores in its first dimension, for {heads} heads of "
                    f"all ranks, got {tuple(mask.shape)}."
                )
            of_heads = rearrange(sum_gradients(mask), "(b h) l s -> b h l s", b=batch)
            return of_heads[:, own].flatten(0, 1)

        attn_mask, padding = masks.attn_mask, masks.key_padding_mask
        if isinstance(attn_mask, Tensor):
            batch = inputs.query.shape[0] if inputs.layouts is None else inputs.layouts[0].batch_size
            attn_mask = of_own_heads(attn_mask, batch)
        elif isinstance(attn_mask, (list, tuple)):
            attn_mask = [of_own_heads(x, 1) if isinstance(x, Tensor) else x for x in attn_mask]
        return masks._replace(
            attn_mask=attn_mask,
            key_padding_mask=None if padding is None else sum_gradients(padding),
            mask_mod=None if masks.mask_mod is None else _with_global_heads(masks.mask_mod, True, own.start),
            score_mod=None if masks.score_mod is None else _with_global_heads(masks.score_mod, False, own.start),
        )

    def _run_as_graph(self, captured: Any, inputs: Inputs) -> None:
        """Count the call as one that can't run as a CUDA graph: all ranks would have to capture at the same time."""
        captured.count("its heads are divided over ranks")

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        parts = [getattr(self, name) for name in _WEIGHTS]
        if "in_proj_weight" in self._fused_names:  # xavier_uniform_ of the fused parameter
            bound = math.sqrt(6 / (sum(len(x) for x in parts) + self.embed_dim))
            for part in parts:
                nn.init.uniform_(part, -bound, bound)
        for name in _BIASES:
            if (bias := getattr(self, name, None)) is not None:
                nn.init.zeros_(bias)

    def to_torch(self) -> nn.MultiheadAttention:
        """Not possible, because `nn.MultiheadAttention` has whole parameters.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "the heads are divided over ranks: make a module with to_torch() before HeadParallel, and load this "
            "module's state_dict into it."
        )

    @property
    def _fused_names(self) -> list[str]:
        """The names in the state_dict whose rows are in three parameters."""
        same_dims = self.kdim == self.embed_dim and self.vdim == self.embed_dim
        has_bias = getattr(self, "q_proj_bias", None) is not None
        return ["in_proj_weight"] * same_dims + ["in_proj_bias"] * has_bias

    def _save_to_state_dict(self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the parameters with the names, and in the order, that they had before they were divided."""
        saved: dict[str, Any] = {}
        super()._save_to_state_dict(saved, prefix, keep_vars)
        fused = self._fused_names
        parts = {prefix + part for name in fused for part in _PARTS[name]}
        for name in parameters_of(self):
            if name in fused:
                destination[prefix + name] = _fuse([cast(DTensor, getattr(self, part)) for part in _PARTS[name]])
            elif prefix + name in saved and prefix + name not in parts:
                destination[prefix + name] = saved[prefix + name]
        destination.update({name: x for name, x in saved.items() if name not in parts and name not in destination})

    def _load_from_state_dict(
        self,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load whole tensors, that are equal on all ranks, or `DTensor`s with any placement.

        It replaces entries of `state_dict`, also those of child modules, which are loaded next.
        """
        refused = [name for name in self._fused_names if not _split(self, name, state_dict, prefix, error_msgs)]
        for name, parameter in self.named_parameters():
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and not isinstance(given, DTensor) and given.shape == parameter.shape:
                state_dict[prefix + name] = _distribute_like(given, cast(DTensor, parameter))
        missing: list[str] = []
        super()._load_from_state_dict(
            cast(Any, state_dict), prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        whole = {prefix + part: prefix + name for name in self._fused_names for part in _PARTS[name]}
        names = dict.fromkeys(whole.get(key, key) for key in missing)
        missing_keys.extend(key for key in names if key not in {prefix + name for name in refused})


class _SummedLinear(NonDynamicallyQuantizableLinear):
    """A linear layer for input features that are divided over ranks: its weight (E, H·D) is divided by columns.

    Attributes:
        adds_up: whether the output is the sum over the ranks. If not, the outputs of the ranks add up to it.
    """

    adds_up: bool

    def forward(self, input: Tensor) -> Tensor:
        """Features of the heads of this rank (…, H/P·D) → outputs (…, E)."""
        mesh = cast(DTensor, self.weight).device_mesh
        out, bias = F.linear(input, cast(Tensor, _local(self.weight))), _local(self.bias)
        if self.adds_up:
            out = cast(Tensor, _SumOverRanks.apply(out, mesh))
            return out if bias is None else out + bias.to(out.dtype)
        if bias is None:
            return out
        # One rank adds it, so that it is in the sum once. All ranks get its gradient.
        bias = cast(Tensor, _SumGradients.apply(bias, mesh)).to(out.dtype)
        return out + bias * float(mesh.get_local_rank() == 0)


def _check_module(module: nn.Module) -> VarlenMultiheadAttention:
    """Return `module` if its heads can be divided, or raise a ValueError or TypeError."""
    kind = type(module).__name__
    if isinstance(module, HeadParallelAttention):
        raise ValueError("the heads of this module are already divided: apply HeadParallel once.")
    if type(module) is nn.MultiheadAttention:
        raise TypeError(
            "HeadParallel divides VarlenMultiheadAttention, got MultiheadAttention: replace it by "
            "VarlenMultiheadAttention.from_torch(module)."
        )
    if type(module) is not VarlenMultiheadAttention:
        raise TypeError(
            f"HeadParallel divides VarlenMultiheadAttention, got {kind}: apply it before fully_shard and "
            "parametrizations, and not to subclasses."
        )
    return module


def _check_division(attention: VarlenMultiheadAttention, mesh: DeviceMesh) -> None:
    """Raise a ValueError if the heads can't be divided over this mesh."""
    check_mesh(mesh, "tp")
    ranks = mesh.size()
    for name in ("num_heads", "num_kv_heads"):
        if (count := getattr(attention, name)) % ranks:
            raise ValueError(
                f"{name} is {count}, which {ranks} ranks can't divide: pass a mesh whose size divides num_heads and "
                "num_kv_heads."
            )
    if attention.graphs is not None:
        raise ValueError("CUDA graphs can't be captured on several ranks at a time: pass cuda_graphs=False.")
    if type(attention.out_proj) not in (NonDynamicallyQuantizableLinear, nn.Linear):
        raise ValueError(
            f"out_proj is a {type(attention.out_proj).__name__}, and only nn.Linear can be divided: apply HeadParallel "
            "before adapters and parametrizations."
        )
    names = {"in_proj_weight", *_WEIGHTS, "in_proj_bias", "bias_k", "bias_v", "sinks"}
    if different := sorted(parameters_of(attention).keys() ^ names):
        raise ValueError(
            f"the parameters differ from those of VarlenMultiheadAttention ({', '.join(different)}): if the module is "
            "pruned, call prune.remove first."
        )
    if any(isinstance(x, DTensor) for x in attention.parameters()):
        raise ValueError("the parameters are DTensors already: apply HeadParallel before fully_shard.")


def _place(owner: nn.Module, name: str, placement: Placement, *, mesh: DeviceMesh, source: int | None) -> None:
    """Replace a parameter of `owner` by a `DTensor`. Rank `source` of the mesh sends it; None takes each rank's own."""
    parameter = parameters_of(owner).get(name)
    if parameter is None or isinstance(parameter, DTensor):  # a module can be both norms
        return
    placed = distribute_tensor(parameter.detach(), mesh, (placement,), src_data_rank=source)
    owner.register_parameter(name, nn.Parameter(placed, parameter.requires_grad))


def _local(parameter: Tensor | None) -> Tensor | None:
    """The part of a parameter that is on this rank. Its gradient becomes that part of the parameter's gradient."""
    return None if parameter is None else cast(DTensor, parameter).to_local()


def _normalize(norm: nn.Module, x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Call q_norm or k_norm on some of the heads. Gradients of its parameters are summed over the ranks."""
    parameters = {name: _SumGradients.apply(_local(p), mesh) for name, p in norm.named_parameters()}
    return cast(Tensor, functional_call(norm, parameters, (x,)))


def _to_local(arguments: tuple[tuple[Any, ...], dict[str, Any]], mesh: DeviceMesh) -> tuple[Any, Any]:
    """Replace `DTensor`s by whole tensors. Arguments that are one object stay one object.

    Raises:
        ValueError: a `DTensor` is on another mesh.
    """
    different: dict[int, Any] = {}

    def convert(x: Any) -> Any:
        if isinstance(x, (list, tuple)) and any(isinstance(item, DTensor) for item in x):
            return different.setdefault(id(x), [convert(item) for item in x])
        if not isinstance(x, DTensor):
            return x
        if x.device_mesh != mesh:
            raise ValueError(f"a DTensor input is on {x.device_mesh}, and the parameters are on {mesh}.")
        if id(x) not in different:
            # Gradients are whole here, because _SumGradients comes next.
            whole = x.redistribute(mesh, (Replicate(),))
            different[id(x)] = whole.to_local(grad_placements=(Replicate(),))
        return different[id(x)]

    args, kwargs = arguments
    return tuple(convert(x) for x in args), {name: convert(x) for name, x in kwargs.items()}


def _with_global_heads(mod: Callable[..., Tensor], is_mask: bool, first: int) -> Callable[..., Tensor]:
    """`shift_heads`, with one function for all layers where possible.

    Raises:
        ValueError: the closure of `mod` has a tensor that needs a gradient.
    """
    cells = [cell.cell_contents for cell in getattr(mod, "__closure__", None) or ()]
    if any(isinstance(x, Tensor) and x.requires_grad for x in cells):
        raise ValueError(
            "a score_mod or mask_mod uses a tensor that needs a gradient, which would be that of this rank's heads "
            "only: pass a tensor that needs none, or a float attn_mask."
        )
    shift = _shift_heads_cached if isinstance(mod, Hashable) else shift_heads
    return shift(mod, is_mask, first)


_shift_heads_cached = functools.lru_cache(maxsize=16)(shift_heads)  # flex compiles each function


@contextlib.contextmanager
def _own_random_numbers(device: torch.device, mesh: DeviceMesh) -> Iterator[None]:
    """A context in which each rank draws its own random numbers. Afterwards all generators are equal again.

    The seed is drawn from the CPU's generator.
    """
    seed = int(torch.randint(2**62, (), device="cpu")) + mesh.get_local_rank()
    is_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if is_cpu else [device], device_type="cuda" if is_cpu else device.type):
        torch.default_generator.manual_seed(seed)
        if not is_cpu:
            getattr(torch, device.type).default_generators[device.index].manual_seed(seed)
        yield


def _fuse(parts: Sequence[DTensor]) -> DTensor:
    """[q; k; v] as one tensor with contiguous rows on each rank, on the mesh of the parameters."""
    mesh = parts[0].device_mesh
    placements = [Replicate() if p.is_replicate() else Shard(cast(Shard, p).dim) for p in parts[0].placements]
    with torch.no_grad():
        whole = [torch.empty(x.shape, dtype=x.dtype, device="meta") if x.is_meta else x.full_tensor() for x in parts]
        return distribute_tensor(torch.cat(whole), mesh, placements, src_data_rank=None)


def _split(
    attention: HeadParallelAttention,
    name: str,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    error_msgs: list[str],
) -> bool:
    """Replace the fused tensor `name` in `state_dict` by three. False, and an error message, if its shape is wrong."""
    given = state_dict.pop(prefix + name, None)
    if given is None:
        return True
    parts = [getattr(attention, part) for part in _PARTS[name]]
    expected = (sum(len(x) for x in parts), *parts[0].shape[1:])
    if given.shape != expected:
        error_msgs.append(
            f"size mismatch for {prefix}{name}: copying a param with shape {tuple(given.shape)} from checkpoint, the "
            f"shape in current model is {expected}."
        )
        return False
    whole = given.full_tensor() if isinstance(given, DTensor) else given
    for part, rows in zip(_PARTS[name], whole.detach().split([len(x) for x in parts]), strict=True):
        state_dict[prefix + part] = rows
    return True


def _distribute_like(whole: Tensor, parameter: DTensor) -> DTensor:
    """A tensor that is equal on all ranks, as a `DTensor` with the placements of `parameter`."""
    whole = whole.detach() if parameter.is_meta else whole.detach().to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    parts = DTensor.from_local(x.contiguous(), mesh, (Partial(),), run_check=False)
    return _wait(parts.redistribute(mesh, (Replicate(),)).to_local())


class _SumGradients(torch.autograd.Function):
    """The input itself; its gradient is the sum of the gradients on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient, ctx.mesh), None


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks, whose gradient is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return _all_reduce(x, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumAndDivide(torch.autograd.Function):
    """This rank's part of the sum over the ranks. The gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, part: Shard) -> Tensor:
        ctx.mesh, ctx.part, ctx.shape = mesh, part, x.shape
        summands = DTensor.from_local(x.contiguous(), mesh, (Partial(),), run_check=False)
        return _wait(summands.redistribute(mesh, (part,)).to_local())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        placed = from_local(gradient.contiguous(), ctx.mesh, ctx.part, ctx.shape)
        return _wait(placed.redistribute(ctx.mesh, (Replicate(),)).to_local()), None, None


class _GatherOutputs(torch.autograd.Function):
    """Weights (B, H/P, L, S) of this rank's heads → weights (B, H, L, S), whose gradient is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.rank, ctx.size = mesh.get_local_rank(), mesh.size()
        placed = DTensor.from_local(weights.contiguous(), mesh, (Shard(1),), run_check=False)
        return _wait(placed.redistribute(mesh, (Replicate(),)).to_local())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.size, 1)[ctx.rank], None


def _wait(x: Any) -> Tensor:
    """The result of a collective, of which a `DTensor` may have only begun."""
    return x.wait() if hasattr(x, "wait") else x
