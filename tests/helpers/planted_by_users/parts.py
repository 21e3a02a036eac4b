"""Parts that several of the models use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class AroundMlp(nn.Module):
    """Runs the layer's MLP on `self.change(x)`."""

    def __init__(self, config, layer_idx, mlp):
        super().__init__()
        self.config, self.layer_idx, self.mlp = config, layer_idx, mlp

    def forward(self, x):
        return self.mlp(self.change(x))

    def change(self, x):
        raise NotImplementedError


def wrap_mlps(layers, make, config):
    for i, layer in enumerate(layers):
        layer.mlp = make(config, i, layer.mlp)


class BertPart(nn.Module):
    """Runs after the dense part of a layer's feed-forward network."""

    def __init__(self, config, layer_idx, part):
        super().__init__()
        self.config, self.layer_idx, self.part = config, layer_idx, part


def wrap_intermediates(model, make):
    for i, layer in enumerate(model.bert.encoder.layer):
        layer.intermediate = make(model.config, i, layer.intermediate)
    model.post_init()


def token_losses(logits, labels):
    """The loss of each next token, (B, L - 1), and which of them count."""
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=-100)
    return losses, labels[:, 1:] != -100


class TokenChoiceMoe(nn.Module):
    """Two of four experts for each token. Keeps its router's probabilities for a loss."""

    def __init__(self, config):
        super().__init__()
        self.router = nn.Linear(config.hidden_size, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(config.hidden_size, 24), nn.SiLU(), nn.Linear(24, config.hidden_size))
            for _ in range(4)
        )

    def forward(self, x):
        self.probabilities = self.router(x).softmax(-1)
        weights, chosen = self.probabilities.topk(2, dim=-1)
        self.chosen = chosen
        gates = torch.zeros_like(self.probabilities).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        return sum(gates[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
