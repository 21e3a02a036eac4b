"""One attention call: `AttentionSpec`, whose fields declare the options of a call.

`OPTIONS` (the arguments of `varlen_attention`) and `SCHEMA` (the arguments of custom operators) are derived from these
fields.

Dimensions: B sequences, T query tokens, S key tokens, H query heads, G key heads (H is a multiple of G), D head dim of
queries and keys, Dv head dim of values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from ..compiler import derived, is_traced
from ..layouts.paged import PagedLayout
from ..layouts.protocol import Layout
from ..layouts.tree import TreeLayout
from .masks import Window
from .other_names import unexpected_argument
from .relative import RelativeBias

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
CausalAlignment = Literal["lower_right", "upper_left"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of query, key and value


class Option(NamedTuple):
    """An option of a call, declared beside its field of `AttentionSpec`.

    Attributes:
        default: The value if the option is not passed.
        parse: `parse(name, value)` checks the value passed and returns the field's value. It raises a ValueError that
            says what to pass.
        feature: The feature that a kernel must support if the value is not the default; "" if there is none.
        advice: The reason and what to change if a kernel does not support this feature.
    """

    default: Any
    parse: Callable[[str, Any], Any]
    feature: str
    advice: str = ""


def _option(default: Any, parse: Callable[[str, Any], Any], feature: str, advice: str = "") -> Any:
    return dataclasses.field(default=default, metadata={"option": Option(default, parse, feature, advice)})


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):  # a bool tensor could change after the call
        raise ValueError(f"{name} must be True or False, got {value!r}.")
    return value


def _scale(name: str, value: object) -> float | None:
    if value is not None and not (isinstance(value, (int, float)) and -math.inf < value < math.inf):
        raise ValueError(
            f"{name} must be a finite number, or None for D^−0.5, got {value!r}. To learn one, multiply query by it."
        )
    return None if value is None else float(value)


def _alignment(name: str, value: Any) -> CausalAlignment:
    if value not in ("lower_right", "upper_left"):
        raise ValueError(f"{name} must be 'lower_right' or 'upper_left', got {value!r}.")
    return value


# Tokens: a longer side of a window has no limit, so that kernels can add each to a position in int32.
_NO_LIMIT = 2**30


def _window_size(name: str, value: object) -> tuple[int, int]:
    if type(value) is tuple and len(value) == 2:  # fast path of the usual case, because every call is checked
        left, right = value
        if type(left) is type(right) is int and -1 <= left < _NO_LIMIT and -1 <= right < _NO_LIMIT:
            return left, right
    sides = value if isinstance(value, Sequence) else ()
    if len(sides) != 2 or any(not isinstance(side, int) or not -1 <= side < 2**63 for side in sides):
        raise ValueError(f"{name} must be (left, right), two integers from −1 (no limit) to 2^63 − 1, got {value!r}.")
    left, right = (int(side) if side < _NO_LIMIT else -1 for side in sides)
    return left, right


def _softcap(name: str, value: object) -> float:
    if isinstance(value, (int, float)) and value is not True and (value == 0 or 1e-30 <= value < math.inf):
        return float(value)
    raise ValueError(f"{name} must be 0 (off) or a positive number, got {value}. The least is 1e-30.")


def _probability(name: str, value: object) -> float:
    if not (isinstance(value, (int, float)) and 0 <= value < 1):
        raise ValueError(f"{name} must be in [0, 1), got {value}.")
    return float(value)


def _mod(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function with the signature of flex_attention's {name}, got {value!r}.")
    return value


@dataclass(frozen=True)
class AttentionSpec:
    """A call without its tensors. It determines which backends can run the call.

    The other fields are the arguments of `varlen_attention` of the same name.

    Attributes:
        device: The device of the tensors.
        dtype: The dtype of query, key and value.
        num_heads, num_kv_heads, head_dim, value_dim: H, G, D, Dv.
        scale: The factor of query · key, as a number.
        alibi: Whether ALiBi slopes are passed.
        relative: The names of the biases of a `RelativeBias`, such as ("bias",); () without one.
        needs_grad: Whether any gradients may be needed.
        relative_grad: Whether gradients of these biases may be needed.
        sinks: Whether sinks are added after the kernel, whose backward then gets a gradient of the log-sum-exp. It only
            matters for expected times, and operators don't know it.
        equal_lengths: Whether every sequence has as many keys as queries. Both alignments are then the same.
        keyless: Whether some sequence may have no key.
        bounded: Whether the host only knows bounds of the lengths.
        paged: Whether keys and values are in pools, at the rows of a `PagedLayout`.
        tree: Whether sequences share prefixes, as those of a `TreeLayout`.

    Example:
        >>> import torch
        >>> from nt_attention.kernels.call import AttentionSpec
        >>> shapes = (14, 8, 64), (14, 2, 64), (14, 2, 64)
        >>> options = {"scale": None, "is_causal": True}
        >>> spec = AttentionSpec.of(torch.device("cpu"), torch.float32, shapes, options)
        >>> spec.scale, spec.window_size
        (0.125, (-1, -1))
        >>> sorted(spec.features)
        ['causal', 'grouped heads']
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float = dataclasses.field(metadata={"option": Option(None, _scale, "")})
    is_causal: bool = _option(False, _bool, "")  # like the next two, a part of the mask geometry
    causal_alignment: CausalAlignment = _option("lower_right", _alignment, "")
    window_size: tuple[int, int] = _option((-1, -1), _window_size, "")
    softcap: float = _option(0.0, _softcap, "softcap", "softcap is not supported: leave softcap at 0.")
    score_mod: ScoreMod | None = _option(
        None, _mod, "score_mod", "score_mod is not supported: use softcap or alibi_slopes if they can express it."
    )
    mask_mod: MaskMod | None = _option(
        None, _mod, "mask_mod", "mask_mod is not supported: use is_causal or window_size if they can express it."
    )
    dropout_p: float = _option(0.0, _probability, "dropout", "dropout is not supported: leave dropout_p at 0.")
    deterministic: bool = _option(
        False, _bool, "deterministic", "deterministic gradients are not supported: leave deterministic at False."
    )
    batch_invariant: bool = _option(
        False, _bool, "batch_invariant", "batch invariance is not supported: leave batch_invariant at False."
    )
    alibi: bool = False
    relative: tuple[str, ...] = ()
    needs_grad: bool = False
    relative_grad: bool = False
    sinks: bool = False
    equal_lengths: bool = True
    keyless: bool = True
    bounded: bool = False
    paged: bool = False
    tree: bool = False

    @classmethod
    def of(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        shapes: tuple[Sequence[int], Sequence[int], Sequence[int]],
        options: Mapping[str, Any],
        **more: Any,
    ) -> AttentionSpec:
        """The spec of a call.

        Args:
            device: The device of the tensors.
            dtype: The dtype of query, key and value.
            shapes: The shapes of query (T, H, D), key (S, G, D) and value (S, G, Dv).
            options: Options by name, as a user passed them or as another spec has them; `scale` is required.
            **more: Fields that are not options.

        Raises:
            ValueError: The shapes do not fit each other, or an option is invalid.
        """
        check_shapes(*shapes)
        (_, num_heads, head_dim), (_, num_kv_heads, value_dim) = shapes[0], shapes[2]
        values = {name: OPTIONS[name].parse(name, value) for name, value in options.items()}
        if values["scale"] is None:
            values["scale"] = head_dim**-0.5
        return cls(device, dtype, num_heads, num_kv_heads, head_dim, value_dim, **values, **more)

    @classmethod
    def of_tensors(
        cls, tensors: tuple[Tensor, Tensor, Tensor], options: Mapping[str, Any], **more: Any
    ) -> AttentionSpec:
        """The spec of a call with query, key and value, after checks of dtypes and devices.

        Args:
            tensors: Query (T, H, D), key (S, G, D) and value (S, G, Dv), or pools with a `PagedLayout`.
            options, **more: As for `of`, with `layout_fields`.

        Raises:
            ValueError: The tensors or options do not fit each other.
        """
        query, key, value = tensors
        check_tensors(query, key, value, more["paged"])
        shapes: Any = (query.shape, key.shape, value.shape)
        if more["paged"]:
            shapes = (query.shape, (1, *key.shape[-2:]), (1, *value.shape[-2:]))
        return cls.of(query.device, query.dtype, shapes, options, **more)

    @derived
    def window(self) -> Window:
        """The window of visible keys, causality included."""
        return Window.of(self.window_size, self.is_causal)

    @derived
    def has_positive_scale(self) -> bool:
        """Whether the scale is a positive normal number of float32, or of float64 if the inputs are float64.

        Kernels that mask before they scale compute −inf · 0 = NaN if the scale is 0.
        """
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.scale >= torch.finfo(dtype).tiny

    @derived
    def has_bias(self) -> bool:
        """Whether ALiBi or a relative bias is added to the scores, by the distances of keys."""
        return self.alibi or bool(self.relative)

    @derived
    def has_mods(self) -> bool:
        """Whether it has a score_mod or a mask_mod."""
        return self.score_mod is not None or self.mask_mod is not None

    @derived
    def nonlinear(self) -> list[str]:
        """The options of this call that make a score nonlinear in query · key."""
        return [name for name in ("softcap", "score_mod") if getattr(self, name) != OPTIONS[name].default]

    @derived
    def may_have_fully_masked_rows(self) -> bool:
        """Whether some query may see no key. If lengths are equal, each query sees its own position."""
        return not self.equal_lengths and (self.keyless or not self.window.is_open)

    @derived
    def lower_right(self) -> bool:
        """Whether alignment is lower right, or lengths are equal, so that both alignments are the same."""
        return self.equal_lengths or self.causal_alignment == "lower_right"

    @derived
    def is_upper_left(self) -> bool:
        """Whether the call needs upper left alignment. False if lengths are equal or every key is visible."""
        return not self.lower_right and not self.window.is_open

    def shift(self, queries: int, keys: int) -> int:
        """The key position of query 0: query i is at key position i + shift."""
        return keys - queries if self.causal_alignment == "lower_right" else 0

    @derived
    def features(self) -> frozenset[str]:
        """The names in `FEATURES` of the features that this call needs."""
        window = self.window
        needed = {
            "causal": window.is_causal,
            "window": not (window.is_causal or window.is_open),
            "alibi": self.alibi,
            "relative bias": bool(self.relative),
            "grouped heads": self.num_heads != self.num_kv_heads,
            "cross": not self.equal_lengths or self.tree,  # a segment sees keys before its own
            "upper_left": self.is_upper_left,
            "no keys": self.tree or (not self.equal_lengths and self.keyless),
            "scale ≤ 0": not self.has_positive_scale,
            "value dim": self.head_dim != self.value_dim,
            "bounds": self.bounded,
            "paged": self.paged,
            **{option.feature: bool(getattr(self, name)) for name, option in _WITH_FEATURE.items()},
        }
        needed["deterministic"] &= self.needs_grad
        return frozenset(name for name, is_needed in needed.items() if is_needed)


class Options(TypedDict, total=False):
    """The types of `OPTIONS`, for type checkers."""

    scale: float | None
    is_causal: bool
    causal_alignment: CausalAlignment
    window_size: tuple[int, int]
    softcap: float
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    dropout_p: float
    deterministic: bool
    batch_invariant: bool


_FIELDS = {field.name: field for field in dataclasses.fields(AttentionSpec)}
# The keyword arguments that `varlen_attention` passes on to kernels.
OPTIONS: dict[str, Option] = {name: field.metadata["option"] for name, field in _FIELDS.items() if field.metadata}
_OTHER_ARGUMENTS = ("layout", "key_layout", "sinks", "alibi_slopes", "relative", "return_lse", "backend")
# 0 stands for 0.0: torch.compile makes inputs of floats in a dictionary, which checkpoints in a graph can't read.
_DEFAULTS = {name: 0 if isinstance(option.default, float) else option.default for name, option in OPTIONS.items()}
_WITH_FEATURE = {name: option for name, option in OPTIONS.items() if option.feature}
assert Options.__annotations__.keys() == OPTIONS.keys()
assert not any(option.default for option in _WITH_FEATURE.values())  # a feature is needed if its option is truthy

# What a call may need beyond plain attention → the reason, and what to change, if a kernel does not support it.
FEATURES = {
    "causal": "causal attention is not supported: leave is_causal at False.",
    "window": "windows are not supported: leave window_size at (-1, -1).",
    **{option.feature: option.advice for option in _WITH_FEATURE.values()},
    "alibi": "ALiBi is not supported: leave out alibi_slopes.",
    "relative bias": "relative biases are not supported: leave out relative.",
    "grouped heads": "grouped heads are not supported: repeat key and value.",
    "cross": "every sequence must have as many keys as queries.",
    "upper_left": 'upper left alignment is not supported: pass causal_alignment="lower_right".',
    "no keys": "every sequence that has queries must have keys.",
    "scale ≤ 0": "scale must be positive: negate query and pass -scale.",
    "value dim": "value must have the head dim of key.",
    "bounds": "the lengths must be known on the host: make the layout without max_tokens.",
    "paged": "keys in a pool are not supported: copy them with PagedLayout.gather.",
}

# The type of a field → its type in an operator's schema. Options that are functions can't be arguments of operators.
_SCHEMA_TYPES = {"bool": "bool", "float": "float", "CausalAlignment": "str", "tuple[int, int]": "int[2]"}
_FUNCTIONS = ("ScoreMod | None", "MaskMod | None")
_IN_SCHEMA = [name for name in (*OPTIONS, "needs_grad", "relative_grad") if _FIELDS[name].type not in _FUNCTIONS]
# The part of an operator's schema that declares these fields.
SCHEMA = ", ".join(f"{_SCHEMA_TYPES[_FIELDS[name].type]} {name}" for name in _IN_SCHEMA)  # type: ignore[index]


def schema_values(spec: AttentionSpec) -> tuple[Any, ...]:
    """The values of the fields in `SCHEMA`, in its order."""
    return tuple([getattr(spec, name) for name in _IN_SCHEMA])


def values_in_schema(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values of these fields, in the order of `SCHEMA`."""
    return tuple([fields[name] for name in _IN_SCHEMA])


def from_schema(values: Sequence[Any]) -> dict[str, Any]:
    """The inverse of `schema_values`: fields by name."""
    return dict(zip(_IN_SCHEMA, values, strict=True))


def all_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """All options by name, in a fixed order. Options that are not in `given` have their default.

    Raises:
        TypeError: A name is not an option. The message says which argument may be meant.
    """
    options = {**_DEFAULTS, **given}
    if len(options) > len(_DEFAULTS):
        raise unexpected_argument(
            "varlen_attention()", given.keys() - _DEFAULTS.keys(), (*_DEFAULTS, *_OTHER_ARGUMENTS)
        )
    return options


def check_options(**given: object) -> None:
    """Check options.

    Raises:
        ValueError: An option is invalid. The message says what to pass.
    """
    for name, value in given.items():
        OPTIONS[name].parse(name, value)


def layout_fields(query: Tensor, layout: Layout, key_layout: Layout | PagedLayout) -> dict[str, Any]:
    """The fields of an `AttentionSpec` that follow from the layouts of queries and keys.

    Raises:
        ValueError: The layouts have different numbers of sequences.
    """
    if layout.batch_size != key_layout.batch_size:
        raise ValueError(
            f"layout has {layout.batch_size} sequences and key_layout {key_layout.batch_size}: pass as many "
            "sequences of keys as of queries. A sequence may have length 0."
        )
    is_paged, is_same = isinstance(key_layout, PagedLayout), key_layout is layout
    is_unknown = not is_same and is_traced(query)  # a graph may run with other lengths
    if not (is_same or is_unknown or isinstance(key_layout, PagedLayout)):
        is_same = layout.same_lengths(key_layout)
    return {
        "equal_lengths": is_same,
        "keyless": is_unknown or key_layout.min_seqlen == 0,
        "bounded": not (layout.knows_lengths and (is_paged or key_layout.knows_lengths)),
        "paged": is_paged,
        "tree": isinstance(layout, TreeLayout),
    }


class Call(NamedTuple):
    """The arguments of a call other than query, key and value.

    Attributes:
        layout, key_layout: The sequences of queries and of keys. `key_layout` is a `PagedLayout` if `spec.paged`.
        alibi_slopes: (H,) or (B, H), or None.
        spec: All other arguments.
        head_dims: The head dims (D, Dv) that the chosen backend is called with; None if not looked up yet.
        relative: The relative bias, or None.
        prepared: Forwards and backwards that run again for other tensors; None if they can't be kept.
        is_direct: Whether no adapter is needed for tensors without rows past the end, contiguous in the last dimension.
        backend: The `Backend` that was chosen. In a graph, "auto" or a name, which is looked up when the graph runs.
            None if it is not chosen yet.
    """

    layout: Layout
    key_layout: Layout  # for type checkers; see `paged`
    alibi_slopes: Tensor | None
    spec: AttentionSpec
    head_dims: tuple[int, int] | None = None
    relative: RelativeBias | None = None
    prepared: PreparedRuns | None = None
    is_direct: bool = False
    backend: Any = None

    @property
    def paged(self) -> PagedLayout:
        """`key_layout` of a call whose keys are in pools."""
        assert isinstance(self.key_layout, PagedLayout)
        return self.key_layout


# `geometry` of the tensors → a function of these tensors that runs the forward or the backward. It also depends on the
# spec and the layouts, so it is cached with them.
PreparedRuns = dict[tuple[Any, ...], Callable[..., tuple[Any, ...]]]
MOST_PREPARED = 64  # more are not kept. None is dropped, because a captured CUDA graph may read its tensors.


def geometry(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The shapes, strides and dtypes, and whether each tensor begins at a multiple of 16 bytes."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0) for x in tensors])


def check_shapes(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> None:
    """Check that shapes are (T, H, D), (S, G, D) and (S, G, Dv), with H a multiple of G.

    Raises:
        ValueError: The shapes are different.
    """
    problem = None
    if not len(query) == len(key) == len(value) == 3:
        problem = "query, key and value must be (tokens, heads, head dim)"
    elif key[2] != query[2]:
        problem = "query and key must have the same head dim"
    elif key[1] != value[1]:
        problem = "key and value must have the same number of heads"
    elif not key[1] or not query[1] or query[1] % key[1]:
        problem = "query heads must be a multiple of key heads"
    elif not query[2] or not value[2]:
        problem = "head dims must not be 0"
    if problem is not None:
        shapes = f"query {tuple(query)}, key {tuple(key)}, value {tuple(value)}"
        raise ValueError(f"{problem}: {shapes}. The order is (T, H, D): (H, T, D) may have been passed.")


def check_tensors(query: Tensor, key: Tensor, value: Tensor, is_paged: bool) -> None:
    """Check the dimensions, dtypes and devices of query, key and value.

    Raises:
        ValueError: They are wrong. The message says what to pass.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if is_paged and name != "query":
            if x.dim() not in (3, 4):
                raise ValueError(f"{name} must be a pool (pages, page_size, G, D) or (N, G, D), got {tuple(x.shape)}.")
        elif x.dim() != 3:
            raise ValueError(
                f"{name} must be (tokens, heads, head dim), got {tuple(x.shape)}: pack a padded "
                "batch with layout.pack, and split an embedding with unflatten(-1, (heads, -1))."
            )
        if x.dtype != query.dtype or x.dtype not in DTYPES:
            raise ValueError(
                f"query, key and value must share one floating-point dtype, got {query.dtype}, {key.dtype} and "
                f"{value.dtype}: cast them to float16, bfloat16, float32 or float64, or use torch.autocast."
            )
        if x.device != query.device:
            raise ValueError(
                f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}."
            )


def check_slopes(slopes: object, heads: int, batch: int, device: torch.device) -> None:
    """Check that ALiBi slopes are (H,) or (B, H), float32 or float64, on `device`, and require no gradient.

    Raises:
        ValueError: They are not.
    """
    if not isinstance(slopes, Tensor) or slopes.shape not in ((heads,), (batch, heads)) or slopes.device != device:
        raise ValueError(
            f"alibi_slopes must be a tensor ({heads},) or ({batch}, {heads}) on {device}, got {describe(slopes)}."
        )
    if slopes.dtype != torch.float32 and slopes.dtype != torch.float64:
        raise ValueError(f"alibi_slopes must be float32 or float64, got {slopes.dtype}.")
    if slopes.requires_grad:
        raise ValueError(
            "alibi_slopes must not require a gradient: pass alibi_slopes.detach(), or learn a bias in a score_mod."
        )


def describe(x: object) -> str:
    """A tensor's shape and device, or the repr of another object, for an error message."""
    return f"{tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x)
