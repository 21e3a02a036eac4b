"""Time and memory of ``nta.patch``: a first patch of a model, which checks it, and that of a second, equal model.

    python benchmarks/patch_time.py [--rounds 5] [--threads 1]
    python benchmarks/patch_time.py --device cuda

The check runs the model itself on short rows, see ``nt_attention/hf/check``. What it has found for equal models is
forgotten before each first patch. On a CPU, ``BertModel`` has the sizes of BERT-base; the others have the layers of
their default configs, but small widths, so that mostly the host takes the time; one of them can't be packed. On a GPU,
models have the sizes of BERT-base, Qwen3-0.6B (also with LoRA) and Llama-3.1-8B, in bfloat16 with random weights, and a
batch of 8 rows of 40 to 512 tokens shows what the comparison of the first batch takes.

Columns: "rows" is an unpatched padded forward of the rows of the check, without gradients. "first patch, cold" is that
of this model in this process, in which kernels may be compiled; "first patch" and "an equal model" are later ones.
"first call" and "later call" are of a padded batch without gradients; the first is compared with the padded run.
"memory" is the highest during the check, over that of "rows", both with the model.
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
from nt_attention.hf.check import first_batches, plans
from nt_attention.hf.check.rows import Rows

SMALL = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 99, "num_attention_heads": 4}
QWEN = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256,
}  # fmt: skip
ON_CPU = {
    "BertModel": {},
    "BertForSequenceClassification": SMALL,
    "LlamaForCausalLM": SMALL | {"num_key_value_heads": 2, "head_dim": 16},
    "MixtralForCausalLM": SMALL | {"num_key_value_heads": 2},
    "Gemma3ForCausalLM": SMALL | {"num_key_value_heads": 2, "head_dim": 16},
    "JambaModel": SMALL | {"num_key_value_heads": 2},
    "LongformerModel": SMALL,
}
ON_GPU = {"BertModel": {}, "Qwen3ForCausalLM": QWEN, "Qwen3ForCausalLM with LoRA": QWEN, "LlamaForCausalLM": LLAMA}
COLUMNS = (
    "model", "", "rows", "first patch, cold", "first patch", "an equal model", "first call", "later call", "memory",
)  # fmt: skip
LENGTHS = (512, 400, 300, 200, 150, 100, 64, 40)


def median_ms(function: Callable[[], Any], rounds: int, before: Callable[[], Any] | None = None) -> float:
    times = []
    for _ in range(rounds):
        if before is not None:
            before()
        synchronize()
        begin = time.perf_counter()
        function()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_of(function: Callable[[], Any]) -> int:
    """The highest number of bytes that are allocated meanwhile; 0 on a CPU."""
    if not torch.cuda.is_available():
        function()
        return 0
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated()


def patch_and_remove(model: Any) -> bool:
    """Whether the model can be packed."""
    try:
        nta.patch(model).remove()
    except ValueError:
        return False
    return True


def make(name: str, sizes: dict[str, Any], device: str) -> Any:
    name, _, adapter = name.partition(" with ")
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = kind(kind.config_class(**sizes)).eval()
        if adapter:
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"])).eval()
    torch.set_default_dtype(torch.float32)
    return model


def compare_first_batch(model: Any, rounds: int) -> tuple[float, float]:
    """The time of a first call, and of later ones."""
    device = next(model.parameters()).device
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long().to(device)
    batch = {"input_ids": torch.randint(5, 99, mask.shape, device=device) * mask, "attention_mask": mask}
    with torch.no_grad():
        with nta.patch(model, packing="always", check="never"):
            model(**batch)  # kernels are chosen and compiled
        first = []
        for _ in range(rounds):
            first_batches._of_model.clear()  # what was compared
            with nta.patch(model, packing="always"):
                first.append(median_ms(lambda: model(**batch), 1))
                later = median_ms(lambda: model(**batch), rounds)
    return statistics.median(first), later


def measure(name: str, sizes: dict[str, Any], device: str, rounds: int) -> None:
    model = make(name, sizes, device)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inputs = Rows.draw(inner).inputs
    begin = time.perf_counter()
    packs = patch_and_remove(model)
    cold = (time.perf_counter() - begin) * 1e3
    with torch.no_grad():
        forward = median_ms(lambda: model(**inputs), rounds)
        of_rows = peak_of(lambda: model(**inputs))
    first = median_ms(lambda: patch_and_remove(model), rounds, before=plans._kept.clear)
    plans._kept.clear()
    of_check = peak_of(lambda: patch_and_remove(model))
    equal = median_ms(lambda: patch_and_remove(model), rounds)
    memory = f"{of_check / of_rows:.3f} of {of_rows / 2**30:.2f} GiB" if of_rows else ""
    call, later = compare_first_batch(model, rounds) if packs else (float("nan"), float("nan"))
    print(
        f"| {name} | {'packed' if packs else 'not packed'} | {forward:.0f} | {cold:.0f} | {first:.0f} | {equal:.1f} | "
        f"{call:.0f} | {later:.1f} | {memory} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, threads: {options.threads}"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {where}; medians, ms")
    columns = (
        "model",
        "",
        "rows",
        "first patch, cold",
        "first patch",
        "an equal model",
        "first call",
        "later call",
        "memory",
    )
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, sizes in (ON_GPU if options.device == "cuda" else ON_CPU).items():
        measure(name, sizes, options.device, options.rounds)
    command = [sys.executable, "-c", "import nt_attention"]
    print(f"import nt_attention: {median_ms(lambda: subprocess.run(command, check=True), options.rounds):.0f} ms")


if __name__ == "__main__":
    main()
