"""Models that mix the sequences of a packed row in one of their layers, each in another way."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention


class Nothing(nn.Module):
    def __init__(self, width):
        super().__init__()

    def forward(self, x):
        return x / 2


class Convolution(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Conv1d(width, width, 3, padding=2, groups=width)

    def forward(self, x):
        return self.weight(x.mT)[..., : x.shape[1]].mT


class RunningMean(nn.Module):
    def __init__(self, width):
        super().__init__()

    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class BatchNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(x.flatten(0, 1)).view_as(x)


class Positions(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(512, width)

    def forward(self, x):
        return self.table(torch.arange(x.shape[1])).expand_as(x)


class FirstToken(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x[:, :1]).expand_as(x)


class LastToken(FirstToken):
    def forward(self, x):
        return self.linear(x[:, -1:]).expand_as(x)


class Mean(FirstToken):
    def forward(self, x):
        return self.linear(x.mean(1, keepdim=True)).expand_as(x)


class LongestRow(nn.Module):
    def __init__(self, width):
        super().__init__()

    def forward(self, x):
        return x * x.shape[1] ** 0.5


class DeafAttention(LlamaAttention):
    """Does not pass on what it is told about packed rows."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **_):
        return super().forward(hidden_states, position_embeddings, None)


class Added(nn.Module):
    def __init__(self, mlp, mixer):
        super().__init__()
        self.mlp, self.mixer = mlp, mixer

    def forward(self, x):
        return self.mlp(x) + self.mixer(x)


class PlantedModel(LlamaModel):
    """A Llama with a module of the class `config.planted` in each second layer."""

    def __init__(self, config):
        super().__init__(config)
        kind = globals()[config.planted]
        for n, layer in enumerate(self.layers):
            if n % 2 and kind is DeafAttention:
                layer.self_attn = DeafAttention(config, n)
            elif n % 2:
                layer.mlp = Added(layer.mlp, kind(config.hidden_size))


class PlantedForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = PlantedModel(config)


def make(kind, planted):
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=53, num_hidden_layers=2, num_attention_heads=6, pad_token_id=0
    )
    config.planted = planted
    torch.manual_seed(0)
    return kind(config).eval()


# class of the planted module → what the refusal says about it, but for its name
REASONS = {
    "Convolution": "tokens of sequence 2 depend on sequence 1: {} has a convolution along the row, which reaches 2",
    "RunningMean": "tokens of sequence 2 depend on sequence 1: {} keeps a state along the row",
    "BatchNorm": "tokens of sequence 2 depend on sequence 1: {} mixes all tokens of the row",
    "Mean": "tokens of sequence 2 depend on sequence 1: {} mixes all tokens of the row",
    "FirstToken": "tokens of sequence 2 depend on sequence 1: {} uses the first token of the row for all tokens",
    "LastToken": "tokens of sequence 2 depend on sequence 3: {} uses later tokens of the row, such as its last one",
    "Positions": "values of sequence 2 depend on the lengths of other sequences: {} counts positions along the row",
    "LongestRow": "values of sequence 2 depend on the lengths of other sequences: {} uses the length of the row, or of",
    "DeafAttention": "tokens of sequence 2 depend on sequence 1: {} does not keep the sequences of a packed row apart",
}
