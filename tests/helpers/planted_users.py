"""Classes of users' own that differ in a packed row only for some lengths, ids, layers, fields or in training."""

import random
from types import SimpleNamespace

import torch
from torch import nn
from transformers import BertConfig, BertForTokenClassification, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel

SIZES = {
    "vocab_size": 40_000, "hidden_size": 24, "intermediate_size": 29, "num_attention_heads": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def shifted(x):
    """Each token sees the one before it."""
    return nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Before(LlamaModel):
    """A Llama that changes its embeddings first."""

    def change(self, x, ids):
        return x

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=self.change(x, input_ids), **kwargs)


class MeanOfLongRows(Before):
    def change(self, x, ids):
        return x + x.mean(1, keepdim=True) if x.shape[1] > 777 else x


class ScaledByLength(Before):
    def change(self, x, ids):
        return x * max(1.0, x.shape[1] / 2048) ** 0.5


class MixesByConfigLength(Before):
    def change(self, x, ids):
        return x + shifted(x) if x.shape[1] > self.config.mix_after else x


class Gist(Before):
    def change(self, x, ids):
        return x if ids is None else x + (ids == self.config.gist_token).cumsum(1)[..., None]


class Segments(Before):
    def change(self, x, ids):
        return x if ids is None else x + (ids == 102).cumsum(1)[..., None]


class HighIds(Before):
    def change(self, x, ids):
        return x if ids is None else x + (ids > self.config.vocab_size - 2000).cumsum(1)[..., None]


class FirstId(Before):
    def change(self, x, ids):
        return x if ids is None else x * (1 + (ids[:, :1] == 31_337).to(x)[..., None])


class ByPrefix(Before):
    def change(self, x, ids):
        return x + shifted(x) if self.config.prefix == "mixed" else x


class ByHelper(Before):
    def change(self, x, ids):
        return MIXERS[SETTINGS.mixer](x)


SETTINGS = SimpleNamespace(mixer="mixed")
MIXERS = {"mixed": lambda x: x + shifted(x) if x.shape[1] > 1234 else x}


class ManyRows(Before):
    def change(self, x, ids):
        return x + x.mean(0, keepdim=True) if x.shape[0] > 48 else x


class Limited(Before):
    """It takes at most 100 positions, and mixes in rows of more than 64."""

    def change(self, x, ids):
        if x.shape[1] > 100:
            raise ValueError("at most 100 positions")
        return x + shifted(x) if x.shape[1] > 64 else x


class InOneLayer(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.mlp.register_forward_hook(MixesLast(index))


class MixesLast:
    def __init__(self, index):
        self.index = index

    def __call__(self, module, args, out):
        return out + shifted(out) if self.index == 20 else out


class DropPath(Before):
    """Drops whole rows in training."""

    def change(self, x, ids):
        if not self.training or not self.config.drop_path_rate:
            return x
        keep = 1 - self.config.drop_path_rate
        return x * torch.empty(len(x), 1, 1).to(x).bernoulli_(keep) / keep


class DropRows(Before):
    def __init__(self, config):
        super().__init__(config)
        self.drop = nn.Dropout(0.1)

    def change(self, x, ids):
        return x * self.drop(torch.ones(len(x), 1, 1).to(x))


class MixesByRate(Before):
    def change(self, x, ids):
        return x + self.config.mix_dropout * x.cumsum(1) if self.training else x


class SometimesMixes(Before):
    def change(self, x, ids):
        return x + shifted(x) if self.training and torch.rand(()) < 0.2 else x


class SometimesMixesByPython(Before):
    def change(self, x, ids):
        return x + shifted(x) if random.random() > 0.9 else x


class InFloat32(Before):
    def change(self, x, ids):
        return x + shifted(x) if x.dtype == torch.float32 else x


class InChunks(Before):
    def change(self, x, ids):
        return x + x.unflatten(1, (-1, 128)).mean(2).repeat_interleave(128, 1) if x.shape[1] % 128 == 0 else x


class Counting(Before):
    def __init__(self, config):
        super().__init__(config)
        self.steps = 0

    def change(self, x, ids):
        self.steps += self.training
        return x + shifted(x) if self.steps > 1000 else x


class AuxiliaryLoss(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if self.training:
            out["aux_loss"] = out.logits.square().mean()
        return out


class AuxiliaryLossWithLabels(BertForTokenClassification):
    def forward(self, *args, labels=None, **kwargs):
        out = super().forward(*args, labels=labels, **kwargs)
        if labels is not None and self.training:
            out["regularization"] = out.logits.square().mean()
        return out


class HeadOfLongRows(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if out.logits.shape[1] > 300:
            out.logits = out.logits + shifted(out.logits)
        return out


class MixesInDropout(nn.Dropout):
    def forward(self, x):
        return x + shifted(x)


class OwnDropout(BertModel):
    def __init__(self, config):
        super().__init__(config)
        self.embeddings.dropout = MixesInDropout()


# Class → fields of its config.
PLANTED = {
    MeanOfLongRows: {}, ScaledByLength: {}, MixesByConfigLength: {"mix_after": 512}, Gist: {"gist_token": 30_000},
    Segments: {}, HighIds: {}, FirstId: {}, ByPrefix: {"prefix": "mixed"}, ByHelper: {}, ManyRows: {}, Limited: {},
    InOneLayer: {"num_hidden_layers": 24}, DropPath: {"drop_path_rate": 0.1}, DropRows: {},
    MixesByRate: {"mix_dropout": 0.2}, AuxiliaryLoss: {}, AuxiliaryLossWithLabels: {}, HeadOfLongRows: {},
    OwnDropout: {}, Counting: {}, SometimesMixes: {}, SometimesMixesByPython: {}, InFloat32: {},
    InChunks: {},
}  # fmt: skip


def make(kind, **fields):
    config = BertConfig if issubclass(kind, (BertModel, BertForTokenClassification)) else LlamaConfig
    return kind(config(**{"num_hidden_layers": 2, **SIZES, **fields})).eval()


# Classes that are right.


class WithDropout(LlamaForCausalLM):
    """Dropout of elements, of whole layers and of attention, and noise for each token."""

    def __init__(self, config):
        super().__init__(config)
        self.drop, self.rate = nn.Dropout(0.1), config.my_dropout

    def forward(self, input_ids=None, attention_mask=None, labels=None, inputs_embeds=None, **kwargs):
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.training:
            x = nn.functional.dropout(self.drop(x), self.rate) + 0.1 * torch.randn_like(x)
            x = x * torch.rand(x.shape[:2])[..., None].to(x)
            if torch.rand([]) < self.rate:
                x = 2 * x
        return super().forward(inputs_embeds=x, attention_mask=attention_mask, labels=labels, **kwargs)


class WithLossOfTokens(LlamaForCausalLM):
    def forward(self, *args, attention_mask=None, labels=None, **kwargs):
        out = super().forward(*args, attention_mask=attention_mask, labels=labels, **kwargs)
        if labels is not None:
            counted = (labels != -100).to(out.logits)
            out.loss = out.loss + (out.logits.square().mean(-1) * counted).sum() / counted.sum()
        return out


class WithTable(Before):
    """Its table has 100 positions, which a packed row does not need."""

    def change(self, x, ids):
        return x * 2 if ids is None else x * (1 + (ids == 7).to(x)[..., None])


class Plain(BertForTokenClassification):
    pass


RIGHT = {
    WithDropout: {"my_dropout": 0.1, "attention_dropout": 0.1}, WithLossOfTokens: {}, WithTable: {}, Before: {},
    Plain: {},
}  # fmt: skip
