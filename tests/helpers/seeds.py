"""Seeds of the random numbers of a test."""

import torch


def seed(number: int) -> None:
    """As `torch.manual_seed`. Without a GPU, this one formats stack traces for later, which takes milliseconds."""
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(number)
