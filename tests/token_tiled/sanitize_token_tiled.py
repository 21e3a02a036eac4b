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


def solve(layout, key_layout, dtype, dims, options, backend="token_tiled", kv_heads=2) -> list[torch.Tensor]:
    """The output and the gradients of a call on new tensors."""
    given = {"alibi_slopes": torch.rand(4, device="cuda")} if "alibi_slopes" in options else {}
    if "relative" in options:
        given["relative"] = biases(layout.total, key_layout.total, 4)
    # the last rows are the tensors' last, and heads are neighbours, so reading too far leaves the allocation
    sides = ((layout, 4, dims[0]), (key_layout, kv_heads, dims[0]), (key_layout, kv_heads, dims[1]))
    q, k, v = (
        torch.randn(side.total, heads, dim, device="cuda", dtype=dtype, requires_grad=True)
        for side, heads, dim in sides
    )
    out, lse = nta.varlen_attention(q, k, v, layout, key_layout, return_lse=True, backend=backend, **options | given)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    leaves = (q, k, v, *(given["relative"].tensors if "relative" in given else ()))
    return [out, *torch.autograd.grad((out.float().square().sum() + lse.sum()), leaves)]


def with_lengths() -> int:
    layout, key_layout = (nta.SequenceLayout.from_lengths(x, device="cuda") for x in (LENGTHS, KEY_LENGTHS))
    calls = [(torch.bfloat16, (64, 64), options) for options in OPTIONS]
    calls += itertools.product((torch.bfloat16, torch.float32), ((40, 24), (128, 128), (256, 256)), OPTIONS[1:2])
    calls += itertools.product((torch.bfloat16,), ((320, 320), (576, 512)), OPTIONS[:2])
    for dtype, dims, options in calls:
        assert all(x.isfinite().all() for x in solve(layout, key_layout, dtype, dims, options))
    return len(calls)


# offsets of 9 sequences that are not valid for bounds of 301 and 700
INVALID = (
    [0, 5, 4, 5, 132, 197, 210, 511, 575, 592],
    [0, 5, 5, 6, 133, 198, 211, 513, 577, 594],
    [0, 5, 5, 6, 133, 198, 211, 411, 650, 701],
    [3, 5, 5, 6, 133, 198, 211, 411, 450, 701],
    [0, 2**31 - 1, 2**31 - 1, 5, 6, 7, 8, 9, 10, 11],
    [0, -(2**31), 5, 5, 6, 7, 8, 9, 10, 11],
)


def with_bounds() -> int:
    """Layouts that know bounds only: offsets that end at the bound, that end before it, and that exceed it."""

    def layout_of(offsets: torch.Tensor, tokens: int, longest: int = 301) -> nta.SequenceLayout:
        given = offsets.to("cuda", torch.int32)
        return nta.SequenceLayout.from_offsets(given, max_seqlen=longest, max_tokens=tokens)

    sides = [torch.tensor([0, *x]).cumsum(0) for x in (LENGTHS, KEY_LENGTHS)]
    short = torch.tensor([0, *(n % 60 for n in LENGTHS)]).cumsum(0)
    done = 0
    for extra in (0, 131):
        layouts = [layout_of(x, int(x[-1]) + extra) for x in sides]
        for options in OPTIONS:
            assert all(x.isfinite().all() for x in solve(*layouts, torch.bfloat16, (64, 64), options))
        for longest in (60, 100):
            shared = layout_of(short, int(short[-1]) + extra, longest)
            for options in OPTIONS[:2]:
                assert all(x.isfinite().all() for x in solve(shared, shared, torch.bfloat16, (64, 64), options))
        flash = solve(*layouts, torch.bfloat16, (64, 64), {"is_causal": True}, "torch_flash")
        assert all(x.isfinite().all() for x in flash)
        done += len(OPTIONS) + 5
    for offsets in INVALID:
        invalid, valid = layout_of(torch.tensor(offsets), 700), layout_of(sides[0], 700)
        for layouts in ((invalid, invalid), (invalid, valid), (valid, invalid)):
            for backend, options in (("token_tiled", OPTIONS[1]), ("token_tiled", OPTIONS[6]), ("torch_flash", {})):
                found = solve(*layouts, torch.bfloat16, (64, 64), options, backend)
                assert all(x.isnan().all() for x in found), (offsets, backend)
                done += 1
    return done


def main() -> None:
    exact, bounded = with_lengths(), with_bounds()
    torch.cuda.synchronize()
    print(f"{exact} calls with lengths and {bounded} with bounds, forward and backward")


if __name__ == "__main__":
    main()
