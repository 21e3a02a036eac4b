"""Runs every text class of transformers on padded batches and on rows packed by hand, patched and registered.

    python tools/rows_matrix.py [TYPE ...] [--encoders] [--jobs N] [--write FILE]

Each class runs as a small model (`tools/small_models.py`) on the CPU, in float64 if it can. Each run is compared with
each sequence alone, run by the class without nt_attention. The outcomes are "right", "refused: REASON",
"takes none: ERROR" (Python or transformers refuses the argument), and "WRONG: OUTPUT". They are kept in
`rows_outcomes.json`, from which `tools/supported_models.py` makes tables for docs/reference/hugging_face.md.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import logging
import signal
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from small_models import (
    build_small,
    encoder_inputs,
    isolated,
    on_meta_device,
    padding_of,
    small_encoder,
    text_classes,
    vocabulary_of,
)
from transformers.models.auto import modeling_auto

import nt_attention as nta
from nt_attention.hf import families
from nt_attention.hf.check.plans import checked
from nt_attention.hf.families import CACHE
from nt_attention.hf.pack import inputs
from nt_attention.hf.pack.encoder_layers import encoder_layers, tokens_of, why_no_layers

OUTCOMES = Path(__file__).with_name("rows_outcomes.json")
LENGTHS = (7, 1, 23, 12)
LAYOUT = nta.SequenceLayout.from_lengths(LENGTHS)
FORMS = ("padded", "cu_seq_lens_q", "position_ids", "both", "with a mask", "several rows")
WAYS = ("patch", "register")
SECONDS = 120  # for one class
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}


def sequences(model: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(6, vocabulary_of(model), (1, n), generator=generator) for n in LENGTHS]


def inputs_of(form: str, ids: list[torch.Tensor], padding: int, first: int) -> dict[str, torch.Tensor]:
    """The inputs of a form; `first` is the position of the first token of a sequence."""
    row, positions = torch.cat(ids, 1), LAYOUT.position_ids[None] + first
    offsets, longest = LAYOUT.cu_seqlens, LAYOUT.max_seqlen
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}
    if form == "padded":
        mask = torch.arange(longest) < torch.tensor(LENGTHS)[:, None]
        return {"input_ids": torch.full(mask.shape, padding).masked_scatter(mask, row), "attention_mask": mask.long()}
    if form == "several rows":  # the second one has the sequences in another order
        other = torch.cat(ids[::-1], 1)
        backwards = torch.cat([torch.arange(n) for n in LENGTHS[::-1]])[None] + first
        return {"input_ids": torch.cat([row, other]), "position_ids": torch.cat([positions, backwards])}
    by_positions = {"position_ids": positions}
    more = {
        "cu_seq_lens_q": lengths,
        "position_ids": by_positions,
        "both": {**lengths, **by_positions},
        "with a mask": {**by_positions, "attention_mask": torch.ones_like(row)},
    }
    return {"input_ids": row, **more[form]}


def tokens_in(form: str, values: torch.Tensor) -> torch.Tensor:
    """The values of the tokens (T, …), or (2 T, …) of several rows."""
    if form == "padded":
        return values[torch.arange(values.shape[1]) < torch.tensor(LENGTHS)[:, None]]
    return values.flatten(0, 1)


def tensors_of(out: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in out.items():
        parts = enumerate(value) if isinstance(value, tuple | list) else [("", value)]
        if name not in CACHE | {"loss", "attentions"}:
            found |= {f"{name}{number}": part for number, part in parts if isinstance(part, torch.Tensor)}
    return found


def outputs_alone(model: Any, rows: list[dict[str, Any]]) -> dict[str, list[torch.Tensor]]:
    """The outputs for each token, from each sequence alone."""
    outs = [tensors_of(model(**row, return_dict=True)) for row in rows]
    return {
        name: [out[name][0] for out in outs]
        for name, first in outs[0].items()
        if first.dim() > 1 and all(out[name].shape[:2] == (1, n) for out, n in zip(outs, LENGTHS, strict=True))
    }


def compare(form: str, out: Any, alone: dict[str, list[torch.Tensor]], tolerance: float) -> str:
    rows = {"padded": (len(LENGTHS), max(LENGTHS)), "several rows": (2, sum(LENGTHS))}
    got = tensors_of(out)
    for name, parts in alone.items():
        want = torch.cat([*parts, *parts[::-1]] if form == "several rows" else parts)
        if name not in got or got[name].shape[:2] != rows.get(form, (1, sum(LENGTHS))):
            return f"WRONG: {name} has the shape {tuple(got[name].shape) if name in got else None}"
        error = float((tokens_in(form, got[name]) - want).abs().max() / want.abs().max().clamp(min=1e-6))
        if not error <= tolerance:
            return f"WRONG: {name} differs by {error:.1e}"
    return "right" if alone else "no output has a value for each token"


def refusal(error: BaseException) -> str:
    """Whether a call was refused: by an error with a reason, or by one from inside of the model."""
    text = " ".join(str(error).split())[:300]
    if "unexpected keyword argument" in text:
        return f"takes none: {text}"
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    is_ours = isinstance(error, ValueError | NotImplementedError) and frames[-1].startswith("nt_attention")
    is_ours = is_ours or frames[-1] == "transformers.modeling_utils"  # it does not support our name
    return f"{'refused' if is_ours else 'error inside'}: {'' if is_ours else type(error).__name__ + ': '}{text}"


def fit(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs in the form that a class takes: with a target, or as choices."""
    if families.is_encoder_decoder(model):
        inputs = {**inputs, "decoder_input_ids": inputs["input_ids"]}
        if "attention_mask" in inputs:
            inputs["decoder_attention_mask"] = inputs["attention_mask"]
    if type(model).__name__.endswith("ForMultipleChoice"):
        rows = {"input_ids", "attention_mask"}
        if "position_ids.view" in inspect.getsource(type(model).forward):
            rows |= {"position_ids"}
        inputs = {name: x.unsqueeze(1) if name in rows else x for name, x in inputs.items()}
    return {**inputs, "output_hidden_states": True}


def form_outcomes(model: Any, way: str, ids: list[torch.Tensor], first: int, alone: Any, stock: str) -> dict[str, str]:
    """The outcome of each form. `alone` has the outputs of each sequence alone, `stock` is the outcome unpatched."""
    outcomes, padding = {}, padding_of(model)
    tolerance = TOLERANCE[next(p.dtype for p in model.parameters() if p.is_floating_point())]
    before, handle = model.config._attn_implementation, None
    try:
        if way == "patch":
            handle = nta.patch(model)
        else:
            model = registered(model)
    except Exception as error:
        by_transformers = f"refused by transformers: {type(error).__name__}: {error}"
        return dict.fromkeys(FORMS, refusal(error) if isinstance(error, ValueError) else by_transformers)
    for form in FORMS:
        try:
            out = model(**fit(model, inputs_of(form, ids, padding, first)), return_dict=True)
            outcomes[form] = compare(form, out, alone, tolerance)
        except Exception as error:
            outcomes[form] = refusal(error)
        if handle is not None:
            calls = [str(reason) for reason in handle.calls if reason is not None]
            outcomes[form] += f" (padded: {'; '.join(calls)})" if calls and outcomes[form] in ("right", stock) else ""
            handle.calls.clear()
        if stock.startswith("WRONG"):
            outcomes[form] = outcomes[form].replace(stock, "as unpatched")
    if handle is not None:
        handle.remove()
    model.config._attn_implementation_internal = before
    return outcomes


def registered(model: Any) -> Any:
    """The model with our attention. transformers only warns if it can't set it later, but not in `from_config`."""
    name = nta.hf.register()
    model.set_attn_implementation(name)
    if model.config._attn_implementation == name:
        return model
    made = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=name).to(model.dtype).eval()
    made.load_state_dict(model.state_dict())
    return made


def first_position(model: Any) -> int:
    """The position of the first token: the padding id + 1 in models that count positions as RoBERTa does."""
    plan = checked(model).plan
    counts = plan is not None and plan.positions == "ids"
    counts = counts or any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
    padding = inputs.padding_id(families.base_model(model)) if counts else None
    return 0 if padding is None else padding + 1


def begin() -> None:
    """Begin a process that runs some classes."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")


def outcome_of(row: tuple[str, str, str]) -> dict[str, Any]:
    """The outcomes of a class."""
    model_type, class_name, head = row
    entry: dict[str, Any] = {"type": model_type, "class": class_name, "head": head}

    def late(*_: Any) -> None:
        raise TimeoutError(f"no outcome after {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        if head == ENCODER:
            return encoder_outcome(entry)
        try:
            model, config = build_small(model_type, class_name), on_meta_device(model_type, class_name).config
            if hasattr(config, "use_cache"):
                model.config.use_cache = config.use_cache
        except Exception as error:  # whatever a class raises
            return {**entry, "not built": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
        with torch.no_grad(), isolated():
            ids, first = sequences(model), first_position(model)
            alone = outputs_alone(model, [fit(model, {"input_ids": x}) for x in ids])
            padded = model(**fit(model, inputs_of("padded", ids, padding_of(model), first)), return_dict=True)
            entry["stock"] = compare("padded", padded, alone, TOLERANCE[model.dtype])
            for way in WAYS:
                entry[way] = form_outcomes(model, way, ids, first, alone, entry["stock"])
    except BaseException as error:
        entry["not built"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    finally:
        signal.alarm(0)
    return entry


ENCODER = "encoder"


def encoder_classes() -> list[tuple[str, str, str]]:
    """Model type, class name and `ENCODER` of each class whose input is not tokens but has a mask of padding."""
    rows = set()
    for name, mapping in vars(modeling_auto).items():
        for model_type, names in mapping.items() if name.endswith("_MAPPING_NAMES") else ():
            for class_name in [names] if isinstance(names, str) else names:
                kind = getattr(transformers, class_name, None)
                try:
                    takes = inspect.signature(kind.forward).parameters
                    if kind.main_input_name != "input_ids" and MASKS & takes.keys():
                        rows.add((model_type, class_name, ENCODER))
                except (AttributeError, ImportError):  # it needs a package that is not installed
                    continue
    return sorted(rows)


MASKS = {"attention_mask", "pixel_attention_mask", "pixel_mask", "past_observed_mask"}


def encoder_outcome(entry: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a class of `encoder_classes`, on a padded batch."""
    try:
        original = on_meta_device(entry["type"], entry["class"])
    except Exception as error:  # whatever a class raises
        return {**entry, "not built": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    if (reason := why_no_layers(original)) is not None:
        return {**entry, "patch": {"padded": f"refused: {reason}"}}
    with isolated(), torch.no_grad():
        model = small_encoder(original, encoder_inputs)
        inputs = {name: x.roll(1, 0) for name, x in encoder_inputs(model).items()}
        mask = layer_tokens(model, inputs)
        want = model(**inputs, return_dict=True)
        try:
            with nta.patch(model, packing="always") as handle:
                got = model(**inputs, return_dict=True)
        except Exception as error:
            return {**entry, "patch": {"padded": refusal(error)}}
    names = tensors_of(want)
    errors = {name: tokens_error(tensors_of(got)[name], x, mask) for name, x in names.items()}
    wrong = next((name for name, error in errors.items() if not error <= TOLERANCE[model.dtype]), None)
    outcome = "right" if wrong is None else f"WRONG: {wrong} differs by {errors[wrong]:.1e}"
    reasons = [reason for reason in handle.calls if reason is not None]
    return {**entry, "patch": {"padded": outcome + (f" (padded: {'; '.join(reasons)})" if reasons else "")}}


def layer_tokens(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tokens (B, L) of the mask that the first layer gets."""
    seen: list[torch.Tensor] = []

    def record(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(inspect.signature(layer.forward).parameters, args, strict=False)) | kwargs
        hidden = next(iter(named.values()))
        tokens, _ = tokens_of(named["attention_mask"], *hidden.shape[:2])
        seen.append(tokens)

    hook = next(iter(encoder_layers(model).values())).register_forward_pre_hook(record, with_kwargs=True)
    model(**inputs)
    hook.remove()
    return seen[0]


def tokens_error(got: torch.Tensor, want: torch.Tensor, mask: torch.Tensor) -> float:
    """The largest error at tokens, or of all values if there are none for each token, relative to the largest value."""
    if want.shape[:2] == mask.shape:
        got, want = got[mask], want[mask]
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-6))


def count(entries: list[dict[str, Any]]) -> str:
    lines = []
    for way in WAYS:
        for form in FORMS:
            outcomes = [entry[way][form] for entry in entries if form in entry.get(way, ())]
            counts = Counter(outcome.partition(":")[0].partition(" (")[0] for outcome in outcomes)
            lines += (
                []
                if not counts
                else [f"{way:10}{form:16}{', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}"]
            )
    return "\n".join([*lines, f"{sum(1 for entry in entries if 'not built' in entry)} not built"])


def write(file: Path, entries: list[dict[str, Any]]) -> None:
    """Write each different outcome once, and its number in the entries; `tools/supported_models.py` reads them."""
    texts = list(dict.fromkeys(json.dumps(x) for entry in entries for x in entry.values() if isinstance(x, dict)))
    numbers = {text: number for number, text in enumerate(texts)}
    rows = [
        json.dumps({key: numbers[json.dumps(x)] if isinstance(x, dict) else x for key, x in entry.items()})
        for entry in entries
    ]
    parts = [f'"{name}": [\n' + ",\n".join(x) + "\n]" for name, x in (("outcomes", texts), ("classes", rows))]
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types, such as bert; by default all")
    parser.add_argument("--heads", nargs="+", metavar="HEAD", help="heads, such as base; by default all")
    parser.add_argument("--encoders", action="store_true", help="classes for audio and images, not for text")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="by default rows_outcomes.json, if all types run")
    options = parser.parse_args(argv)
    classes = encoder_classes() if options.encoders else text_classes()
    rows = [row for row in classes if not options.types or row[0] in options.types]
    rows = [row for row in rows if not options.heads or row[2] in options.heads]
    entries = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), initializer=begin) as pool:
        for entry in pool.map(outcome_of, rows):
            entries.append(entry)
            print(json.dumps(entry), flush=True)
    file = options.write or (None if options.types or options.heads or options.encoders else OUTCOMES)
    if file is not None:
        write(file, entries)
    print(count(entries))
    return int(any("WRONG" in str(entry) for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
