"""Proves on a twin that the layers of an encoder of audio or images can pack (`pack/encoder_layers.py`).

The twin runs a padded batch of its own inputs, patched and unpatched. Both must give the same at tokens: what each
layer gives, the outputs and the loss of the model, and all gradients, in evaluation and in training.

Dimensions: B rows of a padded batch, L positions of the layers in a row, S positions of the inputs.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...torch_private import pytree
from .. import families
from ..pack.change_model import set_attention
from ..pack.encoder_layers import encoder_layers, pack_layers, packing_of
from ..pack.islands import two_groups
from ..proof import Proof
from .parts import is_of_layers
from .trial_runs import (
    MOST_ISLANDS,
    TOLERANCE,
    NotProven,
    TwinHandle,
    first_line,
    gradients_of,
    relative_error,
    why_raised,
    wrong_gradient,
)
from .twin import CannotBuild, build_layers_twin
from .user_code import has_other_code

SHARES = (1.0, 0.55, 0.3, 0.12)  # of the positions of a row that are not padding
SAMPLES, FRAMES = 8_000, 168  # of a row: sound, and features of sound, which models make shorter
SHAPES = ((4, 6), (3, 5), (2, 2), (1, 3))  # of images, in patches


def prove_layers(model: PreTrainedModel) -> Proof:
    """Prove on a twin how the layers of a model pack, or why they can't.

    Args:
        model: the model. It does not run.
    """
    if has_other_code(model):
        return Proof(f"its input is {model.main_input_name}, and it has code that is not from transformers")
    try:
        twin = build_layers_twin(model, inputs_of)
        return LayerTrial(twin).prove()
    except CannotBuild as error:
        return Proof(f"no small model of its class can be built and run, to try it: {error}", tried=False)
    except NotProven as failure:
        return Proof(str(failure))


def inputs_of(twin: Any) -> dict[str, Tensor]:
    """The inputs of a padded batch, of the first form that the model takes.

    Raises:
        CannotBuild: it takes none of the known forms.
    """
    error: Exception | None = None
    for inputs in _forms(twin):
        try:
            with torch.no_grad():
                twin(**inputs)
            return inputs
        except Exception as failure:  # any class
            error = error or failure
    raise CannotBuild("no form of its inputs is known" if error is None else first_line(error))


def _forms(twin: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs (B, …) that models of audio and images take, with a mask of padding."""
    names = inspect.signature(twin.forward).parameters
    dtype, main = next(twin.parameters()).dtype, twin.main_input_name
    generator = torch.Generator().manual_seed(0)
    others = {}
    if "decoder_input_ids" in names:
        others["decoder_input_ids"] = torch.randint(6, 20, (len(SHARES), 5), generator=generator)

    def padded(length: int, *width: int) -> tuple[Tensor, Tensor]:
        mask = torch.arange(length) < torch.tensor([[round(share * length)] for share in SHARES])
        x = torch.randn(len(SHARES), length, *width, generator=generator, dtype=dtype)
        return x * mask.view(*mask.shape, *[1] * len(width)), mask.long()

    if main == "input_values":
        values, mask = padded(SAMPLES)
        yield {main: values, "attention_mask": mask, **others}
    for width in _widths(twin.config) if main == "input_features" else ():
        values, mask = padded(FRAMES, width)
        yield {main: values, "attention_mask": mask, **others}
        length = 2 * getattr(twin.config, "max_source_positions", FRAMES)  # with the width first, as in Whisper
        values, mask = padded(length, width)
        yield {main: values.transpose(1, 2), "attention_mask": mask, **others}
    if main == "pixel_values" and {"pixel_attention_mask", "spatial_shapes"} <= names.keys():
        shapes = torch.tensor(SHAPES)
        mask = torch.arange(int(shapes.prod(1).max())) < shapes.prod(1)[:, None]
        config = getattr(twin.config, "vision_config", twin.config)
        width = config.num_channels * config.patch_size**2
        values = torch.randn(*mask.shape, width, generator=generator, dtype=dtype) * mask[:, :, None]
        yield {main: values, "pixel_attention_mask": mask.long(), "spatial_shapes": shapes}


def _widths(config: Any) -> list[int]:
    """The numbers in a config and its parts that may be the width of features."""
    configs = [config, *(getattr(config, name) for name in getattr(config, "sub_configs", ()))]
    words = ("mel", "feat", "input")
    found = {
        value: None
        for each in configs
        for name, value in each.to_dict().items()
        if any(word in name for word in words) and isinstance(value, int) and value > 4
    }
    return list(found)


@dataclass
class _Run:
    """What a run gave.

    Attributes:
        layers: what each call of a layer gave (B, L, E), in the order of the calls.
        packing: how the layers were packed, or None.
        parts: what each part of a layer gave for the tokens (T, …), by name, in the order of the calls.
        out: the outputs of the model, by name.
        buffers: the buffers after the run.
    """

    layers: list[Tensor] = field(default_factory=list)
    packing: Any = None
    parts: list[tuple[str, Tensor]] = field(default_factory=list)
    out: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class LayerTrial:
    """The proof of the layers of one twin."""

    def __init__(self, twin: PreTrainedModel) -> None:
        self.twin: Any = twin
        self.inputs = inputs_of(twin)
        self.tolerance = TOLERANCE[next(twin.parameters()).dtype]

    def prove(self) -> Proof:
        """Find how the layers pack.

        Raises:
            NotProven: they can't.
        """
        kinds = tuple(sorted({type(layer).__name__ for layer in encoder_layers(self.twin).values()}))
        proof, first = Proof(layers=kinds), None
        while True:
            try:
                self._compare(proof, training=False)
                break
            except NotProven as failure:
                first = first or failure
                if failure.mixer in (None, *proof.islands, *kinds) or len(proof.islands) == MOST_ISLANDS:
                    raise first from None
                proof = replace(proof, islands=(*proof.islands, str(failure.mixer)))
        try:
            self._compare(proof, training=True)
        except NotProven:
            return replace(proof, trains=False, holes=self._holes(proof))
        return replace(proof, holes=self._holes(proof))

    def _holes(self, proof: Proof) -> bool:
        """Whether rows with padding between tokens give the same."""
        name = next(name for name in self.inputs if name.endswith("attention_mask"))
        mask = self.inputs[name].clone()
        if "pixel" not in name:  # the lengths of the rows are computed from the mask
            return False
        mask[0, 3:7] = 0
        try:
            self._compare(proof, training=False, inputs={**self.inputs, name: mask})
        except NotProven:
            return False
        return True

    def _compare(self, proof: Proof, training: bool, inputs: dict[str, Tensor] | None = None) -> None:
        """Compare the patched with the unpatched model.

        Raises:
            NotProven: something differs.
        """
        inputs = self.inputs if inputs is None else inputs
        variants = [inputs, *([{**inputs, **labels}] if (labels := self._labels(inputs)) and training else [])]
        for each in variants:
            want = self._run(each, training)
            got = self._run(each, training, proof)
            if got.packing is None:
                raise NotProven("its layers get no mask of padding")
            mask = got.packing.pad(torch.ones(got.packing.token_shape, dtype=torch.bool)).bool()
            for mine, theirs in zip(got.layers, want.layers, strict=True):
                if self._differ(mine[mask], theirs[mask]):
                    raise self._refusal(got, want)
            of_mine, of_theirs = ({n: _at_tokens(x, mask) for n, x in run.out.items()} for run in (got, want))
            wrong = next((n for n, x in of_theirs.items() if self._differ(of_mine.get(n), x)), None)
            if wrong is not None:
                raise NotProven(
                    f"its output {wrong!r} depends on what layers give at padding, and packed layers give 0 there"
                )
            for name, buffer in want.buffers.items():
                if self._differ(got.buffers[name], buffer):
                    raise NotProven(f"training updates its buffer {name} from all positions, with padding")
            self._compare_gradients(of_mine, of_theirs)

    def _compare_gradients(self, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
        weights = {name: torch.randn_like(x) for name, x in want.items() if x.requires_grad}
        mine, theirs = (gradients_of(self.twin, {name: x[name] for name in weights}, weights) for x in (got, want))
        if (name := wrong_gradient(mine, theirs, self.tolerance)) is not None:
            raise NotProven(f"the gradient of {name} differs between packed and padded layers")

    def _labels(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Labels that the model takes, or nothing."""
        if "labels" not in inspect.signature(self.twin.forward).parameters:
            return {}
        rows, generator = len(SHARES), torch.Generator().manual_seed(1)
        per_row = torch.randint(2, (rows,), generator=generator)
        length = self._run(inputs, False).layers[0].shape[1]
        per_position = nn.functional.one_hot(torch.randint(2, (rows, length), generator=generator), 2)
        for labels in (torch.randint(2, 5, (rows, 1), generator=generator), per_row, per_position):
            try:
                if self.twin(**inputs, labels=labels).get("loss") is not None:
                    return {"labels": labels}
            except Exception:  # the model takes labels of another form
                continue
        return {}

    @contextmanager
    def _patched(self, proof: Proof) -> Iterator[None]:
        with TwinHandle(type(self.twin).__name__) as handle:
            if families.routes_attention(self.twin):
                set_attention(self.twin, handle)
            pack_layers(self.twin, proof, handle, two_groups)
            yield

    def _run(self, inputs: dict[str, Tensor], training: bool, proof: Proof | None = None) -> _Run:
        """Run the twin, patched with a proof or unpatched, from the same random state."""
        run, before = _Run(), copy.deepcopy(dict(self.twin.named_buffers()))
        torch.default_generator.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.twin.train(training)
        copies = {name: x.clone() for name, x in inputs.items()}
        try:
            with (
                nullcontext() if proof is None else self._patched(replace(proof, trains=True)),
                _recorded(self.twin, run),
            ):
                out = self.twin(**copies)
        except NotProven:
            raise
        except Exception as error:
            raise why_raised(self.twin, error) from error
        finally:
            self.twin.eval()
            run.buffers = dict(self.twin.named_buffers())
            for name, buffer in before.items():  # a backward may read those of the run, so they are not written
                module, _, of_module = name.rpartition(".")
                setattr(self.twin.get_submodule(module), of_module, buffer)
        run.out = {
            f"{name}{n or ''}": x if x.is_floating_point() else x.double()
            for name, value in out.items()
            for n, x in enumerate(pytree.tree_leaves(value))
            if isinstance(x, Tensor)
        }
        return run

    def _refusal(self, got: _Run, want: _Run) -> NotProven:
        """Which part of a layer gives other values at tokens, in the order of the calls."""
        mask = got.packing.pad(torch.ones(got.packing.token_shape, dtype=torch.bool)).bool()
        kinds = {name: type(x).__name__ for name, x in self.twin.named_modules() if not is_of_layers(type(x))}
        theirs: dict[str, list[Tensor]] = {}
        for name, x in want.parts:
            theirs.setdefault(name, []).append(x)
        for name, mine in [(name, x) for name, x in got.parts if name in kinds]:
            if not theirs.get(name):  # attention modules may not call all of their parts
                continue
            x = theirs[name].pop(0)
            if mine.shape[:2] != got.packing.token_shape or x.shape[:2] != mask.shape:
                continue
            if self._differ(mine[0], x[mask]):
                where = f"{name} ({kinds[name]})"
                return NotProven(f"{where} gives other values in a packed row than in padded rows", kinds[name])
        return NotProven("its layers give other values in a packed row than in padded rows")

    def _differ(self, got: Tensor | None, want: Tensor) -> bool:
        return got is None or got.shape != want.shape or relative_error(got, want) > self.tolerance


def _at_tokens(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask] if x.shape[:2] == mask.shape else x


@contextmanager
def _recorded(twin: Any, run: _Run) -> Iterator[None]:
    """Record what layers and their parts give."""
    handles = []
    for path, layer in encoder_layers(twin).items():
        for name, part in layer.named_modules():

            def record(
                module: nn.Module, args: Any, kwargs: Any, out: Any, at: str = f"{path}.{name}".rstrip(".")
            ) -> None:
                first = next((x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)), None)
                if first is None:
                    return
                run.parts.append((at, first))
                if at in layers:
                    run.layers.append(first)
                    run.packing = run.packing or packing_of(itertools.chain(args, kwargs.values()))

            handles.append(part.register_forward_hook(record, with_kwargs=True))
    layers = set(encoder_layers(twin))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
