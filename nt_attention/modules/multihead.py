"""``VarlenMultiheadAttention``, a replacement for ``nn.MultiheadAttention`` that takes ragged batches.

Dimensions: B sequences, j their ragged length, L and S padded lengths of queries and keys, T tokens, E embed dim, H
query heads, G key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .._tracing import can_be_read
from ..kernels.call import OPTIONS, MaskMod, ScoreMod, check_options
from ..kernels.select import check_backend_name
from ..layout import SequenceLayout
from .alibi import alibi_slopes
from .config import AttentionConfig
from .inputs import Inputs, Masks, read_inputs
from .packed_attention import packed_attention
from .padded_attention import padded_attention
from .rotary import Rotary

QkNorm = Literal["rms", "layer"] | Callable[[int], nn.Module]
# Passed on to ``varlen_attention`` by name. nn.MultiheadAttention has only their defaults.
_SCORE_OPTIONS = ("window_size", "softcap", "scale")
_CHECKED = {*_SCORE_OPTIONS, "alibi", "backend", "dropout", "add_zero_attn"}


class VarlenMultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention (Vaswani et al. 2017) over jagged NestedTensors, packed tokens or padded batches.

    It replaces ``nn.MultiheadAttention``. The arguments up to ``dtype``, the parameters, their initialisation under a
    seed, and the state_dict are the same. The keyword arguments after ``dtype`` are new.

    Args:
        num_kv_heads: G, heads of keys and values, a divisor of ``num_heads`` (grouped heads, Ainslie et al. 2023).
        head_dim: D; ``embed_dim // num_heads`` if None.
        window_size: how many keys (before, after) its own position a query sees; −1 is no limit.
        softcap: if not 0, scores become softcap · tanh(scores / softcap).
        scale: the factor of query · key; D^−0.5 if None.
        sinks: learn (H,), for each head one more score in the softmax that has no value.
        alibi: add −slope · |distance| to the scores, with the slopes of Press et al. 2022.
        qk_norm: normalise each head of queries and keys over D, before rotary: "rms" (RMSNorm, as in Qwen3), "layer"
            (LayerNorm, as in ViT-22B), or a function from D to a module. The modules are ``q_norm`` and ``k_norm``.
        rotary: a ``Rotary``, which rotates queries and keys by their positions in their sequences.
        backend: "auto", or a name from ``available_backends()``.
    """

    sinks: nn.Parameter | None

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
    ) -> None:
        nn.Module.__init__(self)  # not the parent's: shapes are more general here. Parameters are made in its order.
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
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._create_parameters(bias, add_bias_kv, sinks, factory)
        self.q_norm, self.k_norm = (_norm(qk_norm, self.head_dim, factory) for _ in range(2))
        self.rotation = None if rotary is None else rotary.of_head_dim(self.head_dim)
        self._check_options()
        self._reset_parameters()

    def _create_parameters(self, bias: bool, add_bias_kv: bool, sinks: bool, factory: dict[str, Any]) -> None:
        """Create the parameters. Only ``out_proj`` is initialised here."""
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
                "add_bias_kv and add_zero_attn add keys that stand at no position, which window_size and alibi need: "
                "leave out one of the two."
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Check options that are set after the constructor too."""
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
        for initialise, names in init.items():
            for name in names:
                if (parameter := getattr(self, name)) is not None:
                    initialise(parameter)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Whether nn.TransformerEncoderLayer's fast path may read the weights instead of calling ``forward``.

        True if nn.MultiheadAttention computes the same and no backend is named. False in a graph, because the fast path
        does not support jagged NestedTensors.
        """
        if self.in_proj_weight is None or torch.compiler.is_compiling():
            return False
        return self.is_stock and self.backend == "auto"

    @property
    def is_stock(self) -> bool:
        """Whether nn.MultiheadAttention computes the same, with the options as they are now."""
        return not self._beyond_stock()

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, backend: str = "auto") -> VarlenMultiheadAttention:
        """A ``VarlenMultiheadAttention`` that shares the parameters of ``module``, but not its hooks.

        Raises:
            ValueError: ``module`` has options that would be lost, or is parametrized or pruned.
        """
        if isinstance(module, VarlenMultiheadAttention) and not module.is_stock:
            raise ValueError(f"{module._beyond_stock()} would be lost: copy.copy(module) shares parameters as well.")
        new = cls(**_stock_arguments(module), backend=backend)
        cls.share_parameters(module, new)
        return new

    def to_torch(self) -> nn.MultiheadAttention:
        """An ``nn.MultiheadAttention`` that shares these parameters, but not the hooks.

        Raises:
            ValueError: it does not have an option in use, or this module is parametrized or pruned.
        """
        if not self.is_stock:
            raise ValueError(f"nn.MultiheadAttention has no {self._beyond_stock()}.")
        stock = nn.MultiheadAttention(**_stock_arguments(self))
        self.share_parameters(self, stock)
        return stock

    @staticmethod
    def share_parameters(of: nn.MultiheadAttention, to: nn.MultiheadAttention) -> None:
        """Replace the parameters, ``out_proj`` and training mode of ``to`` by those of ``of``.

        Raises:
            ValueError: one module has parameters that the other lacks.
        """
        given, wanted = ({name for name, x in module._parameters.items() if x is not None} for module in (of, to))
        if given != wanted:
            raise ValueError(
                f"{', '.join(sorted(given ^ wanted))} of {type(of).__name__} are made of other parameters, or not "
                "stock's: take that out before (parametrize.remove_parametrizations, prune.remove) and put it on the "
                "other one."
            )
        to._parameters.update({name: x for name, x in of._parameters.items() if name in to._parameters})
        to.out_proj = of.out_proj
        to.train(of.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | Sequence[Tensor] | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        layout: SequenceLayout | None = None,
        key_layout: SequenceLayout | None = None,
        mask_mod: MaskMod | None = None,
        score_mod: ScoreMod | None = None,
    ) -> tuple[Any, Tensor | None]:
        """Attend from ``query`` to ``key`` and ``value``.

        Padding is not computed for ragged inputs, and for padded inputs with only ``key_padding_mask`` and
        ``is_causal``. Padded self-attention then gives 0 where ``key_padding_mask`` is True. Every score of the padded
        batch is computed for weights, for ``attn_mask``, and for a padded batch in a torch.compile graph.

        Args:
            query: NestedTensor (B, j, E), whatever ``batch_first`` is; packed (T, E) with ``layout``; a list of B
                tensors (Li, E); or dense as for nn.MultiheadAttention. (L, E) without ``layout`` is one sequence.
            key, value: in the same form. For self-attention pass the same object as ``query``: it is projected at once.
            key_padding_mask: (B, S), True at padding, or numbers to add to the scores. Dense inputs only.
            need_weights: None is True for dense inputs, as in nn.MultiheadAttention, and False for ragged ones.
            attn_mask: (L, S) or (B·H, L, S), True where a query may not see a key, or numbers to add to the scores. For
                ragged inputs L and S are at least the longest lengths, or it is a list of B masks (Li, Si) or
                (H, Li, Si).
            average_attn_weights: whether weights are the mean over heads.
            is_causal: query i sees keys 0 … i. Dense inputs then need need_weights=False. Together with ``attn_mask``
                it is nn.MultiheadAttention's hint that the mask is causal.
            layout: the sequences of a packed query, and of key and value if ``key_layout`` is None.
            key_layout: the sequences of a packed key and value.
            mask_mod, score_mod: as for ``varlen_attention``. Ragged inputs only.

        Returns:
            The output, in the form of query and with query's own offsets. And the weights after dropout, or None:
            (B, L, S), or (B, H, L, S) by head. For ragged inputs they are padded with 0 to the longest lengths. The
            keys of ``add_bias_kv`` and ``add_zero_attn`` are last. A query that sees no key gets 0 from attention.

        Raises:
            ValueError: inputs that do not fit each other. For dense inputs it is an ``InputError``, a subclass of all
                types that nn.MultiheadAttention raises.
        """
        if layout is None and key_layout is not None:
            raise ValueError("key_layout describes packed keys, whose queries need layout= too.")
        if (mask_mod or score_mod) and self._adds_keys:
            raise ValueError("mask_mod and score_mod count keys, to which add_bias_kv and add_zero_attn add some.")
        masks = Masks(is_causal, key_padding_mask, attn_mask, mask_mod, score_mod)
        embed_dims = self.embed_dim, self.kdim, self.vdim
        inputs = read_inputs(
            query, key, value, layout, key_layout, masks, need_weights, embed_dims, self.num_heads, self.batch_first
        )
        attend: Callable[..., tuple[Tensor, Tensor | None]] = padded_attention
        if self._runs_packed(inputs):
            inputs, attend = inputs.pack(), packed_attention
        q, k, v = self._project(inputs)
        out, weights = attend(q, k, v, inputs, self._config())
        return inputs.give_back(self.out_proj(out.flatten(-2)), weights, average_attn_weights)

    def _runs_packed(self, inputs: Inputs) -> bool:
        """Whether the call runs on packed heads. If not, every score of the padded batch is computed."""
        if inputs.need_weights or inputs.masks.attn_mask is not None or (self.dropout == 1 and self.training):
            return False  # kernels do not support a dropout of 1
        if inputs.layouts is not None:
            return True
        if not can_be_read(inputs.query):
            return False
        padding = inputs.masks.key_padding_mask
        if padding is None:
            return self.backend != "auto" or not self.is_stock
        if padding.dtype != torch.bool:
            return False
        if self.backend == "auto" and self.dropout and self.training and inputs.query.device.type == "cpu":
            return False  # on a CPU, only the reference has dropout, and it is slow
        uses_positions = inputs.masks.is_causal or self.alibi or self.rotation is not None
        # In cross-attention only the keys are packed by the mask, so positions of queries and keys would not match.
        return inputs.is_self_attention or not (uses_positions or tuple(self.window_size) != (-1, -1))

    def _project(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs (…, E) → q (…, H, D), k and v (…, G, D). For self-attention they are views of one product."""
        query, key, value = inputs[:3]
        weight, bias = self.in_proj_weight, self.in_proj_bias
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        if weight is not None and key is query and value is query:
            qkv = F.linear(query, weight, bias)
            q, k, v = qkv.view(*query.shape[:-1], sum(heads), self.head_dim).split(heads, -2)
        else:
            q_dim, kv_dim, _ = widths = [n * self.head_dim for n in heads]
            biases = (None,) * 3 if bias is None else bias.split(widths)
            if weight is not None and value is key:
                both = F.linear(key, weight[q_dim:], None if bias is None else bias[q_dim:])
                parts = (F.linear(query, weight[:q_dim], biases[0]), *both.split(kv_dim, -1))
            else:
                each = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
                weights = each if weight is None else weight.split(widths)
                parts = tuple(map(F.linear, (query, key, value), weights, biases))
            q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotation is not None:
            positions, key_positions = inputs.positions
            q, k = self.rotation.rotate(q, positions), self.rotation.rotate(k, key_positions)
        return q, k, v

    def _config(self) -> AttentionConfig:
        bias_k = self.bias_k
        options = {name: getattr(self, name) for name in _SCORE_OPTIONS}
        options["sinks"] = self.sinks
        options["alibi_slopes"] = alibi_slopes(self.num_heads, self.out_proj.weight.device) if self.alibi else None
        options["dropout_p"] = self.dropout if self.training else 0.0
        options["backend"] = self.backend
        return AttentionConfig(options, bias_k, None if bias_k is None else self.bias_v, self.add_zero_attn)

    @property
    def _adds_keys(self) -> bool:
        return self.bias_k is not None or self.add_zero_attn

    def _beyond_stock(self) -> str:
        """The options in use that nn.MultiheadAttention does not have."""
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
        beyond = self._beyond_stock()
        return f"{self.embed_dim}, {self.num_heads}" + (f", beyond stock: {beyond}" if beyond else "")


def _check_heads(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    if embed_dim <= 0 or num_heads <= 0:
        raise ValueError(f"embed_dim and num_heads must be greater than 0, got {embed_dim} and {num_heads}.")
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}.")
    if head_dim is None and embed_dim % num_heads:  # nn.MultiheadAttention raises this type here
        raise AssertionError(
            f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}; or pass head_dim."
        )
    if head_dim is not None and head_dim <= 0:
        raise ValueError(f"head_dim must be greater than 0, got {head_dim}.")


def _stock_arguments(module: nn.MultiheadAttention) -> dict[str, Any]:
    """The constructor's arguments for a module of the same shapes, on the meta device."""
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
        raise ValueError(f'qk_norm must be "rms", "layer" or what makes a module from head_dim, got {kind!r}.')
    return make(head_dim).to(**factory) if callable(make) else None
