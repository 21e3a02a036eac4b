"""`patch(shared_prefixes=True)` in random configurations of ten decoder families, against the unpatched padded model.

Outputs, losses and all gradients, in float64. `check_configuration(7)` runs configuration 7 alone.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import pytest
import tiny
import torch
from in_float64 import InFloat64
from seeds import seed
from sweeps import sweep_except
from torch import Tensor

import nt_attention as nta

pytestmark = [
    pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning"),
    pytest.mark.usefixtures("uncompared"),
]
CONFIGURATIONS = 200
TOLERANCE = 1e-9  # of the largest value
MIN_SHARED = 32
TYPES = ("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "deepseek_v3", "phi3")
WITHOUT_SDPA = ("gemma2", "gpt_oss")  # softcap and sinks
WINDOWED = ("mistral", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "phi3")
BY_LAYER = ("qwen3", "gemma2", "gemma3_text", "gpt_oss")


@dataclasses.dataclass(frozen=True)
class Configuration:
    model_type: str
    fields: dict[str, Any]  # of the config
    head: str  # "causal", "sequence" or "base"
    rows: list[list[int]]
    side: str  # of the padding; "" if there is none
    call: str  # "labels", "keep" or "plain"
    trains: bool


def configuration(number: int) -> Configuration:
    draw = random.Random(number)
    model_type = TYPES[number % len(TYPES)]
    head = draw.choice(["causal", "causal", "causal", "sequence", "base"])
    rows = random_rows(draw)
    same = len({*map(len, rows)}) == 1
    return Configuration(
        model_type=model_type,
        fields=random_fields(draw, model_type),
        head=head,
        rows=rows,
        side=draw.choice(["left", "right", "right", *[""] * 4 * same]),
        call=draw.choice(["labels", "labels", "keep", "plain"] if head == "causal" else ["plain"]),
        trains=draw.random() < 0.7,
    )


def random_fields(draw: random.Random, model_type: str) -> dict[str, Any]:
    heads, layers, window = draw.choice([2, 4, 6]), draw.choice([1, 2, 3]), draw.choice([3, 7, 20, 300])
    fields: dict[str, Any] = {"num_hidden_layers": layers, "num_attention_heads": heads}
    if model_type == "gpt2":
        fields = {"n_layer": layers, "n_head": heads}
    elif model_type == "deepseek_v3":
        fields |= {"num_key_value_heads": heads, "first_k_dense_replace": draw.choice([0, 1])}
    elif model_type == "phi3":
        fields |= {"num_key_value_heads": draw.choice([1, 2, heads])}
    elif model_type != "gpt_neox":
        fields |= {"num_key_value_heads": draw.choice([1, 2, heads]), "head_dim": draw.choice([8, 16, 24])}
    if model_type in WINDOWED:
        fields["sliding_window"] = draw.choice([window, window, None]) if model_type in ("mistral", "phi3") else window
    if model_type in BY_LAYER:
        fields["layer_types"] = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    if model_type == "gemma2":
        fields["attn_logit_softcapping"] = draw.choice([0.7, 5.0, 50.0])
    if model_type not in ("gpt_oss", "gpt_neox"):
        fields["tie_word_embeddings"] = draw.random() < 0.5
    return fields


def random_rows(draw: random.Random) -> list[list[int]]:
    """Rows that are paths of a random tree, in any order."""
    form = draw.choice(["tree"] * 7 + ["one row", "nothing", "equal rows"])
    if form == "one row":
        return [_tokens(draw, draw.randint(1, 60))]
    if form == "nothing":
        return [_tokens(draw, draw.randint(1, 60)) for _ in range(draw.randint(2, 5))]
    if form == "equal rows":
        return [_tokens(draw, draw.randint(MIN_SHARED, 60))] * draw.randint(2, 5)
    prompts = [_tokens(draw, draw.randint(MIN_SHARED, 50)) for _ in range(draw.randint(1, 2))]
    rows = [row for prompt in prompts for row in _grown(draw, prompt, draw.randint(1, 3))]
    rows += [_tokens(draw, draw.randint(1, 45)) for _ in range(draw.randint(0, 2))]
    draw.shuffle(rows)
    return rows


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(4, tiny.VOCABULARY - 1) for _ in range(count)]


def _grown(draw: random.Random, prefix: list[int], depth: int) -> list[list[int]]:
    """Rows that begin with a prefix; some may end with it."""
    if depth == 0:
        return [prefix]
    lengths = [draw.choice([0, 1, 3, 9]) for _ in range(draw.randint(1, 4))]
    return [row for n in lengths for row in _grown(draw, prefix + _tokens(draw, n), draw.randint(0, depth - 1))]


def tokens_computed(rows: list[list[int]]) -> int:
    """The number of tokens if each that is shared is computed once."""
    computed = 0
    for at, row in enumerate(rows):
        shared = max((_common(row, other) for other in rows[:at]), default=0)
        computed += len(row) - (shared if shared >= MIN_SHARED else 0)
    return computed


def _common(row: list[int], other: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(row, other, strict=False)) if x != y), min(len(row), len(other)))


def make_model(config: Configuration) -> Any:
    prefix = tiny.CONFIGS[config.model_type][0]
    name = prefix + {"causal": "ForCausalLM", "sequence": "ForSequenceClassification", "base": "Model"}[config.head]
    other = {"GPT2ForCausalLM": "GPT2LMHeadModel", "Gemma3Model": "Gemma3TextModel"}
    other["Gemma3ForSequenceClassification"] = "Gemma3TextForSequenceClassification"
    implementation = "eager" if config.model_type in WITHOUT_SDPA else "sdpa"
    model = tiny.make(config.model_type, other.get(name, name), implementation, **config.fields)
    model.config._experts_implementation = "eager"  # the product of all experts at once has no float64
    return model.double().train(config.trains)


def make_batch(config: Configuration) -> dict[str, Any]:
    length = max(map(len, config.rows)) + (2 if config.side else 0)
    ids = torch.full((len(config.rows), length), tiny.PAD)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(config.rows):
        where = slice(length - len(row), length) if config.side == "left" else slice(0, len(row))
        ids[at, where], mask[at, where] = torch.tensor(row), 1
    batch: dict[str, Any] = {"input_ids": ids} | ({"attention_mask": mask} if config.side else {})
    if config.side == "left":
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if config.call == "labels":
        first = mask.cumsum(1) == 1  # which the unpatched model predicts from padding if it is on the left
        batch["labels"] = ids.masked_fill((mask == 0) | first, -100)
    if config.call == "keep":
        batch["logits_to_keep"] = 5
    return batch


def solve(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs of tokens, the loss if there is one, and all gradients."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    with InFloat64():
        out = model(**batch, use_cache=False)
        values = {name: x for name, x in out.items() if isinstance(x, Tensor)}
        for name, x in values.items():
            if x.dim() > 2:
                values[name] = x[mask[:, -x.shape[1] :]]
        generator = torch.Generator().manual_seed(3)
        loss = sum((torch.randn(x.shape, generator=generator, dtype=x.dtype) * x).sum() for x in values.values())
        torch.autograd.backward(loss)
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    assert all(x.dtype == torch.float64 for x in values.values())
    return {name: x.detach() for name, x in values.items()} | grads


def check_configuration(number: int) -> Any:
    """Run a configuration. Returns its handle."""
    config = configuration(number)
    seed(number)
    model = make_model(config)
    unpatched, batch = copy.deepcopy(model), make_batch(config)
    handle = nta.patch(model, shared_prefixes=True, packing="always", on_fallback="raise")
    got, want = solve(model, batch), solve(unpatched, batch)
    assert got.keys() == want.keys()
    for name, x in want.items():
        error = (got[name] - x).abs().max() / x.abs().max().clamp(min=1e-3) if x.numel() else 0
        assert error < TOLERANCE, f"{name} has an error of {error:.1e} in {config}"
    tokens, computed = sum(map(len, config.rows)), tokens_computed(config.rows)
    shares = computed <= 0.95 * tokens
    prefixes = handle.prefixes
    if len(config.rows) > 1:
        assert list(prefixes.calls) == [None if shares else "its rows share too little"], config
    if shares:
        assert (prefixes.tokens, prefixes.computed) == (tokens, computed), config
    return handle


@pytest.mark.parametrize("number", sweep_except(range(CONFIGURATIONS), 0, 1, 2))
def test_random_configurations(number: int) -> None:
    check_configuration(number)
