"""Eight threads on one patched and one registered model: every call gives what it gives alone.

``python tests/patch/eight_threads.py --calls 100000`` runs the full count; the tests run a part of it.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
import tiny

import nt_attention as nta
from nt_attention import NotPackedWarning

LENGTHS, LENGTH = [7, 1, 5, 11], 13


def models():
    """A patched model and a registered one, the base model under the first, and the handle."""
    patched = tiny.make("llama", "LlamaForCausalLM", "sdpa", num_hidden_layers=1)
    registered = tiny.make("llama", "LlamaForCausalLM", nta.hf.register(), num_hidden_layers=1)
    handle = nta.patch(patched)
    return {"patched": patched, "its base model": patched.model, "registered": registered}, handle


def batches():
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, tiny.VOCABULARY, mask.shape)
    padded = {"input_ids": ids, "attention_mask": mask.long()}
    left = {"input_ids": ids.flip(1), "attention_mask": mask.long().flip(1)}
    packed = {"input_ids": ids[mask][None], "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    return {
        "padded": padded, "padded, with a cache": {**padded, "use_cache": True}, "left": left,
        "packed": {**packed, "use_cache": False}, "no padding": {"input_ids": ids},
    }  # fmt: skip


def fresh(batch):
    """Copies, as from a data loader: otherwise cached layouts would be found."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def run(calls: int, threads: int = 8) -> tuple[int, dict[str, int]]:
    """Make this number of calls in total, and compare each with the first of its kind.

    Returns:
        how many calls the handle has counted, and how many calls of each kind were made.
    """
    torch.manual_seed(0)
    of, handle = models()
    kinds = [(name, form, batch) for name in of for form, batch in batches().items()]
    with torch.no_grad():
        wanted = {(name, form): of[name](**fresh(batch))[0] for name, form, batch in kinds}
    counted, made = sum(handle.calls.values()), dict.fromkeys(wanted, 0)
    start, lock = threading.Barrier(threads), threading.Lock()

    def work(which: int) -> None:
        start.wait()
        for call in range(which, calls, threads):
            name, form, batch = kinds[call // threads * 7 % len(kinds)]
            with torch.no_grad():
                got = of[name](**fresh(batch))[0]
            torch.testing.assert_close(got, wanted[name, form], rtol=1e-4, atol=1e-5)
            with lock:
                made[name, form] += 1

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, which) for which in range(threads)]:
            done.result()
    assert sum(made.values()) == calls
    in_all = {f"{name}, {form}": count for (name, form), count in made.items()}
    return sum(handle.calls.values()) - counted, in_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", NotPackedWarning)
    sys.setswitchinterval(1e-5)
    begun = time.perf_counter()
    _, made = run(options.calls, options.threads)
    for kind, count in made.items():
        print(f"{count:>8}  {kind}")
    print(f"{options.calls} calls on {options.threads} threads without an error, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
