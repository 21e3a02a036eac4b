"""Random parameters for modules."""

from torch import nn


def with_random_parameters(module: nn.Module, std: float = 0.4) -> nn.Module:
    """Draw every parameter: initial biases, norms and sinks are 0 or 1, which would hide errors."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module
