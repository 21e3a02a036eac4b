"""Models whose packed rows need no mask of T × T give the same outputs with that mask."""

import pytest
import torch
import transformers
from small_models import fill_config, isolated, randomize, small_config, vocabulary_of
from sweeps import sweep_except
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import nt_attention as nta
from nt_attention.hf.route import masks
from nt_attention.hf.route.by_name import MIX_ROWS

# a CPU has no kernel with the softcap of some models
pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
LENGTHS, WINDOW = (9, 1, 14), 4
LISTED = sorted(masks._PASS_GEOMETRY - MIX_ROWS)


def small_model(model_type):
    """A small model, with a window in the layers that may have one."""
    kind = getattr(transformers, MODEL_MAPPING_NAMES[model_type])
    fields = small_config(fill_config(kind.config_class()))
    if "sliding_window" in fields:
        fields |= {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
        if set(kinds := fields.get("layer_types") or ()) <= {"full_attention", "sliding_attention"} and kinds:
            fields["layer_types"] = ["sliding_attention", "full_attention"] * (len(kinds) // 2)
    with isolated():
        model = kind._from_config(kind.config_class(**fields), attn_implementation=nta.hf.register()).eval()
        randomize(model)
    return model


def inputs_of(model):
    """The inputs of a whole row, and of the forms of packed rows."""
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    ids = {"input_ids": torch.randint(6, vocabulary_of(model), (1, sum(LENGTHS)))}
    positions = {"position_ids": layout.position_ids[None] + (2 if hasattr(model, "embeddings") else 0)}
    lengths = {"cu_seq_lens_q": layout.cu_seqlens, "cu_seq_lens_k": layout.cu_seqlens}
    return [ids, {**ids, **lengths}, {**ids, **positions, **lengths}, {**ids, **positions}]


@torch.no_grad()
@pytest.mark.parametrize("model_type", sweep_except(LISTED, *LISTED[::5]))
def test_listed_types_need_no_mask(model_type, monkeypatch):
    if model_type not in MODEL_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {model_type}")
    model = small_model(model_type)
    for inputs in inputs_of(model):
        with monkeypatch.context() as patches:
            patches.setattr(masks, "_PASS_GEOMETRY", set())
            try:
                want = model(**inputs)[0]
            except ValueError as error:  # it counts positions
                if "got cu_seq_lens_q without position_ids" in str(error):
                    continue
                raise
        with monkeypatch.context() as patches:
            patches.setattr(masks, "ALL_MASK_ATTENTION_FUNCTIONS", {})  # no mask can be made
            got = model(**inputs)[0]
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
