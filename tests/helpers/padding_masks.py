"""Padding masks (B, L) of three rows, for tests of the masks that transformers makes."""

import torch

LENGTHS, LENGTH = [13, 7, 2], 13


def right_padding(size=LENGTH):
    return torch.arange(size) < torch.tensor(LENGTHS)[:, None]


PADDINGS = {
    "no mask": None,
    "all ones": torch.ones(3, LENGTH, dtype=torch.bool),
    "right": right_padding(),
    "left": right_padding().flip(1),
    "a row without tokens": right_padding() & torch.tensor([1, 0, 1]).bool()[:, None],
}
