"""Random numbers in a forward: which functions make them, but for dropout; and dropout switched off.

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..route import dropout

_DROPOUT = {"dropout", "dropout_", "alpha_dropout", "alpha_dropout_"}
_RANDOM = re.compile(
    "rand|randn|randint|(rand|randn|randint)_like|randperm|normal|(uniform|normal|log_normal|exponential|geometric"
    "|cauchy|random)_|bernoulli_?|multinomial|poisson|binomial|dropout[123]d|feature_alpha_dropout|gumbel_softmax|rrelu"
)


class RandomNumbers(TorchFunctionMode):
    """A mode that notes the functions of torch that make random numbers, and their shapes.

    Args:
        drops: whether dropout of elements drops.
    """

    def __init__(self, drops: bool = True) -> None:
        super().__init__()
        self.drops, self.made = drops, list[tuple[str, tuple[int, ...]]]()

    def __enter__(self) -> RandomNumbers:
        dropout.thread[0] = threading.get_ident()  # our attention has a generator of its own
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        dropout.thread[0] = None
        super().__exit__(*error)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in _DROPOUT:
            return function(*args, **kwargs) if self.drops else kwargs.get("input", args[0] if args else None)
        if name == "scaled_dot_product_attention" and not self.drops:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        out = function(*args, **kwargs)
        if isinstance(out, Tensor) and kwargs.get("generator") is None and _RANDOM.fullmatch(name):
            self.made.append((name.strip("_"), tuple(out.shape)))
        return out

    def by_row(self, rows: int, length: int) -> str | None:
        """A function that has made random numbers for each row of a padded batch, and not for each token, or None."""
        for name, shape in self.made:
            of_tokens = shape[:2] in ((rows, length), (length, rows)) or shape[:1] == (rows * length,)
            if len(shape) and shape[0] == rows and not of_tokens:
                return name
        return None
