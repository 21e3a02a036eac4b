"""Layers that read the whole row: what a field of the config, the length or the number of rows turns on."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    T5ForConditionalGeneration,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from .parts import AroundMlp, wrap_mlps


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


class DynamicRotary(nn.Module):
    """Rows beyond `max_position_embeddings` get a larger base, computed from the length of the row."""

    def __init__(self, config):
        super().__init__()
        self.dim = config.hidden_size // config.num_attention_heads
        self.base, self.longest = 10_000.0, config.max_position_embeddings

    def forward(self, x, position_ids):
        length = x.shape[1]
        growth = max(1.0, 4.0 * length / self.longest - 3.0)
        base = self.base * growth ** (self.dim / (self.dim - 2))
        inverse = base ** -(torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float32) / self.dim)
        angles = position_ids[..., None].float() * inverse
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class DynamicRotaryLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.rotary_emb = DynamicRotary(config)


class SingleRowPath(AroundMlp):
    """One row takes another activation, as a kernel for serving would."""

    def forward(self, x):
        out = self.mlp(x)
        return out.clamp(-0.02, 0.02) if len(x) == 1 else out


class SingleRowLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, SingleRowPath, config)
