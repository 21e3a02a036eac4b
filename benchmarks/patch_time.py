"""Time of the check of ``nta.patch`` on a CPU: a first patch of a model, and that of a second, equal model.

    python benchmarks/patch_time.py [--rounds 5] [--threads 1]

The check runs the model itself on short rows, see ``nt_attention/hf/check``. What it has found for equal models is
forgotten before each first patch. ``BertModel`` has the sizes of BERT-base. The others have the layers of their default
configs, but small widths, so that mostly the host takes the time; one of them can't be packed. Also the time of a
padded forward of the rows of the check, and of importing ``nt_attention``, in processes of their own.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import nt_attention as nta
from nt_attention.hf.check import plans
from nt_attention.hf.check.rows import Rows

SMALL = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 99, "num_attention_heads": 4}
SIZES = {
    "BertModel": {},
    "BertForSequenceClassification": SMALL,
    "LlamaForCausalLM": SMALL | {"num_key_value_heads": 2, "head_dim": 16},
    "MixtralForCausalLM": SMALL | {"num_key_value_heads": 2},
    "Gemma3ForCausalLM": SMALL | {"num_key_value_heads": 2, "head_dim": 16},
    "JambaModel": SMALL | {"num_key_value_heads": 2},
    "LongformerModel": SMALL,
}


def median_ms(function: Callable[[], Any], rounds: int, before: Callable[[], Any] | None = None) -> float:
    times = []
    for _ in range(rounds):
        if before is not None:
            before()
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def patch_and_remove(model: Any) -> bool:
    """Whether the model can be packed."""
    try:
        nta.patch(model).remove()
    except ValueError:
        return False
    return True


def measure(name: str, rounds: int) -> None:
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES[name])).eval()
    second, inputs = copy.deepcopy(model), Rows.draw(model).inputs
    packs = patch_and_remove(model)
    with torch.no_grad():
        forward = median_ms(lambda: model(**inputs), rounds)
    first = median_ms(lambda: patch_and_remove(model), rounds, before=plans._kept.clear)
    equal = median_ms(lambda: patch_and_remove(second), rounds)
    layers, kept = model.config.num_hidden_layers, "packed" if packs else "not packed"
    print(f"| {name} | {layers} | {kept} | {forward:.0f} | {first:.0f} | {equal:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, threads: {options.threads}; medians, ms"
    )
    print("| model | layers | | forward of its rows | first patch | an equal model |\n|---|---|---|---|---|---|")
    for name in SIZES:
        measure(name, options.rounds)
    command = [sys.executable, "-c", "import nt_attention"]
    print(f"import nt_attention: {median_ms(lambda: subprocess.run(command, check=True), options.rounds):.0f} ms")


if __name__ == "__main__":
    main()
