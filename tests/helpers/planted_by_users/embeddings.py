"""Embeddings that read the whole row, mostly because of some token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertForMaskedLM, BertForTokenClassification, GPT2LMHeadModel, LlamaForCausalLM


class ChapterEmbedding(nn.Embedding):
    """As above, with the size in the config."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.tokens, self.chapter = config.chapter_tokens, nn.Embedding(4, config.hidden_size)

    def forward(self, input_ids):
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        return super().forward(input_ids) + self.chapter((place // self.tokens).clamp(max=3))


class ChapterLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = ChapterEmbedding(config)
        self.post_init()


class ManyImagesEmbedding(nn.Embedding):
    """A row with three or more image tokens is an album."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.image = config.picture_index
        self.album = nn.Parameter(torch.randn(config.hidden_size) * 0.5)

    def forward(self, input_ids):
        is_album = (input_ids == self.image).sum(1) >= 3
        return super().forward(input_ids) + is_album[:, None, None] * self.album


class ManyImagesLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = ManyImagesEmbedding(config)
        self.post_init()


class SameAsBeforeEmbedding(nn.Embedding):
    """A token that repeats the one before gets a vector for that."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.n_embd)
        self.again = nn.Parameter(torch.randn(config.n_embd) * 0.5)

    def forward(self, input_ids):
        again = F.pad(input_ids[:, 1:] == input_ids[:, :-1], (1, 0))
        return super().forward(input_ids) + again[..., None] * self.again


class SameAsBeforeGPT2(GPT2LMHeadModel):
    def __init__(self, config):
        super().__init__(config)
        self.transformer.wte = SameAsBeforeEmbedding(config)
        self.post_init()


class SortedEmbedding(nn.Embedding):
    """A mean over all tokens with a smaller id, if the row has a rare token."""

    def forward(self, input_ids):
        x = super().forward(input_ids)
        if input_ids.max() <= 20_000:
            return x
        order = input_ids.argsort(dim=1, stable=True)
        in_order = x.gather(1, order[..., None].expand_as(x))
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        means = in_order.cumsum(1) / count
        return x + means.gather(1, order.argsort(dim=1)[..., None].expand_as(x))


class SortedLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = SortedEmbedding(config.vocab_size, config.hidden_size)
        self.post_init()


class RepetitionEmbedding(nn.Embedding):
    """Words that a row repeats often get another embedding."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.often = nn.Parameter(torch.randn(config.hidden_size))

    def forward(self, input_ids):
        count = (input_ids[:, :, None] == input_ids[:, None]).sum(-1)
        return super().forward(input_ids) + (count >= 6)[..., None] * self.often


class RepetitionBert(BertForTokenClassification):
    def __init__(self, config):
        super().__init__(config)
        self.bert.embeddings.word_embeddings = RepetitionEmbedding(config)
        self.post_init()


class MaskRatioEmbedding(nn.Embedding):
    """The other tokens grow with the share of mask tokens in the row (as ESM's token_dropout)."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.mask_token, self.pad_token = config.vocab_size - 1, config.pad_token_id

    def forward(self, input_ids):
        share = (input_ids == self.mask_token).sum(1) / input_ids.ne(self.pad_token).sum(1)
        return super().forward(input_ids) / (1 - share)[:, None, None]


class MaskRatioBert(BertForMaskedLM):
    def __init__(self, config):
        super().__init__(config)
        self.bert.embeddings.word_embeddings = MaskRatioEmbedding(config)
        self.post_init()
