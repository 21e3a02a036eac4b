"""The parts of a model: the classes of its modules and their flags, but for layers that compute each token alone."""

from __future__ import annotations

import re

from torch import nn

from ..families import class_of

# Packages that replace layers by layers which compute each token alone, and layers of torch that do so.
OF_LAYERS = ("accelerate", "bitsandbytes", "deepspeed", "liger_kernel", "peft", "torchao")
_OF_TORCH = (
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.Sequential,
    nn.ParameterList, nn.ParameterDict, nn.GELU, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Tanh,
    nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Mish, nn.Softplus, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid,
    nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip


# The methods of PEFT whose layers compute each token alone. Others, such as Lily's router, may mix tokens.
_OF_PEFT = re.compile(
    r"peft\.(peft_model|mixed_model|utils\..*|tuners\.(_buffer_dict|lycoris_utils|tuners_utils|mixed|adalora|adamss"
    r"|adaption_prompt|beft|boft|c3a|deft|delora|fourierft|frod|glora|gralora|hira|hra|ia3|ln_tuning|loha|lokr|lora"
    r"|miss|multitask_prompt_tuning|oft|osf|p_tuning|peanut|prefix_tuning|prompt_tuning|psoft|pvera|randlora|road"
    r"|shira|supertuning|tinylora|trainable_tokens|unilora|vblora|vera|waveft)(\..*)?)"
)
_QUANTIZED = re.compile(r"torch\.ao\.nn\.quantized\..*\.(Linear|Embedding|LinearPackedParams|EmbeddingPackedParams)")


def is_of_layers(kind: type) -> bool:
    """Whether a class is a layer that computes each token alone: of torch, or of a package such as peft."""
    module = kind.__module__
    if kind in _OF_TORCH:
        return True
    if module.partition(".")[0] == "peft":
        return _OF_PEFT.fullmatch(module) is not None
    if _QUANTIZED.fullmatch(name_of(kind)):
        return True
    return module.partition(".")[0] in OF_LAYERS or module.startswith(("transformers.integrations", "torch.nn.utils"))


def parts_of(model: nn.Module) -> frozenset[str]:
    """The names of the classes of a model's modules, but for layers that compute each token alone."""
    kinds = {class_of(module) for module in model.modules()}
    return frozenset(name_of(kind) for kind in kinds if not is_of_layers(kind))


def name_of(kind: type) -> str:
    """The full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def marks_of(model: nn.Module) -> dict[tuple[str, str, str], str]:
    """The flags of a model's modules: (class, attribute, value) → the path of a module that has it.

    Of numbers, only that they are numbers: they may be sizes. Their values are in the config.
    """
    found: dict[tuple[str, str, str], str] = {}
    for path, module in model.named_modules():
        kind = class_of(module)
        if is_of_layers(kind):
            continue
        for name, value in vars(module).items():
            if name.startswith("_") or name in _STATES:
                continue
            if value is None or isinstance(value, bool | str):
                found.setdefault((kind.__qualname__, name, str(value)), path)
            elif isinstance(value, int | float):
                found.setdefault((kind.__qualname__, name, "a number"), path)
    return found


# Attributes that callers change, and that do not change what a token depends on.
_STATES = {
    "training", "gradient_checkpointing", "name_or_path", "warnings_issued", "use_cache", "padding_idx", "pad_token_id",
    "loss_type", "attn_implementation", "_attn_implementation", "layers_are_rescaled",
}  # fmt: skip
