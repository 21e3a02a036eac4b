"""Every kernel of token_tiled under every switch, on a GPU, for compute-sanitizer to watch (no test by itself):

export PYTORCH_NO_CUDA_MEMORY_CACHING=1   # so that each tensor's end is the end of an allocation
compute-sanitizer --tool memcheck python tests/token_tiled/sanitize_token_tiled.py
compute-sanitizer --tool racecheck python tests/token_tiled/sanitize_token_tiled.py
"""

import itertools

import torch

import nt_attention as nta

LENGTHS = [5, 0, 1, 127, 65, 13, 301, 64, 17]
KEY_LENGTHS = [11, 3, 0, 65, 127, 13, 289, 64, 1]
OPTIONS = (
    {},
    {"is_causal": True},
    {"window_size": (40, 7), "causal_alignment": "upper_left"},
    {"softcap": 2.0},
    {"alibi_slopes": True, "is_causal": True},
    {"dropout_p": 0.2},
    {"batch_invariant": True, "is_causal": True},
    {"relative": True},
    {"relative": True, "deterministic": True, "is_causal": True},
)


def biases(queries: int, keys: int, heads: int) -> nta.RelativeBias:
    """Biases whose last rows are the last of their allocations, with buckets out of range."""
    bias, query_bias, key_bias = (
        torch.randn(*rows, heads, 33, device="cuda", requires_grad=True) for rows in ((), (queries,), (keys,))
    )
    return nta.RelativeBias(torch.arange(-40, 41, device="cuda"), bias, query_bias, key_bias)


def main() -> None:
    layout, key_layout = (nta.SequenceLayout.from_lengths(x, device="cuda") for x in (LENGTHS, KEY_LENGTHS))
    done = 0
    # the last rows are the tensors' last, and heads are neighbours, so reading too far leaves the allocation
    calls = [(torch.bfloat16, (64, 64), options) for options in OPTIONS]
    calls += itertools.product((torch.bfloat16, torch.float32), ((40, 24), (128, 128), (256, 256)), OPTIONS[1:2])
    for dtype, (head_dim, value_dim), options in calls:
        given = {"alibi_slopes": torch.rand(4, device="cuda")} if "alibi_slopes" in options else {}
        if "relative" in options:
            given["relative"] = biases(layout.total, key_layout.total, 4)
        q = torch.randn(layout.total, 4, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        k = torch.randn(key_layout.total, 2, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        v = torch.randn(key_layout.total, 2, value_dim, device="cuda", dtype=dtype, requires_grad=True)
        out, lse = nta.varlen_attention(
            q, k, v, layout, key_layout, return_lse=True, backend="token_tiled", **{**options, **given}
        )
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        leaves = (q, k, v, *(given["relative"].tensors if "relative" in given else ()))
        grads = torch.autograd.grad((out.float().square().sum() + lse.sum()), leaves)
        assert all(x.isfinite().all() for x in (out, *grads))
        done += 1
    torch.cuda.synchronize()
    print(f"{done} calls, forward and backward")


if __name__ == "__main__":
    main()
