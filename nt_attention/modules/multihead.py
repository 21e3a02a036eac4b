"""`VarlenMultiheadAttention`, a replacement for `nn.MultiheadAttention` that takes ragged batches.

Dimensions: B sequences, j their ragged length, L and S padded lengths of queries and keys, T tokens, E embed dim, H
query heads, G key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..compiler import can_be_read, is_compiling
from ..graphs.cache import CapturedCalls, CudaGraphs
from ..kernels.alibi import alibi_slopes
from ..kernels.call import OPTIONS, MaskMod, ScoreMod, check_options
from ..kernels.other_names import unexpected_argument
from ..kernels.select import check_backend_name
from ..layouts.protocol import Layout, Sharded
from ..patching.forwards import CONTEXT_PARALLEL, is_context_parallel
from ..torch_private import PARAMETERS, forward_hooks_of, parameters_of
from . import graphs
from .config import AttentionConfig
from .inputs import Inputs, Masks, read_inputs
from .packed_attention import packed_attention
from .padded_attention import padded_attention
from .rotary import Rotary, Rotation

NEEDS_WEIGHTS = "need_weights is not False"
TensorOrList = TypeVar("TensorOrList", Tensor, Sequence[Tensor])
_OTHER_VALUES = "key_padding_mask has values other than 0 and −inf"
QkNorm = Literal["rms", "layer"] | Callable[[int], nn.Module]
# Arguments of `varlen_attention`. nn.MultiheadAttention only supports their defaults.
_SCORE_OPTIONS = ("window_size", "softcap", "scale")
_SCORE_DEFAULTS = tuple([OPTIONS[name].default for name in _SCORE_OPTIONS])
# The attributes of a module that computes what nn.MultiheadAttention computes, which has no such attributes.
STOCK_OPTIONS = {
    **dict(zip(_SCORE_OPTIONS, _SCORE_DEFAULTS, strict=True)),
    **{"alibi": False, "backend": "auto", "graphs": None},
    **dict.fromkeys(("sinks", "q_norm", "k_norm", "rotation")),
}
_CHECKED = {*_SCORE_OPTIONS, "alibi", "backend", "dropout", "add_zero_attn"}


class VarlenMultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention (Vaswani et al. 2017) for NestedTensors, packed tensors, lists and padded batches.

    It can replace `nn.MultiheadAttention`. The arguments up to `dtype`, the parameters, their initialization for a
    given seed, and the state_dict are the same. The arguments after `dtype` are new.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as for
            `nn.MultiheadAttention`.
        num_kv_heads: G, the number of key and value heads (grouped-query attention, Ainslie et al. 2023). `num_heads`
            must be a multiple of it, and is the default.
        head_dim: D; None is `embed_dim // num_heads`.
        window_size: (left, right), the number of keys that a query sees before and after its position. −1 is no limit.
        softcap: if not 0, scores become softcap · tanh(scores / softcap).
        scale: the factor of query · key; None is D^−0.5.
        sinks: learn an additional score for each head, (H,), which is part of the softmax but has no value.
        alibi: add −slope · |distance| to the scores, with the slopes of Press et al. 2022.
        qk_norm: normalize each head of queries and keys over D, before rotary: "rms" (RMSNorm, as in Qwen3), "layer"
            (LayerNorm, as in ViT-22B), or a function that takes D and returns a module. The modules are `q_norm` and
            `k_norm`.
        rotary: a `Rotary`, to rotate queries and keys by their positions.
        backend: "auto", or a name from `available_backends()`.
        cuda_graphs: run packed calls on a GPU as CUDA graphs: True for those without gradients in evaluation mode,
            "training" also for those with gradients, "auto" for both where the GPU waits for the host. See `patch`,
            which has the same option. `graphs.calls` counts the calls.

    Raises:
        ValueError: an option has an invalid value, or `add_bias_kv` or `add_zero_attn` is used with a window or ALiBi.
        AssertionError: `embed_dim` is not divisible by `num_heads`, as in `nn.MultiheadAttention`.
        TypeError: `rotary` is not a `Rotary`.

    Example:
        >>> import torch, nt_attention as nta
        >>> attention = nta.VarlenMultiheadAttention(64, 8, num_kv_heads=2)
        >>> x = torch.nested.nested_tensor([torch.randn(2, 64), torch.randn(5, 64)], layout=torch.jagged)
        >>> out, _ = attention(x, x, x, is_causal=True)
        >>> [tuple(y.shape) for y in (x + out).unbind()]
        [(2, 64), (5, 64)]
    """

    kdim: int
    vdim: int
    head_dim: int
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    rotation: Rotation | None
    out_proj: NonDynamicallyQuantizableLinear
    sinks: nn.Parameter | None
    # Whether padding masks of 0 and −inf are packed too, and not only boolean ones.
    _packs_float_masks = False
    # The CUDA graphs of packed calls; None without them. Set by `patch` and by `cuda_graphs=`.
    graphs: CapturedCalls | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        scale: float | None = None,
        sinks: bool = False,
        alibi: bool = False,
        qk_norm: QkNorm | None = None,
        rotary: Rotary | None = None,
        backend: str = "auto",
        cuda_graphs: CudaGraphs = False,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise _unexpected_argument(unknown, in_call=False)
        # Not the parent's __init__, because shapes are more general here. The order of the parameters is the same.
        nn.Module.__init__(self)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(embed_dim, num_heads, num_kv_heads, head_dim)
        if rotary is not None and not isinstance(rotary, Rotary):
            raise TypeError(f"rotary must be a Rotary, got {type(rotary).__name__}.")
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        self.window_size = window_size
        self.softcap = softcap
        self.scale = scale
        self.alibi = alibi
        self.backend = backend
        self.graphs = CapturedCalls.of_option(cuda_graphs)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._create_parameters(bias, add_bias_kv, sinks, factory)
        self.q_norm, self.k_norm = (_norm(qk_norm, self.head_dim, factory) for _ in range(2))
        self.rotation = None if rotary is None else rotary.of_head_dim(self.head_dim)
        self._check_options()
        self._reset_parameters()

    def _create_parameters(self, bias: bool, add_bias_kv: bool, sinks: bool, factory: dict[str, Any]) -> None:
        """Create the parameters. Only `out_proj` is initialized here."""
        same_dims = self.kdim == self.embed_dim and self.vdim == self.embed_dim
        q_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

        def parameter(name: str, wanted: bool, *shape: int) -> None:
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)) if wanted else None)

        parameter("in_proj_weight", same_dims, q_dim + 2 * kv_dim, self.embed_dim)
        parameter("q_proj_weight", not same_dims, q_dim, self.embed_dim)
        parameter("k_proj_weight", not same_dims, kv_dim, self.kdim)
        parameter("v_proj_weight", not same_dims, kv_dim, self.vdim)
        parameter("in_proj_bias", bias, q_dim + 2 * kv_dim)
        self.out_proj = NonDynamicallyQuantizableLinear(q_dim, self.embed_dim, bias=bias, **factory)
        parameter("bias_k", add_bias_kv, 1, 1, kv_dim)
        parameter("bias_v", add_bias_kv, 1, 1, kv_dim)
        parameter("sinks", sinks, self.num_heads)

    def _check_options(self) -> None:
        check_options(**{name: getattr(self, name) for name in _SCORE_OPTIONS})
        check_backend_name(self.backend)
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout must be in [0, 1], got {self.dropout}.")
        if self._adds_keys and (self.alibi or tuple(self.window_size) != (-1, -1)):
            raise ValueError(
                "add_bias_kv and add_zero_attn add keys without a position, but window_size and alibi need positions: "
                "leave out one of them."
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and check options that are changed after construction."""
        before = self.__dict__.get(name)
        super().__setattr__(name, value)
        if name in _CHECKED and "rotation" in self.__dict__:  # the constructor sets it last
            try:
                self._check_options()
            except ValueError:
                self.__dict__[name] = before
                raise

    def _reset_parameters(self) -> None:
        init = {
            nn.init.xavier_uniform_: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
            nn.init.xavier_normal_: ("bias_k", "bias_v"),
            nn.init.zeros_: ("in_proj_bias", "sinks"),
        }
        for initialize, names in init.items():
            for name in names:
                if (parameter := getattr(self, name)) is not None:
                    initialize(parameter)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Whether nn.TransformerEncoderLayer may use its fast path, which does not call this module's `forward`.

        True if the fast path computes what `forward` computes, and `backend` is "auto". The fast path reads the weights
        of this module and of `out_proj`, and adds no keys. False in a graph, because it does not support jagged
        NestedTensors.
        """
        if self.in_proj_weight is None or is_compiling() or self._adds_keys or "forward" in self.__dict__:
            return False
        return type(self).forward is type(self)._own_forward and self.is_in_its_weights

    @property
    def is_in_its_weights(self) -> bool:
        """Whether nn.MultiheadAttention, which only reads the weights of `out_proj`, computes the same."""
        return self.is_stock and self.backend == "auto" and reads_weight_only(self.out_proj)

    @property
    def is_stock(self) -> bool:
        """Whether nn.MultiheadAttention supports all options that are used."""
        own = self.__dict__  # a hot path: nn.TransformerEncoderLayer asks in each forward, through _qkv_same_embed_dim
        is_default = (
            (own["window_size"], own["softcap"], own["scale"]) == _SCORE_DEFAULTS
            and not own["alibi"]
            and own["num_kv_heads"] == own["num_heads"]
            and own["head_dim"] * own["num_heads"] == own["embed_dim"]
            and own.get("q_norm", self) is own.get("rotation", self) is own[PARAMETERS].get("sinks") is None
        )
        return is_default or not self._extra_options()

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, backend: str = "auto") -> VarlenMultiheadAttention:
        """Create a `VarlenMultiheadAttention` that shares the parameters of `module`, but not its hooks.

        Args:
            module: the module to share parameters with.
            backend: "auto", or a name from `available_backends()`.

        Returns:
            The new module, in the same training mode.

        Raises:
            ValueError: `module` is a `VarlenMultiheadAttention` with extra options, or is parametrized or pruned.

        Example:
            >>> import torch, nt_attention as nta
            >>> stock = torch.nn.MultiheadAttention(64, 8, batch_first=True)
            >>> attention = nta.VarlenMultiheadAttention.from_torch(stock)
            >>> attention.in_proj_weight is stock.in_proj_weight
            True
        """
        if isinstance(module, VarlenMultiheadAttention) and not module.is_stock:
            raise ValueError(
                f"from_torch would lose {module._extra_options()}: use copy.copy(module), which also shares parameters."
            )
        new = cls(**_stock_arguments(module), backend=backend)
        cls.share_parameters(module, new)
        return new

    def to_torch(self) -> nn.MultiheadAttention:
        """Create an `nn.MultiheadAttention` that shares the parameters of this module, but not its hooks.

        Returns:
            The new module, in the same training mode.

        Raises:
            ValueError: `nn.MultiheadAttention` does not support an option that is used, or this module is parametrized
                or pruned.

        Example:
            >>> import nt_attention as nta
            >>> nta.VarlenMultiheadAttention(64, 8).to_torch()
            MultiheadAttention(
              (out_proj): NonDynamicallyQuantizableLinear(in_features=64, out_features=64, bias=True)
            )
        """
        if not self.is_stock:
            raise ValueError(f"nn.MultiheadAttention does not support {self._extra_options()}: use the defaults.")
        stock = nn.MultiheadAttention(**_stock_arguments(self))
        self.share_parameters(self, stock)
        return stock

    @staticmethod
    def share_parameters(of: nn.MultiheadAttention, to: nn.MultiheadAttention) -> None:
        """Set the parameters, `out_proj` and the training mode of `to` to those of `of`.

        Raises:
            ValueError: the modules do not have parameters with the same names.
        """
        given, wanted = ({name for name, x in parameters_of(module).items() if x is not None} for module in (of, to))
        if given != wanted:
            raise ValueError(
                f"only one of the two modules has the parameters {', '.join(sorted(given ^ wanted))}: if "
                f"{type(of).__name__} is parametrized or pruned, first call parametrize.remove_parametrizations or "
                "prune.remove."
            )
        table = parameters_of(to)
        table.update({name: x for name, x in parameters_of(of).items() if name in table})
        to.out_proj = of.out_proj
        to.train(of.training)

    def forward(
        self,
        query: TensorOrList,
        key: TensorOrList,
        value: TensorOrList,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | Sequence[Tensor] | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        layout: Layout | Sharded | None = None,
        key_layout: Layout | Sharded | None = None,
        mask_mod: MaskMod | None = None,
        score_mod: ScoreMod | None = None,
        **unknown: Never,
    ) -> tuple[TensorOrList, Tensor | None]:
        """Compute attention of `query` to `key` and `value`.

        Padding is not computed for ragged inputs (NestedTensors, packed tensors, lists), nor for padded inputs whose
        only masks are `is_causal` and a boolean `key_padding_mask`. In self-attention, the output for such padded
        inputs is 0 at padding. Weights, `attn_mask`, and padded batches in a graph need every score of the padded
        batch.

        Syncs with the device once for a padded batch that it packs, and once for a NestedTensor with new offsets.

        Args:
            query: a NestedTensor (B, j, E), for any `batch_first`; packed (T, E) with `layout`; a list of B tensors
                (Li, E); or padded as for `nn.MultiheadAttention`. (L, E) without `layout` is a single sequence.
            key, value: in the form of `query`. For self-attention pass the object `query`, so that all three are
                projected by one matrix product.
            key_padding_mask: (B, S), True at padding, or numbers to add to the scores. Only for padded inputs.
            need_weights: whether to return attention weights. None is True for padded inputs, as in
                `nn.MultiheadAttention`, and False for ragged inputs.
            attn_mask: (L, S) or (B·H, L, S), True where a query must not see a key, or numbers to add to the scores.
                For ragged inputs, L and S are at least the longest lengths. A list of B masks, (Li, Si) or (H, Li, Si),
                is possible as well.
            average_attn_weights: whether to return the mean of the weights over heads.
            is_causal: query i sees the keys 0 … i. Padded inputs then need `need_weights=False`. With `attn_mask`, it
                is a hint that the mask is causal, as in `nn.MultiheadAttention`.
            layout: the sequences of a packed query, and of key and value if `key_layout` is None. With a
                `ShardedLayout` (`SequenceLayout.shard`), query, key and value are the tokens of this rank: packed, as
                DTensors with `Shard(0)`, or NestedTensors from `ShardedLayout.local`. The call is a collective then,
                and gradients of parameters are those of these tokens.
            key_layout: the sequences of a packed key and value; a `ShardedLayout` if `layout` is one.
            mask_mod, score_mod: as for `varlen_attention`. Only for ragged inputs.

        Returns:
            A tuple of the output, in the form of `query`, and the weights after dropout, or None. Weights are
                (B, L, S), or (B, H, L, S) if not averaged. For ragged inputs they are padded with 0 to the longest
                lengths. The keys of `add_bias_kv` and `add_zero_attn` come last.

        Raises:
            ValueError: the inputs do not match. For padded inputs it is an `InputError`, a subclass of all types that
                `nn.MultiheadAttention` raises. Or a `ShardedLayout` is used with weights, `attn_mask`, dropout in
                training mode, `add_bias_kv`, `add_zero_attn` or CUDA graphs.
            TypeError: query, key and value are neither tensors nor lists, or only one layout is a `ShardedLayout`.

        Example:
            >>> import torch, nt_attention as nta
            >>> attention, layout = nta.VarlenMultiheadAttention(64, 8), nta.SequenceLayout.from_lengths([2, 5])
            >>> x = torch.randn(layout.total, 64)
            >>> attention(x, x, x, is_causal=True, layout=layout)[0].shape
            torch.Size([7, 64])
        """
        if unknown:
            raise _unexpected_argument(unknown, in_call=True)
        masks = Masks(is_causal, key_padding_mask, attn_mask, mask_mod, score_mod)
        inputs, reason = self.read(query, key, value, layout, key_layout, masks, need_weights)
        return self.compute(inputs, reason, average_attn_weights)

    _own_forward: ClassVar[Any] = forward

    if TYPE_CHECKING:  # that of nn.Module takes and returns anything

        def __call__(
            self,
            query: TensorOrList,
            key: TensorOrList,
            value: TensorOrList,
            key_padding_mask: Tensor | None = None,
            need_weights: bool | None = None,
            attn_mask: Tensor | Sequence[Tensor] | None = None,
            average_attn_weights: bool = True,
            is_causal: bool = False,
            *,
            layout: Layout | Sharded | None = None,
            key_layout: Layout | Sharded | None = None,
            mask_mod: MaskMod | None = None,
            score_mod: ScoreMod | None = None,
        ) -> tuple[TensorOrList, Tensor | None]: ...

    def read(
        self, query: Any, key: Any, value: Any, layout: Any, key_layout: Any, masks: Masks, need_weights: bool | None
    ) -> tuple[Inputs, str | None]:
        """Check the arguments of a call and pack them. Also why every score is computed, or None if none is in vain."""
        if layout is None and key_layout is not None:
            raise ValueError("key_layout is for packed keys, and packed queries need layout= too: pass both layouts.")
        if (masks.mask_mod or masks.score_mod) and self._adds_keys:
            raise ValueError(
                "mask_mod and score_mod can't be used with add_bias_kv or add_zero_attn, whose keys have no position."
            )
        embed_dims = self.embed_dim, self.kdim, self.vdim
        inputs = read_inputs(
            query, key, value, layout, key_layout, masks, need_weights, embed_dims, self.num_heads, self.batch_first
        )
        if inputs.is_sharded:
            self._check_sharded()
        reason = self._why_padded(inputs)
        if reason is None and inputs.layouts is None:
            packed = inputs.pack()
            return (inputs, _OTHER_VALUES) if packed is None else (packed, None)
        return inputs, reason

    def compute(self, inputs: Inputs, reason: str | None, average_attn_weights: bool) -> tuple[Any, Tensor | None]:
        """Outputs in the form of the caller, and weights or None. The arguments are those that `read` returns."""
        if inputs.layouts is not None and torch.is_grad_enabled() and not inputs.is_sharded:
            inputs = inputs.without_rows_past_end()
        if reason is None and self.graphs is not None and not is_compiling():
            out = self._run_as_graph(self.graphs, inputs)
            if out is not None:
                return inputs.convert_back(out, None, average_attn_weights)
        out, weights = self._attend(inputs, padded_attention if reason else packed_attention)
        return inputs.convert_back(out, weights, average_attn_weights)

    def _attend(
        self, inputs: Inputs, attention: Callable[..., tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs (…, E), and weights or None."""
        q, k, v = self._project(inputs)
        options = {
            **{"window_size": self.window_size, "softcap": self.softcap, "scale": self.scale, "sinks": self.sinks},
            "alibi_slopes": alibi_slopes(self.num_heads, self.out_proj.weight.device) if self.alibi else None,
            **{"dropout_p": self.dropout if self.training else 0.0, "backend": self.backend},
        }
        bias_k = self.bias_k
        config = AttentionConfig(options, bias_k, None if bias_k is None else self.bias_v, self.add_zero_attn)
        out, weights = attention(q, k, v, inputs, config)
        return self.out_proj(out.flatten(-2)), weights

    def _run_as_graph(self, captured: CapturedCalls, inputs: Inputs) -> Tensor | None:
        """Outputs (T, E) of packed inputs, computed by a CUDA graph; None if the call can't run as one."""
        assert inputs.layouts is not None
        masks = inputs.masks
        if masks.mask_mod is not None or masks.score_mod is not None:
            captured.count("it has a mask_mod or a score_mod")
            return None
        layouts = inputs.layouts[0], inputs.layouts[1], inputs.layouts[1]
        given: dict[tuple[int, int], graphs.PackedValues] = {}  # one object with two layouts is two inputs
        which = []
        for x, layout in zip(inputs[:3], layouts, strict=True):
            given.setdefault((id(x), id(layout)), graphs.PackedValues(x, layout))
            which.append(list(given).index((id(x), id(layout))))

        def attend(packed: list[graphs.PackedValues]) -> Tensor:
            query, key, value = [packed[i] for i in which]
            bounded = inputs._replace(
                query=query.values, key=key.values, value=value.values, layouts=(query.layout, key.layout)
            )
            return self._attend(bounded, packed_attention)[0]

        return graphs.run_as_graph(captured, self, (masks.is_causal, *which), list(given.values()), attend)

    def _check_sharded(self) -> None:
        """Raise a ValueError if an option is not supported with a `ShardedLayout`."""
        for option, is_used, instead in (
            ("dropout in training mode", self.training and self.dropout > 0, "set dropout to 0, or call eval()"),
            ("add_bias_kv or add_zero_attn", self._adds_keys, "leave them out, or use sinks=True"),
            ("cuda_graphs", self.graphs is not None, "leave it out"),
        ):
            if is_used:
                raise ValueError(f"{option} is not supported with a ShardedLayout: {instead}.")

    def _why_padded(self, inputs: Inputs) -> str | None:
        """Why every score of the padded batch is computed, or None if the call runs on packed tensors."""
        masks = inputs.masks
        if inputs.need_weights:
            return NEEDS_WEIGHTS
        if masks.attn_mask is not None:
            return "it has an attn_mask"
        if self.dropout == 1 and self.training:
            return "kernels do not support a dropout of 1"
        if inputs.layouts is not None:
            return None
        if is_context_parallel():
            return CONTEXT_PARALLEL
        padding = masks.key_padding_mask
        if not can_be_read(inputs.query, padding):
            return "its values can't be read here"
        if padding is None:
            return "it has no padding" if self.backend == "auto" and self.is_stock else None
        if padding.dtype != torch.bool and not self._packs_float_masks:
            return "key_padding_mask is not boolean"
        if padding.requires_grad:
            return "key_padding_mask needs a gradient"
        uses_positions = masks.is_causal or self.alibi or self.rotation is not None
        # In cross-attention the mask removes padding from keys only, so positions of queries and keys would not match.
        uses_positions = uses_positions or tuple(self.window_size) != (-1, -1)
        return "it is cross-attention that uses positions" if uses_positions and not inputs.is_self_attention else None

    def _project(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs (…, E) → q (…, H, D), k and v (…, G, D). In self-attention they are views of one matrix product."""
        query, key, value = inputs[:3]
        weight, bias = self.in_proj_weight, self.in_proj_bias
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        if weight is not None and key is query and value is query:
            is_plain = bias is None or bias.dtype == weight.dtype
            qkv = F.linear(query, weight, bias) if is_plain else _linear(query, weight, bias)
            q, k, v = qkv.view(*query.shape[:-1], sum(heads), self.head_dim).split(heads, -2)
        else:
            q_dim, kv_dim, _ = widths = [n * self.head_dim for n in heads]
            biases = (None,) * 3 if bias is None else bias.split(widths)
            if weight is not None and value is key:
                both = _linear(key, weight[q_dim:], None if bias is None else bias[q_dim:])
                parts = (_linear(query, weight[:q_dim], biases[0]), *both.split(kv_dim, -1))
            else:
                each = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
                weights = each if weight is None else weight.split(widths)
                parts = tuple(map(_linear, (query, key, value), weights, biases))
            q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotation is not None:
            positions, key_positions = inputs.positions
            q = self.rotation.rotate(q, positions, inputs.in_graph)
            k = self.rotation.rotate(k, key_positions, inputs.in_graph)
        return q, k, v

    @property
    def _adds_keys(self) -> bool:
        return self.bias_k is not None or self.add_zero_attn

    def _extra_options(self) -> str:
        """The options that are used and that nn.MultiheadAttention does not support."""
        used = {
            "num_kv_heads": self.num_kv_heads != self.num_heads,
            "head_dim": self.head_dim * self.num_heads != self.embed_dim,
            **{
                name: OPTIONS[name].parse(name, getattr(self, name)) != OPTIONS[name].default for name in _SCORE_OPTIONS
            },
            "sinks": self.sinks is not None,
            "alibi": self.alibi,
            "qk_norm": self.q_norm is not None,
            "rotary": self.rotation is not None,
        }
        return ", ".join(name for name, is_used in used.items() if is_used)

    def extra_repr(self) -> str:
        extra = self._extra_options()
        return f"{self.embed_dim}, {self.num_heads}" + (f", extra options: {extra}" if extra else "")


def _unexpected_argument(unknown: Collection[str], *, in_call: bool) -> TypeError:
    constructor = "VarlenMultiheadAttention()", signature(VarlenMultiheadAttention).parameters
    call = "VarlenMultiheadAttention.forward()", signature(VarlenMultiheadAttention.forward).parameters
    (name, known), other = (call, constructor) if in_call else (constructor, call)
    return unexpected_argument(name, unknown, known, *other)


def reads_weight_only(linear: nn.Module) -> bool:
    """Whether a call of `linear` gives what its weight and bias say, so that code may read them and not call it."""
    is_linear = isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward
    return is_linear and not (any(forward_hooks_of(linear)) or "forward" in linear.__dict__)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, also if the bias has another dtype than the weight.

    PyTorch adds such a bias to the product of (L, B, E) that is not contiguous, as in nn.MultiheadAttention with
    `batch_first`. For other inputs it raises an error, except under autocast, which casts the bias.
    """
    if bias is None or bias.dtype == weight.dtype:
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in (bias.dtype, weight.dtype):
        return F.linear(x, weight, bias)
    product = F.linear(x, weight)
    return (product + bias).to(product.dtype)


def _check_heads(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    if embed_dim <= 0 or num_heads <= 0:
        raise ValueError(f"embed_dim and num_heads must be greater than 0, got {embed_dim} and {num_heads}.")
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}.")
    if head_dim is None and embed_dim % num_heads:  # nn.MultiheadAttention raises this type here
        raise AssertionError(
            f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}: pass other sizes, or head_dim."
        )
    if head_dim is not None and head_dim <= 0:
        raise ValueError(f"head_dim must be greater than 0, got {head_dim}.")


def _stock_arguments(module: nn.MultiheadAttention) -> dict[str, Any]:
    """Arguments for the constructor of a module with the same shapes, on the meta device."""
    names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
    return {
        **{name: getattr(module, name) for name in names},
        "bias": module.in_proj_bias is not None,
        "add_bias_kv": module.bias_k is not None,
        "device": "meta",
    }


def _norm(kind: QkNorm | None, head_dim: int, factory: dict[str, Any]) -> nn.Module | None:
    make = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}.get(kind) if isinstance(kind, str) else kind
    if kind is not None and not callable(make):
        raise ValueError(f'qk_norm must be "rms", "layer", or a function from head_dim to a module, got {kind!r}.')
    return make(head_dim).to(**factory) if callable(make) else None
