"""Train with GRPO in TRL, and compute the prompt of each group once. Rewards and gradient norms stay the same.

TRL repeats a prompt in the row of each of its answers. The model has random weights, and the text is Python's
documentation, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
from typing import Any

from shared_data import llama_config, paragraphs
from transformers import LlamaForCausalLM, set_seed
from trl_grpo import show, train

import nt_attention as nta


def run(shared: bool, options: argparse.Namespace) -> dict[str, Any]:
    """The steps, and the handle."""
    set_seed(0)
    model = LlamaForCausalLM(llama_config(options.hidden_size))
    handle = nta.patch(model, shared_prefixes=shared)  # the only new line
    return {**train(model, paragraphs(300, 64), options.steps, answers=8), "handle": handle}


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=64)
    options = parser.parse_args(argv)
    results = {"packed": run(False, options), "shared": run(True, options)}
    show(results)
    print(results["shared"]["handle"].prefixes)
    return results


if __name__ == "__main__":
    main()
