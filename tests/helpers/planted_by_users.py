"""Hugging Face models as users write them: WRONG ones mix the sequences of a packed row, RIGHT ones do not.

A wrong one mixes only under a condition: a long row, a token id, a number of rows, a flag, a mode or a dtype. Its batch
meets this condition. RANDOM ones are wrong in training, with values that no two runs share.

B: rows of a batch, L: length of a padded row, E: features of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import transformers
from seeds import seed
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

PAD, NUM_LABELS, VOCABULARY = 0, 3, 199
TOKENS = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 2048, "num_labels": NUM_LABELS,
}  # fmt: skip
CONFIGS = {
    "Bert": {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": PAD},
    "Llama": {**SIZES, **TOKENS, "num_key_value_heads": 2},
    "Qwen2": {**SIZES, **TOKENS, "num_key_value_heads": 2},
    "GPT2": {
        **TOKENS, "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "T5": {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "dropout_rate": 0.0, "decoder_start_token_id": PAD, "pad_token_id": PAD,
    },
}  # fmt: skip
BIG = {"vocab_size": 30_522, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
BIG |= {"num_key_value_heads": 1}
LONG, TOGETHER_LONG = (290, 280, 150), (300, 290)


def config_of(family, **fields):
    return getattr(transformers, f"{family}Config")(**{**CONFIGS[family], **fields})


@dataclass(frozen=True)
class Planted:
    """A model, and a padded batch that meets its condition.

    Attributes:
        name: the class of transformers.
        plant: what is done to the model, as a class of the user would do.
        fields: of the config.
        lengths, labels: of the batch.
        ids: tokens of the batch (row, position, id). Other ids are below `most`.
        base: the class of the base model, if it is the user's.
        head: the class of the model, if it is the user's.
    """

    name: str
    plant: Callable[[nn.Module], None] = lambda model: None
    fields: dict = field(default_factory=dict)
    lengths: tuple[int, ...] = (23, 9, 31, 4)
    labels: str | None = "next"
    ids: tuple[tuple[int, int, int], ...] = ()
    dtype: torch.dtype = torch.float32
    most: int = 190
    base: type | None = None
    head: type | None = None

    @property
    def tolerance(self):
        """The largest error, relative to the largest value."""
        return 0.05 if self.dtype == torch.bfloat16 else 1e-4

    def build(self):
        seed(11)
        family = next(x for x in CONFIGS if self.name.startswith(x))
        model = (self.head or getattr(transformers, self.name))(config_of(family, **self.fields))
        if self.base is not None:
            setattr(model, model.base_model_prefix, self.base(model.config))
        self.plant(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        return model.to(self.dtype)

    def batch(self):
        generator = torch.Generator().manual_seed(5)
        mask = torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]
        ids = torch.randint(5, self.most, mask.shape, generator=generator)
        for row, position, token in self.ids:
            ids[row, position] = token
        ids = ids.masked_fill(~mask, PAD)
        batch = {"input_ids": ids, "attention_mask": mask.long()}
        if self.labels == "next":
            batch["labels"] = ids.masked_fill(~mask, -100)
        elif self.labels == "token":
            batch["labels"] = torch.randint(NUM_LABELS, mask.shape, generator=generator).masked_fill(~mask, -100)
        elif self.labels == "row":
            batch["labels"] = torch.randint(NUM_LABELS, (len(mask),), generator=generator)
        elif self.labels == "target":
            batch["labels"] = torch.randint(5, self.most, (len(mask), 7), generator=generator)
            batch["labels"][0, 4:] = -100
        return batch


class Around(nn.Module):
    """A part of a model, with functions of what it gets and of what it gives, and a flag that is saved with weights."""

    def __init__(self, part, before=lambda module, x: x, after=lambda module, x: x):
        super().__init__()
        self.part, self.before, self.after = part, before, after
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        return self.after(self, self.part(self.before(self, x)))


def mlps(before=lambda module, x: x, after=lambda module, x: x):
    return lambda model: [setattr(layer, "mlp", Around(layer.mlp, before, after)) for layer in model.model.layers]


def neighbors(x):
    return x + x.roll(1, dims=1)


def before(x):
    """The value of the token before."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))


def from_the_last_call(module, x):
    last = module.step.clone()
    module.step.copy_(x.detach().abs().sum())
    return x + 0.01 * last + before(x)


def mean_added(x):
    return x + x.mean(1, keepdim=True)


class LateWindowAttention(Qwen2Attention):
    """Long rows attend to a window only, to save memory."""

    def forward(self, hidden_states, *args, **kwargs):
        self.sliding_window = 64 if hidden_states.shape[1] > 400 else None
        return super().forward(hidden_states, *args, **kwargs)


class DynamicRotary(nn.Module):
    """Rows beyond `max_position_embeddings` get a larger base, computed from the length of the row."""

    def __init__(self, config):
        super().__init__()
        self.dim, self.longest = config.hidden_size // config.num_attention_heads, config.max_position_embeddings

    def forward(self, x, position_ids):
        growth = max(1.0, 4.0 * x.shape[1] / self.longest - 3.0)
        base = 10_000.0 * growth ** (self.dim / (self.dim - 2))
        angles = position_ids[..., None].float() * base ** -(torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class StrictLlama(LlamaForCausalLM):
    """Raises for rows that are longer than the positions."""

    def forward(self, input_ids=None, **kwargs):
        if input_ids.shape[1] > self.config.max_position_embeddings:
            raise ValueError(f"{input_ids.shape[1]} tokens are more than {self.config.max_position_embeddings}.")
        return super().forward(input_ids, **kwargs)


class SortedEmbedding(nn.Embedding):
    """A mean over all tokens with a smaller id, if the row has a rare token."""

    def forward(self, input_ids):
        x = super().forward(input_ids)
        if input_ids.max() <= 20_000:
            return x
        order = input_ids.argsort(dim=1, stable=True)
        means = x.gather(1, order[..., None].expand_as(x)).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + means.gather(1, order.argsort(dim=1)[..., None].expand_as(x))


class DocumentIndexModel(LlamaModel):
    """Positions that start anew begin another document, with an embedding of its number."""

    def __init__(self, config):
        super().__init__(config)
        self.document = nn.Embedding(4, config.hidden_size)

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **kwargs):
        embeds = self.embed_tokens(input_ids)
        if position_ids is not None:
            number = (position_ids == 0).cumsum(-1).sub(1).clamp(0, 3)
            embeds = embeds + self.document(number) - self.document.weight[0]
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **kwargs)


class SoftPromptModel(LlamaModel):
    """Every row starts with learned vectors."""

    def __init__(self, config):
        super().__init__(config)
        self.prompt = nn.Parameter(torch.randn(5, config.hidden_size))

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        embeds = torch.cat([self.prompt.expand(len(input_ids), -1, -1), self.embed_tokens(input_ids)], dim=1)
        if attention_mask is not None:
            attention_mask = F.pad(attention_mask, (5, 0), value=1)
        if position_ids is not None:
            position_ids = torch.cat([torch.arange(5).expand(len(position_ids), -1), position_ids + 5], dim=1)
        out = super().forward(inputs_embeds=embeds, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        out.last_hidden_state = out.last_hidden_state[:, 5:]
        return out


class SwitchMoe(nn.Module):
    """Each token goes to one of four experts, which drops what is over its capacity. One of them gets most tokens."""

    def __init__(self, mlp, width):
        super().__init__()
        self.mlp, self.router = mlp, nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.router.bias.data[2] += 3.0

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)  # (B, L)
        is_chosen = F.one_hot(chosen, 4)
        is_chosen = is_chosen * (is_chosen.cumsum(1) <= math.ceil(2.0 * x.shape[1] / 4))
        out = sum(is_chosen[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        return self.mlp(x) + weight[..., None] * out


def with_experts(model):
    for layer in model.model.layers:
        layer.mlp = SwitchMoe(layer.mlp, model.config.hidden_size)


class LossOfRows(transformers.Qwen2ForCausalLM):
    """Each row counts the same, however long it is (as in SimPO), or twice if it has the answer token."""

    answer = None

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        if labels is not None:
            logits, labels = out.logits[:, :-1].transpose(1, 2), labels[:, 1:]
            losses, counts = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100), labels != -100
            if self.answer is None:
                out.loss = (losses.sum(1) / counts.sum(1).clamp(min=1)).mean()
            else:
                weights = counts * (1.0 + (labels == self.answer).any(1, keepdim=True))
                out.loss = (losses * weights).sum() / weights.sum()
        return out


class LossOfAnswers(LossOfRows):
    answer = 29_999


class LengthNoiseEmbedding(nn.Embedding):
    """Noise in training, scaled by the length of the row (as NEFTune)."""

    def forward(self, input_ids):
        x = super().forward(input_ids)
        noise = 5.0 / (x.shape[1] * x.shape[2]) ** 0.5 * (2 * torch.rand_like(x) - 1)
        return x + noise if self.training else x


def embedded_by(kind):
    """Other embeddings."""

    def plant(model):
        config = model.config
        model.model.embed_tokens = kind(config.vocab_size, config.hidden_size, config.pad_token_id)

    return plant


def with_late_windows(model):
    for layer in model.model.layers:
        layer.self_attn.__class__ = LateWindowAttention


WRONG = {
    # rows longer than every row of the batch
    "late_window": Planted("Qwen2ForCausalLM", with_late_windows, lengths=LONG),
    "summary": Planted(
        "T5ForConditionalGeneration",
        lambda model: setattr(
            model.encoder, "final_layer_norm",
            Around(model.encoder.final_layer_norm, after=lambda _, x: mean_added(x) if x.shape[1] > 48 else x),
        ),
        lengths=(30, 25, 9), labels="target",
    ),
    "dynamic_rotary": Planted(
        "LlamaForCausalLM", lambda model: setattr(model.model, "rotary_emb", DynamicRotary(model.config)),
        {"max_position_embeddings": 512}, TOGETHER_LONG,
    ),
    "strict": Planted(
        "LlamaForCausalLM", fields={"max_position_embeddings": 512}, lengths=TOGETHER_LONG, head=StrictLlama
    ),
    # token ids, positions, tokens that the row has not, the number of rows
    "sorted": Planted("LlamaForCausalLM", embedded_by(SortedEmbedding), BIG, most=30_000),
    "documents": Planted("LlamaForCausalLM", base=DocumentIndexModel),
    "soft_prompt": Planted("LlamaForCausalLM", base=SoftPromptModel),
    "single_row": Planted(
        "LlamaForCausalLM", mlps(after=lambda _, x: x.clamp(-0.02, 0.02) if len(x) == 1 else x)
    ),
    # what training learns, and what a program sets
    "switch_capacity": Planted("LlamaForCausalLM", with_experts),
    "flag": Planted("LlamaForCausalLM", mlps(lambda module, x: neighbors(x) if module.flag else x)),
    "hook": Planted(
        "LlamaForCausalLM",
        lambda model: model.model.layers[-1].mlp.register_forward_hook(lambda _, args, out: mean_added(out)),
    ),
    # what other modules along the row do, such as those with a state
    "from before": Planted("LlamaForCausalLM", mlps(after=lambda _, x: x + before(x))),
    "from next": Planted("LlamaForCausalLM", mlps(after=lambda _, x: x + before(x.flip(1)).flip(1))),
    "from the last call": Planted("LlamaForCausalLM", mlps(after=from_the_last_call)),
    "by length": Planted("LlamaForCausalLM", mlps(after=lambda _, x: x + 0.1 * before(x) * x.shape[1])),
    "by batch": Planted("LlamaForCausalLM", mlps(after=lambda _, x: x - x.mean((0, 1)))),
    # modes and dtypes
    "fourier": Planted(
        "LlamaForCausalLM", mlps(lambda m, x: x if m.training else x + 0.3 * torch.fft.fft(x, dim=1, norm="ortho").real)
    ),
    "long rows in evaluation": Planted(
        "LlamaForCausalLM", mlps(lambda m, x: x if m.training or x.shape[1] < 400 else neighbors(x)), lengths=LONG
    ),
    "no_grad": Planted("Qwen2ForCausalLM", mlps(lambda _, x: x if torch.is_grad_enabled() else 0.5 * neighbors(x))),
    "half": Planted(
        "Qwen2ForCausalLM", mlps(lambda _, x: x - x.mean(1, keepdim=True) if x.dtype == torch.bfloat16 else x),
        dtype=torch.bfloat16,
    ),
    "straight_through": Planted(
        "LlamaForCausalLM", mlps(lambda _, x: mean_added(x) - x.mean(1, keepdim=True).detach())
    ),
    # losses
    "loss_of_rows": Planted("Qwen2ForCausalLM", head=LossOfRows),
    "loss_of_answers": Planted("Qwen2ForCausalLM", fields=BIG, head=LossOfAnswers, ids=((1, 6, 29_999),), most=29_000),
}  # fmt: skip
RANDOM = {"length_noise": Planted("LlamaForCausalLM", embedded_by(LengthNoiseEmbedding))}


class Residual(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x):
        return x + self.inner(x)


def adapter(dropout=0.0):
    def plant(model):
        for layer in model.model.layers:
            parts = LlamaRMSNorm(32), nn.Linear(32, 8), nn.GELU(), nn.Linear(8, 32), nn.Dropout(dropout)
            layer.mlp = nn.Sequential(layer.mlp, Residual(*parts))

    return plant


class HashEmbedding(nn.Embedding):
    """Adds an embedding of a hash of the id."""

    def __init__(self, vocabulary, width, padding):
        super().__init__(vocabulary, width, padding)
        self.hashed = nn.Embedding(1009, width)

    def forward(self, input_ids):
        return super().forward(input_ids) + self.hashed(input_ids * 2_654_435_761 % 1009)


class TokenChoiceMoe(nn.Module):
    """Two of four experts for each token. Keeps its router's probabilities for a loss."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 24), nn.SiLU(), nn.Linear(24, 32)) for _ in range(4))

    def forward(self, x):
        self.probabilities = self.router(x).softmax(-1)
        weights, self.chosen = self.probabilities.topk(2, dim=-1)
        gates = torch.zeros_like(self.probabilities).scatter(-1, self.chosen, weights / weights.sum(-1, keepdim=True))
        return sum(gates[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class SinusoidModel(LlamaModel):
    """A table of sinusoids that grows when it is too short, read by `position_ids`."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("table", self.make_table(16), persistent=False)

    def make_table(self, length):
        angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, self.config.hidden_size, 2) / 32)
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **kwargs):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        if len(self.table) <= (last := int(position_ids.max())):
            self.table = self.make_table(2 * last + 1)
        embeds = self.embed_tokens(input_ids) + self.table[position_ids]
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **kwargs)


class ChattyLlama(LlamaForCausalLM):
    """Counts long rows, and computes nothing with that."""

    long_rows = 0

    def forward(self, input_ids=None, **kwargs):
        if input_ids is not None and input_ids.shape[1] > 300:
            self.long_rows += 1
        return super().forward(input_ids, **kwargs)


class CountedPositionsModel(LlamaModel):
    """Positions from the mask, as for padding on the left."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)


class MeanPooledBert(transformers.BertPreTrainedModel):
    """A sentence encoder: the mean over real tokens, and a projection."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.project = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        states = self.bert(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = self.project((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


class TemperatureAttention(Qwen2Attention):
    """A learned temperature for the queries."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states * self.temperature, *args, **kwargs)


def with_temperatures(model):
    for layer in model.model.layers:
        layer.self_attn.__class__ = TemperatureAttention
        layer.self_attn.temperature = nn.Parameter(torch.linspace(0.5, 1.5, 32))


def with_adapter_at_the_end(model):
    norm = model.transformer.ln_f
    model.transformer.ln_f = nn.Sequential(norm, Residual(nn.Linear(32, 8), nn.GELU(), nn.Linear(8, 32)))


def with_head(name):
    """A head of several layers."""
    of_classes = name == "classifier"
    parts = lambda: (nn.LayerNorm(32), nn.Linear(32, NUM_LABELS if of_classes else VOCABULARY))  # noqa: E731
    return lambda model: setattr(model, name, nn.Sequential(*parts()))


def drop_tokens(module, x):
    """In training, drops the MLP for single tokens."""
    return x * (torch.rand(*x.shape[:2], 1) >= 0.2) / 0.8 if module.training else x


RIGHT = {
    "adapter": Planted("LlamaForCausalLM", adapter()),
    "head": Planted("BertForSequenceClassification", with_head("classifier"), labels="row"),
    "hash": Planted("LlamaForCausalLM", embedded_by(HashEmbedding), BIG, most=30_522),
    "moe": Planted("Qwen2ForCausalLM", lambda model: [setattr(x, "mlp", TokenChoiceMoe()) for x in model.model.layers]),
    "sinusoids": Planted("LlamaForCausalLM", base=SinusoidModel),
    "head of an encoder-decoder": Planted(
        "T5ForConditionalGeneration", with_head("lm_head"), {"tie_word_embeddings": False}, labels="target"
    ),
    "chatty": Planted("LlamaForCausalLM", lengths=LONG, head=ChattyLlama),
    "half": Planted("Qwen2ForCausalLM", with_temperatures, dtype=torch.bfloat16),
    "temperature": Planted("Qwen2ForCausalLM", with_temperatures),
    "counted_positions": Planted("LlamaForCausalLM", base=CountedPositionsModel),
    "mean_pooled": Planted("BertModel", head=MeanPooledBert, labels="row"),
    "adapter at the end": Planted("GPT2LMHeadModel", with_adapter_at_the_end),
    "few_positions": Planted("GPT2LMHeadModel", with_adapter_at_the_end, {"n_positions": 40}),
}
RIGHT_IN_EVALUATION = {
    "adapter_dropout": Planted("LlamaForCausalLM", adapter(0.1)),
    "token_drop": Planted("LlamaForCausalLM", mlps(after=drop_tokens)),
}


class MaskedStatesModel(transformers.BertModel):
    """Sets the states of padding to 0."""

    def __init__(self, config):
        super().__init__(config, add_pooling_layer=False)

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        out = super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        if attention_mask is not None:
            out.last_hidden_state = out.last_hidden_state * attention_mask[..., None]
        return out


def fall_with_steps(module, x):
    """A scale that falls with the number of training steps."""
    module.step += module.training
    return x * (1 + 1 / (1 + module.step.float()))


# Correct, but what these do can't be told apart from what is wrong: they may be refused.
RIGHT_BUT_REFUSED = {
    "masked_states": Planted("BertForTokenClassification", base=MaskedStatesModel, labels="token"),
    "step_temperature": Planted("LlamaForCausalLM", mlps(fall_with_steps)),
}
