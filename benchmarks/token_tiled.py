"""The token-tiled kernels beside every other way to run a ragged batch on this GPU.

    python benchmarks/token_tiled.py [--batches A D E] [--rivals torch_flash flash_attn_4] [--save FILE]

Times are the device's own (``timing.py``), in ms, forward and forward + backward, all in one run, bf16. Rivals are
called as directly as they can be; ours through ``varlen_attention`` and autograd. Each rival's output is compared with
ours first. ``flash_attn_4`` is there if flash-attn-4 is installed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from batches import BATCHES, TOKENS, Batch, equal, lognormal
from timing import device_ms
from torch import Tensor
from torch.nn import functional as F

import nt_attention as nta

MORE = (
    Batch("one long", "one of 8192 beside lognormal ≤ 128", (8192, *lognormal(128)[:800]), 12, 12, 64),
    Batch("all 17", "1927 × 17", equal(17), 12, 12, 64),
    Batch("all 1", "32768 × 1", equal(1), 12, 12, 64),
    Batch("window", "A, 128 on either side", BATCHES["A"].lengths, 16, 16, 64, window_size=(128, 128)),
    Batch("GQA 32/1", "B's lengths", BATCHES["B"].lengths, 32, 1, 128, True),
    *(
        Batch(f"{name} d{d}", f"{name}, head dim {d}", BATCHES[name].lengths, width // d, width // d, d)
        for name, width in (("A", 1024), ("F", 768), ("E", 768))
        for d in (32, 72, 80, 96, 128, 160, 192, 256)
    ),
)
ALL = BATCHES | {batch.name: batch for batch in MORE}


class Problem:
    """A batch's tensors: leaves that want gradients, and the gradient from above."""

    def __init__(self, batch: Batch) -> None:
        torch.manual_seed(0)
        self.batch = batch
        self.layout = nta.SequenceLayout.from_lengths(batch.lengths, device="cuda")

        def random(heads: int) -> Tensor:
            return torch.randn(self.layout.total, heads, batch.head_dim, device="cuda", dtype=torch.bfloat16)

        self.grad = random(batch.heads)
        self.qkv = [random(heads).requires_grad_() for heads in (batch.heads, batch.kv_heads, batch.kv_heads)]
        self.scale = batch.head_dim**-0.5
        left, right = batch.window_size
        self.window = (left, 0 if batch.is_causal else right)
        self.sees_all = self.window == (-1, -1) or (batch.is_causal and left < 0)


Rival = tuple[Callable[[], Tensor], Callable[[], object]]  # forward, and forward + backward


def by_autograd(forward: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> Rival:
    @torch.no_grad()
    def inference() -> Tensor:
        return forward(*leaves)

    return inference, lambda: torch.autograd.grad(forward(*leaves), leaves, grad)


def token_tiled(p: Problem, batch_invariant: bool = False) -> Rival:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nta.varlen_attention(
            q, k, v, p.layout, is_causal=p.batch.is_causal, window_size=p.batch.window_size,
            batch_invariant=batch_invariant, backend="token_tiled",
        )  # fmt: skip

    return by_autograd(forward, p.qkv, p.grad)


def torch_flash(p: Problem) -> Rival:
    q, k, v = (x.detach() for x in p.qkv)
    cu, longest = p.layout.cu_seqlens, p.layout.max_seqlen
    left, right = (None if side < 0 else side for side in p.window)
    ends = (cu, cu, longest, longest, 0.0, p.batch.is_causal)
    options = {"scale": p.scale, "window_size_left": left, "window_size_right": right}

    def forward() -> tuple[Tensor, ...]:
        return torch.ops.aten._flash_attention_forward(q, k, v, *ends, False, **options)

    def both() -> object:
        out, lse, seed, unused, _ = forward()
        return torch.ops.aten._flash_attention_backward(p.grad, q, k, v, out, lse, *ends, seed, unused, **options)

    return lambda: forward()[0], both


def flash_attn_4(p: Problem) -> Rival | None:
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError:
        return None
    cu, longest = p.layout.cu_seqlens, p.layout.max_seqlen
    left, right = (None if side < 0 else side for side in p.batch.window_size)
    if p.batch.head_dim in (16, 80):
        return None  # its dQ is wrong there on Hopper, in silence

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
            softmax_scale=p.scale, causal=p.batch.is_causal, window_size=(left, right),
        )  # fmt: skip
        return out

    return by_autograd(forward, p.qkv, p.grad)


def mem_efficient(p: Problem) -> Rival | None:
    if not p.sees_all:
        return None
    cu, longest = p.layout.cu_seqlens, p.layout.max_seqlen
    group = p.batch.heads // p.batch.kv_heads

    def forward(*qkv: Tensor) -> Tensor:
        q, k, v = (x[None] if x.shape[1] == p.batch.heads else x.repeat_interleave(group, 1)[None] for x in qkv)
        mask_type = 1 if p.batch.is_causal else 0
        return torch.ops.aten._efficient_attention_forward(
            q, k, v, None, cu, cu, longest, longest, 0.0, mask_type, torch.is_grad_enabled(), scale=p.scale
        )[0][0]

    return by_autograd(forward, p.qkv, p.grad)


def flex(p: Problem) -> Rival:
    from torch.nn.attention.flex_attention import create_block_mask

    of_token = p.layout.sequence_ids
    left, right = (p.layout.total if side < 0 else side for side in p.window)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (of_token[i] == of_token[j]) & (i - j <= left) & (j - i <= right)

    total = p.layout.total
    mask = create_block_mask(seen, None, None, total, total, device="cuda", _compile=True)

    def forward(*qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        return compiled_flex()(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return by_autograd(forward, p.qkv, p.grad)


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def padded(p: Problem) -> Rival | None:
    """Without a mask for the padding, which only favours it: its outputs are wrong, and its time is what is shown."""
    if not p.sees_all or len(p.batch.lengths) * p.layout.max_seqlen > 16 * TOKENS:
        return None
    q, k, v, grad = (p.layout.pad(x.detach()).transpose(1, 2) for x in (*p.qkv, p.grad))

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gqa = p.batch.heads != p.batch.kv_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=p.batch.is_causal, scale=p.scale, enable_gqa=gqa)

    return by_autograd(forward, [x.requires_grad_() for x in (q, k, v)], grad)


RIVALS: dict[str, Callable[[Problem], Rival | None]] = {
    "token_tiled": token_tiled,
    "batch-invariant": functools.partial(token_tiled, batch_invariant=True),
    "torch_flash": torch_flash,
    "flash_attn_4": flash_attn_4,
    "mem-efficient": mem_efficient,
    "flex": flex,
    "padded": padded,
}


def measure(batch: Batch, names: list[str]) -> dict[str, tuple[float, float]]:
    problem = Problem(batch)
    want = token_tiled(problem)[0]().float()
    times = {}
    for name in names:
        rival = RIVALS[name](problem)
        if rival is None:
            continue
        forward, both = rival
        got = forward()
        if name != "padded":
            error = ((got.float() - want).norm() / want.norm()).item()
            if not error < 0.02:
                print(f"{batch.name}: {name} differs from token_tiled by {error:.1e}", file=sys.stderr)
        times[name] = device_ms(forward), device_ms(both)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", default=list(BATCHES), help=f"of {', '.join(map(repr, ALL))}, or all")
    parser.add_argument("--rivals", nargs="+", default=list(RIVALS), choices=RIVALS)
    parser.add_argument("--save", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    batches = list(ALL) if options.batches == ["all"] else options.batches

    lines = [
        f"`python benchmarks/token_tiled.py {' '.join(sys.argv[1:])}`",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{datetime.date.today()}. ms of device time, forward / forward + backward; in brackets the time over ours.",
        "",
        f"| batch | {' | '.join(options.rivals)} |",
        f"|---|{'---|' * len(options.rivals)}",
    ]
    print("\n".join(lines), flush=True)
    for name in batches:
        batch = ALL[name]
        times = measure(batch, options.rivals)
        ours = times["token_tiled"]
        cells = [
            " / ".join(f"{t:.3f} ({t / our:.2f})" for t, our in zip(times[rival], ours, strict=True))
            if rival in times
            else "–"
            for rival in options.rivals
        ]
        lines.append(f"| {name}: {len(batch.lengths)} sequences, {batch.about} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.save:
        options.save.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
