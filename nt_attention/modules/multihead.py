"""``VarlenMultiheadAttention``: ``nn.MultiheadAttention`` for ragged batches.

Dimensions: B sequences, j their ragged length, L and S padded lengths of queries and keys, T tokens, E embed dim, H
query heads, G key heads, D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .. import nested
from .._tracing import refuse_jit_trace
from ..functional import check_score_options, check_window_size, varlen_attention
from ..kernels.call import MaskMod, ScoreMod
from ..kernels.select import check_backend_name
from ..layout import SequenceLayout
from . import dense, padded
from .alibi import alibi_slopes
from .rotary import Rotary

QkNorm = Literal["rms", "layer"] | Callable[[int], nn.Module]
_OPTIONS = {"window_size", "softcap", "scale", "alibi", "backend", "dropout", "add_zero_attn"}


class VarlenMultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention (Vaswani et al. 2017) over jagged NestedTensors, packed tokens or padded batches.

    Stands in for ``nn.MultiheadAttention``: the arguments up to ``dtype`` are its own, and so are the parameters, their
    initialisation under a seed, and the state_dict. The keyword arguments after them go beyond it.

    Args:
        num_kv_heads: G, heads of keys and values, a divisor of ``num_heads`` (grouped heads, Ainslie et al. 2023).
        head_dim: D, ``embed_dim // num_heads`` if None.
        window_size: how many keys (before, after) its own place a query sees; −1 is no limit.
        softcap: if not 0, scores become softcap · tanh(scores / softcap).
        scale: of the scores; D^−0.5 if None.
        sinks: learn a score (H,) for each head that takes part in the softmax and has no value.
        alibi: add −slope · |distance| to the scores, with the slopes of Press et al. 2022.
        qk_norm: normalise each head of queries and keys over D before anything else: "rms" (RMSNorm, as in Qwen3),
            "layer" (LayerNorm, as in ViT-22B), or what makes a module from D. They are ``q_norm`` and ``k_norm``.
        rotary: a ``Rotary``, which turns queries and keys by their positions in their sequences.
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
        nn.Module.__init__(self)  # not the parent's: the shapes below are more general, in the same order of creation
        if embed_dim <= 0 or num_heads <= 0:
            raise ValueError(f"embed_dim and num_heads must be greater than 0, got {embed_dim} and {num_heads}.")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads <= 0 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}.")
        if head_dim is None and embed_dim % num_heads:  # nn.MultiheadAttention raises this type here
            raise AssertionError(
                f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}; or pass head_dim."
            )
        if head_dim is not None and head_dim <= 0:
            raise ValueError(f"head_dim must be greater than 0, got {head_dim}.")
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
        same_dims = self.kdim == embed_dim and self.vdim == embed_dim

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        q_dim, kv_dim = num_heads * self.head_dim, num_kv_heads * self.head_dim

        def parameter(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **factory)) if wanted else None

        self.register_parameter("in_proj_weight", parameter(same_dims, q_dim + 2 * kv_dim, embed_dim))
        self.register_parameter("q_proj_weight", parameter(not same_dims, q_dim, embed_dim))
        self.register_parameter("k_proj_weight", parameter(not same_dims, kv_dim, self.kdim))
        self.register_parameter("v_proj_weight", parameter(not same_dims, kv_dim, self.vdim))
        self.register_parameter("in_proj_bias", parameter(bias, q_dim + 2 * kv_dim))
        self.out_proj = NonDynamicallyQuantizableLinear(q_dim, embed_dim, bias=bias, **factory)
        self.register_parameter("bias_k", parameter(add_bias_kv, 1, 1, kv_dim))
        self.register_parameter("bias_v", parameter(add_bias_kv, 1, 1, kv_dim))
        self.register_parameter("sinks", parameter(sinks, num_heads))
        self.q_norm, self.k_norm = (_norm(qk_norm, self.head_dim, factory) for _ in range(2))
        self.rotation = None if rotary is None else rotary.of_head_dim(self.head_dim)
        self._check_options()
        self._reset_parameters()

    def _check_options(self) -> None:
        check_window_size(self.window_size)
        check_score_options(self.scale, self.softcap)
        check_backend_name(self.backend)
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout must be in [0, 1], got {self.dropout}.")
        if self.added_keys and (self.alibi or tuple(self.window_size) != (-1, -1)):
            raise ValueError(
                "add_bias_kv and add_zero_attn add keys that stand at no position, which window_size and alibi need: "
                "leave out one of the two."
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Options that are set later are checked like those of the constructor."""
        before = self.__dict__.get(name)
        super().__setattr__(name, value)
        if name in _OPTIONS and "rotation" in self.__dict__:  # the constructor sets it last
            try:
                self._check_options()
            except ValueError:
                self.__dict__[name] = before
                raise

    def _reset_parameters(self) -> None:
        if self.in_proj_weight is not None:
            nn.init.xavier_uniform_(self.in_proj_weight)
        else:
            for weight in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for added in (self.bias_k, self.bias_v):
            if added is not None:
                nn.init.xavier_normal_(added)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Whether nn.TransformerEncoderLayer's fast path may read the weights and never call ``forward``.

        That is right for what stock attention computes too, on any backend, and not in a graph: the fast path knows no
        jagged NestedTensors.
        """
        return (
            self.in_proj_weight is not None
            and self.is_stock
            and self.backend == "auto"
            and not torch.compiler.is_compiling()
        )

    @property
    def is_stock(self) -> bool:
        """Whether nn.MultiheadAttention computes the same, with the options as they are now."""
        return not self._beyond_stock()

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, backend: str = "auto") -> VarlenMultiheadAttention:
        """A stand-in that shares the parameters of ``module``: training one trains the other. Hooks are not taken over.

        Raises:
            ValueError: options beyond stock, or parameters that are made of others (parametrized, pruned).
        """
        if isinstance(module, VarlenMultiheadAttention) and not module.is_stock:
            raise ValueError(f"{module._beyond_stock()} would be lost: copy.copy(module) shares parameters as well.")
        new = cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            module.in_proj_bias is not None,
            module.bias_k is not None,
            module.add_zero_attn,
            module.kdim,
            module.vdim,
            module.batch_first,
            device="meta",
            backend=backend,
        )
        _check_parameters(module, new)
        cls.share_parameters(module, new)
        return new.train(module.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """The stock module that shares these parameters.

        Raises:
            ValueError: as ``from_torch``.
        """
        if not self.is_stock:
            raise ValueError(f"nn.MultiheadAttention has no {self._beyond_stock()}.")
        stock = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            self.dropout,
            self.in_proj_bias is not None,
            self.bias_k is not None,
            self.add_zero_attn,
            self.kdim,
            self.vdim,
            self.batch_first,
            device="meta",
        )
        _check_parameters(self, stock)
        self.share_parameters(self, stock)
        return stock.train(self.training)

    @staticmethod
    def share_parameters(of: nn.MultiheadAttention, to: nn.MultiheadAttention) -> None:
        """Let ``to`` hold the parameters of ``of``, and its ``out_proj``, in place of its own."""
        for name, own in of._parameters.items():
            if name in to._parameters:
                to._parameters[name] = own
        to.out_proj = of.out_proj

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

        On ragged inputs, and on padded ones for which only ``key_padding_mask`` and ``is_causal`` are asked, padding is
        never computed; a padded batch in self-attention then gives 0 where ``key_padding_mask`` is True. Weights and
        ``attn_mask`` take every score of the padded batch, and so does a padded batch in a torch.compile graph.

        Args:
            query: NestedTensor (B, j, E), whatever ``batch_first`` says; packed (T, E) with ``layout``; a list of B
                tensors (Li, E); or dense as for nn.MultiheadAttention, where (L, E) without ``layout`` is one sequence.
            key, value: of the same kind; the same object as ``query`` for self-attention, which is then one product.
            key_padding_mask: (B, S), True at padding, or numbers to add to the scores. Dense inputs only.
            need_weights: True if None on dense inputs, as in nn.MultiheadAttention, False on ragged ones.
            attn_mask: (L, S) or (B·H, L, S), True where a query may not see a key, or numbers to add to the scores. For
                ragged inputs L and S are at least the longest lengths, or it is a list of B masks (Li, Si) or
                (H, Li, Si).
            average_attn_weights: whether weights are the mean over heads.
            is_causal: alone, query i sees keys 0 … i (with need_weights=False, where the input is dense); beside
                ``attn_mask``, nn.MultiheadAttention's hint that the mask says just this.
            layout: the sequences of a packed query, and of key and value unless ``key_layout`` says otherwise.
            key_layout: those of a packed key and value.
            mask_mod, score_mod: as for ``varlen_attention``. Ragged inputs only.

        Returns:
            The output, of query's kind and with query's own offsets. And the weights after dropout, or None: (B, L, S),
            or (B, H, L, S) by head, for ragged inputs padded with 0 to the longest lengths; the keys that
            ``add_bias_kv`` and ``add_zero_attn`` add come last. A query that sees no key gets 0 from attention.

        Raises:
            ValueError: inputs that do not fit each other. Where they are dense it is an ``InputError``, which is also
                each of the types that nn.MultiheadAttention raises.
        """
        if layout is None and key_layout is not None:
            raise ValueError("key_layout describes packed keys, whose queries need layout= too.")
        if (mask_mod or score_mod) and (self.bias_k is not None or self.add_zero_attn):
            raise ValueError("mask_mod and score_mod count keys, to which add_bias_kv and add_zero_attn add some.")
        inputs = (query, key, value)
        in_lists = isinstance(query, (list, tuple))
        if in_lists:
            refuse_jit_trace()
        for name, x in zip(("query", "key", "value"), inputs, strict=True):
            if not in_lists and not isinstance(x, Tensor):
                raise TypeError(
                    f"query, key and value must be tensors, or lists of them; {name} is {type(x).__name__}."
                )
        if not in_lists and layout is None and not any(nested.are_nested(*inputs)):
            if mask_mod or score_mod:
                raise ValueError("mask_mod and score_mod are for ragged inputs: pass attn_mask to padded ones.")
            asked = (key_padding_mask, need_weights is not False, attn_mask, average_attn_weights, is_causal)
            return dense.forward(self, *inputs, *asked)  # type: ignore[arg-type]
        if key_padding_mask is not None:
            raise ValueError("a ragged batch has no padding: leave out key_padding_mask, whose tokens are not there.")
        weights: Tensor | None
        rewrap: Callable[[Tensor], Any] | None = None
        if in_lists or layout is None:
            if in_lists and layout is not None:
                raise ValueError("lists of tensors bring their own layout: leave out layout= and key_layout=.")
            ragged: Callable[..., _Packed] = _from_lists if in_lists else _from_nested
            query, key, value, layout, key_layout, rewrap = ragged(*inputs)
        elif any(nested.are_nested(*inputs)):
            raise ValueError("NestedTensors bring their own layout: leave out layout= and key_layout=.")
        is_self = key_layout is None or key_layout is layout
        layout = SequenceLayout.require(layout, "layout")
        key_layout = layout if is_self else SequenceLayout.require(key_layout, "key_layout")
        self.check_widths(query, key, value)
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 2:
                raise ValueError(f"packed {name} must be (tokens, features), got {tuple(x.shape)}.")
        layout.check_rows(query, "query")
        key_layout.check_keys(key, value)
        if attn_mask is not None and is_causal:  # the hint says what the mask says
            attn_mask, is_causal = (attn_mask, False) if need_weights else (None, True)
        if need_weights or attn_mask is not None or self.drops_all:
            out, weights = padded.attend(
                *(self, query, key, value, layout, key_layout, attn_mask, is_causal, mask_mod, score_mod),
                need_weights=bool(need_weights),
            )
            weights = weights.mean(1) if weights is not None and average_attn_weights else weights
        else:
            out = self.attend(query, key, value, layout, key_layout, is_causal, mask_mod, score_mod)
            weights = None
        return out if rewrap is None else rewrap(out), weights

    # What follows is for the files of this folder.

    @property
    def dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    @property
    def counts_places(self) -> bool:
        """Whether scores go by where tokens stand, causality aside."""
        return self.window_size != (-1, -1) or self.alibi or self.rotation is not None

    @property
    def drops_all(self) -> bool:
        """Whether dropout leaves nothing, which kernels do not take."""
        return self.dropout_p == 1

    @property
    def added_keys(self) -> int:
        """How many keys every sequence has beside its own."""
        return (self.bias_k is not None) + self.add_zero_attn

    @property
    def slopes(self) -> Tensor | None:
        return alibi_slopes(self.num_heads, self.out_proj.weight.device) if self.alibi else None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: SequenceLayout,
        key_layout: SequenceLayout,
        is_causal: bool,
        mask_mod: MaskMod | None = None,
        score_mod: ScoreMod | None = None,
    ) -> Tensor:
        """Packed (T, E), (S, Ek), (S, Ev) to (T, E), through ``varlen_attention``."""
        q, k, v = self.project(query, key, value, layout, key_layout)
        window_size, alignment = self.window_size, "upper_left"
        if self.added_keys:
            equal = layout.same_lengths(key_layout)
            k, v, key_layout = self._prepend_keys(k, v, key_layout)
            if is_causal and equal:
                alignment = "lower_right"  # which, with the added keys in front, leaves them visible to all
            elif is_causal:
                is_causal, window_size = False, (-1, self.added_keys)
        out = varlen_attention(
            q,
            k,
            v,
            layout,
            key_layout,
            is_causal=is_causal,
            causal_alignment=alignment,  # type: ignore[arg-type]
            window_size=window_size,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            alibi_slopes=self.slopes,
            mask_mod=mask_mod,
            score_mod=score_mod,
            dropout_p=self.dropout_p,
            backend=self.backend,
        )
        return layout.fill_past_end(self.out_proj(cast(Tensor, out).flatten(1)), 0.0)

    def project(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        places: SequenceLayout | Tensor,
        key_places: SequenceLayout | Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(…, H, D), (…, G, D), (…, G, D) of inputs (…, E): views of one product where the inputs are one.

        ``places`` tell the positions of packed rows, or are those of padded ones (B or 1, L).
        """
        weight, bias = self.in_proj_weight, self.in_proj_bias
        q_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = [q_dim, kv_dim, kv_dim]
        if weight is not None and key is query and value is query:
            heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
            q, k, v = F.linear(query, weight, bias).unflatten(-1, (sum(heads), self.head_dim)).split(heads, -2)
        else:
            biases = (None,) * 3 if bias is None else bias.split(widths)
            if weight is not None and value is key:
                both = F.linear(key, weight[q_dim:], None if bias is None else bias[q_dim:])
                parts = (F.linear(query, weight[:q_dim], biases[0]), *both.split(kv_dim, -1))
            else:
                each = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
                parts = tuple(
                    map(F.linear, (query, key, value), each if weight is None else weight.split(widths), biases)
                )
            q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotation is not None:
            q, k = self.rotation.turn_at(q, places), self.rotation.turn_at(k, key_places)
        return q, k, v

    def _prepend_keys(self, k: Tensor, v: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor, SequenceLayout]:
        """Every sequence with the added keys before its own (attention asks for no order of keys)."""
        longer = layout.extended(self.added_keys)
        ks, vs = self.keys_to_add(k, v)
        return self._before_each(ks, k, layout, longer), self._before_each(vs, v, layout, longer), longer

    @staticmethod
    def _before_each(added: list[Tensor], x: Tensor, layout: SequenceLayout, longer: SequenceLayout) -> Tensor:
        """``x`` (N, G, D) with the ``added`` rows, (1, G, D) each, at the start of every sequence."""
        rows = x.shape[0]

        def build() -> Tensor:
            sequence, position = longer.locate_rows(rows + len(added) * layout.batch_size)
            own = position - len(added)
            return torch.where(own < 0, rows + position, layout.offsets[sequence] + own)

        index = layout.cached(("prepended", len(added), rows), build)
        return torch.cat([x, *added]).index_select(0, index)

    def keys_to_add(self, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """``bias_k`` and the zero key, those that there are, and their values: (1, G, D) each."""
        ks, vs = [], []
        if self.bias_k is not None:
            ks.append(self.bias_k.to(k.dtype).view(1, *k.shape[-2:]))
            vs.append(self.bias_v.to(v.dtype).view(1, *v.shape[-2:]))  # type: ignore[union-attr]
        if self.add_zero_attn:
            ks.append(k.new_zeros(1, *k.shape[-2:]))
            vs.append(v.new_zeros(1, *v.shape[-2:]))
        return ks, vs

    def check_widths(self, query: Tensor, key: Tensor, value: Tensor, error: type[ValueError] = ValueError) -> None:
        wanted = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, x, dim in wanted:
            if x.dim() < 2 or x.shape[-1] != dim:
                raise error(f"{name} must have {dim} features in its last dimension, got {tuple(x.shape)}.")

    def _beyond_stock(self) -> str:
        """The options in use that nn.MultiheadAttention does not have."""
        options = {
            "num_kv_heads": self.num_kv_heads != self.num_heads,
            "head_dim": self.head_dim * self.num_heads != self.embed_dim,
            "window_size": tuple(self.window_size) != (-1, -1),
            "softcap": bool(self.softcap),
            "scale": self.scale is not None,
            "sinks": self.sinks is not None,
            "alibi": self.alibi,
            "qk_norm": self.q_norm is not None,
            "rotary": self.rotation is not None,
        }
        return ", ".join(name for name, used in options.items() if used)

    def extra_repr(self) -> str:
        beyond = self._beyond_stock()
        return f"{self.embed_dim}, {self.num_heads}" + (f", beyond stock: {beyond}" if beyond else "")


def _check_parameters(of: nn.Module, to: nn.Module) -> None:
    there, wanted = ({name for name, x in module._parameters.items() if x is not None} for module in (of, to))
    if there != wanted:
        raise ValueError(
            f"{', '.join(sorted(there ^ wanted))} of {type(of).__name__} are made of other parameters, or not stock's: "
            "take that out before (parametrize.remove_parametrizations, prune.remove) and put it on the other one."
        )


def _norm(kind: QkNorm | None, head_dim: int, factory: dict[str, Any]) -> nn.Module | None:
    make = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}.get(kind) if isinstance(kind, str) else kind
    if kind is not None and not callable(make):
        raise ValueError(f'qk_norm must be "rms", "layer" or what makes a module from head_dim, got {kind!r}.')
    return make(head_dim).to(**factory) if callable(make) else None


_Packed = tuple[Tensor, Tensor, Tensor, SequenceLayout, SequenceLayout, Callable[[Tensor], Any]]


def _from_nested(query: Tensor, key: Tensor, value: Tensor) -> _Packed:
    named = {"query": query, "key": key, "value": value}
    for (name, x), kind in zip(named.items(), nested.are_nested(*named.values()), strict=True):
        if not kind:
            raise ValueError(
                f"query, key and value must be NestedTensors (B, j, E) here; {name} is a plain tensor {tuple(x.shape)}."
            )
    q, k, v = nested.unwrap_each(query=query, key=key, value=value)
    for name, rows in zip(named, (q.values, k.values, v.values), strict=True):
        if rows.dim() != 2:
            raise ValueError(
                f"query, key and value must be NestedTensors (B, j, E) here; {name} has {rows.dim() + 1} dims."
            )
    _check_values(k.layout, v.layout)
    return q.values, k.values, v.values, q.layout, k.layout, q.rewrap


def _from_lists(query: Sequence[Tensor], key: Sequence[Tensor], value: Sequence[Tensor]) -> _Packed:
    packed: dict[int, tuple[Tensor, SequenceLayout]] = {}
    for name, xs in (("query", query), ("key", key), ("value", value)):
        fits = isinstance(xs, (list, tuple)) and all(isinstance(x, Tensor) and x.dim() == 2 for x in xs)
        if not fits or len(xs) != len(query) or not len(xs):
            told = f"{len(xs)} of them" if isinstance(xs, (list, tuple)) else type(xs).__name__
            raise ValueError(
                f"query, key and value must be lists of as many tensors (Li, E), one or more; {name} is {told}."
            )
        kinds = {(x.shape[1], x.dtype, x.device) for x in xs}
        if len(kinds) > 1:
            told = "; ".join(f"{width}, {dtype}, {device}" for width, dtype, device in kinds)
            raise ValueError(f"the tensors of {name} must share their width, dtype and device, got {told}.")
        if id(xs) not in packed:
            lengths = [len(x) for x in xs]
            packed[id(xs)] = torch.cat(list(xs)), SequenceLayout.from_lengths(lengths, device=xs[0].device)
    (q, own), (k, other), (v, others) = (packed[id(xs)] for xs in (query, key, value))
    _check_values(other, others)
    other = own if own.same_lengths(other) else other
    bounds = own.host_offsets.tolist()
    # slices one by one: outputs of split could not be changed in place
    return q, k, v, own, other, lambda out: [out[begin:end] for begin, end in itertools.pairwise(bounds)]


def _check_values(key_layout: SequenceLayout, value_layout: SequenceLayout) -> None:
    if not key_layout.same_lengths(value_layout):
        raise ValueError("key and value must have the same lengths.")
