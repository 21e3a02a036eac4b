"""The device time of attention to stored keys, by backend and by where keys are stored.

    python benchmarks/paged_decoding.py [--parts workloads grid prefill answers] [--rounds N] [--scale 1.0]
        [--save FILE]

In the part `workloads` each sequence has one query. Times are in µs: a CUDA graph has calls on several copies of the
inputs, which together do not fit in the L2 cache. It is replayed, by turns with those of the other ways, and a time is
the median of the replays over the number of calls. `floor` is the time to read keys and values once, at the bandwidth
given by `--bandwidth` in TB/s. Every way is first compared with the reference. FlashInfer takes part if it is
installed; its plan, which is made on the host, is not timed.

The part `grid` needs a GPU. It has 108 batches of packed keys with 1 to 16 queries a sequence, whose causal attention
`split_kv` runs with its smallest tiles. It prints the time of each backend over that of the fastest one. The part
`prefill` needs a GPU, too. Its sequences have 16 to 2,048 queries, as in chunked prefill.

The part `answers` decodes several answers of each prompt, in pages of 16 rows. The answers of a prompt share its pages.
`each` reads the keys of each sequence by itself, `shared` reads pages that a bundle of sequences shares once. In the
rows "nothing shared" the pages are copies.

Without a GPU, the ways are only compared, with `TRITON_INTERPRET=1` and a small `--scale` of the lengths.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from by_turns import show
from torch import Tensor

import nt_attention as nta
from nt_attention.kernels import support
from nt_attention.kernels.split_kv import sharing

L2_BYTES = 2**28  # five times the L2 cache of an H200
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Workload:
    """Lengths of the keys of each sequence, and heads. `target` is in µs."""

    name: str
    lengths: list[int]
    heads: int
    kv_heads: int
    head_dim: int
    target: float

    @property
    def bytes(self) -> int:
        """The size of keys and values in 16 bits."""
        return sum(self.lengths) * self.kv_heads * self.head_dim * 4


def workloads(scale: float) -> list[Workload]:
    generator = torch.Generator().manual_seed(0)
    uniform = (64 * torch.randperm(64, generator=generator) + 33).tolist()  # 33 to 4065
    normal = torch.randn(8, generator=generator)
    lognormal = (normal + 7.5).exp().clamp(16, 8192).int().tolist()
    cases = [
        ("one of 65,536", [65536], 32, 8, 128, 85.0),
        ("64 uniform ≤ 4096", uniform, 32, 8, 128, 150.0),
        ("256 × 512, 12 heads × 64", [512] * 256, 12, 12, 64, 115.0),
        ("one of 65,536, 63 × 256", [65536] + [256] * 63, 32, 8, 128, 105.0),
        ("8 lognormal ≤ 8192", lognormal, 32, 8, 128, 30.0),
    ]
    return [Workload(name, [max(1, int(scale * n)) for n in lengths], *more) for name, lengths, *more in cases]


@dataclass(frozen=True)
class Inputs:
    """One copy of the inputs: queries, and packed keys and values."""

    query: Tensor
    key: Tensor
    value: Tensor
    layout: nta.SequenceLayout
    key_layout: nta.SequenceLayout

    @classmethod
    def random(cls, case: Workload, device: torch.device, queries: int = 1) -> Inputs:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        key_layout = nta.SequenceLayout.from_lengths(case.lengths, device=device)
        layout = nta.SequenceLayout.from_lengths([min(queries, n) for n in case.lengths], device=device)
        query = torch.randn(layout.total, case.heads, case.head_dim, device=device, dtype=dtype)
        key, value = torch.randn(2, key_layout.total, case.kv_heads, case.head_dim, device=device, dtype=dtype)
        return cls(query, key, value, layout, key_layout)

    def in_pages(self, page: int) -> tuple[Tensor, Tensor, nta.PagedLayout]:
        """Pools of pages in a random order, and where the keys are stored."""
        lengths = self.key_layout.lengths
        pages = -(-lengths // page)
        most, count = int(pages.max()), int(pages.sum())
        order = torch.randperm(count, device=self.key.device)
        table = torch.zeros(len(lengths), most, dtype=torch.int32, device=self.key.device)
        used = torch.arange(most, device=self.key.device) < pages[:, None]
        table[used] = order.int()
        paged = nta.PagedLayout(table, lengths.int(), page)
        rows = paged.rows(self.key_layout.sequence_ids, self.key_layout.position_ids)
        pools = [x.new_zeros(count * page, *x.shape[1:]) for x in (self.key, self.value)]
        for pool, x in zip(pools, (self.key, self.value), strict=True):
            pool[rows] = x
        key, value = (pool.unflatten(0, (-1, page)) for pool in pools)
        return key, value, paged


def packed(name: str) -> Callable[[Inputs], Call]:
    def prepare(x: Inputs) -> Call:
        options = {"is_causal": True, "backend": name}
        return lambda: nta.varlen_attention(x.query, x.key, x.value, x.layout, x.key_layout, **options)  # type: ignore[return-value,arg-type]

    return prepare


def paged(name: str, page: int) -> Callable[[Inputs], Call]:
    def prepare(x: Inputs) -> Call:
        key, value, where = x.in_pages(page)
        return lambda: nta.varlen_attention(x.query, key, value, x.layout, where, backend=name)  # type: ignore[return-value]

    return prepare


def flashinfer(page: int) -> Callable[[Inputs], Call]:
    def prepare(x: Inputs) -> Call:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        key, value, where = x.in_pages(page)
        lengths = x.key_layout.lengths
        pages = -(-lengths // page)
        indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
        used = torch.arange(where.table.shape[1], device=key.device) < pages[:, None]
        buffers = (indptr, where.table[used].contiguous(), (lengths - (pages - 1) * page).int())
        memory = torch.empty(2**27, dtype=torch.uint8, device=key.device)
        names = ("indptr", "indices", "last_page_len")
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            memory, "NHD", use_cuda_graph=True, use_tensor_cores=True,
            **{f"paged_kv_{name}_buffer": x.clone() for name, x in zip(names, buffers, strict=True)},
        )  # fmt: skip
        heads = (x.query.shape[1], key.shape[2], key.shape[3])
        wrapper.plan(*buffers, *heads, page, data_type=key.dtype, q_data_type=key.dtype)
        return lambda: wrapper.run(x.query, (key, value))

    return prepare


# (query heads, key heads, head dim) → queries of a sequence
GRID_HEADS = {(32, 8, 128): (1, 4), (16, 16, 64): (1, 4, 16), (32, 32, 128): (1, 4, 16), (32, 4, 64): (1,)}
GRID_BACKENDS = ("split_kv", "flash_attn_4", "torch_flash", "token_tiled")


def grid_lengths() -> list[list[int]]:
    """The lengths of the keys of each batch."""
    generator = torch.Generator().manual_seed(1)

    def lognormal(count: int, most: int) -> list[int]:
        return (torch.randn(count, generator=generator).exp() * most / 6).clamp(16, most).int().tolist()

    equal = [(1, 512), (1, 8192), (1, 65536), (8, 1024), (32, 512), (64, 128), (256, 64), (256, 512), (1024, 64)]
    return [[n] * count for count, n in equal] + [lognormal(8, 8192), lognormal(64, 4096), [32768] + [256] * 63]


def grid(device: torch.device) -> list[str]:
    """For each backend: how often it is the fastest, and its time over that of the fastest one."""
    names = [name for name in GRID_BACKENDS if nta.available_backends()[name] is None]
    rows: list[dict[str, float]] = []
    for heads, queries, lengths in ((h, n, x) for h, each in GRID_HEADS.items() for n in each for x in grid_lengths()):
        case = Workload("", lengths, *heads, 0.0)
        inputs = [Inputs.random(case, device, queries) for _ in range(min(12, max(2, -(-L2_BYTES // case.bytes))))]
        row = {}
        for name in names:
            graph = captured([packed(name)(x) for x in inputs])
            row[name] = statistics.median(replay_us(graph, len(inputs), 3) for _ in range(3))
        rows.append({name: us / min(row.values()) for name, us in row.items()})
    lines = ["", f"{len(rows)} batches with 1 to 16 queries a sequence", ""]
    lines += ["| backend | fastest in | mean over the fastest | most |", "|---|---|---|---|"]
    for name in names:
        each = [row[name] for row in rows]
        lines.append(f"| {name} | {each.count(1.0)} | {statistics.mean(each):.2f} | {max(each):.2f} |")
    return lines


# (query heads, key heads, head dim), and (sequences, queries of each, keys of each)
PREFILL_HEADS = [(32, 8, 128), (12, 12, 64)]
PREFILL = [(32, 16, 512), (32, 64, 512), (8, 64, 4096), (1, 64, 65536), (1, 512, 65536), (8, 512, 4096)]
PREFILL += [(4, 2048, 8192)]


def prefill(options: argparse.Namespace, device: torch.device) -> list[str]:
    """A row for each batch."""
    found = ways(device)
    lines = ["", "µs of causal attention", ""]
    lines += [f"| heads | sequences × queries, keys | {' | '.join(found)} |", "|---" * (2 + len(found)) + "|"]
    for heads in PREFILL_HEADS:
        for count, queries, keys in PREFILL:
            inputs = Inputs.random(Workload("", [keys] * count, *heads, 0.0), device, queries)
            calls = {name: prepare(inputs) for name, prepare in found.items() if "Infer" not in name}
            graphs = {name: captured([call] * 3) for name, call in calls.items()}  # they read what the calls hold
            times: dict[str, list[float]] = {name: [] for name in graphs}
            for _ in range(options.rounds):
                for name, graph in graphs.items():
                    times[name].append(replay_us(graph, 3, 2))
            cells = " | ".join(f"{statistics.median(times[name]):.0f}" if name in times else "" for name in found)
            query_heads, key_heads, head_dim = heads
            lines.append(f"| {query_heads}/{key_heads} × {head_dim} | {count} × {queries}, {keys} | {cells} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


# (prompts, answers of each, tokens of a prompt); each answer has 1 to 512 tokens
ANSWERS = [(1, count, prompt) for prompt in (2048, 8192) for count in (8, 16, 32, 64)]
ANSWERS += [(8, 8, 2048), (4, 16, 8192), (8, 32, 2048)]


@dataclass(frozen=True)
class Answers:
    """One copy of the inputs: a query for each answer, and pools (pages, 16, G, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    paged: nta.PagedLayout
    layout: nta.SequenceLayout

    @classmethod
    def random(cls, case: tuple[int, int, int], scale: float, device: torch.device, is_shared: bool) -> Answers:
        prompts, count, tokens = case
        batch, page = prompts * count, 16
        prompt_pages = max(1, int(scale * tokens) // page)
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, max(2, int(scale * 512)), (batch,), generator=generator) + prompt_pages * page
        pages = -(-int(lengths.max()) // page)
        table = torch.randperm(batch * pages, generator=generator).view(prompts, count, pages).int()
        if is_shared:
            table[:, :, :prompt_pages] = table[:, :1, :prompt_pages]
        paged = nta.PagedLayout(table.flatten(0, 1).to(device), lengths.int().to(device), page)
        options = {"device": device, "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
        pools = torch.randn(2, batch * pages, page, 8, 128, **options)  # type: ignore[arg-type]
        query = torch.randn(batch, 32, 128, **options)  # type: ignore[arg-type]
        return cls(query, pools[0], pools[1], paged, nta.SequenceLayout.from_lengths([1] * batch, device=device))

    def attend(self, backend: str = "split_kv") -> Tensor:
        return nta.varlen_attention(self.query, self.key, self.value, self.layout, self.paged, backend=backend)  # type: ignore[return-value]

    @property
    def bytes_once(self) -> int:
        """The size of all keys and values that are read, each page once."""
        used = torch.arange(self.paged.table.shape[1], device=self.key.device) < -(-self.paged.lengths // 16)[:, None]
        return len(self.paged.table[used].unique()) * 16 * 8 * 128 * 4


def answers(options: argparse.Namespace, device: torch.device) -> list[str]:
    """A row for each number of answers and length of the prompt."""
    lines = ["", "µs of answers of prompts, 32/8 heads × 128", ""]
    lines += ["| prompts × answers, tokens of a prompt | pages | floor | each | shared | each / shared |"]
    lines += ["|---" * 6 + "|"]
    for case in ANSWERS:
        for is_shared in (True, False):
            row = answers_row(case, is_shared, options, device)
            prompts, count, tokens = case
            pages = "shared" if is_shared else "nothing shared"
            lines.append(f"| {prompts} × {count}, {tokens} | {pages} | {' | '.join(row)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def answers_row(
    case: tuple[int, int, int], is_shared: bool, options: argparse.Namespace, device: torch.device
) -> list[str]:
    torch.manual_seed(0)
    first = Answers.random(case, options.scale, device, is_shared)
    copies = max(2, -(-L2_BYTES // first.bytes_once)) if device.type == "cuda" else 1
    inputs = [first, *(Answers.random(case, options.scale, device, is_shared) for _ in range(copies - 1))]
    least, outs, graphs = sharing.LEAST_BYTES, [], {}
    for name, bytes_from in (("each", 2**62), ("shared", options.least_bytes)):
        sharing.LEAST_BYTES = least if bytes_from is None else bytes_from
        outs.append(first.attend())
        if device.type == "cuda":
            graphs[name] = captured([x.attend for x in inputs])
    sharing.LEAST_BYTES = least
    want = first.attend("reference")
    for out in outs:
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    times: dict[str, list[float]] = {name: [] for name in ("each", "shared")}
    for _ in range(options.rounds if graphs else 0):
        for name, graph in graphs.items():
            times[name].append(replay_us(graph, copies))
    each, shared = (statistics.median(x or [float("nan")]) for x in times.values())
    floor = first.bytes_once / options.bandwidth / 1e6
    return [f"{floor:.1f}", f"{each:.1f}", f"{shared:.1f}", f"{each / shared:.2f}"]


def ways(device: torch.device) -> dict[str, Callable[[Inputs], Call]]:
    found = {"split_kv, packed": packed("split_kv")}
    found |= {f"split_kv, pages of {page}": paged("split_kv", page) for page in (16, 256)}
    available = nta.available_backends()
    for name in ("flash_attn_4", "torch_flash", "token_tiled"):
        if device.type == "cuda" and available[name] is None:
            found[name] = packed(name)
    if device.type == "cuda" and importlib.util.find_spec("flashinfer"):
        found["FlashInfer, pages of 16"] = flashinfer(16)
    return found


def captured(calls: list[Call]) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, calls: int, replays: int = 5) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / (replays * calls)


def run(case: Workload, device: torch.device, rounds: int) -> dict[str, tuple[float, float]]:
    """Way → its error over that of the reference in the same dtype, and its time in µs."""
    torch.manual_seed(0)
    copies = max(2, -(-L2_BYTES // case.bytes)) if device.type == "cuda" else 1
    inputs = [Inputs.random(case, device) for _ in range(copies)]
    first = inputs[0]
    exact = packed("reference")(
        Inputs(first.query.double(), first.key.double(), first.value.double(), first.layout, first.key_layout)
    )()
    own = float((packed("reference")(first)().double() - exact).norm()) or torch.finfo(torch.float64).tiny
    errors, graphs = {}, {}
    for name, prepare in ways(device).items():
        calls = [prepare(x) for x in inputs]
        errors[name] = float((calls[0]().double() - exact).norm()) / own
        if device.type == "cuda":
            graphs[name] = captured(calls), calls  # the calls hold the pools that the graph reads
    times: dict[str, list[float]] = {name: [] for name in errors}
    for _ in range(rounds if graphs else 0):
        for name, (graph, _) in graphs.items():
            times[name].append(replay_us(graph, copies))
    return {name: (error, statistics.median(times[name] or [float("nan")])) for name, error in errors.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=["workloads", "grid", "prefill", "answers"], default=["workloads"]
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--bandwidth", type=float, default=4.3)
    parser.add_argument("--least-bytes", type=int, help="keys and values from which `answers` looks for shared pages")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    lines = [f"{where}, torch {torch.__version__}"]
    with support.by_documentation():
        if "workloads" in options.parts:
            lines += table(options, device)
        if "grid" in options.parts:
            lines += grid(device)
        if "prefill" in options.parts:
            lines += prefill(options, device)
        if "answers" in options.parts:
            lines += answers(options, device)
    show(lines, options.save)


def table(options: argparse.Namespace, device: torch.device) -> list[str]:
    """A row for each workload."""
    names = list(ways(device))
    lines = ["", "µs (error over that of the reference in the same dtype)", ""]
    lines += [f"| workload | floor | target | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for case in workloads(options.scale):
        found = run(case, device, options.rounds)
        floor = case.bytes / options.bandwidth / 1e6
        cells = " | ".join(f"{us:.1f} ({error:.2f})" for error, us in found.values())
        lines.append(f"| {case.name} | {floor:.1f} | {case.target:.0f} | {cells} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


if __name__ == "__main__":
    main()
