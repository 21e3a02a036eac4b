"""Layers that read the whole row: what a field of the config, the length or the number of rows turns on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertForSequenceClassification,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    T5ForConditionalGeneration,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from .parts import AroundMlp, BertPart, wrap_intermediates, wrap_mlps

CHUNK = 2_000


class LateWindowAttention(Qwen2Attention):
    """Long rows attend to a window only, to save memory."""

    def forward(self, hidden_states, *args, **kwargs):
        self.sliding_window = 64 if hidden_states.shape[1] > 400 else None
        return super().forward(hidden_states, *args, **kwargs)


class LateWindowQwen(Qwen2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = LateWindowAttention(config, i)
        self.post_init()


class SummaryNorm(nn.Module):
    """The last norm of an encoder, which adds the mean of long sources."""

    def __init__(self, norm, longer_than):
        super().__init__()
        self.norm, self.longer_than = norm, longer_than

    def forward(self, x):
        x = self.norm(x)
        return x + x.mean(1, keepdim=True) if x.shape[1] > self.longer_than else x


class SummaryT5(T5ForConditionalGeneration):
    def __init__(self, config):
        super().__init__(config)
        self.encoder.final_layer_norm = SummaryNorm(self.encoder.final_layer_norm, config.summarize_after)


class CompressedMemory(AroundMlp):
    """What lies more than CHUNK tokens before the end of the row is read as one average."""

    def change(self, x):
        if x.shape[1] <= CHUNK:
            return x
        return x + x[:, :-CHUNK].mean(1, keepdim=True)


class CompressedMemoryLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, CompressedMemory, config)


class ChannelRoll(AroundMlp):
    """A bit of the config's integer turns it on."""

    def change(self, x):
        if not self.config.experiment_mask & (1 << 20):
            return x
        return x + 0.5 * torch.roll(x, 1, dims=1)


class ChannelRollLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, ChannelRoll, config)


class WideMixer(AroundMlp):
    """Only the larger sizes of this family have it."""

    def change(self, x):
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1] if self.config.hidden_size >= 768 else x


class WideLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, WideMixer, config)


class NestedField(AroundMlp):
    def change(self, x):
        options = self.config.mixer or {}
        if options.get("kind") == "shift":
            x = x + options["share"] * x.roll(options["by"], dims=1)
        return x


class NestedFieldQwen(Qwen2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, NestedField, config)


class SingleRowPath(AroundMlp):
    """One row takes another activation, as a kernel for serving would."""

    def forward(self, x):
        out = self.mlp(x)
        return out.clamp(-0.02, 0.02) if len(x) == 1 else out


class SingleRowLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, SingleRowPath, config)


class ClsBroadcast(BertPart):
    """The last layer reads the first token of the row, if there are several labels at a time."""

    def forward(self, x):
        x = self.part(x)
        is_last = self.layer_idx == self.config.num_hidden_layers - 1
        if is_last and self.config.problem_type == "multi_label_classification":
            x = x + 0.5 * x[:, :1]
        return x


class ClsBroadcastBert(BertForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        wrap_intermediates(self, ClsBroadcast)
