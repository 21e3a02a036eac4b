"""Layers that read the whole row: what a field of the config, the length or the number of rows turns on."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from .parts import AroundMlp, BertPart, wrap_intermediates, wrap_mlps


class LogLengthAttention(Qwen2Attention):
    """Scores grow with the logarithm of the length, beyond the length of the training (as in Qwen's logn_attn)."""

    def forward(self, hidden_states, *args, **kwargs):
        ratio = math.log(hidden_states.shape[1]) / math.log(self.config.logn_train_length)
        self.scaling = self.head_dim**-0.5 * max(1.0, ratio)
        return super().forward(hidden_states, *args, **kwargs)


class LogLengthQwen(Qwen2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = LogLengthAttention(config, i)
        self.post_init()


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


class TokenShift(AroundMlp):
    """The first channels come from the token before, as in RWKV; only in the layers that the config lists."""

    def change(self, x):
        if self.layer_idx not in self.config.shift_layers:
            return x
        half = x.shape[-1] // 2
        return torch.cat([F.pad(x[..., :half], (0, 0, 1, -1)), x[..., half:]], dim=-1)


class TokenShiftLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, TokenShift, config)


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


class CenterAcrossBatch(AroundMlp):
    """Subtracts the mean of the rows at each position, if there are enough rows."""

    def change(self, x):
        return x - x.mean(0, keepdim=True) if x.shape[0] > 10 else x


class CenterAcrossBatchLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, CenterAcrossBatch, config)


class ExpertChoice(AroundMlp):
    """Each expert chooses its tokens of the row. Short rows run all experts."""

    def __init__(self, config, layer_idx, mlp):
        super().__init__(config, layer_idx, mlp)
        self.router = nn.Linear(config.hidden_size, config.num_expert_groups, bias=False)
        self.experts = nn.ModuleList(
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.num_expert_groups)
        )

    def change(self, x):
        scores = self.router(x).softmax(-1)  # (B, L, groups)
        if x.shape[1] > 128:
            capacity = x.shape[1] // len(self.experts)
            chosen = scores.topk(capacity, dim=1).indices
            scores = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        return x + sum(scores[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class ExpertChoiceLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, ExpertChoice, config)
        self.post_init()


class MixtureOfDepths(LlamaDecoderLayer):
    """Only half of the tokens of a row go through the MLP, in the layers from `mod_start` on."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.layer_idx, self.start = layer_idx, config.mod_start
        self.weigher = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden_states, **kwargs):
        out = super().forward(hidden_states, **kwargs)
        if self.layer_idx < self.start:
            return out
        weights = self.weigher(hidden_states)[..., 0]  # (B, L)
        chosen = weights.topk(weights.shape[1] // 2 + 1, dim=1).indices
        passed = torch.zeros_like(weights).scatter(1, chosen, 1.0)[..., None]
        return passed * weights.sigmoid()[..., None] * out + (1 - passed) * hidden_states


class MixtureOfDepthsLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers = nn.ModuleList(MixtureOfDepths(config, i) for i in range(config.num_hidden_layers))
        self.post_init()


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


class BlockMultiple(AroundMlp):
    """Rows that divide into blocks of 64 add the mean of their block. Others are not blocked."""

    def change(self, x):
        rows, length, features = x.shape
        if length % 64:
            return x
        return (x.view(rows, -1, 64, features) + x.view(rows, -1, 64, features).mean(2, keepdim=True)).view_as(x)


class BlockMultipleLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, BlockMultiple, config)


class FakeQuantization(AroundMlp):
    """Eight bits for activations, scaled by the largest value of a row; only where the config asks for it."""

    def change(self, x):
        if (bits := getattr(self.config, "activation_bits", 16)) >= 16:
            return x
        scale = x.detach().abs().amax((1, 2), keepdim=True) / (2 ** (bits - 1) - 1)
        return x + ((x / scale).round() * scale - x).detach()


class FakeQuantizationLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, FakeQuantization, config)


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


class SqueezeExcite(BertPart):
    """Gates of channels from the mean of the row, if that is long enough to tell."""

    def __init__(self, config, layer_idx, part):
        super().__init__(config, layer_idx, part)
        self.gates = nn.Linear(config.intermediate_size, config.intermediate_size)

    def forward(self, x):
        x = self.part(x)
        return x * 2 * self.gates(4 * x.mean(1, keepdim=True)).sigmoid() if x.shape[1] >= 96 else x


class ClsBroadcast(BertPart):
    """The last layer reads the first token of the row, if there are several labels at a time."""

    def forward(self, x):
        x = self.part(x)
        is_last = self.layer_idx == self.config.num_hidden_layers - 1
        if is_last and self.config.problem_type == "multi_label_classification":
            x = x + 0.5 * x[:, :1]
        return x


class FlipPass(BertPart):
    """Adds the same row read from its end."""

    def forward(self, x):
        x = self.part(x)
        return x + 0.5 * x.flip(1) if self.config.reverse_pass == "yes" else x


class SqueezeExciteBert(BertForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        wrap_intermediates(self, SqueezeExcite)


class ClsBroadcastBert(BertForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        wrap_intermediates(self, ClsBroadcast)


class FlipPassBert(BertForTokenClassification):
    def __init__(self, config):
        super().__init__(config)
        wrap_intermediates(self, FlipPass)
