"""The text models of the installed transformers, from the mappings of its Auto classes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from .twin import fill_config

# The mappings of transformers' Auto classes for text: mapping → the name of its heads in the documentation.
MAPPINGS = {
    "MODEL_MAPPING_NAMES": "base",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal LM",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "masked LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "seq2seq LM",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "token",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "sequence",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "QA",
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES": "multiple choice",
    "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES": "next sentence",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES": "pretraining",
    "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES": "text encoding",
}
_OF_TEXT = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ", "TOKEN_CLASSIFICATION", "MULTIPLE_CHOICE", "TEXT_ENCODING")


def text_classes() -> list[tuple[str, str, str]]:
    """Model type, class name and head of every text model, each class once."""
    text = {kind for name in MAPPINGS if any(part in name for part in _OF_TEXT) for kind in _mapping(name)}
    names = set(dir(transformers))  # hasattr would import the code of every model
    found: dict[str, tuple[str, str, str]] = {}
    for name, head in MAPPINGS.items():
        for model_type, class_names in _mapping(name).items():
            for class_name in [class_names] if isinstance(class_names, str) else class_names:
                if model_type in text and class_name in names:
                    found.setdefault(f"{model_type} {class_name}", (model_type, class_name, head))
    return sorted(found.values())


def _mapping(name: str) -> dict[str, Any]:
    mapping: dict[str, Any] = getattr(modeling_auto, name)
    return mapping


def classes_of(source: str) -> list[tuple[str, str, str]]:
    """The source itself, class name and head of the classes that a config names, or of all classes of its model type.

    Args:
        source: a folder with a config.json, or a name on the Hub. Raises OSError or ValueError if it has no config.
    """
    config = AutoConfig.from_pretrained(source)
    of_type = [(name, head) for model_type, name, head in text_classes() if model_type == config.model_type]
    names = config.architectures or [name for name, _ in of_type]
    return [(source, name, dict(of_type).get(name, "")) for name in names]


def on_meta_device(source: str, class_name: str) -> PreTrainedModel:
    """A model of a class without values, with the default config of a model type, or the config of `classes_of`."""
    kind: Any = getattr(transformers, class_name)
    is_type = source in transformers.CONFIG_MAPPING
    config = transformers.CONFIG_MAPPING[source]() if is_type else AutoConfig.from_pretrained(source)
    if not isinstance(config, kind.config_class):
        config = kind.config_class()
    with torch.device("meta"):
        model: PreTrainedModel = kind(fill_config(config))
        return model
