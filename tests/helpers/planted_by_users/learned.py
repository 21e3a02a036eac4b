"""Layers that read the whole row: what training, a program, a mode or a dtype turns on. The last two are random."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertForTokenClassification, LlamaForCausalLM, Qwen2ForCausalLM

from .parts import AroundMlp, BertPart, wrap_intermediates, wrap_mlps


class FourierInEvaluation(AroundMlp):
    """A smoothing of the row that is only used at inference."""

    def change(self, x):
        if self.training:
            return x
        return x + self.config.smoothing * torch.fft.fft(x, dim=1, norm="ortho").real


class FourierLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, FourierInEvaluation, config)


class CenterInHalf(AroundMlp):
    """Against overflow: in 16 bits, tokens are centered over the row."""

    def change(self, x):
        return x - x.mean(1, keepdim=True) if x.dtype in (torch.float16, torch.bfloat16) else x


class CenterInHalfQwen(Qwen2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, CenterInHalf, config)


class StraightThroughMean(AroundMlp):
    """The same values, and gradients that go to all tokens of the row."""

    def change(self, x):
        mean = x.mean(1, keepdim=True)
        return x + mean - mean.detach()


class StraightThroughLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, StraightThroughMean, config)


class FlagBuffer(AroundMlp):
    """A flag that is saved with the weights."""

    def __init__(self, config, layer_idx, mlp):
        super().__init__(config, layer_idx, mlp)
        self.register_buffer("look_around", torch.tensor(False))

    def change(self, x):
        return x + x.roll(1, dims=1) if self.look_around else x


class FlagBufferLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, FlagBuffer, config)


class EnabledLater(AroundMlp):
    """A plain attribute, which a method of the model sets."""

    look_around = False

    def change(self, x):
        return x + x.flip(1) if self.look_around else x


class EnabledLaterLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, EnabledLater, config)

    def enable(self):
        for layer in self.model.layers:
            layer.mlp.look_around = True


class HookedLlama(LlamaForCausalLM):
    """Its __init__ registers a hook."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[-1].mlp.register_forward_hook(add_mean)


def add_mean(module, inputs, output):
    return output + output.mean(1, keepdim=True)


class SwitchMoe(AroundMlp):
    """Each token goes to one of four experts, which drops what is over its capacity."""

    def __init__(self, config, layer_idx, mlp):
        super().__init__(config, layer_idx, mlp)
        self.router = nn.Linear(config.hidden_size, 4)
        self.experts = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)  # (B, L)
        is_chosen = F.one_hot(chosen, 4)
        capacity = math.ceil(self.config.capacity_factor * x.shape[1] / 4)
        is_chosen = is_chosen * (is_chosen.cumsum(1) <= capacity)
        out = sum(is_chosen[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        return self.mlp(x) + weight[..., None] * out


class SwitchLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, SwitchMoe, config)
        self.post_init()

    def prefer_one_expert(self):
        for layer in self.model.layers:
            layer.mlp.router.bias[2] += 3.0


class MergeWithoutGradients(AroundMlp):
    """Merges neighbors where no gradients are needed, to be faster (as ToMe)."""

    def change(self, x):
        return x if torch.is_grad_enabled() else 0.5 * (x + x.roll(1, dims=1))


class MergeQwen(Qwen2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, MergeWithoutGradients, config)


class RowMixup(BertPart):
    """Mixes each row with another one in training (manifold mixup)."""

    def forward(self, x):
        x = self.part(x)
        if self.training and self.layer_idx == self.config.mixup_layer:
            share = self.config.mixup_share
            x = (1 - share) * x + share * x.roll(1, dims=0)
        return x


class RowMixupBert(BertForTokenClassification):
    def __init__(self, config):
        super().__init__(config)
        wrap_intermediates(self, RowMixup)


class LengthNoiseEmbedding(nn.Embedding):
    """Noise in training, scaled by the length of the row (as NEFTune)."""

    noise_alpha = 0.0

    def forward(self, input_ids):
        x = super().forward(input_ids)
        if self.training and self.noise_alpha:
            x = x + self.noise_alpha / (x.shape[1] * x.shape[2]) ** 0.5 * (2 * torch.rand_like(x) - 1)
        return x


class LengthNoiseLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = LengthNoiseEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.model.embed_tokens.noise_alpha = config.embed_noise
        self.post_init()
