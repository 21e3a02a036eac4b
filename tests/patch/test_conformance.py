"""Patched models, whatever way a call runs: outputs are those of each sequence alone, under eager attention.

A new way to run calls gets a line in ROUTES; a new form of batch gets one in `batches`. References are computed once.
"""

import pytest
import tiny
import torch
from cuda_graphs import DEVICE, cuda_graphs  # noqa: F401
from sweeps import covering
from tiny import LENGTHS
from token_tiled_cases import IGNORED_WARNINGS

import nt_attention as nta

pytestmark = [*IGNORED_WARNINGS, pytest.mark.usefixtures("fresh_compiler")]

CLASSES = [
    *(("bert", "BertModel"), ("bert", "BertForMaskedLM"), ("roberta", "RobertaForTokenClassification")),
    *(("llama", "LlamaForCausalLM"), ("llama", "LlamaForSequenceClassification"), ("gpt2", "GPT2LMHeadModel")),
    *(("modernbert", "ModernBertForMaskedLM"), ("mistral", "MistralModel")),
]
# How a call runs: the options of patch, and the backend of torch.compile.
ROUTES = {
    "packed": ({"packing": "always"}, None),
    "graph": ({"packing": "always", "cuda_graphs": True}, None),
    "compiled": ({"packing": "always"}, "eager"),
    "registered": ({"padding_free": False}, None),
}


def batches(model_type):
    """Name → the sequences of a batch, its arguments, and where its tokens are, in their order."""
    made = {}
    for side in ("right", "left"):
        batch = tiny.batch_of(model_type, side)
        made[side] = [0, 1, 2, 3], batch, batch["attention_mask"].bool()
    right, tokens = tiny.batch_of(model_type, "right"), tiny.mask_of("right")
    for name, rows in {"fewer rows": [2, 0], "one row": [3]}.items():
        made[name] = rows, {key: x[rows] for key, x in right.items()}, tokens[rows]
    whole = {key: x[[0], : LENGTHS[0]] for key, x in right.items()}
    made["no padding"] = [0], whole, torch.ones(1, LENGTHS[0], dtype=torch.bool)
    if model_type not in tiny.ENCODERS:  # an encoder needs cu_seq_lens or positions of its own; see test_hf_families
        ids = torch.cat(tiny.sequences())[None]
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        row = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
        made["packed by the caller"] = [0, 1, 2, 3], row, torch.ones_like(ids, dtype=torch.bool)
    return made


def check(out, model_type, name, sequences, tokens):
    for key, want in tiny.alone(model_type, name).items():
        pairs = zip(out[key], want, strict=True) if key == "hidden_states" else [(out[key], want)]
        for got, alone in pairs:
            if len(alone) == sum(LENGTHS):
                parts = alone.split(LENGTHS)
                alone, got = torch.cat([parts[i] for i in sequences]), got.cpu()[tokens]
            else:
                alone = alone[sequences]
            torch.testing.assert_close(got.cpu(), alone, rtol=5e-5, atol=5e-5)


def skipped(route, name, model_type, batch):
    """Batches in which the model itself reads padding, or mixes sequences."""
    if batch == "packed by the caller":
        return tiny.per_sequence(name)
    return batch == "left" and route == "registered" and (name == "BertModel" or tiny.per_sequence(name))


@covering({"model_type, name": CLASSES, "route": ROUTES})
def test_every_route_gives_each_sequence_alone(model_type, name, route, request):
    options, backend = ROUTES[route]
    if route == "graph":
        request.getfixturevalue("cuda_graphs")
    model = tiny.make(model_type, name, "sdpa").to(DEVICE)
    with nta.patch(model, **options) as handle, torch.inference_mode() if route == "graph" else torch.no_grad():
        call = model if backend is None else torch.compile(model, backend=backend, dynamic=True)
        for batch, (sequences, given, tokens) in batches(model_type).items():
            if skipped(route, name, model_type, batch):
                continue
            given = {key: x.to(DEVICE) for key, x in given.items()}
            for _ in range(2 if route == "graph" else 1):  # captured, and replayed
                check(call(**given, output_hidden_states=True), model_type, name, sequences, tokens)
        assert route == "registered" or set(handle.calls) <= {None, "there is no padding to skip"}
        assert route != "graph" or handle.graphs.calls[None]
