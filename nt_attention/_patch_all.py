"""`patch_all`: patches every Hugging Face model, and every Transformer of `torch.nn`, that a program builds."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Literal, get_args

from torch import nn

from ._patch import apply_patch, check_options
from .graphs.cache import CapturedCalls, CudaGraphs
from .patching import building
from .patching.forwards import Handle, active_handles, restore_copies
from .patching.handle import CheckMode, Counts, OnFallback, PatchHandle, wrap_lines
from .patching.pickling import leave_out, without_forward
from .torch_models.stacks import Layer, Stack

__all__ = ["PatchAllHandle", "patch_all"]

_OF_TORCH = (nn.Transformer, *get_args(Stack), *get_args(Layer))


class PatchAllHandle:
    """The result of `patch_all`: which models were patched, how their calls ran, and `remove()` to undo all patches.

    Print it to see all of this. As a context manager it calls `remove()` at the end of the `with` block.

    Attributes:
        models: class name → the number of models that were patched.
        counts: class name → how the calls of these models ran, as `Counts`.
        left: class name → why models were not patched. They run as they are.
        active: False after `remove()`.
    """

    __module__ = "nt_attention"

    def __init__(
        self,
        packing: Literal["auto", "always"],
        on_fallback: OnFallback,
        cuda_graphs: CudaGraphs,
        shared_prefixes: bool,
        check: CheckMode = "first",
    ) -> None:
        self.models: Counter[str] = Counter()
        self.counts: dict[str, Counts] = {}
        self.left: dict[str, str] = {}
        self.active: bool = True
        self._packing, self._on_fallback = packing, on_fallback
        self._cuda_graphs, self._shared_prefixes, self._check = cuda_graphs, shared_prefixes, check
        self._handles: weakref.WeakKeyDictionary[Handle, str] = weakref.WeakKeyDictionary()

    def remove(self) -> None:
        """Restore all models that were patched, and patch no further ones. Later calls do nothing.

        Example:
            >>> import nt_attention as nta
            >>> nta.patch_all().remove()
        """
        if self.active:
            self.active = False
            building.remove_listener(self.listener)
            for handle in list(self._handles):
                handle.remove()
                restore_copies(handle)

    def __enter__(self) -> PatchAllHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        lines = [f"nt_attention.patch_all{'' if self.active else ' (removed)'}:"]
        for name, number in self.models.items():
            calls = [f"    {line}" for line in repr(self.counts[name]).splitlines()]
            lines += [f"  {name}: {number} model{'s' if number > 1 else ''} patched", *calls]
        lines += [f"  {name}: not patched: {reason}" for name, reason in self.left.items()]
        nothing = "  no Hugging Face model and no Transformer of torch.nn was built"
        return "\n".join(wrap_lines(lines if len(lines) > 1 else [*lines, nothing]))

    def listener(self, model: nn.Module) -> None:
        """Patch a model that is complete. Whatever keeps it from being patched does not stop the program."""
        leave_out(nn.Module, without_forward)
        kinds: tuple[type, ...] = _OF_TORCH
        if "transformers.modeling_utils" in sys.modules:
            try:
                from .hf.pickling import PreTrainedModel, leave_out_patches
            except ImportError as error:  # transformers is too old
                if not isinstance(model, _OF_TORCH):
                    self.left[type(model).__name__] = str(error)
                    return
            else:
                leave_out_patches()
                kinds = (*_OF_TORCH, PreTrainedModel)
        named = next((part for part in model.modules() if isinstance(part, kinds)), None)
        if named is None:
            return
        for earlier in set(active_handles(model)):
            if not earlier.is_automatic:
                return  # the program has patched it
            self._take_back(earlier)
        for part in model.modules():
            if isinstance(part, Layer):  # the program made the model of it
                self.left.pop(type(part).__name__, None)
        name = type(named).__name__
        reason = self._patch(name, model, self._shared_prefixes and not isinstance(named, _OF_TORCH))
        if reason is not None:
            self.left[name] = reason
            for part in [] if isinstance(model, _OF_TORCH) else _of_torch_in(model):
                self.listener(part)

    def _patch(self, name: str, model: nn.Module, shares: bool) -> str | None:
        """Patch a model. Returns the reason if that is not possible."""
        counts = self.counts.get(name, Counts())
        handle = PatchHandle(name, self._on_fallback, self._cuda_graphs, None, True, shares, counts, self._check)
        handle.is_automatic = True
        try:
            apply_patch(handle, model, True, self._packing)
        except Exception as error:  # the code of any model ran
            reason = next(iter(handle.left.values()), repr(error))
            return reason.partition(" (checked ")[0].removeprefix(f"{name} ").rstrip(".")
        reason = "".join(handle.changed.values()).partition(", not packed, because ")[2].partition("; ")[0]
        if reason:
            handle.remove()
            return reason
        self.models[name] += 1
        self.counts[name] = counts
        self._handles[handle] = name
        return None

    def _take_back(self, handle: Handle) -> None:
        """Remove the patch of a model that has become a part of another one."""
        handle.remove()
        restore_copies(handle)
        if (name := self._handles.pop(handle, None)) is not None:
            self.models[name] -= 1
            if not self.models[name]:
                del self.models[name]
                if not self.counts[name].calls:
                    del self.counts[name]


def _of_torch_in(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in a model that `patch` packs by themselves."""
    for child in model.children():
        yield from [child] if isinstance(child, _OF_TORCH) else _of_torch_in(child)


def patch_all(
    *,
    packing: Literal["auto", "always"] = "auto",
    on_fallback: OnFallback = "warn",
    cuda_graphs: CudaGraphs = False,
    shared_prefixes: bool = False,
    check: CheckMode = "first",
) -> PatchAllHandle:
    """Make models padding-free that the program builds from now on, in this process.

    They are every Hugging Face model, and every `nn.Transformer`, `nn.TransformerEncoder`, `nn.TransformerDecoder` and
    layer of their classes. A model is patched as by `patch` when it is complete: when its constructor,
    `from_pretrained` or `from_config` returns. A model that another one builds for itself is a part of that one, and so
    is a layer of which an encoder makes copies. A deep copy of a patched model is patched too. A model that can't be
    patched runs as it is, and the handle says why. Models that exist already, and those of processes that are started
    without fork, are not patched.

    The modules of a model keep their classes: `patch_all` replaces no `nn.MultiheadAttention`. Pickled and saved models
    and configs have no trace of the patch, and load without this package. If the program calls `patch` for a model, its
    options replace those of this function.

    Args:
        packing, on_fallback, cuda_graphs, shared_prefixes, check: as in `patch`. With `on_fallback="warn"`, each
            reason is shown once for each class.

    Returns:
        A `PatchAllHandle`. Its `remove()` restores the models, as does the end of `with patch_all():`.

    Raises:
        ValueError: an option has another value than those of `patch`.

    Example:
        >>> import torch, nt_attention as nta
        >>> from transformers import BertConfig, BertModel
        >>> handle = nta.patch_all()
        >>> model = BertModel(BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
        >>> out = model(torch.full((2, 3), 7), attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))
        >>> print(handle)
        nt_attention.patch_all:
          BertModel: 1 model patched
            1 call ran packed: 5 tokens in 6 positions, pad ratio 1.20 (17% skipped)
            first batch compared with the padded run: largest difference ...
        >>> handle.remove()
    """
    check_options(packing, on_fallback, check)
    CapturedCalls.of_option(cuda_graphs)  # raises an error for another value
    handle = PatchAllHandle(packing, on_fallback, cuda_graphs, shared_prefixes, check)
    building.add_listener(handle.listener)
    return handle
