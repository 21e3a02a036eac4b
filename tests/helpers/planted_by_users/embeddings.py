"""Embeddings that read the whole row, mostly because of some token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertForMaskedLM, BertForTokenClassification, GPT2LMHeadModel, LlamaForCausalLM


class GistEmbedding(nn.Embedding):
    """Tokens after a gist token know that there was one."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.gist = config.summary_token_id
        self.after = nn.Parameter(torch.randn(config.hidden_size) * 0.5)

    def forward(self, input_ids):
        after = (input_ids == self.gist).cumsum(1) > 0
        return super().forward(input_ids) + after[..., None] * self.after


class GistLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = GistEmbedding(config)
        self.post_init()


class TurnEmbedding(nn.Embedding):
    """Speakers take turns: the number of end tokens so far is even or odd."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.n_embd)
        self.end_of_turn = config.vocab_size - 1
        self.speaker = nn.Embedding(2, config.n_embd)

    def forward(self, input_ids):
        turn = (input_ids == self.end_of_turn).long().cumsum(-1) % 2
        return super().forward(input_ids) + self.speaker(turn)


class TurnGPT2(GPT2LMHeadModel):
    def __init__(self, config):
        super().__init__(config)
        self.transformer.wte = TurnEmbedding(config)
        self.post_init()


class PageEmbedding(nn.Embedding):
    """Every 512 tokens of the row begin a new page."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.page = nn.Embedding(8, config.hidden_size)

    def forward(self, input_ids):
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        return super().forward(input_ids) + self.page((place // 512).clamp(max=7))


class PageLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = PageEmbedding(config)
        self.post_init()


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


class SuffixEmbedding(nn.Embedding):
    """A token after a suffix token gets a part of it."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.suffixes_from = config.suffixes_from
        self.after = nn.Embedding(config.vocab_size - config.suffixes_from, config.hidden_size)

    def forward(self, input_ids):
        before = F.pad(input_ids[:, :-1], (1, 0))
        is_suffix = before >= self.suffixes_from
        extra = self.after((before - self.suffixes_from).clamp(min=0))
        return super().forward(input_ids) + is_suffix[..., None] * extra


class SuffixLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = SuffixEmbedding(config)
        self.post_init()


class TaskEmbedding(nn.Embedding):
    """The first token of a row may name a task, with an id at the end of the vocabulary."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.tasks_from = config.vocab_size - 22
        self.tasks = nn.Embedding(22, config.hidden_size)

    def forward(self, input_ids):
        first = input_ids[:, :1]
        task = self.tasks((first - self.tasks_from).clamp(min=0)) * (first >= self.tasks_from)[..., None]
        return super().forward(input_ids) + task


class TaskBert(BertForMaskedLM):
    def __init__(self, config):
        super().__init__(config)
        self.bert.embeddings.word_embeddings = TaskEmbedding(config)
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
