"""Models and losses that read the whole row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel, Qwen2ForCausalLM

from .parts import token_losses


class DocumentIndexModel(LlamaModel):
    """Positions that start anew begin another document, with an embedding of its number."""

    def __init__(self, config):
        super().__init__(config)
        self.document = nn.Embedding(config.max_documents, config.hidden_size)
        self.post_init()

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **kwargs):
        embeds = self.embed_tokens(input_ids)
        if position_ids is not None:
            number = (position_ids == 0).cumsum(-1).sub(1).clamp(0, self.config.max_documents - 1)
            embeds = embeds + self.document(number) - self.document.weight[0]
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **kwargs)


class DocumentIndexLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = DocumentIndexModel(config)
        self.post_init()


class SoftPromptModel(LlamaModel):
    """Every row starts with learned vectors."""

    def __init__(self, config):
        super().__init__(config)
        self.prompt = nn.Parameter(torch.randn(config.num_virtual_tokens, config.hidden_size))
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        count, rows = self.config.num_virtual_tokens, len(input_ids)
        embeds = torch.cat([self.prompt.expand(rows, -1, -1), self.embed_tokens(input_ids)], dim=1)
        if attention_mask is not None:
            attention_mask = F.pad(attention_mask, (count, 0), value=1)
        if position_ids is not None:
            first = torch.arange(count, device=embeds.device).expand(len(position_ids), -1)
            position_ids = torch.cat([first, position_ids + count], dim=1)
        out = super().forward(inputs_embeds=embeds, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        out.last_hidden_state = out.last_hidden_state[:, count:]
        return out


class SoftPromptLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = SoftPromptModel(config)
        self.post_init()


class StrictLlama(LlamaForCausalLM):
    """Raises for rows that are longer than the positions."""

    def forward(self, input_ids=None, **kwargs):
        if input_ids.shape[1] > self.config.max_position_embeddings:
            raise ValueError(f"{input_ids.shape[1]} tokens are more than {self.config.max_position_embeddings}.")
        return super().forward(input_ids, **kwargs)


class PerRowLossQwen(Qwen2ForCausalLM):
    """Each row counts the same, however long it is (as in SimPO)."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        if labels is not None:
            losses, counts = token_losses(out.logits, labels)
            out.loss = (losses.sum(1) / counts.sum(1).clamp(min=1)).mean()
        return out


class AnswerWeightLlama(LlamaForCausalLM):
    """Rows whose labels have the answer token count twice."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        if labels is not None:
            losses, counts = token_losses(out.logits, labels)
            weights = counts * (1.0 + (labels == self.config.answer_token_id).any(1, keepdim=True))
            out.loss = (losses * weights).sum() / weights.sum()
        return out
