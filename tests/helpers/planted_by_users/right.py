"""Models that are fine to pack."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    Qwen2ForCausalLM,
    RobertaForTokenClassification,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from .parts import AroundMlp, TokenChoiceMoe, token_losses, wrap_mlps


class HoulsbyAdapter(AroundMlp):
    def __init__(self, config, layer_idx, mlp):
        super().__init__(config, layer_idx, mlp)
        self.norm = LlamaRMSNorm(config.hidden_size)
        self.down = nn.Linear(config.hidden_size, config.adapter_width)
        self.up = nn.Linear(config.adapter_width, config.hidden_size)

    def forward(self, x):
        out = self.mlp(x)
        return out + self.up(F.gelu(self.down(self.norm(out))))


class AdapterLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, HoulsbyAdapter, config)
        self.post_init()


class DropoutAdapter(HoulsbyAdapter):
    def forward(self, x):
        out = self.mlp(x)
        return out + F.dropout(self.up(F.gelu(self.down(out))), self.config.adapter_dropout, self.training)


class DropoutAdapterLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, DropoutAdapter, config)
        self.post_init()


class MlpHeadBert(BertForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        self.classifier = nn.Sequential(
            nn.Linear(config.hidden_size, config.head_width), nn.GELU(), nn.LayerNorm(config.head_width),
            nn.Linear(config.head_width, config.num_labels),
        )  # fmt: skip
        self.post_init()


class HashEmbedding(nn.Embedding):
    """Adds an embedding of a hash of the id."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.factor = config.hash_factor
        self.hashed = nn.Embedding(1009, config.hidden_size)

    def forward(self, input_ids):
        return super().forward(input_ids) + self.hashed(input_ids * self.factor % 1009)


class HashLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = HashEmbedding(config)
        self.post_init()


class MoeQwen(Qwen2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = TokenChoiceMoe(config)
        self.post_init()


class MarkedEmbedding(nn.Embedding):
    """Memory tokens get learned vectors of their own; nothing else depends on them."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.memory_from = config.memory_from
        self.memory = nn.Embedding(config.vocab_size - config.memory_from, config.hidden_size)

    def forward(self, input_ids):
        is_memory = input_ids >= self.memory_from
        memory = self.memory((input_ids - self.memory_from).clamp(min=0))
        return torch.where(is_memory[..., None], memory, super().forward(input_ids))


class MarkedLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = MarkedEmbedding(config)
        self.post_init()


class GatedHeadT5(T5ForConditionalGeneration):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Sequential(nn.LayerNorm(config.d_model), nn.Linear(config.d_model, config.vocab_size))
        self.post_init()


class SoftcapQwen(Qwen2ForCausalLM):
    """Softcapped logits, and a loss for the size of their normalizer (z-loss)."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        out.logits = self.config.final_softcap * torch.tanh(out.logits / self.config.final_softcap)
        if labels is not None:
            losses, counts = token_losses(out.logits, labels)
            losses = losses + self.config.z_loss * out.logits[:, :-1].logsumexp(-1).square()
            out.loss = (losses * counts).sum() / counts.sum()
        return out


class FocalRoberta(RobertaForTokenClassification):
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        out = super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        if labels is not None:
            losses = F.cross_entropy(out.logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
            out.loss = ((1 - (-losses).exp()) ** self.config.focal_gamma * losses)[labels != -100].mean()
        return out


class ChattyLlama(LlamaForCausalLM):
    """Counts long rows, and computes nothing with that."""

    long_rows = 0

    def forward(self, input_ids=None, **kwargs):
        if input_ids is not None and input_ids.shape[1] > 300:
            self.long_rows += 1
        return super().forward(input_ids, **kwargs)


class TemperatureAttention(Qwen2Attention):
    """A learned temperature for the queries."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.temperature = nn.Parameter(torch.ones(config.num_attention_heads * self.head_dim))

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states * self.temperature, *args, **kwargs)


class TemperatureQwen(Qwen2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = TemperatureAttention(config, i)
        self.post_init()


class CountedPositionsModel(LlamaModel):
    """Positions from the mask, as for padding on the left."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)


class CountedPositionsLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = CountedPositionsModel(config)
        self.post_init()


class RewardLlamaForSequenceClassification(LlamaForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        self.score = nn.Sequential(
            nn.Linear(config.hidden_size, config.hidden_size),
            nn.ReLU(),
            nn.Linear(config.hidden_size, config.num_labels),
        )
        self.post_init()


class ZeroAdapterGPT2(GPT2LMHeadModel):
    """An adapter for each token, whose last layer starts at zero."""

    def __init__(self, config):
        super().__init__(config)
        self.adapter = nn.Sequential(nn.Linear(config.n_embd, 8), nn.GELU(), nn.Linear(8, config.n_embd))
        self.post_init()
        nn.init.zeros_(self.adapter[-1].weight)
        self.transformer.ln_f = nn.Sequential(self.transformer.ln_f, Residual(self.adapter))


class MaskedStatesModel(BertModel):
    """Sets the states of padding to 0."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        out = super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        if attention_mask is not None:
            out.last_hidden_state = out.last_hidden_state * attention_mask[..., None]
        return out


class MaskedStatesBert(BertForTokenClassification):
    def __init__(self, config):
        super().__init__(config)
        self.bert = MaskedStatesModel(config, add_pooling_layer=False)
        self.post_init()


class PassThroughLlama(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class StepTemperature(AroundMlp):
    """A scale that falls with the number of training steps."""

    def __init__(self, config, layer_idx, mlp):
        super().__init__(config, layer_idx, mlp)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def change(self, x):
        if self.training:
            self.step += 1
        return x * (1 + 1 / (1 + self.step.float()))


class StepTemperatureLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, StepTemperature, config)


class TokenDropPath(AroundMlp):
    """Drops the MLP for single tokens."""

    def forward(self, x):
        out = self.mlp(x)
        if not self.training:
            return out
        keep = torch.rand(*x.shape[:2], 1, device=x.device) >= self.config.token_drop
        return out * keep / (1 - self.config.token_drop)


class TokenDropPathLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        wrap_mlps(self.model.layers, TokenDropPath, config)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)
