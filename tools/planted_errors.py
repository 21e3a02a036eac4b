"""Do the tests notice small errors? Plants one error after another in a copy of the package and runs some tests.

    python tools/planted_errors.py                      # all of them
    python tools/planted_errors.py layouts/ hf/route    # those in files with these beginnings
    python tools/planted_errors.py -k window            # those with a name like this

Each error replaces some text of one file. If the text is not there, it is searched in the whole package, because code
moves. An error whose text is gone, or is in several files, is printed as "to be adapted". The exit status is 1 if an
error was not found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

import pytest
import torch
import transformers  # noqa: F401

ROOT = Path(__file__).parent.parent
COPIED = ("nt_attention", "tests", "conftest.py", "pyproject.toml")


class Error(NamedTuple):
    """A planted error.

    Attributes:
        name: a short name.
        file: the file in `nt_attention/` where the text was.
        old, new: the text and what replaces it; only the first occurrence in a file.
        tests: what pytest runs: files or directories in `tests/`, and options.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


ERRORS = [
    # layouts
    Error(
        "index of tokens in a padded batch",
        "layouts/sequence.py",
        "return ids * length + positions",
        "return ids * max(1, length - 1) + positions",
        "layout/test_layout_laws.py",
    ),
    Error(
        "positions that jump ahead begin no sequence",
        "layouts/cache.py",
        "begins[:, 1:] = rows.diff(dim=1) != 1",
        "begins[:, 1:] = rows.diff(dim=1) <= 0",
        "layout/test_layout_laws.py",
    ),
    Error(
        "one hole is no hole",
        "layouts/sequence.py",
        "(index[end - 1] - index[first] >= lengths)",
        "(index[end - 1] - index[first] > lengths)",
        "layout/test_layout_laws.py",
    ),
    Error(
        "the first row past the end stays",
        "layouts/rows.py",
        "past = torch.arange(values.shape[0], device=values.device) >= first",
        "past = torch.arange(values.shape[0], device=values.device) > first",
        "layout/test_bounded_layouts.py -k past_the_end",
    ),
    Error(
        "a bound below the longest sequence is accepted",
        "layouts/sequence.py",
        "max_seqlen < self._longest",
        "max_seqlen < self.min_seqlen",
        "layout/test_layout_laws.py",
    ),
    Error(
        "the gradient of pad takes the first rows",
        "layouts/rows.py",
        "return packed.index_select(0, ctx.saved_tensors[0]), None, None, None",
        "return packed[: len(ctx.saved_tensors[0])], None, None, None",
        "layout/test_pack_pad_to_nested.py",
    ),
    Error(
        "layouts with other keys share a cache entry",
        "layouts/protocol.py",
        "cache.find_or_build(key, build, other_cache)",
        "cache.find_or_build(key, build)",
        "refusals",
    ),
    # nested
    Error(
        "holes move the tokens after them",
        "layouts/nested.py",
        "(begins - tokens.host[:-1]).numpy()",
        "(begins - begins).numpy()",
        "nested",
    ),
    Error(
        "the shortest length of a NestedTensor is the longest",
        "layouts/nested.py",
        "(values, offsets, None, 1, layout.min_seqlen, layout.max_seqlen)",
        "(values, offsets, None, 1, layout.max_seqlen, layout.max_seqlen)",
        "nested/test_nested_tensors.py",
    ),
    Error(
        "overlapping sequences are accepted",
        "layouts/nested.py",
        'wrong = (ends < begins) | (ends > torch.cat([begins[1:], torch.tensor([rows], device="cpu")]))',
        "wrong = ends < begins",
        "multihead/test_errors.py",
    ),
    # bounded
    Error(
        "offsets past the bound are valid",
        "layouts/bounded.py",
        "& (offsets[-1] <= max_tokens)",
        "& (offsets[-1] >= 0)",
        "layout/test_bounded_layouts.py",
    ),
    Error(
        "a sequence longer than the bound is valid",
        "layouts/bounded.py",
        "in_order = ((lengths >= 0) & (lengths <= max_seqlen)).all()",
        "in_order = (lengths >= 0).all()",
        "layout/test_bounded_layouts.py",
    ),
    Error(
        "results of invalid offsets are 0",
        "layouts/bounded.py",
        "(past & self.are_valid)",
        "past",
        "layout/test_bounded_layouts.py",
    ),
    # paged
    Error(
        "the row in a page is ignored",
        "layouts/paged.py",
        "return entries * unit + row",
        "return entries * unit + 0 * row",
        "paged/test_paged_layouts.py",
    ),
    Error(
        "a sequence with too few pages has no error",
        "layouts/paged.py",
        "self.lengths.where(self.lengths <= capacity, -1)",
        "self.lengths.where(self.lengths <= capacity, 0)",
        "paged/test_paged_attention.py -k 'not split_kv'",
    ),
    # functional
    Error(
        "keys of another number of sequences are accepted",
        "kernels/call.py",
        "if layout.batch_size != key_layout.batch_size:",
        "if False:",
        "refusals",
    ),
    Error(
        "the spec of a batch with other layouts is used",
        "functional.py",
        "key = key and (*key, *more.values())",
        'key = key and (*key, more["paged"])',
        "attention/test_attention.py -k other_layouts",
    ),
    Error(
        "autocast casts float64",
        "functional.py",
        "x.is_floating_point() and x.dtype != torch.float64",
        "x.is_floating_point()",
        "attention/test_attention_table.py -k autocast",
    ),
    # autograd
    Error(
        "lse of a fully masked row ignores the sink",
        "kernels/autograd.py",
        "with_sinks = torch.where(masked, sinks, torch.logaddexp(finite, sinks))",
        "with_sinks = torch.logaddexp(finite, sinks)",
        "attention/test_attention_table.py -k 'results and cpu'",
    ),
    Error(
        "the second derivative is 0",
        "kernels/autograd.py",
        """raise RuntimeError(
            "trying to differentiate twice""",
        """return (None, *_)
        raise RuntimeError(
            "trying to differentiate twice""",
        "attention/test_attention.py",
    ),
    Error(
        "the share of a sink is that of the keys",
        "kernels/autograd.py",
        "share = torch.sigmoid(finite - sinks)",
        "share = torch.sigmoid(sinks - finite)",
        "attention/test_attention_table.py -k 'results and cpu'",
    ),
    # adapters
    Error(
        "lse of a fully masked row has a gradient",
        "kernels/adapters.py",
        "saved.grad_lse.masked_fill(saved.lse == -torch.inf, 0.0)",
        "saved.grad_lse",
        "attention/test_attention_table.py -k 'nan_gradient and cpu'",
    ),
    Error(
        "the gradient of lse is rounded",
        "kernels/adapters.py",
        "[high, (grad_lse - high).to(out.dtype)]",
        "[high, 0 * high]",
        "backends/test_adapters.py",
    ),
    Error(
        "the share of lse in dk has no scale",
        "kernels/adapters.py",
        "grads[1].add_(share, alpha=spec.scale)",
        "grads[1].add_(share)",
        "attention/test_attention_table.py -k room",
    ),
    Error(
        "rows past the end keep what was in memory",
        "kernels/adapters.py",
        "        out[layout.total :] = 0\n",
        "",
        "attention/test_attention_table.py -k 'results and cpu'",
    ),
    # rewrites
    Error(
        "the mirrored window is not mirrored",
        "kernels/rewrites.py",
        "window_size=(0 if spec.is_causal else right, left)",
        "window_size=(left, 0 if spec.is_causal else right)",
        "attention/test_attention_table.py -k 'fake and lower'",
    ),
    Error(
        "slopes of reversed sequences are not reversed",
        "kernels/rewrites.py",
        "slopes = slopes.flip(0) if",
        "slopes = slopes if",
        "attention/test_attention_table.py -k 'fake and lower'",
    ),
    Error(
        "buckets of reversed sequences are not reversed",
        "kernels/rewrites.py",
        "buckets=relative.buckets.flip(0)",
        "buckets=relative.buckets",
        "attention/test_attention_table.py -k 'fake and lower'",
    ),
    Error(
        "queries without keys are kept",
        "kernels/rewrites.py",
        "kept = torch.minimum(queries, keys)",
        "kept = torch.where(keys > 0, queries, 0)",
        "attention/test_attention_table.py -k 'fake and masked'",
    ),
    # masks, ALiBi, relative biases
    Error(
        "the left side of a window is exclusive",
        "kernels/masks.py",
        "after_left = distance >= -int(self.left)",
        "after_left = distance > -int(self.left)",
        "attention/test_attention_table.py -k 'results and reference'",
    ),
    Error(
        "the number of visible pairs lacks the last key",
        "kernels/masks.py",
        "shift + int(self.right) + 1",
        "shift + int(self.right)",
        "backends/test_call_size.py",
    ),
    Error(
        "a mask that hides one key is no mask",
        "kernels/masks.py",
        "diagonal + self.right >= keys - 1",
        "diagonal + self.right >= keys - 2",
        "attention/test_attention_table.py -k 'results and reference or results and cpu'",
    ),
    Error(
        "slopes for a number of heads that is no power of 2",
        "kernels/alibi.py",
        "2 ** (-4 * (i + 1) / n)",
        "2 ** (-4 * (i + 2) / n)",
        "multihead/test_options.py multihead/test_masks.py",
    ),
    Error(
        "distances of a relative bias have the other sign",
        "kernels/relative.py",
        "distance.clamp(-radius, radius) + radius",
        "radius - distance.clamp(-radius, radius)",
        "attention/test_attention_table.py -k 'results and reference or results and cpu'",
    ),
    Error(
        "the gradient of a bias is the mean of the tiles",
        "kernels/relative.py",
        "grad.flatten(0, -4).sum(0)",
        "grad.flatten(0, -4).mean(0)",
        "attention/test_attention_table.py -k 'results and small'",
    ),
    # reference, cpu, flex
    Error(
        "the gradient of softcap is linear",
        "kernels/backends/reference.py",
        "(1 - (capped / spec.softcap).square())",
        "(1 - (capped / spec.softcap).abs())",
        "attention/test_attention_table.py -k 'one_graph and reference and softcap'",
    ),
    Error(
        "dropout keeps its weights small",
        "kernels/backends/reference.py",
        "/ (1 - spec.dropout_p)",
        "",
        "attention/test_attention_table.py -k 'dropout and reference'",
    ),
    Error(
        "a tile misses its first key",
        "kernels/backends/cpu_tiles.py",
        "low = int(max(0, min(keys, first + shift - left)))",
        "low = int(max(0, min(keys, first + shift - left + 1)))",
        "attention/test_attention_table.py -k 'results and cpu'",
    ),
    Error(
        "gradients of keys that no query sees are not written",
        "kernels/backends/cpu_tiles.py",
        "most_tiles <= 1 and keys_used == key_layout.total",
        "most_tiles <= 1",
        "attention/test_attention_table.py -k 'results and cpu'",
    ),
    Error(
        "keys of padding are visible",
        "kernels/backends/cpu_tiles.py",
        "None if hidden or is_key.all() else",
        "None if is_key.any() else",
        "backends/test_cpu_backend.py",
    ),
    Error(
        "queries of padding have gradients",
        "kernels/backends/cpu.py",
        "tiles_lse.masked_fill(tiles.padded_queries, torch.inf)",
        "tiles_lse.masked_fill(tiles.padded_queries, 0.0)",
        "backends/test_cpu_backend.py",
    ),
    Error(
        "each length has a call of its own",
        "kernels/backends/cpu_tiles.py",
        "total = least[i] + self.price +",
        "total = least[i] +",
        "backends/test_cpu_backend.py -k start_threads",
    ),
    Error(
        "NaN in a query is a fully masked row",
        "kernels/backends/cpu.py",
        "wrong = (lse == 0) & query.isnan()",
        "wrong = (lse != 0) & query.isnan()",
        "backends/test_cpu_backend.py",
    ),
    Error(
        "the weights that dropout keeps are not scaled",
        "kernels/backends/cpu_scores.py",
        "factor.div_(1 - dropout.p)",
        "factor.div_(1)",
        "attention/test_attention_table.py -k 'dropout and cpu'",
    ),
    Error(
        "mods of the backward read what variables have become",
        "kernels/mods.py",
        "of_copy.cell_contents = kept(cell.cell_contents)",
        "of_copy.cell_contents = cell.cell_contents",
        "backends/test_cpu_backend.py",
    ),
    Error(
        "causality of the kernel with a scale below 0",
        "kernels/backends/cpu_tiles.py",
        " and shift == 0 and spec.has_positive_scale",
        " and shift == 0",
        "attention/test_attention_table.py -k 'results and cpu'",
    ),
    Error(
        "the last block of a flex mask is left out",
        "kernels/backends/flex.py",
        "(end - 1) // BLOCK - first + 1, 0)",
        "(end - 1) // BLOCK - first, 0)",
        "backends/test_flex_backend.py",
    ),
    # token_tiled and split_kv, in Triton's interpreter
    Error(
        "intervals end one key early",
        "kernels/token_tiled/triton_kernels.py",
        "tl.maximum(own + after + 1, lowest)",
        "tl.maximum(own + after, lowest)",
        "token_tiled/test_token_tiled_plan.py",
    ),
    Error(
        "the block at the window's end has no mask",
        "kernels/token_tiled/triton_kernels.py",
        "unmasked_from = tl.load(Lo + end - 1)",
        "unmasked_from = tl.load(Lo + start)",
        "attention/test_attention_table.py -k 'token_tiled and window'",
    ),
    Error(
        "softcap has a gradient of 1",
        "kernels/token_tiled/triton_kernels.py",
        "cap_gradient = 1.0 - capped * capped",
        "cap_gradient = 1.0",
        "attention/test_attention_table.py -k 'token_tiled and softcap'",
    ),
    Error(
        "the gradient of lse has the other sign",
        "kernels/token_tiled/triton_kernels.py",
        "delta -= tl.load(GradLse",
        "delta += tl.load(GradLse",
        "attention/test_attention_table.py -k 'results and token_tiled'",
    ),
    Error(
        "a bounded plan has too few tiles",
        "kernels/token_tiled/bounded_plan.py",
        "number = most // rows + self.batch_size",
        "number = most // rows",
        "token_tiled/test_token_tiled_bounds.py -k TestPlans",
    ),
    Error(
        "parts of a row have equal weights",
        "kernels/split_kv/triton_kernels.py",
        "weights = tl.exp2((most - overall) * LOG2E)",
        "weights = tl.exp2(0 * (most - overall))",
        "paged/test_paged_attention.py",
    ),
    Error(
        "the first keys of a window need no mask",
        "kernels/split_kv/triton_kernels.py",
        "all_from = tl.maximum(lo, last_query + shift - before)",
        "all_from = lo",
        "attention/test_attention_table.py paged/test_paged_attention.py -k 'split_kv and window'",
    ),
    # choice of backends
    Error(
        "few queries with gradients run on split_kv",
        "kernels/cost_model.py",
        "    if spec.needs_grad:\n        return False\n",
        "",
        "backends/test_cost_model.py",
    ),
    Error(
        "times of a smaller head dim",
        "kernels/cost_model.py",
        "min(enough, key=sum) if enough",
        "min(measured, key=sum) if enough",
        "backends/test_cost_model.py",
    ),
    Error(
        "the numbers of another card come before the user's",
        "kernels/cost_model.py",
        "for table in reversed(tables):",
        "for table in tables:",
        "backends/test_cost_model.py",
    ),
    Error(
        "times per token are scaled by FLOPs",
        "kernels/measurements.py",
        "factors = (1.0, all_multiprocessors, memory,",
        "factors = (1.0, all_multiprocessors, all_multiprocessors,",
        "backends/test_measurements.py",
    ),
    Error(
        "expected times may be negative",
        "cli/tune.py",
        "(x >= 0).all() and ",
        "",
        "cli/test_tune.py",
    ),
    Error(
        "use_backend has no end",
        "kernels/select.py",
        "_requested.reset(token)",
        "pass",
        "backends/test_backend_selection.py",
    ),
    Error(
        "a named backend may fall back",
        "kernels/select.py",
        "candidates = [backends[name]] if name in backends else []",
        "candidates = list(backends.values())",
        "backends/test_backend_selection.py",
    ),
    # compat
    Error(
        "queries of a window are at one position",
        "compat/flash_attn.py",
        'is_ordered = options["is_causal"] or options["window_size"] != (-1, -1)',
        'is_ordered = options["is_causal"]',
        "compat",
    ),
    Error(
        "keys before the padding count",
        "compat/_kv_cache.py",
        "lengths - pad)",
        "lengths)",
        "compat",
    ),
    # modules
    Error(
        "the hint replaces a mask although weights are needed",
        "modules/inputs.py",
        "return both and not need_weights and self.key_padding_mask is None",
        "return both and self.key_padding_mask is None",
        "multihead/test_masks.py multihead/test_nn_module.py",
    ),
    Error(
        "padding counts in positions",
        "modules/inputs.py",
        "positions = (~hidden).cumsum(1) - 1",
        "positions = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape)",
        "multihead/test_options.py multihead/test_masks.py",
    ),
    Error(
        "the last pair of NTK keeps its frequency",
        "modules/rotary.py",
        "/ max(1, pairs - 1)",
        "/ pairs",
        "multihead/test_rotary.py",
    ),
    Error(
        "keys and values share a bias",
        "modules/multihead.py",
        "None if bias is None else bias[q_dim:]",
        "None if bias is None else bias[q_dim:].flip(0)",
        "multihead/test_nn_module.py multihead/test_options.py",
    ),
    Error(
        "added keys are hidden",
        "modules/padded_attention.py",
        "F.pad(scores.visible, beyond, value=True)",
        "F.pad(scores.visible, beyond, value=False)",
        "multihead/test_nn_module.py multihead/test_masks.py",
    ),
    Error(
        "the answer about graphs does not reach rotary",
        "modules/multihead.py",
        "k = self.rotation.rotate(k, key_positions, inputs.in_graph)",
        "k = self.rotation.rotate(k, positions, inputs.in_graph)",
        "multihead/test_options.py",
    ),
    Error(
        "rows past the end of the values are read",
        "modules/inputs.py",
        "key.shape[0] == value.shape[0] == key_layout.total",
        "key.shape[0] == key_layout.total",
        "multihead/test_masks.py",
    ),
    Error(
        "weights keep the keys of heads of other sequences",
        "modules/padded_attention.py",
        "weights = weights.masked_fill(~tokens, 0.0)",
        "weights = weights.masked_fill(tokens, 0.0)",
        "multihead/test_options.py",
    ),
    Error(
        "the fast path is taken past a forward of its own",
        "modules/multihead.py",
        "return type(self).forward is type(self)._own_forward and",
        "return",
        "multihead/test_layers.py",
    ),
    Error(
        "a patched attention that falls back averages no weights",
        "torch_models/attention_modules.py",
        "need_weights is not False, attn_mask, average_attn_weights, is_causal",
        "need_weights is not False, attn_mask, False, is_causal",
        "patch/test_patch_attention_modules.py",
    ),
    Error(
        "a patched attention packs where a layer mixes tokens",
        "torch_models/attention_modules.py",
        "(None if inputs.layouts is not None else self.padded_because) or super()",
        "super()",
        "patch/test_patch_attention_modules.py patch/test_patch_transformer_encoder.py patch/test_torch_models.py",
    ),
    Error(
        "only floating-point padding masks of 0 are packed",
        "torch_models/attention_modules.py",
        "_packs_float_masks = True",
        "_packs_float_masks = False",
        "patch/test_patch_single_modules.py",
    ),
    # torch_models
    Error(
        "a causal mask with other values is causal",
        "torch_models/padded_inputs.py",
        "(mask == causal).all()",
        "(mask == causal).any()",
        "patch/test_torch_models.py",
    ),
    Error(
        "outputs of sequence-first modules are batch-first",
        "torch_models/padded_inputs.py",
        "return padded if self.batch_first else padded.transpose(0, 1)",
        "return padded",
        "patch/test_torch_models.py",
    ),
    Error(
        "a memory that hides more than the padding",
        "torch_models/padded_inputs.py",
        'return "hidden" if differs or hidden is None else "same"',
        'return "same"',
        "patch/test_patch_transformer.py",
    ),
    # hf/route
    Error(
        "models that mix rows may have our attention by name",
        "hf/route/by_name.py",
        "if config.model_type in MIX_ROWS or",
        "if",
        "hugging_face/test_hf_hand_packed.py",
    ),
    Error(
        "positions beside cu_seq_lens_q are not looked at",
        "hf/route/attention.py",
        "if read is None or not read.same_lengths(layout):",
        "if False:",
        "hugging_face/test_hf_hand_packed.py",
    ),
    Error(
        "whether the next token is predicted is asked of a loss over all tokens",
        "hf/check/find.py",
        "for x in (alone, none))",
        'for x in (torch.where(alone < 0, labels["labels"], 1 - alone), labels["labels"]))',
        "patch/test_patch_differences.py",
    ),
    Error(
        "a call in another mode is not compared",
        "hf/check/first_batches.py",
        "call.entry.head, model.training, frozenset",
        "call.entry.head, True, frozenset",
        "hugging_face/test_hf_planted.py -k another_mode",
    ),
    Error(
        "modules that were replaced are not compared again",
        "hf/check/first_batches.py",
        "if now != self._last:",
        "if False:",
        "hugging_face/test_hf_padded_modules.py -k put_in_after",
    ),
    Error(
        "the check runs the same neighbors twice",
        "hf/check/rows.py",
        "return replace(self, sequences=(other.sequences[0], self.sequences[1], other.sequences[2]), targets=targets)",
        "return self",
        "hugging_face/test_hf_planted.py -k without_a_gradient",
    ),
    Error(
        "positions that were changed in inference mode are not read again",
        "hf/route/positions.py",
        "forget(position_ids, key)",
        "pass",
        "hugging_face/test_hf_attention_positions.py -k any_first_layer",
    ),
    Error(
        "heads that read padding are not noticed",
        "hf/check/heads.py",
        "if not names:",
        "if names:",
        "hugging_face/test_hf_heads.py",
    ),
    Error(
        "hooks on parts of a stack get packed tokens",
        "torch_models/changed_modules.py",
        "if have_foreign_hooks(",
        "if handle.is_automatic and have_foreign_hooks(",
        "patch/test_patch_transformer.py",
    ),
    Error(
        "a small batch is never a graph",
        "hf/pack/packed_forward.py",
        "and not first.is_settled(call):",
        "and False:",
        "patch/test_patch_differences.py",
    ),
    Error(
        "two calls that wait for their backward have one slot",
        "graphs/cache.py",
        "(slot for slot in slots if slot.is_free)",
        "(slot for slot in slots)",
        "graphs/test_graph_laws.py -k wait",
    ),
    Error(
        "a graph that gains nothing is kept",
        "graphs/cache.py",
        "if graph is None or not graph.times.pays:",
        "if graph is None:",
        "graphs/test_graph_policy.py",
    ),
    Error(
        "a call that the device is late for counts as one that waits for the host",
        "graphs/policy.py",
        "return self._was_reached and self.device_ms <= LATE * self.host_ms",
        "return self._was_reached",
        "graphs/test_graph_policy.py",
    ),
    Error(
        "a larger batch waits for the host if a smaller one does",
        "graphs/policy.py",
        "waits and _covers(size, bucket)",
        "waits and _covers(bucket, size)",
        "graphs/test_graph_policy.py",
    ),
    Error(
        "the time of a batch without padding is never known, so it is never a graph",
        "hf/pack/packed_forward.py",
        "if call.begin is not None and (packs or type(route) is Unpatched):",
        "if call.begin is not None and packs:",
        "graphs/test_graph_laws.py -k chosen_by",
    ),
    Error(
        "a graph under autocast serves calls without it",
        "graphs/cache.py",
        "key = work.key, _settings(device), own.state.training",
        "key = work.key, own.state.training",
        "graphs/test_graph_laws.py -k settings",
    ),
    Error(
        "the rest of a graph's inputs keeps NaN of another batch",
        "graphs/capture.py",
        "if x.shape != y.shape:  #",
        "if False:  #",
        "graphs/test_graph_laws.py -k nan",
    ),
    Error(
        "results of a graph are its own tensors",
        "graphs/capture.py",
        "cast(Tensor, x).clone(memory_format=torch.contiguous_format)",
        "cast(Tensor, x)",
        "graphs/test_graph_laws.py -k stay",
    ),
    Error(
        "parameters may change before the backward of a graph",
        "graphs/gradients.py",
        "if any(version_of(x) != version",
        "if False and any(version_of(x) != version",
        "graphs/test_graph_laws.py -k before_the_backward",
    ),
    Error(
        "parameters of which the outputs are independent get zeros",
        "graphs/gradients.py",
        "and needed[i] and i in used]",
        "and needed[i]]",
        "graphs/test_graph_laws.py -k some_outputs",
    ),
    Error(
        "a function of a module is replaced, and its graph stays",
        "graphs/module_state.py",
        "and tables[i].get(name) is x for",
        "and True for",
        "graphs/test_graph_laws.py -k changed_module",
    ),
    Error(
        "a refused capture changes the module",
        "graphs/capture.py",
        "before.restore()  #",
        "pass  #",
        "graphs/test_graph_laws.py -k refused",
    ),
    Error(
        "a refused capture is tried again",
        "graphs/cache.py",
        "own.refused[key, bucket] = str(error)",
        "pass",
        "graphs/test_graph_laws.py -k counted",
    ),
    Error(
        "global hooks of modules are no reason",
        "graphs/cache.py",
        "yield torch_private.has_hooks_of_all_modules(),",
        "yield False,",
        "graphs/test_graph_laws.py -k counted",
    ),
    Error(
        "labels of rows past the end of a graph are counted",
        "hf/pack/inputs.py",
        "if not layout.knows_lengths:",
        "if False:",
        "graphs/test_graph_laws.py -k logits",
    ),
    Error(
        "all inputs of a graph have the sizes of the source",
        "hf/pack/graphs.py",
        'Form("padded", call.side_of(name))',
        'Form("padded")',
        "graphs/test_graph_laws.py -k t5 and results_are",
    ),
    Error(
        "a number that a forward draws for nothing is a reason for no graph",
        "graphs/capture.py",
        "torch.rand(())",
        "pass",
        "graphs/test_graph_laws.py -k left_out",
    ),
    Error(
        "positions that count padding begin sequences",
        "hf/route/positions.py",
        "varies & (step != 1) & (step != distance)",
        "varies & (step != 1)",
        "hugging_face/test_hf_positions.py",
    ),
    Error(
        "a sliding window has one key more",
        "hf/route/attention.py",
        "window = sliding_window - 1 if sliding_window else -1",
        "window = sliding_window if sliding_window else -1",
        "hugging_face/test_hf_attention_function.py",
    ),
    Error(
        "two sequences in a row see each other in an additive mask",
        "hf/route/attention.py",
        "mask.masked_fill(~other, torch.finfo(mask.dtype).min)",
        "mask",
        "hugging_face/test_hf_attention_function.py hugging_face/test_hf_attention_positions.py",
    ),
    Error(
        "long sequences keep the frequencies of short ones",
        "hf/route/rope.py",
        "return length if length > rotary.original_max_seq_len else 0",
        "return 0",
        "hugging_face/test_hf_rope.py",
    ),
    Error(
        "longrope begins one token early",
        "hf/route/rope.py",
        "return trained + 1 if length > trained else 0",
        "return trained + 1 if length >= trained else 0",
        "hugging_face/test_hf_rope.py",
    ),
    # hf/pack
    Error(
        "the first token of a sequence is predicted",
        "hf/pack/routes.py",
        ".masked_fill(layout.position_ids == 0, ignored)",
        "",
        "hugging_face/test_hf_models.py -k training and Llama",
    ),
    Error(
        "positions of tokens in rows with left padding",
        "hf/pack/inputs.py",
        "return packing.pack(is_token.cumsum(1) * is_token + padding)",
        "return packing.layout.position_ids.unsqueeze(0) + padding",
        "hugging_face/test_hf_models.py -k patched and roberta",
    ),
    Error(
        "masked positions of span logits are 0",
        "hf/pack/outputs.py",
        "value = torch.finfo(x.dtype).min if name in families.LOWEST_AT_PADDING else 0.0",
        "value = 0.0",
        "hugging_face/test_hf_models.py -k patched and QuestionAnswering",
    ),
    Error(
        "padding repeats the next token",
        "hf/pack/packing.py",
        "token = torch.searchsorted(self.index, flat, right=nearest)",
        "token = torch.searchsorted(self.index, flat)",
        "patch/test_patch_outputs.py patch/test_patch_hugging_face.py",
    ),
    Error(
        "the first token of a row without padding on the left",
        "hf/pack/packing.py",
        "index_select(0, layout.safe_offsets[:-1])",
        "index_select(0, layout.safe_offsets[1:] - 1)",
        "patch/test_patch_outputs.py patch/test_patch_hugging_face.py",
    ),
    Error(
        "rows with several sequences share positions",
        "hf/pack/packing.py",
        "return self.layout.position_ids if self.shares_rows else self.padded_positions",
        "return self.padded_positions",
        "patch/test_patch_packing.py hugging_face/test_hf_hand_packed.py",
    ),
    Error(
        "an ignored label in the middle ends the target",
        "hf/pack/encoder_decoder.py",
        "mask = (labels != _IGNORED).flip(1).cumsum(1).flip(1) > 0",
        "mask = labels != _IGNORED",
        "hugging_face/test_hf_encoder_decoder.py",
    ),
    Error(
        "the outputs of the source are padded as the target",
        "hf/pack/encoder_decoder.py",
        "pad_outputs(out, self.packing.source, names=of_source)",
        "pad_outputs(out, self.packing.target, names=of_source)",
        "hugging_face/test_hf_encoder_decoder.py",
    ),
    # distributed
    Error(
        "a piece lacks the first key of its window",
        "distributed/planner.py",
        "return max(0, piece.start - self.left),",
        "return max(0, min(piece.start, piece.start - self.left + 1)),",
        "distributed/test_planner.py distributed/test_sharded_attention.py",
    ),
    Error(
        "the work of a piece lacks the keys after it",
        "distributed/planner.py",
        "return before + after + stop - start",
        "return before + stop - start",
        "distributed/test_planner.py",
    ),
    Error(
        "a swap changes the tokens of a rank by too many",
        "distributed/planner.py",
        "sizes - tokens, sorter=order)",
        "sizes - tokens + 1, sorter=order)",
        "distributed/test_planner.py",
    ),
    Error(
        "whole sequences are not swapped",
        "distributed/planner.py",
        "if cut or not draft.swap(rest):",
        "if True:",
        "distributed/test_planner.py",
    ),
    Error(
        "the lse of two groups of heads are joined as rows",
        "distributed/exchange.py",
        "torch.cat(of_lse, 1 - schedule.dim).T",
        "torch.cat(of_lse, schedule.dim).T",
        "distributed/test_sharded_attention.py",
    ),
    Error(
        "received rows are used by other keys",
        "distributed/exchange_plan.py",
        "uses[uses >= 0] += whole",
        "uses[uses >= 0] += 0",
        "distributed/test_sharded_attention.py",
    ),
    Error(
        "a window after a query is that of a sequence's end in each piece",
        "distributed/exchange_plan.py",
        "keys[1] if geometry.has_positions else stop",
        "stop",
        "distributed/test_sharded_attention.py",
    ),
    Error(
        "a mod gets the position of a query in its piece",
        "distributed/mods.py",
        "return mask_mod(batch[b], h + first_head, q_idx + first_query[b]",
        "return mask_mod(batch[b], h + first_head, q_idx",
        "distributed/test_sharded_attention.py",
    ),
    # handles
    Error(
        "a fallback is not counted",
        "patching/handle.py",
        "            self.calls[reason] += 1\n            self.positions",
        "            self.positions",
        "patch/test_patch_handle.py patch/test_patch_packing.py",
    ),
    Error(
        "each fallback warns",
        "patching/handle.py",
        "is_new = warns and reason not in self._warned",
        "is_new = warns",
        "patch/test_torch_models.py patch/test_patch_handle.py",
    ),
    Error(
        "remove restores in the wrong order",
        "patching/handle.py",
        "self._undo.pop()",
        "self._undo.pop(0)",
        "patch/test_torch_models.py patch/test_patch_handle.py patch/test_patch_attention_modules.py",
    ),
    # estimate
    Error(
        "the model is not restored",
        "_estimate.py",
        "                before.restore()",
        "                pass",
        "patch/test_estimate.py",
    ),
    Error(
        "rows are not sorted",
        "_estimate.py",
        "ordered = sorted((row for batch in rows for row in batch), reverse=True)",
        "ordered = [row for batch in rows for row in batch]",
        "patch/test_estimate.py",
    ),
    Error(
        "packed calls run without the patch",
        "_estimate.py",
        "        packed, packed_bytes = time_rounds(seconds / 4)\n    calls = handle.calls\n",
        "    packed, packed_bytes = time_rounds(seconds / 4)\n    calls = handle.calls\n",
        "patch/test_estimate.py",
    ),
    Error(
        "random tokens may be padding",
        "_estimate.py",
        "    ids[ids == pad] = 1 if pad == 0 else 0",
        "    ids[0, 0] = pad",
        "patch/test_estimate.py",
    ),
    Error(
        "a silent fallback warns",
        "patching/handle.py",
        'self.on_fallback == "warn" and not is_quiet',
        "not is_quiet",
        "patch/test_patch_handle.py",
    ),
    # cli
    Error(
        "NaN is right",
        "cli/check.py",
        'wrong += [] if error <= tolerance else [f"{name} off by {error:.1e}"]',
        'wrong += [f"{name} off by {error:.1e}"] if error > tolerance else []',
        "cli/test_check.py",
    ),
]


def find_file(package: Path, error: Error) -> Path | None:
    """The file that has the text of an error: the file where it was, or else the only one; None if there is none."""
    file = package / error.file
    if file.exists() and error.old in file.read_text("utf-8"):
        return file
    files = [x for x in sorted(package.rglob("*.py")) if error.old in x.read_text("utf-8")]
    return files[0] if len(files) == 1 else None


def run(copy: Path, error: Error) -> tuple[str, str]:
    """(result, details) of the tests of one error, which is planted in the copy and removed again."""
    file = find_file(copy / "nt_attention", error)
    if file is None:
        return "to be adapted", "its text is gone, or is in several files"
    text = file.read_text("utf-8")
    file.write_text(text.replace(error.old, error.new, 1), "utf-8")
    names, _, option = error.tests.partition(" -k ")
    arguments = ["-q", "-x", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-m", "not sweep and not gpu"]
    arguments += [*(["-k", option.strip("'")] if option else []), *(f"tests/{x}" for x in names.split())]
    output = copy / "output.txt"
    if (child := os.fork()) == 0:  # torch is imported already, and nt_attention is not
        run_pytest(copy, output, arguments)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    file.write_text(text, "utf-8")
    lines = output.read_text("utf-8", errors="replace").splitlines()
    failed = [x for x in lines if x.startswith(("FAILED", "ERROR"))]
    details = failed[0][:150] if failed else " ".join(lines[-1:])[:150]
    return {0: "NOT FOUND", 1: "found"}.get(status, f"pytest ended with {status}"), details


def run_pytest(copy: Path, output: Path, arguments: list[str]) -> NoReturn:
    """Run pytest in this process, and end it."""
    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True  # two versions of a file may have the same size and time
    status = 3
    try:
        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="the beginnings of files in nt_attention/")
    parser.add_argument("-k", default="", help="a part of the name of an error")
    parser.add_argument("--list", action="store_true", help="only say whether the texts are still there")
    parser.add_argument("--clean", action="store_true", help="plant nothing: then no test must fail")
    parser.add_argument("--skip", type=int, default=0, help="leave out this number of errors")
    options = parser.parse_args()
    selected = [x for x in ERRORS if x.file.startswith(tuple(options.files) or "") and options.k in x.name]
    if options.list:
        for error in selected:
            file = find_file(ROOT / "nt_attention", error)
            print(f"{error.file}: {error.name}: {'to be adapted' if file is None else file.relative_to(ROOT)}")
        return 0
    not_found = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        os.environ["NT_ATTENTION_CACHE"] = str(copy / "cache")
        torch.set_num_threads(1)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        for error in selected[options.skip :]:
            began = time.monotonic()
            result, details = run(copy, error._replace(new=error.old) if options.clean else error)
            not_found += result == "NOT FOUND"
            seconds = time.monotonic() - began
            print(f"{result:13} {error.file}: {error.name} ({seconds:.0f} s)\n    {details}", flush=True)
    print(f"{len(selected)} errors, {not_found} not found")
    return 1 if not_found else 0


if __name__ == "__main__":
    sys.exit(main())
