"""One attention call: its options, declared once as fields of ``AttentionSpec``, and what is derived from them.

``OPTIONS`` (the arguments of ``varlen_attention``) and ``SCHEMA`` (those of operators) are derived from these fields.

Dimensions: B sequences, T query tokens, S key tokens, H query heads, G key heads (H a multiple of G), D the head dim of
queries and keys, Dv that of values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from ..layout import SequenceLayout
from .masks import Window

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
CausalAlignment = Literal["lower_right", "upper_left"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of query, key and value


class Option(NamedTuple):
    """What a user may pass for a field of ``AttentionSpec``.

    Attributes:
        default: the value if the option is left out.
        parse: (the option's name, the value passed) → the field's value.

            Raises:
                ValueError: the value passed is invalid; says what to pass.
        feature: the feature that a kernel needs if the option is not its default; "" if it needs none.
        advice: what to change if a kernel does not have this feature.
    """

    default: Any
    parse: Callable[[str, Any], Any]
    feature: str = ""
    advice: str = ""


def _option(default: Any, parse: Callable[[str, Any], Any], feature: str = "", advice: str = "") -> Any:
    return dataclasses.field(default=default, metadata={"option": Option(default, parse, feature, advice)})


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):  # a tensor, for example, may change after the call
        raise ValueError(f"{name} must be True or False, got {value!r}.")
    return value


def _scale(name: str, value: object) -> float | None:
    if value is not None and not (isinstance(value, (int, float)) and -math.inf < value < math.inf):
        raise ValueError(
            f"{name} must be a finite number, or None for D^−0.5, got {value!r}. It gets no gradient: to learn one, "
            "multiply query by it."
        )
    return None if value is None else float(value)


def _alignment(name: str, value: Any) -> CausalAlignment:
    if value not in ("lower_right", "upper_left"):
        raise ValueError(f"{name} must be 'lower_right' or 'upper_left', got {value!r}.")
    return value


def _window_size(name: str, value: object) -> tuple[int, int]:
    if type(value) is tuple and len(value) == 2:  # the usual case, which is fast: every call comes here
        left, right = value
        if type(left) is type(right) is int and -1 <= left < 2**63 and -1 <= right < 2**63:
            return left, right
    sides = value if isinstance(value, Sequence) else ()
    if len(sides) != 2 or any(not isinstance(side, int) or not -1 <= side < 2**63 for side in sides):
        raise ValueError(
            f"{name} must be (left, right), each −1 for open or 0 and more, got {value!r}: two integers of up to 63 "
            "bits."
        )
    return int(sides[0]), int(sides[1])


def _softcap(name: str, value: object) -> float:
    if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise ValueError(f"{name} must be 0 (off) or a positive number, got {value}.")
    return float(value)


def _probability(name: str, value: object) -> float:
    if not (isinstance(value, (int, float)) and 0 <= value < 1):
        raise ValueError(f"{name} must be in [0, 1), got {value}.")
    return float(value)


def _mod(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function as flex_attention takes it, got {value!r}.")
    return value


@dataclass(frozen=True)
class AttentionSpec:
    """One call without its tensors: everything that decides which backends can run it.

    Options have the meaning of ``varlen_attention``'s arguments of the same name.

    Attributes:
        device: of the tensors.
        dtype: of query, key and value.
        num_heads, num_kv_heads, head_dim, value_dim: H, G, D, Dv.
        alibi: whether ALiBi slopes are passed.
        needs_grad: whether gradients of query, key or value may be needed.
        equal_lengths: whether every sequence has as many keys as queries, so that both alignments are the same.
        keyless: whether some sequence may have no key.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float = dataclasses.field(metadata={"option": Option(None, _scale)})
    is_causal: bool = _option(False, _bool)
    causal_alignment: CausalAlignment = _option("lower_right", _alignment)
    window_size: tuple[int, int] = _option((-1, -1), _window_size)
    softcap: float = _option(0.0, _softcap, "softcap", "has no softcap: leave softcap at 0.")
    score_mod: ScoreMod | None = _option(
        None, _mod, "score_mod", "takes no score_mod: use softcap and alibi_slopes where they say it."
    )
    mask_mod: MaskMod | None = _option(
        None, _mod, "mask_mod", "takes no mask_mod: use is_causal and window_size where they say it."
    )
    dropout_p: float = _option(0.0, _probability, "dropout", "has no dropout: leave dropout_p at 0.")
    deterministic: bool = _option(
        False, _bool, "deterministic", "its backward adds in no fixed order: leave deterministic at False."
    )
    batch_invariant: bool = _option(
        False, _bool, "batch_invariant", "does not promise batch invariance: leave batch_invariant at False."
    )
    alibi: bool = False
    needs_grad: bool = False
    equal_lengths: bool = True
    keyless: bool = True

    @classmethod
    def of(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        shapes: tuple[Sequence[int], Sequence[int], Sequence[int]],
        options: Mapping[str, Any],
        **more: Any,
    ) -> AttentionSpec:
        """The spec of a call with tensors of these shapes, (T, H, D), (S, G, D) and (S, G, Dv).

        Args:
            options: by name, as a user passed them or as another spec has them.
            more: the fields that are not options.

        Raises:
            ValueError: other shapes, or an invalid option.
        """
        check_shapes(*shapes)
        (_, num_heads, head_dim), (_, num_kv_heads, value_dim) = shapes[0], shapes[2]
        values = {name: OPTIONS[name].parse(name, value) for name, value in options.items()}
        if values["scale"] is None:
            values["scale"] = head_dim**-0.5
        return cls(device, dtype, num_heads, num_kv_heads, head_dim, value_dim, **values, **more)

    @property
    def window(self) -> Window:
        """The window of visible keys, causality included."""
        return Window.of(self.window_size, self.is_causal)

    @property
    def has_positive_scale(self) -> bool:
        """Whether the scale is above 0 in the kernel's dtype: float32 without subnormals, or float64 for float64.

        A kernel that masks before it scales computes −inf · 0 = NaN under a scale of 0.
        """
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.scale >= torch.finfo(dtype).tiny

    @property
    def nonlinear(self) -> list[str]:
        """The options in use that make a score nonlinear in query · key."""
        return [name for name in ("softcap", "score_mod") if getattr(self, name) != OPTIONS[name].default]

    @property
    def may_have_fully_masked_rows(self) -> bool:
        """Whether some query may see no key. Not if lengths are equal: each query sees its own position."""
        return not self.equal_lengths and (self.keyless or not self.window.is_open)

    @property
    def lower_right(self) -> bool:
        """Whether the diagonal ends at the lower right. True for equal lengths: both alignments are then the same."""
        return self.equal_lengths or self.causal_alignment == "lower_right"

    @property
    def is_upper_left(self) -> bool:
        """Whether the call needs upper left alignment. It does not if lengths are equal or every key is visible."""
        return not self.lower_right and not self.window.is_open

    def shift(self, queries: int, keys: int) -> int:
        """The key position of query 0: query i is at key position i + shift."""
        return keys - queries if self.causal_alignment == "lower_right" else 0

    @property
    def features(self) -> frozenset[str]:
        """The features that this call needs, as named in ``FEATURES``."""
        window = self.window
        asked = {
            "causal": window.is_causal,
            "window": not (window.is_causal or window.is_open),
            "alibi": self.alibi,
            "grouped heads": self.num_heads != self.num_kv_heads,
            "cross": not self.equal_lengths,
            "upper_left": self.is_upper_left,
            "no keys": not self.equal_lengths and self.keyless,
            "scale ≤ 0": not self.has_positive_scale,
            "value dim": self.head_dim != self.value_dim,
            **{option.feature: getattr(self, name) != option.default for name, option in _WITH_FEATURE.items()},
        }
        asked["deterministic"] &= self.needs_grad
        return frozenset(name for name, wanted in asked.items() if wanted)


class Options(TypedDict, total=False):
    """The types of ``OPTIONS``, for type checkers."""

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
# The keyword arguments that ``varlen_attention`` passes on to kernels.
OPTIONS: dict[str, Option] = {name: field.metadata["option"] for name, field in _FIELDS.items() if field.metadata}
_DEFAULTS = {name: option.default for name, option in OPTIONS.items()}
_WITH_FEATURE = {name: option for name, option in OPTIONS.items() if option.feature}
assert Options.__annotations__.keys() == OPTIONS.keys()

# Features: what a call may need beyond plain attention → what to change if a kernel does not have it.
FEATURES = {
    "causal": "has no causality: leave is_causal at False.",
    "window": "has no windows: leave window_size at (-1, -1).",
    **{option.feature: option.advice for option in _WITH_FEATURE.values()},
    "alibi": "has no ALiBi: leave out alibi_slopes.",
    "grouped heads": "has no grouped heads: repeat key and value.",
    "cross": "wants as many keys as queries in every sequence.",
    "upper_left": 'aligns causality and windows lower right only: pass causal_alignment="lower_right".',
    "no keys": "wants keys in every sequence that has queries.",
    "scale ≤ 0": "needs a scale above 0: negate query and pass -scale.",
    "value dim": "wants values with the head dim of the keys.",
}

# The type of a field → its type in an operator's schema. The other options are functions, which operators can't take.
_SCHEMA_TYPES = {"bool": "bool", "float": "float", "CausalAlignment": "str", "tuple[int, int]": "int[2]"}
_IN_SCHEMA = [name for name in (*OPTIONS, "needs_grad") if _FIELDS[name].type in _SCHEMA_TYPES]
# The part of an operator's schema that declares these fields.
SCHEMA = ", ".join(f"{_SCHEMA_TYPES[_FIELDS[name].type]} {name}" for name in _IN_SCHEMA)  # type: ignore[index]


def schema_values(spec: AttentionSpec) -> tuple[Any, ...]:
    return tuple([getattr(spec, name) for name in _IN_SCHEMA])


def from_schema(values: Sequence[Any]) -> dict[str, Any]:
    """The inverse of ``schema_values``: fields by name."""
    return dict(zip(_IN_SCHEMA, values, strict=True))


def all_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option by name, always in the same order: as given, or its default.

    Raises:
        TypeError: a name that is not an option.
    """
    options = {**_DEFAULTS, **given}
    if len(options) > len(_DEFAULTS):
        unknown = ", ".join(map(repr, sorted(given.keys() - _DEFAULTS.keys())))
        raise TypeError(f"varlen_attention has no argument {unknown}.")
    return options


def check_options(**given: object) -> None:
    """Check options.

    Raises:
        ValueError: one of them is invalid; says what to pass.
    """
    for name, value in given.items():
        OPTIONS[name].parse(name, value)


class Call(NamedTuple):
    """The arguments of a call other than query, key and value.

    ``head_dims`` (D, Dv) are those that the chosen backend is called with; None if not looked up yet.
    """

    layout: SequenceLayout
    key_layout: SequenceLayout
    alibi_slopes: Tensor | None
    spec: AttentionSpec
    head_dims: tuple[int, int] | None = None


def check_shapes(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> None:
    """Check that shapes are (T, H, D), (S, G, D) and (S, G, Dv), with H a multiple of G.

    Raises:
        ValueError: other shapes.
    """
    problem = None
    if not len(query) == len(key) == len(value) == 3:
        problem = "query, key and value must be (tokens, heads, head dim)"
    elif key[2] != query[2]:
        problem = "query and key must have the same head dim"
    elif key[1] != value[1]:
        problem = "key and value must have the same heads"
    elif not key[1] or not query[1] or query[1] % key[1]:
        problem = "query's heads must be a multiple of key's"
    elif not query[2] or not value[2]:
        problem = "a head dim is 0"
    if problem is not None:
        raise ValueError(f"{problem}: query {tuple(query)}, key {tuple(key)}, value {tuple(value)}.")


def check_slopes(slopes: object, heads: int, batch: int, device: torch.device) -> None:
    """Check that ALiBi slopes are (H,) or (B, H), float32 or float64, on ``device``, and require no gradient.

    Raises:
        ValueError: they are not.
    """
    if not isinstance(slopes, Tensor) or slopes.shape not in ((heads,), (batch, heads)) or slopes.device != device:
        raise ValueError(
            f"alibi_slopes must be a tensor ({heads},) or ({batch}, {heads}) on {device}, got {describe(slopes)}."
        )
    if slopes.dtype != torch.float32 and slopes.dtype != torch.float64:
        raise ValueError(f"alibi_slopes must be float32 (flash kernels read nothing else), got {slopes.dtype}.")
    if slopes.requires_grad:
        raise ValueError("alibi_slopes get no gradient: pass slopes.detach(), or learn the bias in a score_mod.")


def describe(x: object) -> str:
    """A tensor's shape and device, or the repr of another object, for an error message."""
    return f"{tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x)
