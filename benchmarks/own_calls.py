"""Count the calls of the package's own Python functions in a warm call, by file and function. Runs on the CPU.

    python benchmarks/own_calls.py [--case packed|trained|module|patched] [--functions 25]

The number does not depend on the machine, so it shows what a change does to the host time where clocks are too noisy.
Functions of PyTorch and transformers are not counted. Compare two trees with `PYTHONPATH=OTHER_TREE`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import nt_attention as nta

PACKAGE = str(Path(nta.__file__).parent)
LENGTHS = [30, 7, 64, 27]
WARMUP = 3


def count(function: Callable[[], object]) -> Counter[tuple[str, str]]:
    """(file, function) → its calls in one run, after runs to warm up."""
    calls: Counter[tuple[str, str]] = Counter()

    def see(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls[code.co_filename[len(PACKAGE) + 1 :], code.co_qualname] += 1

    for _ in range(WARMUP):
        function()
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def packed() -> Callable[[], object]:
    """`varlen_attention` of packed tensors, without gradients."""
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    query, key, value = torch.randn(3, layout.total, 4, 16).unbind()
    return lambda: nta.varlen_attention(query, key, value, layout)


def trained() -> Callable[[], object]:
    """The same with gradients, forward and backward."""
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    query, key, value = (torch.randn(layout.total, 4, 16, requires_grad=True) for _ in range(3))
    return lambda: nta.varlen_attention(query, key, value, layout).sum().backward()


def module() -> Callable[[], object]:
    """The second layer of a model: the module with the NestedTensor that the first one returned. Without gradients."""
    layers = [nta.VarlenMultiheadAttention(64, 4) for _ in range(2)]
    x = nta.SequenceLayout.from_lengths(LENGTHS).to_nested(torch.randn(sum(LENGTHS), 64))
    with torch.no_grad():
        hidden = layers[0](x, x, x)[0]
    return torch.no_grad()(lambda: layers[1](hidden, hidden, hidden))


def patched() -> Callable[[], object]:
    """A batch of a patched BERT of two layers, without gradients."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
    model = BertModel(BertConfig(num_hidden_layers=2, **sizes)).eval()
    nta.patch(model, packing="always")
    ids = torch.randint(1, 100, (len(LENGTHS), max(LENGTHS)))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return torch.no_grad()(lambda: model(input_ids=ids, attention_mask=mask))


CASES = {"packed": packed, "trained": trained, "module": module, "patched": patched}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--functions", type=int, default=25, help="how many are listed, those with most calls first")
    options = parser.parse_args()
    for name in options.case or CASES:
        calls = count(CASES[name]())
        files: Counter[str] = Counter()
        for (file, _), number in calls.items():
            files[file] += number
        print(f"{name}: {sum(calls.values())} own calls")
        for file, number in files.most_common():
            print(f"  {number:4}  {file}")
        for (file, function), number in calls.most_common(options.functions):
            print(f"        {number:4}  {file}: {function}")


if __name__ == "__main__":
    main()
