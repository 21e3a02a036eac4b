"""DeepSpeed's engine on a patched model, with ZeRO, in one process on the CPU."""

import copy

import pytest
import tiny
import torch

import nt_attention as nta

deepspeed = pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """DeepSpeed keeps the process group of its first engine, so all tests share one."""
    store = tmp_path_factory.mktemp("group") / "store"
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            environment.setenv(name, value)
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


def losses(model, stage):
    batch = tiny.batch_of("llama", "right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    config = {
        "train_batch_size": len(labels),
        "train_micro_batch_size_per_gpu": len(labels),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    found = []
    for _ in range(3):
        loss = engine(**batch, labels=labels).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_losses(stage, record):
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa").train()
    want = losses(copy.deepcopy(model), stage)
    with nta.patch(model) as handle:
        assert losses(model, stage) == pytest.approx(want, rel=1e-5)
    assert handle.calls == {None: 3}
    record(f"DeepSpeed {deepspeed.__version__}", f"ZeRO, stage {stage}", "before", handle)
