"""Models that are fine to pack."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertPreTrainedModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaModel,
    Qwen2ForCausalLM,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from .parts import AroundMlp, TokenChoiceMoe, wrap_mlps


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


class SinusoidModel(LlamaModel):
    """A table of sinusoids that grows when it is too short, read by `position_ids`."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("table", self.make_table(16), persistent=False)
        self.post_init()

    def make_table(self, length):
        angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, self.config.hidden_size, 2) / 32)
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        if len(self.table) <= (last := int(position_ids.max())):
            self.table = self.make_table(2 * last + 1).to(input_ids.device)
        embeds = self.embed_tokens(input_ids) + self.table[position_ids]
        return super().forward(inputs_embeds=embeds, attention_mask=attention_mask, position_ids=position_ids, **kwargs)


class SinusoidLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = SinusoidModel(config)
        self.post_init()


class GatedHeadT5(T5ForConditionalGeneration):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Sequential(nn.LayerNorm(config.d_model), nn.Linear(config.d_model, config.vocab_size))
        self.post_init()


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


class MeanPooledBert(BertPreTrainedModel):
    """A sentence encoder: the mean over real tokens, and a projection."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.project = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        states = self.bert(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        logits = self.project(mean)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


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
