"""Sharded attention and patched models on two GPUs with NCCL, against one GPU."""

import pytest
import torch
from processes import run_on_gpus
from ranks import average, use_two_calls
from test_patched_models import batch_of, make, step
from torch.distributed.device_mesh import init_device_mesh

import nt_attention as nta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
BATCHES = [[40, 1, 0, 700, 13, 3, 90], [300, 20, 5, 1000, 80, 41, 600, 7, 250], [3000]]
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window_size": (100, -1)},
    "two-sided window": {"window_size": (50, 20)},
    "softcap": {"is_causal": True, "softcap": 20.0},
    "alibi": {"is_causal": True, "alibi_slopes": torch.linspace(0.01, 0.5, 8)},
    "sinks": {"is_causal": True, "sinks": torch.linspace(-1, 2, 8)},
}


def inputs_of(tokens, heads, kv_heads, dim, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(tokens, h, dim, device="cuda", generator=generator).to(dtype) for h in counts]


def results_of(inputs, grad, layout, **options):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = nta.varlen_attention(*leaves, layout, **options)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def all_masks(dtype, tolerance):
    mesh = init_device_mesh("cuda", (2,))
    for lengths in BATCHES:
        layout = nta.SequenceLayout.from_lengths(lengths, device="cuda")
        sharded = layout.shard(mesh)
        *inputs, grad = inputs_of(layout.total, 8, 4, 64, dtype)
        for name, options in OPTIONS.items():
            options = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in options.items()}
            wants = [sharded.local(x) for x in results_of(inputs, grad, layout, **options)]
            for calls in ("selected", "groups of heads", "whole sequences alone"):
                with pytest.MonkeyPatch.context() as patch:
                    if calls != "selected":
                        use_two_calls(patch, calls == "groups of heads")
                    local = [sharded.local(x) for x in inputs]
                    found = results_of(local, sharded.local(grad), sharded, **options)
                for x, want in zip(found, wants, strict=True):
                    error = (x - want).detach().float().norm() / want.detach().float().norm().clamp(min=1e-9)
                    assert error < tolerance, (lengths, name, calls, float(error))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 1.5e-2)])
def test_all_masks(dtype, tolerance):
    run_on_gpus(2, all_masks, dtype, tolerance)


def same_bits():
    mesh = init_device_mesh("cuda", (2,))
    for lengths in ([7680, 3840, 1920, 1024, 640, 480, 320, 200, 140, 90, 50], [16384]):
        sharded = nta.SequenceLayout.from_lengths(lengths, device="cuda").shard(mesh)
        *inputs, grad = (sharded.local(x) for x in inputs_of(sum(lengths), 32, 8, 128, torch.bfloat16))
        options = {"is_causal": True, "deterministic": True}
        first, *others = (results_of(inputs, grad, sharded, **options) for _ in range(3))
        assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def test_same_bits_if_deterministic():
    run_on_gpus(2, same_bits)


def patched_llama():
    mesh = init_device_mesh("cuda", (2,))
    batch = {name: x.cuda() for name, x in batch_of("llama").items()}
    found = []
    for more in ({}, {"mesh": mesh}):
        model = make("llama").float().cuda()
        nta.patch(model, on_fallback="raise", packing="always", **more)
        found.append(step(model, batch, average))
    for name, want in found[0].items():
        torch.testing.assert_close(found[1][name], want, rtol=1e-3, atol=1e-5)


def test_patched_llama():
    run_on_gpus(2, patched_llama)


def compiled():
    mesh = init_device_mesh("cuda", (2,))
    torch.manual_seed(0)
    projection = torch.nn.Linear(128, 3 * 128).cuda().bfloat16()

    def run(x, sharded):
        q, k, v = projection(x).unflatten(1, (3, 2, 64)).unbind(1)
        return nta.varlen_attention(q, k, v, sharded, is_causal=True).flatten(1) + x

    graph = torch.compile(run, dynamic=True, fullgraph=True)
    for lengths in BATCHES:
        sharded = nta.SequenceLayout.from_lengths(lengths, device="cuda").shard(mesh)
        x = torch.randn(sharded.total, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        results = []
        for call in (run, graph):
            out = call(x, sharded)
            results.append([out, *torch.autograd.grad(out.float().square().mean(), [x, projection.weight])])
        for want, found in zip(*results, strict=True):
            assert (found - want).float().norm() <= 2e-2 * want.float().norm()


def test_compiled_by_inductor():
    run_on_gpus(2, compiled)


def losses_of_example(options):
    import long_context

    return long_context.train(long_context.options_of(options))["losses"]


@pytest.mark.parametrize("more", [[], ["--bf16"]], ids=["float32", "bf16"])
def test_long_context_example(more):
    options = ["--hidden-size", "256", "--rows", "3", *more]
    found = [run_on_gpus(world, losses_of_example, options) for world in (1, 2)]
    for losses in found[1]:
        assert losses == pytest.approx(found[0][0], rel=3e-2 if more else 1e-4)
