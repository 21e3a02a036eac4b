"""Runs of a twin, packed and unpatched, and comparisons of what they give.

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...patching.handle import PatchHandle
from ...torch_private import pytree
from .. import families
from ..families import Family
from ..pack.change_model import make_padding_free, set_attention
from ..pack.deferred_scores import CannotDeferError
from ..pack.islands import one_group
from ..proof import Proof
from ..route.packed_mask import CannotMaskError, MixesSequencesError
from ..route.rope import scales_by_length
from . import diagnosis
from .trial_batch import LENGTHS, TARGETS, Batch, special_ids
from .trial_draws import Draws
from .twin import padding_of, vocabulary_of
from .twin_config import VOCABULARY

if TYPE_CHECKING:
    from ..pack.islands import Grouping

# The largest error, relative to the largest value. Many models compute norms in float32 even if they are in float64.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


MOST_ISLANDS = 4  # classes of a model


class NotProven(Exception):
    """The packed run of a twin is wrong. The message says why. `mixer` is the class of a module that mixes tokens."""

    def __init__(self, reason: str, mixer: str | None = None) -> None:
        super().__init__(reason)
        self.mixer = mixer


class NotTried(NotProven):
    """The model can't be tried, whatever it computes."""


class NeedsPackage(NotProven):
    """A layer can keep packed sequences apart only with a package that is not installed."""


class TwinHandle(PatchHandle):
    """The handle of a patched twin: a call that does not run packed is an error."""

    def fall_back(self, reason: str, what: str = "this call", advice: str = "") -> None:
        raise NotProven(f"can't run packed: {reason}")


class Runs:
    """The runs of one twin.

    Args:
        twin: the twin.
        family: what is known about its family.
        numbers: ids of tokens that its code or config may compare with.
        lengths: lengths of rows that its code may compare with. A packed row is always longer than 4,096.
        has_user_code: whether it has code that is not from torch or transformers.
        proof: what was proven with another twin. Only this is tried, with random numbers that are constants.
    """

    def __init__(
        self,
        twin: PreTrainedModel,
        family: Family,
        numbers: Iterable[int] = (),
        lengths: Iterable[int] = (),
        has_user_code: bool = False,
        proof: Proof | None = None,
    ) -> None:
        self.twin: Any = twin
        self.base: Any = families.base_model(twin)
        self.family, self.numbers, self.lengths = family, set(numbers), set(lengths)
        self.has_user_code, self.known = has_user_code, proof
        self.vocabulary = vocabulary_of(twin, None if proof else VOCABULARY)
        self.draws = Draws(self.twin, self.base) if has_user_code else None
        self.tolerance = TOLERANCE[next(iter(twin.parameters())).dtype]
        # The sides on which an unpatched run with padding is no reference. RoPE that is scaled by length is scaled for
        # the longest row of a batch.
        self.scaled_by_length = any(scales_by_length(module) for module in twin.modules())
        self.no_reference = {"right", "left"} if self.scaled_by_length else set()
        self.names = set(inspect.signature(twin.forward).parameters)
        if takes_any(twin):
            self.names |= {"labels", "start_positions", "end_positions"}
        # its inputs have the shape (B / 2, 2, L)
        self.choices = type(twin).__name__.endswith("ForMultipleChoice")
        self.pairs = families.is_encoder_decoder(twin)  # its inputs are pairs of a source and a target

    def _batch(self, side: str) -> Batch:
        special = special_ids(self.numbers, self.vocabulary, 12) if self.known else ()
        batch = Batch(side, self.vocabulary, padding_of(self.twin), special)
        if self.pairs:
            batch.target = Batch("right", self.vocabulary, padding_of(self.twin), (), TARGETS, seed=4)
        return batch

    @torch.no_grad()
    def _run(self, model: Any, inputs: dict[str, Tensor]) -> Any:
        return self._forward(model, inputs)

    def _forward(self, model: Any, inputs: dict[str, Tensor]) -> Any:
        """Run a model. Its inputs and outputs are on the CPU, as all values that are compared."""
        inputs = {name: x.to(model.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        out = model(**self._form(model, inputs))
        if not isinstance(out, MutableMapping):
            raise NotTried(f"it returns a {type(out).__name__}, not outputs by name")
        if model.device.type != "cpu":
            for name, value in out.items():
                out[name] = pytree.tree_map_only(Tensor, Tensor.cpu, value)
        return out

    def _form(self, model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inputs in the form that the model takes."""
        if not self.choices or model is self.base:
            return inputs
        choices = min(2, len(inputs["input_ids"]))
        return {name: x if name == "labels" else x.unflatten(0, (-1, choices)) for name, x in inputs.items()}

    @contextmanager
    def _patched(
        self, proof: Proof, shared_prefixes: bool = False, grouping: Grouping = one_group
    ) -> Iterator[PatchHandle]:
        with TwinHandle(type(self.twin).__name__, shared_prefixes=shared_prefixes) as handle:
            if families.routes_attention(self.twin):
                set_attention(self.twin, handle)
            make_padding_free(self.twin, proof, self.family, handle, "always", shared_prefixes, grouping)
            yield handle

    def _packed(self, model: Any, inputs: dict[str, Tensor], proof: Proof, grouping: Grouping = one_group) -> Any:
        with self._patched(proof, grouping=grouping), torch.no_grad():
            return self._call(model, inputs)

    def _call(self, model: Any, inputs: dict[str, Tensor]) -> Any:
        try:
            return self._forward(model, inputs)
        except NotProven:
            raise
        except Exception as error:
            raise why_raised(model, error) from error

    def _padded(self, inputs: dict[str, Tensor]) -> Any:
        copies = {name: x.clone() for name, x in inputs.items()}  # some losses change positions in place
        return self._forward(self.twin, copies)

    def _alone(self, model: Any, batch: Batch, inputs: list[dict[str, Tensor]] | None = None) -> dict[str, Tensor]:
        """The values of each sequence without padding. `inputs`: `batch.rows()`, by default, or `batch.groups()`."""
        inputs = batch.rows() if inputs is None else inputs
        # copies, because RoPE that is scaled by length keeps the scale of a longer sequence
        models = [copy.deepcopy(model) if self.scaled_by_length else model for _ in inputs]
        return batch.values_alone([self._run(*pair) for pair in zip(models, inputs, strict=True)], inputs)

    def _compare_numbers(self, out: Any, unpatched: Any) -> None:
        for name, value in unpatched.items():
            is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim())
            if is_number and relative_error(torch.as_tensor(out[name]), torch.as_tensor(value)) > self.tolerance:
                raise NotProven(f"its {name} is a number of all positions of the batch, with padding")

    def _gradients(self, values: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return gradients_of(self.twin, values, weights)

    def _compare_gradients(self, proof: Proof, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
        # Modules with a state compute in float32, and the first layers get its rounding many times.
        tolerance = (10 if proof.islands else 1) * self.tolerance
        if (name := wrong_gradient(got, want, tolerance)) is not None:
            raise NotProven(f"the gradient of {name} differs between packed rows and each sequence alone")

    def _different(self, got: dict[str, Tensor], want: dict[str, Tensor]) -> str | None:
        """The name of an output that differs, or None."""
        for name, value in want.items():
            if name not in got or got[name].shape != value.shape or relative_error(got[name], value) > self.tolerance:
                return name
        return None


def why_raised(model: Any, error: Exception) -> NotProven:
    """Why a patched model that raises an error is not proven."""
    where, mixer = diagnosis.raised_in(model, error)
    if isinstance(error, CannotDeferError | CannotMaskError):
        return NotProven(f"{where} {error}", mixer)
    if isinstance(error, MixesSequencesError):
        return NotProven(f"{where} computes attention over the whole row", mixer)
    if "packed sequences apart without" in str(error):  # from transformers' functions that use such packages
        return NeedsPackage(f"in {where}, {str(error).splitlines()[0]}", mixer)
    mask = "(0)" in str(error)  # the mask of a packed row has no elements
    why = "uses the attention mask, which a packed row does not have, or does not pass on its cu_seq_lens"
    return NotProven(f"{where} {why if mask else f'raises {first_line(error)}'}", mixer)


def gradients_of(model: Any, values: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of all parameters, by name, of the sum of values times weights.

    Values that require no gradient are left out.
    """
    total = torch.stack([(x * weights[name]).sum() for name, x in values.items() if x.requires_grad]).sum()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def wrong_gradient(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> str | None:
    """The name of a parameter whose gradient differs, or None. Small gradients may have the errors of large ones."""
    largest = max((float(x.abs().max()) for x in want.values() if x.numel()), default=0.0)
    return next((name for name, x in want.items() if relative_error(got[name], x, 1e-2 * largest) > tolerance), None)


def relative_error(got: Tensor, want: Tensor, least: float = 1e-6) -> float:
    """The largest error, relative to the largest value. NaN and infinity count as an error."""
    if not want.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()  # buffers may be integers or bool
    error = (got - want).abs().max() / want.abs().max().clamp(min=least)
    return float(error.nan_to_num(float("inf")))


def of_tokens(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the values for each row, such as a pooled output, which models read from padding if it is on the left."""
    return {name: value for name, value in values.items() if len(value) > len(LENGTHS)}


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:200]}"


def takes_any(model: PreTrainedModel) -> bool:
    """Whether the forward of a model takes any keyword arguments."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
