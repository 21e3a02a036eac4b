"""Short rows that a model runs to check how it can be packed, and what it gives for each of them.

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...graphs.module_state import Snapshot
from ...kernels.select import automatic_choice
from ...torch_private import parameters_of, pytree
from .. import families
from ..pack.encoder_decoder import OF_SOURCE
from ..pack.inputs import padding_id
from ..pack.tensor_parallel import is_distributed
from ..route.packed_mask import PackedMask
from .later import are_sharded

LENGTHS = (11, 9, 13)
TARGETS = (7, 10, 5)  # of an encoder-decoder
OTHER_LENGTHS = (29, 9, 40)  # the second sequence stays as it is
_LOWEST, _HIGHEST = 6, 1000  # ids of tokens


@dataclass(frozen=True)
class Rows:
    """Sequences of token ids, with their targets if the model is an encoder-decoder.

    Attributes:
        sequences, targets: (n,) int64 each.
        padding: the id at padding.
        is_left: whether padding is on the left.
    """

    sequences: tuple[Tensor, ...]
    targets: tuple[Tensor, ...] | None
    padding: int
    is_left: bool = False

    @classmethod
    def draw(cls, model: Any, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Rows:
        """Random tokens that are no special ids of the config."""
        config = model.config.get_text_config()
        base = families.base_model(model)
        given = padding_id(base)
        padding = _HIGHEST if given is None else given
        embeddings = embeddings_of(base)
        vocabulary = min(getattr(embeddings, "num_embeddings", getattr(config, "vocab_size", _HIGHEST)), _HIGHEST)
        padding = min(padding, vocabulary - 1) if given is None else padding
        special = {x for name, x in config.to_dict().items() if name.endswith("_token_id") and isinstance(x, int)}
        ids = [x for x in range(min(_LOWEST, vocabulary // 2), vocabulary) if x not in special | {padding}]
        longest = getattr(config, "max_position_embeddings", None) or max(OTHER_LENGTHS) + 2
        generator = torch.Generator().manual_seed(seed)

        def drawn(length: int) -> Tensor:
            places = torch.randint(len(ids), (min(length, max(1, longest - 2)),), generator=generator)
            return torch.tensor(ids)[places].to(device_of(base))

        pairs = families.is_encoder_decoder(model)
        targets = tuple(drawn(n) for n in TARGETS[: len(lengths)]) if pairs else None
        return cls(tuple(map(drawn, lengths)), targets, padding)

    def with_neighbors(self, other: Rows) -> Rows:
        """The second sequence of these rows between the neighbors of others."""
        targets = None
        if self.targets is not None and other.targets is not None:
            targets = other.targets[0], self.targets[1], other.targets[2]
        return replace(self, sequences=(other.sequences[0], self.sequences[1], other.sequences[2]), targets=targets)

    def each(self) -> list[Rows]:
        """Each sequence alone."""
        targets = self.targets or (None,) * len(self.sequences)
        pairs = zip(self.sequences, targets, strict=True)
        return [replace(self, sequences=(x,), targets=None if y is None else (y,)) for x, y in pairs]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each sequence."""
        return tuple(map(len, self.sequences))

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The arguments of a padded call."""
        inputs = self._padded(self.sequences, self.is_left)
        if self.targets is not None:
            inputs |= {f"decoder_{name}": x for name, x in self._padded(self.targets, False).items()}
        return inputs

    def _padded(self, sequences: tuple[Tensor, ...], is_left: bool) -> dict[str, Tensor]:
        lengths = torch.tensor([len(x) for x in sequences])
        positions = torch.arange(int(lengths.max()))
        mask = positions >= int(lengths.max()) - lengths[:, None] if is_left else positions < lengths[:, None]
        mask = mask.to(sequences[0].device)
        ids = torch.full(mask.shape, self.padding, device=mask.device).masked_scatter(mask, torch.cat(sequences))
        return {"input_ids": ids, "attention_mask": mask.long()}

    def values(self, out: Any) -> dict[str, Tensor]:
        """What a padded call gives: for each token (T, …), and for each row (B, …)."""
        inputs, found = self.inputs, {}
        for name, value in tensors_in(out):
            of_target = self.targets is not None and not name.startswith(OF_SOURCE)
            mask = inputs["decoder_attention_mask" if of_target else "attention_mask"].bool()
            if value.shape[:2] == mask.shape:
                found[name] = value[mask]
            elif value.dim() == 2 and len(value) == len(self.sequences):
                found[name] = value
        return found

    def part(self, values: dict[str, Tensor], which: int) -> dict[str, Tensor]:
        """Of the values for tokens, those of one sequence."""
        found = {}
        for name, value in values.items():
            sequences = self.sequences if self.targets is None or name.startswith(OF_SOURCE) else self.targets
            lengths = [len(x) for x in sequences]
            if len(value) == sum(lengths):
                found[name] = value.split(lengths)[which]
        return found


def tensors_in(out: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of an output, by name, but for caches and the loss."""
    for name, value in out.items():
        if name not in families.CACHE and name != "loss":
            parts = enumerate(value) if isinstance(value, tuple | list) else [("", value)]
            yield from ((f"{name}{n}", x) for n, x in parts if isinstance(x, Tensor) and x.is_floating_point())


def embeddings_of(model: Any) -> nn.Module | None:
    """The module that embeds token ids, or None if the class does not say."""
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return embeddings if isinstance(embeddings, nn.Module) else None


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter, on which its inputs are."""
    parameter = families.first_parameter(model)
    return torch.device("cpu") if parameter is None else parameter.device


def run(model: Any, rows: Rows, inside: bool = False) -> dict[str, Tensor]:
    """What a model gives for a padded batch, see `Rows.values`. `inside`: its call is running, so run its `forward`."""
    seed_all(0)
    out = (model.forward if inside else model)(**rows.inputs, **options_of(model))
    if not isinstance(out, Mapping):
        raise TypeError(f"it returns a {type(out).__name__}, not outputs by name")
    return rows.values(gathered(out))


def gathered(out: Any) -> Any:
    """Outputs by name, in which tensors that are divided over ranks are whole."""
    for name, x in list(out.items()):
        if is_distributed(x):
            out[name] = x.full_tensor()
    return out


def options_of(model: Any) -> dict[str, bool]:
    """The options of a call that returns outputs by name, and makes no cache."""
    names = inspect.signature(model.forward).parameters
    return {name: name == "return_dict" for name in ("return_dict", "use_cache") if name in names}


def seed_all(seed: int) -> None:
    """Seed every generator."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@dataclass
class Seen:
    """A call of a module in a packed row, its inputs and outputs (n, …) for one sequence, and its number."""

    number: int
    path: str
    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


def run_and_watch(
    base: nn.Module, rows: Rows, which: int, inside: bool = False
) -> tuple[dict[str, Tensor], list[Seen]]:
    """As `run`, and the calls of modules, in their order, with what they get and give for one sequence."""
    spans = {}
    for sequences in (rows.targets, rows.sequences):
        if sequences:
            lengths = [len(x) for x in sequences]
            begin = sum(lengths[:which])
            spans[sum(lengths)] = slice(begin, begin + lengths[which])
    with watching(base, spans) as seen:
        return run(base, rows, inside), seen


@contextmanager
def watching(base: nn.Module, spans: dict[int, slice]) -> Iterator[list[Seen]]:
    """A context that notes the calls of the modules of a packed model.

    `spans`: the number of tokens of a packed row → those of the sequence that is noted.
    """
    paths, seen = {module: path for path, module in base.named_modules()}, list[Seen]()

    def of_sequence(values: Any) -> list[Tensor]:
        found = []
        for x in pytree.tree_leaves(values):
            if isinstance(x, Tensor) and not isinstance(x, PackedMask) and x.is_floating_point() and x.dim() > 1:
                if x.shape[0] == 1 and x.shape[1] in spans:
                    found.append(x[0, spans[x.shape[1]]].detach().clone())
                elif x.shape[0] in spans:
                    found.append(x[spans[x.shape[0]]].detach().clone())
        return found

    def note(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        seen.append(Seen(len(seen), paths[module], module, of_sequence((args, kwargs)), of_sequence(out)))

    with hooked([module for module in paths if module is not base], note, with_kwargs=True):
        yield seen


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable[..., Any], with_kwargs: bool = False) -> Iterator[None]:
    """A context in which modules have a forward hook for the calls of this thread: others may call the model too."""
    thread = threading.get_ident()

    def in_this_thread(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    handles = [module.register_forward_hook(in_this_thread, with_kwargs=with_kwargs) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """A context without gradients, after which a model, its config, modes and all random numbers are as before."""
    modes = {module: module.training for module in model.modules()}
    configs = {id(x): vars(x) for module in modes if (x := getattr(module, "config", None)) is not None}
    before, states = Snapshot(model, configs.values()), (random.getstate(), np.random.get_state())
    device = device_of(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            # FSDP2 replaces parameters in a forward, and knows which ones it has gathered.
            tables = [parameters_of(module) for module in modes] if are_sharded(model) else []
            parameters = [table.copy() for table in tables]
            before.restore()
            for table, now in zip(tables, parameters, strict=True):
                table.update(now)
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def plain_mode(device: torch.device) -> Iterator[None]:
    """A context in which a model runs as no program around it has asked for."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        automatic_choice(),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
