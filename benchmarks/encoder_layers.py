"""Training steps of wav2vec2-base (CTC, frozen feature encoder) and of SigLIP2-NaFlex: packed layers and padded.

    python benchmarks/encoder_layers.py [--tiny] [--rounds 10] [--batch 32] [--save FILE]

They run by turns on the same batch with sdpa: bf16 on a GPU, float32 on a CPU. Lengths are lognormal. ``--tiny`` takes
small models, to try the program on a CPU. Weights are random. SigLIP2 has the sizes of its base and so400m models.
"""

from __future__ import annotations

import argparse
import copy
import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from by_turns import by_turns, reserve_memory, show
from torch import Tensor

import nt_attention as nta

SO400M = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
Case = tuple[Any, dict[str, Tensor], float]  # model, inputs, positions for each token


def lengths_of(rows: int, longest: int) -> Tensor:
    """(B,) lognormal lengths, of which one is `longest`."""
    generator = torch.Generator().manual_seed(0)
    lengths = (
        (longest * 0.3 * torch.exp(0.7 * torch.randn(rows, generator=generator))).long().clamp(longest // 20, longest)
    )
    lengths[0] = longest
    return lengths


def wav2vec2(rows: int, tiny: bool) -> Case:
    """Sound of up to 20 s (2 s if `tiny`), with labels."""
    fields: dict[str, Any] = {**TINY, "conv_dim": (32,) * 7, "num_conv_pos_embedding_groups": 4} if tiny else {}
    model = transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(**fields, attn_implementation="sdpa", layerdrop=0.0)
    )
    model.freeze_feature_encoder()
    longest = 16_000 * (2 if tiny else 20)
    lengths = lengths_of(rows, longest)
    mask = torch.arange(longest) < lengths[:, None]
    inputs = {"input_values": torch.randn(rows, longest) * mask, "attention_mask": mask.long()}
    return model, {**inputs, "labels": torch.randint(1, 32, (rows, 2))}, rows * longest / int(lengths.sum())


def siglip2(rows: int, tiny: bool, **sizes: int) -> Case:
    """Images of up to 1024 patches (64 if `tiny`), with labels."""
    fields: dict[str, Any] = {**TINY, "num_patches": 64} if tiny else sizes
    vision = transformers.Siglip2VisionConfig(**fields, attn_implementation="sdpa")
    config = transformers.Siglip2Config(vision_config=vision.to_dict(), num_labels=10, attn_implementation="sdpa")
    model = transformers.Siglip2ForImageClassification(config)
    longest = 64 if tiny else 1024
    heights = lengths_of(rows, longest).float().sqrt().long().clamp(min=1)
    shapes = torch.stack([heights, heights], 1)
    lengths = shapes.prod(1)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    pixels = torch.randn(*mask.shape, vision.num_channels * vision.patch_size**2) * mask[:, :, None]
    inputs = {"pixel_values": pixels, "pixel_attention_mask": mask.long(), "spatial_shapes": shapes}
    return model, {**inputs, "labels": torch.randint(10, (rows,))}, mask.numel() / int(lengths.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    reserve_memory()
    lines = [f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {args.batch} rows", ""]
    lines += ["| step | pad ratio | padded | packed layers | ratio |", "|---|---|---|---|---|"]
    so400m = functools.partial(siglip2, **SO400M)
    cases = {"wav2vec2, CTC": wav2vec2, "SigLIP2-NaFlex base": siglip2, "SigLIP2-NaFlex so400m": so400m}
    for title, case in cases.items():
        torch.manual_seed(0)
        padded, inputs, pad_ratio = case(args.batch, args.tiny)
        padded = padded.to(device).train()
        packed, inputs = copy.deepcopy(padded), {name: x.to(device) for name, x in inputs.items()}
        handle = nta.patch(packed, packing="always", on_fallback="raise")

        def step(model: Any, inputs: dict[str, Tensor] = inputs) -> None:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(**inputs).loss
            loss.backward()
            model.zero_grad()

        times = by_turns({"padded": lambda m=padded: step(m), "packed": lambda m=packed: step(m)}, args.rounds)
        assert set(handle.calls) == {None}
        ratio = times["padded"] / times["packed"]
        lines.append(
            f"| {title} | {pad_ratio:.2f} | {times['padded']:.1f} ms | {times['packed']:.1f} ms | {ratio:.2f} × |"
        )
    show(lines, args.save)


if __name__ == "__main__":
    main()
