"""Models with a state along the row are packed if the packages are installed that keep packed sequences apart.

The packages run on GPUs only. Here, functions in plain PyTorch with the same names and arguments stand for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from packaging.version import Version
from sweeps import sweep_except

transformers = pytest.importorskip("transformers")
if Version(transformers.__version__) < Version("5.23"):
    pytest.skip("these models take seq_idx from transformers 5.23 on", allow_module_level=True)

CAUSAL_CONV1D = """
    import torch
    from torch.nn import functional as F

    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        lengths = [x.shape[2]] if seq_idx is None else torch.unique_consecutive(seq_idx, return_counts=True)[1].tolist()
        parts = [F.pad(part, (weight.shape[1] - 1, 0)) for part in x.split(lengths, 2)]
        out = torch.cat([F.conv1d(part, weight[:, None], bias, groups=len(weight)) for part in parts], 2)
        return out if activation is None else F.silu(out)
"""
MAMBA_SSM = """
    import torch
    from torch.nn import functional as F

    def mamba_split_conv1d_scan_combined(*args, seq_idx=None, **kwargs):
        return None  # the model then takes the two functions one after the other

    def mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, dt_softplus=False,
        dt_limit=(0.0, float("inf")), return_final_states=False,
    ):
        dt = dt if dt_bias is None else dt + dt_bias
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        B, C = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (B, C))
        state, outs = 0.0, []
        for t in range(x.shape[1]):
            if t and seq_idx is not None:
                state = state * (seq_idx[:, t] == seq_idx[:, t - 1]).to(x.dtype)[:, None, None, None]
            new = dt[:, t, :, None, None] * x[:, t, :, :, None] * B[:, t, :, None, :]
            state = state * torch.exp(dt[:, t] * A)[:, :, None, None] + new
            outs.append((state * C[:, t, :, None, :]).sum(3))
        out = torch.stack(outs, 1)
        return out if D is None else out + D[:, None] * x
"""
FLA = """
    import torch
    from torch.nn import functional as F

    def chunk_gated_delta_rule(
        query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
    ):
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        groups = value.shape[2] // key.shape[2]
        query, key = (x.repeat_interleave(groups, 2) for x in (query, key))
        begins, outs = set() if cu_seqlens is None else set(cu_seqlens.tolist()), []
        for t in range(query.shape[1]):
            if t == 0 or t in begins:
                state = value.new_zeros(len(value), *value.shape[2:3], key.shape[3], value.shape[3])
            k, v = key[:, t, :, :, None], value[:, t, :, None, :]
            state = state * g[:, t].exp()[:, :, None, None]
            state = state + k * (v - (state * k).sum(2, keepdim=True)) * beta[:, t, :, None, None]
            outs.append((state * query[:, t, :, :, None]).sum(2) * query.shape[3] ** -0.5)
        return torch.stack(outs, 1).to(value.dtype), None
"""
FILES = {
    "causal_conv1d/__init__.py": CAUSAL_CONV1D,
    "mamba_ssm/__init__.py": "",
    "mamba_ssm/ops/__init__.py": "",
    "mamba_ssm/ops/triton/__init__.py": "",
    "mamba_ssm/ops/triton/ssd_combined.py": MAMBA_SSM,
    "fla/__init__.py": "",
    "fla/ops/__init__.py": "",
    "fla/ops/gated_delta_rule.py": FLA,
}
PROGRAM = """
    import json
    import sys
    import traceback

    import torch

    import nt_attention as nta
    from small_models import build_small

    def check(model_type, class_name):
        model = build_small(model_type, class_name)
        lengths = torch.tensor([7, 1, 23, 12])
        mask = (torch.arange(23) >= 23 - lengths[:, None]).long()
        ids = torch.randint(6, 20, (4, 23)) * mask
        model.train()
        alone = [model(input_ids=ids[n : n + 1, 23 - length :]).logits[0] for n, length in enumerate(lengths)]
        try:
            handle = nta.patch(model, on_fallback="raise")
        except ValueError as error:
            return str(error)
        logits = model(input_ids=ids, attention_mask=mask).logits
        assert handle.calls == {None: 1}, handle
        for n, length in enumerate(lengths):
            torch.testing.assert_close(logits[n, 23 - length :], alone[n], rtol=1e-4, atol=1e-4)
        grads = [
            torch.autograd.grad(out.square().sum(), list(model.parameters()), materialize_grads=True, allow_unused=True)
            for out in (logits[mask.bool()], torch.cat(alone))
        ]
        for x, y in zip(*grads, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * float(y.abs().max()) + 1e-9)
        return "packed"

    found = {}
    for model_type, class_name in zip(sys.argv[1::2], sys.argv[2::2]):
        try:
            found[model_type] = check(model_type, class_name)
        except Exception:
            found[model_type] = traceback.format_exc()
    print(json.dumps(found))
"""
MODELS = [
    ("bamba", "BambaForCausalLM"),
    ("falcon_h1", "FalconH1ForCausalLM"),
    ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    ("nemotron_h", "NemotronHForCausalLM"),
    ("qwen3_next", "Qwen3NextForCausalLM"),
]


def run(directory: Path, files: dict[str, str], *models: tuple[str, str]) -> dict[str, str]:
    """What PROGRAM finds for each model if the packages in `files` are installed. One process runs all of them."""
    for name, text in files.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    program = directory / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    root = Path(__file__).parents[2]
    path = f"{directory}:{root}:{root / 'tools'}"
    environment = {"PYTHONPATH": path, "NT_ATTENTION_CACHE": str(directory / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(program), *(part for model in models for part in model)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**environment, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sweep
@pytest.mark.parametrize("models", sweep_except([MODELS, MODELS[3:4]], MODELS[3:4]))
def test_state_models_are_packed_with_their_packages(tmp_path: Path, models: list[tuple[str, str]]) -> None:
    assert run(tmp_path, FILES, *models) == {model_type: "packed" for model_type, _ in models}
