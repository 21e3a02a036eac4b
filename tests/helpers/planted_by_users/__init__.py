"""Hugging Face models as users write them: WRONG ones mix the sequences of a packed row, RIGHT ones do not.

A wrong one mixes only under a condition: a long row, a token id, a flag of the config, a learned gate, a mode or a
dtype. Its batch meets this condition. RANDOM ones are wrong in training, with values that no two runs share.

B: rows of a batch, L: length of a padded row, E: features of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from seeds import seed
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig, Qwen2Config, T5Config

from . import embeddings, forwards, layers, learned, right

PAD = 0
NUM_LABELS = 3
TOKENS = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 2048, "num_labels": NUM_LABELS,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


BERT_VOCABULARY = 30_522


def llama(**more):
    return LlamaConfig(**{**SIZES, **TOKENS, "num_key_value_heads": 2, **more})


def qwen2(**more):
    return Qwen2Config(**{**SIZES, **TOKENS, "num_key_value_heads": 2, **more})


def bert(**more):
    return BertConfig(**{**SIZES, **NO_DROPOUT, "pad_token_id": PAD, **more})


def gpt2(**more):
    sizes = {"vocab_size": 199, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(**{**sizes, **dropout, **TOKENS, **more})


def t5(**more):
    sizes = {"vocab_size": 199, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5Config(**{**sizes, "dropout_rate": 0.0, "decoder_start_token_id": PAD, "pad_token_id": PAD, **more})


@dataclass(frozen=True)
class Planted:
    """A model's class and config, and a padded batch that meets its condition.

    `trained` sets what training would have set. `ids` puts tokens into a batch: ids[row, position] = id. Other ids
    are below `most`.
    """

    cls: type
    config: Callable
    fields: dict
    lengths: tuple[int, ...] = (23, 9, 31, 4)
    labels: str = "next"
    ids: tuple[tuple[int, int, int], ...] = ()
    trained: Callable[[nn.Module], None] | None = None
    dtype: torch.dtype = torch.float32
    most: int = 190

    @property
    def tolerance(self):
        """The largest error, relative to the largest value."""
        return 0.05 if self.dtype == torch.bfloat16 else 1e-4

    def build(self):
        seed(11)
        model = self.cls(self.config(**self.fields))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            if self.trained is not None:
                self.trained(model)
        return model.to(self.dtype)

    def batch(self):
        generator = torch.Generator().manual_seed(5)
        mask = torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]
        input_ids = torch.randint(5, self.most, mask.shape, generator=generator)
        for row, position, token in self.ids:
            input_ids[row, position] = token
        input_ids = input_ids.masked_fill(~mask, PAD)
        batch = {"input_ids": input_ids, "attention_mask": mask.long()}
        rows = len(self.lengths)
        if self.labels == "next":
            batch["labels"] = input_ids.masked_fill(~mask, -100)
        elif self.labels == "token":
            classes = torch.randint(NUM_LABELS, mask.shape, generator=generator)
            batch["labels"] = classes.masked_fill(~mask, -100)
        elif self.labels == "row":
            batch["labels"] = torch.randint(NUM_LABELS, (rows,), generator=generator)
        elif self.labels == "rows":
            batch["labels"] = torch.randint(2, (rows, NUM_LABELS), generator=generator).float()
        elif self.labels == "target":
            batch["labels"] = torch.randint(5, self.most, (rows, 7), generator=generator)
            batch["labels"][0, 4:] = -100
        return batch


def set_parts(name, value):
    """Sets a parameter or a buffer of all modules that have it, as training would."""

    def trained(model):
        for full_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if full_name.endswith(name):
                tensor.copy_(torch.full_like(tensor, value) if isinstance(value, float) else value(tensor))

    return trained


BIG = {"vocab_size": BERT_VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
BIG_LLAMA = {**BIG, "num_key_value_heads": 1}
LONG = (290, 280, 150)
TOGETHER_LONG = (300, 290)


WRONG = {
    # rows longer than every row of the batch
    "late_window": Planted(layers.LateWindowQwen, qwen2, {}, LONG),
    "summary": Planted(layers.SummaryT5, t5, {"summarize_after": 48}, (30, 25, 9), labels="target"),
    "dynamic_rotary": Planted(layers.DynamicRotaryLlama, llama, {"max_position_embeddings": 512}, TOGETHER_LONG),
    "strict": Planted(forwards.StrictLlama, llama, {"max_position_embeddings": 512}, TOGETHER_LONG),
    # token ids and positions
    "sorted": Planted(embeddings.SortedLlama, llama, BIG_LLAMA, most=30_000),
    "documents": Planted(forwards.DocumentIndexLlama, llama, {"max_documents": 4}),
    # more tokens than the row has
    "soft_prompt": Planted(forwards.SoftPromptLlama, llama, {"num_virtual_tokens": 5}),
    # the number of rows
    "single_row": Planted(layers.SingleRowLlama, llama, {}),
    # what training learns
    "switch_capacity": Planted(
        learned.SwitchLlama, llama, {"capacity_factor": 2.0}, trained=learned.SwitchLlama.prefer_one_expert
    ),
    "flag_buffer": Planted(learned.FlagBufferLlama, llama, {}, trained=set_parts("look_around", torch.ones_like)),
    # what a program changes in the model
    "enabled_later": Planted(learned.EnabledLaterLlama, llama, {}, trained=learned.EnabledLaterLlama.enable),
    "own_hook": Planted(learned.HookedLlama, llama, {}),
    # modes and dtypes
    "fourier": Planted(learned.FourierLlama, llama, {"smoothing": 0.3}),
    "no_grad": Planted(learned.MergeQwen, qwen2, {}),
    "half": Planted(learned.CenterInHalfQwen, qwen2, {}, dtype=torch.bfloat16),
    "straight_through": Planted(learned.StraightThroughLlama, llama, {}),
    "mixup": Planted(learned.RowMixupBert, bert, {"mixup_layer": 1, "mixup_share": 0.3}, labels="token"),
    # losses
    "per_row_loss": Planted(forwards.PerRowLossQwen, qwen2, {}),
    "answer_weight": Planted(
        forwards.AnswerWeightLlama, llama, {**BIG_LLAMA, "answer_token_id": 29_999}, ids=((1, 6, 29_999),), most=29_000
    ),
}

RANDOM = {
    "length_noise": Planted(learned.LengthNoiseLlama, llama, {"embed_noise": 5.0}),
}

RIGHT = {
    "adapter": Planted(right.AdapterLlama, llama, {"adapter_width": 8}),
    "mlp_head": Planted(right.MlpHeadBert, bert, {"head_width": 24}, labels="row"),
    "hash": Planted(right.HashLlama, llama, {**BIG_LLAMA, "hash_factor": 2_654_435_761}, most=BERT_VOCABULARY),
    "moe": Planted(right.MoeQwen, qwen2, {}),
    "sinusoids": Planted(right.SinusoidLlama, llama, {}),
    "gated_head": Planted(right.GatedHeadT5, t5, {"tie_word_embeddings": False}, labels="target"),
    "chatty": Planted(right.ChattyLlama, llama, {}, LONG),
    "half": Planted(right.TemperatureQwen, qwen2, {}, dtype=torch.bfloat16),
    "temperature": Planted(right.TemperatureQwen, qwen2, {}),
    "counted_positions": Planted(right.CountedPositionsLlama, llama, {}),
    "mean_pooled": Planted(right.MeanPooledBert, bert, {}, labels="row"),
    "zero_adapter": Planted(right.ZeroAdapterGPT2, gpt2, {}, trained=set_parts("adapter.2.weight", torch.randn_like)),
    "few_positions": Planted(right.ZeroAdapterGPT2, gpt2, {"n_positions": 40}),
    "noise_off": Planted(learned.LengthNoiseLlama, llama, {"embed_noise": 0.0}),
    "mixup_off": Planted(learned.RowMixupBert, bert, {"mixup_layer": -1, "mixup_share": 0.3}, labels="token"),
}

RIGHT_IN_EVALUATION = {
    "adapter_dropout": Planted(right.DropoutAdapterLlama, llama, {"adapter_width": 8, "adapter_dropout": 0.1}),
    "token_drop": Planted(right.TokenDropPathLlama, llama, {"token_drop": 0.2}),
}

# Correct, but what these do can't be told apart from what is wrong: they may be refused.
RIGHT_BUT_REFUSED = {
    "masked_states": Planted(right.MaskedStatesBert, bert, {}, labels="token"),
    "step_temperature": Planted(right.StepTemperatureLlama, llama, {}),
}
