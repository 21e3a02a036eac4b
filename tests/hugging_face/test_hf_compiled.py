"""Models under the registered name compile as one graph, and packed rows stay apart in it."""

import tiny
import torch
from sweeps import covering

import nt_attention as nta

LENGTHS, LENGTH = [11, 4, 7], 11


MODELS = {"llama": "LlamaForCausalLM", "bert": "BertModel", "mistral": "MistralForCausalLM"}


@covering({"model_type": MODELS, "form": ["padded", "packed", "packed under a mask"]})
def test_compiled_model_is_one_graph_and_gives_what_eager_gives(model_type, form):
    torch._dynamo.reset()
    model = tiny.make(model_type, MODELS[model_type], nta.hf.register())
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, tiny.VOCABULARY, mask.shape)
    with torch.no_grad():
        alone = torch.cat([model(ids[b : b + 1, :n])[0][0] for b, n in enumerate(LENGTHS)])
        if form == "padded":
            call = {"input_ids": ids, "attention_mask": mask.long()}
        else:
            positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
            call = {"input_ids": ids[mask][None], "position_ids": positions, "use_cache": False}
            if form == "packed under a mask":
                call["attention_mask"] = torch.ones_like(positions)
        got = torch.compile(model, backend="eager", fullgraph=True)(**call)[0]
    torch.testing.assert_close(got[mask] if form == "padded" else got[0], alone, rtol=0, atol=5e-5)
