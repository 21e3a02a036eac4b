"""Time of ``nta.patch`` on a CPU: with the check of a model, and for an equal model, which is not checked again.

    python benchmarks/patch_time.py [--rounds 9]

Models have the layers of their default configs, but small widths. "first call" is the time of a padded batch that is
also compared with the padded run, and "later calls" that of the same batch afterwards. Also the time of importing
``nt_attention``, in processes of their own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import nt_attention as nta

SMALL = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 99, "num_attention_heads": 4}
KINDS = ("BertForSequenceClassification", "LlamaForCausalLM", "MixtralForCausalLM", "Gemma3ForCausalLM", "JambaModel")


def time_ms(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3


def median_ms(function: Callable[[], Any], rounds: int) -> float:
    return statistics.median(time_ms(function) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(2)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; ms, medians but for what is first")
    print("| model | layers | first patch | patch of an equal model | first call | later calls |")
    print("|---|---|---|---|---|---|")
    mask = (torch.arange(64) < torch.tensor([[64], [40], [21], [9]])).long()
    batch = {"input_ids": 7 * mask, "attention_mask": mask}
    for name in KINDS:
        kind = getattr(transformers, name)
        more = {} if name.startswith("Bert") else {"head_dim": 16, "num_key_value_heads": 2}
        model = kind(kind.config_class(**SMALL, **more)).eval()
        first = time_ms(lambda model=model: nta.patch(model).remove())
        again = median_ms(lambda model=model: nta.patch(model).remove(), rounds)
        with nta.patch(model), torch.no_grad():
            compared = time_ms(lambda model=model: model(**batch))
            later = median_ms(lambda model=model: model(**batch), rounds)
        times = " | ".join(f"{x:.1f}" for x in (first, again, compared, later))
        print(f"| {name} | {model.config.num_hidden_layers} | {times} |", flush=True)
    command = [sys.executable, "-c", "import nt_attention"]
    print(f"import nt_attention: {median_ms(lambda: subprocess.run(command, check=True), rounds):.0f} ms")


if __name__ == "__main__":
    main()
