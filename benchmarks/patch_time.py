"""Time of ``nta.patch`` on a CPU: for models whose proof is shipped, and for a new proof of the same models.

    python benchmarks/patch_time.py [--rounds 9]

Models have the layers of their default configs, but small widths. A shipped proof is looked up each time: its key is
made from the config, the modules and the source files of the model. "lookup" is the time of this alone, which patch did
not need when it had a table of families. Also the time of importing ``nt_attention``, in processes of their own.
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
from nt_attention.hf.prove import store

import nt_attention as nta

SMALL = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 99, "num_attention_heads": 4}
KINDS = ("BertForSequenceClassification", "LlamaForCausalLM", "MixtralForCausalLM", "Gemma3ForCausalLM", "JambaModel")


def median_ms(function: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def patch_and_remove(model: Any) -> None:
    try:
        nta.patch(model).remove()
    except ValueError:  # it can't be packed
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(2)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; medians, ms")
    print("| model | layers | patch and remove | of this, lookup | new proof |\n|---|---|---|---|---|")
    for name in KINDS:
        kind = getattr(transformers, name)
        more = {"head_dim": 16, "num_key_value_heads": 2} if name.startswith(("Gemma", "Llama")) else {}
        model = kind(kind.config_class(**SMALL, **more)).eval()
        known = "" if store.key_of(model) in store.shipped() else " (not shipped)"
        store.proof_of(model)
        whole = median_ms(lambda model=model: patch_and_remove(model), rounds)
        lookup = median_ms(lambda model=model: store.proof_of(model), rounds)
        new = median_ms(lambda model=model: store.make(model), 3)
        layers = model.config.num_hidden_layers
        print(f"| {name}{known} | {layers} | {whole:.1f} | {lookup:.1f} | {new:.0f} |", flush=True)
    command = [sys.executable, "-c", "import nt_attention"]
    print(f"import nt_attention: {median_ms(lambda: subprocess.run(command, check=True), rounds):.0f} ms")


if __name__ == "__main__":
    main()
