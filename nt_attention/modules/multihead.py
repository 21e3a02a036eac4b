"""``VarlenMultiheadAttention``: ``nn.MultiheadAttention`` for ragged batches.

Dimensions: B sequences, j their ragged length, L and S padded lengths of queries and keys, T tokens, E embed dim, H
query heads, G key heads, D head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .. import nested
from ..functional import check_window_size, varlen_attention
from ..layout import SequenceLayout


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
        qk_norm, rotary: not there yet.
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
        qk_norm: object = None,
        rotary: object = None,
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
        check_window_size(window_size)
        for name, value in (("qk_norm", qk_norm), ("rotary", rotary)):
            if value is not None:
                raise NotImplementedError(
                    f"{name} is not there yet: leave it out, or apply it around varlen_attention."
                )
        if (add_bias_kv or add_zero_attn) and (alibi or tuple(window_size) != (-1, -1)):
            raise ValueError(
                "add_bias_kv and add_zero_attn add keys that stand at no position, which window_size and alibi need: "
                "leave out one of the two."
            )
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        self.window_size = (window_size[0], window_size[1])
        self.softcap = softcap
        self.scale = scale
        self.alibi = alibi
        self.backend = backend
        # What stock attention computes too; where it does not, the name below also keeps nn.TransformerEncoderLayer
        # from its fast path, which would read our weights and never call forward.
        self._is_stock = (
            num_kv_heads == num_heads
            and self.head_dim * num_heads == embed_dim
            and self.window_size == (-1, -1)
            and not (softcap or sinks or alibi)
            and scale is None
        )
        same_dims = self.kdim == embed_dim and self.vdim == embed_dim
        self._qkv_same_embed_dim = same_dims and self._is_stock

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
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        # the parent asks this name which of its two sets of weights to fill
        flag, self._qkv_same_embed_dim = self._qkv_same_embed_dim, self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = flag
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, backend: str = "auto") -> VarlenMultiheadAttention:
        """A stand-in that shares the parameters of ``module``: training one trains the other."""
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
        cls.share_parameters(module, new)
        return new.train(module.training)

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
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        layout: SequenceLayout | None = None,
        key_layout: SequenceLayout | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` to ``key`` and ``value``.

        On ragged inputs, and on padded ones for which only ``key_padding_mask`` and ``is_causal`` are asked, padding is
        never computed; a padded batch in self-attention then gives 0 where ``key_padding_mask`` is True. Where a dense
        input asks for weights or another mask, nn.MultiheadAttention's own path runs.

        Args:
            query: NestedTensor (B, j, E), whatever ``batch_first`` says; packed (T, E) with ``layout``; or dense as for
                nn.MultiheadAttention, where (L, E) without ``layout`` is one sequence.
            key, value: of the same kind; the same object as ``query`` for self-attention, which is then one product.
            key_padding_mask: (B, S), True at padding. Dense inputs only.
            need_weights: True if None on dense inputs, as in nn.MultiheadAttention, False on ragged ones.
            attn_mask, average_attn_weights: nn.MultiheadAttention's. Dense inputs only.
            is_causal: alone, query i sees keys 0 … i (with need_weights=False, where the input is dense); beside
                ``attn_mask``, nn.MultiheadAttention's hint.
            layout: the sequences of a packed query, and of key and value unless ``key_layout`` says otherwise.
            key_layout: those of a packed key and value.

        Returns:
            The output, of query's kind and with query's own offsets; and the weights, or None.

        Raises:
            ValueError: inputs that do not fit each other.
            NotImplementedError: weights or ``attn_mask`` where only stock attention has them.
        """
        inputs = (query, key, value)
        if layout is None and key_layout is not None:
            raise ValueError("key_layout describes packed keys, whose queries need layout= too.")
        if layout is None and not any(map(nested.is_nested, inputs)):
            return self._dense(*inputs, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if key_padding_mask is not None:
            raise ValueError("a ragged batch has no padding: leave out key_padding_mask, whose tokens are not there.")
        if attn_mask is not None or need_weights:
            raise NotImplementedError(
                "attn_mask and need_weights=True are not there yet for ragged inputs: pass is_causal=True, or a "
                "mask_mod to varlen_attention, and need_weights=False."
            )
        return self._ragged(*inputs, layout, key_layout, is_causal), None

    def _ragged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: SequenceLayout | None,
        key_layout: SequenceLayout | None,
        is_causal: bool,
    ) -> Tensor:
        rewrap: Callable[[Tensor], Tensor] | None = None
        if layout is None:
            named = {"query": query, "key": key, "value": value}
            for name, x in named.items():
                if not nested.is_nested(x):
                    raise ValueError(
                        f"query, key and value must be NestedTensors (B, j, E) here; {name} is a plain tensor "
                        f"{tuple(x.shape)}."
                    )
            q, k, v = nested.unwrap_each(**named)
            for name, rows in zip(named, (q.values, k.values, v.values), strict=True):
                if rows.dim() != 2:
                    raise ValueError(
                        f"query, key and value must be NestedTensors (B, j, E) here; {name} has {rows.dim() + 1} dims."
                    )
            if not k.layout.same_lengths(v.layout):
                raise ValueError("key and value must have the same lengths.")
            query, key, value, layout, key_layout, rewrap = q.values, k.values, v.values, q.layout, k.layout, q.rewrap
        elif any(map(nested.is_nested, (query, key, value))):
            raise ValueError("NestedTensors bring their own layout: leave out layout= and key_layout=.")
        key_layout = layout if key_layout is None else key_layout
        SequenceLayout.require(layout, "layout")
        SequenceLayout.require(key_layout, "key_layout")
        self._check_embedding(query, key, value)
        out = self._attend(query, key, value, layout, key_layout, is_causal)
        return out if rewrap is None else rewrap(out)

    def _dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool | None,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        need_weights = True if need_weights is None else need_weights
        only_padding = key_padding_mask is None or key_padding_mask.dtype == torch.bool
        worth_it = key_padding_mask is not None or is_causal or not self._is_stock or self.backend != "auto"
        if not need_weights and attn_mask is None and only_padding and worth_it and query.dim() in (2, 3):
            return self._padded(query, key, value, key_padding_mask, is_causal), None
        if not self._is_stock:
            raise NotImplementedError(
                "weights, attn_mask and floating-point padding masks are there for stock attention only, not beside "
                f"{self._beyond_stock()}: pass need_weights=False, a boolean key_padding_mask, and is_causal in "
                "place of attn_mask."
            )
        return super().forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )

    def _padded(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Dense (B, L, E), (L, B, E) or unbatched (L, E): packed, attended, and padded again."""
        is_self = key is query and value is query
        batched = query.dim() == 3
        if key.dim() != query.dim() or value.dim() != query.dim():
            raise ValueError(
                "query, key and value must have as many dimensions each, got "
                f"{query.dim()}, {key.dim()} and {value.dim()}."
            )
        if batched and not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        elif not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        self._check_embedding(query, key, value)
        if query.shape[0] != key.shape[0] or key.shape[:2] != value.shape[:2]:
            raise ValueError(
                f"query, key and value must share their batch, and key and value their length, got "
                f"{tuple(query.shape[:2])}, {tuple(key.shape[:2])} and {tuple(value.shape[:2])} (batch, length)."
            )
        if key_padding_mask is not None and key_padding_mask.shape != key.shape[:2]:
            raise ValueError(
                f"key_padding_mask must be {tuple(key.shape[:2])} (batch, keys), got {tuple(key_padding_mask.shape)}."
            )
        key_layout = _full(key) if key_padding_mask is None else SequenceLayout.from_attention_mask(~key_padding_mask)
        layout = key_layout if is_self else _full(query)
        packed_query = layout.pack(query)
        packed_key = packed_query if is_self else key_layout.pack(key)
        packed_value = packed_key if value is key or is_self else key_layout.pack(value)
        out = layout.pad(self._attend(packed_query, packed_key, packed_value, layout, key_layout, is_causal))
        if not batched:
            return out.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: SequenceLayout,
        key_layout: SequenceLayout,
        is_causal: bool,
    ) -> Tensor:
        """Packed (T, E), (S, Ek), (S, Ev) to (T, E)."""
        for name, x, rows in (("query", query, layout), ("key", key, key_layout), ("value", value, key_layout)):
            rows.check_rows(x, name)
        q, k, v = self._project(query, key, value)
        window_size, alignment = self.window_size, "upper_left"
        if self.bias_k is not None or self.add_zero_attn:
            extra, equal = (self.bias_k is not None) + self.add_zero_attn, layout.same_lengths(key_layout)
            k, v, key_layout = self._prepend_keys(k, v, key_layout)
            if is_causal and equal:
                alignment = "lower_right"  # which, with the added keys in front, leaves them visible to all
            elif is_causal:
                is_causal, window_size = False, (-1, extra)
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
            alibi_slopes=alibi_slopes(self.num_heads, query.device) if self.alibi else None,
            dropout_p=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        return layout.fill_past_end(self.out_proj(cast(Tensor, out).flatten(1)), 0.0)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """(T, H, D), (S, G, D), (S, G, D): views of one product where the inputs are one."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and key is query and value is query:
            heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
            return list(F.linear(query, weight, bias).view(-1, sum(heads), self.head_dim).split(heads, 1))
        q_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = [q_dim, kv_dim, kv_dim]
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.split(widths)
        )
        biases = (None,) * 3 if bias is None else bias.split(widths)
        if weight is not None and value is key:
            both = F.linear(key, weight[q_dim:], None if bias is None else bias[q_dim:])
            projected = (F.linear(query, weights[0], biases[0]), *both.split(kv_dim, -1))
        else:
            projected = tuple(map(F.linear, (query, key, value), weights, biases))
        return [x.unflatten(-1, (-1, self.head_dim)) for x in projected]

    def _prepend_keys(self, k: Tensor, v: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor, SequenceLayout]:
        """Every sequence with bias_k, bias_v and the zero key before its own (attention asks for no order of keys)."""
        ks, vs = [k], [v]
        if self.bias_k is not None:
            ks.append(self.bias_k.to(k.dtype).view(1, *k.shape[1:]))
            vs.append(self.bias_v.to(v.dtype).view(1, *v.shape[1:]))  # type: ignore[union-attr]
        if self.add_zero_attn:
            ks.append(k.new_zeros(1, *k.shape[1:]))
            vs.append(v.new_zeros(1, *v.shape[1:]))
        added, rows = len(ks) - 1, k.shape[0]
        longer = layout.extended(added)

        def build() -> Tensor:
            own = longer.position_ids - added
            return torch.where(own < 0, rows + own + added, layout.offsets[longer.sequence_ids] + own)

        index = layout.remember(("prepended", added, rows), build)
        return torch.cat(ks).index_select(0, index), torch.cat(vs).index_select(0, index), longer

    def _check_embedding(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        wanted = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, x, dim in wanted:
            if x.dim() < 2 or x.shape[-1] != dim:
                raise ValueError(f"{name} must have {dim} features in its last dimension, got {tuple(x.shape)}.")

    def _beyond_stock(self) -> str:
        options = {
            "num_kv_heads": self.num_kv_heads != self.num_heads,
            "head_dim": self.head_dim * self.num_heads != self.embed_dim,
            "window_size": self.window_size != (-1, -1),
            "softcap": bool(self.softcap),
            "scale": self.scale is not None,
            "sinks": self.sinks is not None,
            "alibi": self.alibi,
        }
        return ", ".join(name for name, used in options.items() if used)

    def extra_repr(self) -> str:
        beyond = self._beyond_stock()
        return f"{self.embed_dim}, {self.num_heads}" + (f", beyond stock: {beyond}" if beyond else "")


def _full(padded: Tensor) -> SequenceLayout:
    """The layout of a batch (B, L, E) without padding."""
    return SequenceLayout.from_lengths([padded.shape[1]] * padded.shape[0], device=padded.device)


@functools.cache
def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """(H,) float32: the geometric sequence that starts at and has the ratio 2^(−8/n), for n the power of 2 up to H.

    Where H is no power of 2, every second slope of the sequence for 2n fills up, as in Press et al. 2022's code.
    """
    n = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    slopes += [2 ** (-4 * (i + 1) / n) for i in range(0, 2 * (num_heads - n), 2)]
    with torch.inference_mode(False):  # kept for all calls, so not made as an inference tensor by the first one
        return torch.tensor(slopes, dtype=torch.float32, device=device)
