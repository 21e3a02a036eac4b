"""`ShardedTrainer` on two GPUs with NCCL, against Trainer on one."""

import pytest
import torch
from accelerate import ParallelismConfig
from processes import run_on_gpus, under_torchrun
from test_sharded_trainer import FSDP, make, make_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer

import nt_attention as nta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def trained(folder, kind):
    """The losses and gradient norms of a Trainer."""
    from nt_attention.hf.trainer import ShardedTrainer

    with under_torchrun(fsdp=kind == "FSDP2", gpus=True):
        model, more, trainer = make_model().float(), {"use_cpu": False, "max_grad_norm": 1e3}, Trainer
        if kind != "one GPU":
            mesh, trainer = init_device_mesh("cuda", (1, 2), mesh_dim_names=("dp", "cp"))["cp"], ShardedTrainer
            if kind == "FSDP2":
                config = ParallelismConfig(cp_size=2)
                mesh = config.get_device_mesh("cuda")["cp"]
                more |= {"parallelism_config": config, "fsdp": True, "fsdp_config": FSDP}
                more["accelerator_config"] = {"use_configured_state": True}  # that of `under_torchrun`
            nta.patch(model, mesh=mesh, on_fallback="raise")
        trainer = make(trainer, folder, model, 6, **more)
        trainer.train()
        logs = trainer.state.log_history
        return [[entry[key] for entry in logs if key in entry] for key in ("loss", "grad_norm", "eval_loss")]


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_sharded_trainer(kind, tmp_path):
    (want,) = run_on_gpus(1, trained, str(tmp_path / "one"), "one GPU")
    for found in run_on_gpus(2, trained, str(tmp_path / "two"), kind):
        for one, other in zip(found, want, strict=True):
            assert one == pytest.approx(other, rel=1e-3)
