"""Compile the split_kv kernels for a GPU, which this machine need not have. A test runs this.

python tests/split_kv/compile_split_kv.py 90 227 all   # without "all" only the kernels that need most memory

The numbers are the compute capability, and the KiB of shared memory that a program may have.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from nt_attention.kernels.call import AttentionSpec
from nt_attention.kernels.split_kv import launches, sharing, triton_kernels
from nt_attention.kernels.triton_support import block_size, column_parts

INTEGERS = ("Table", "TableOffsets", "Offsets", "Lengths")
LONG_INTEGERS = ("FirstKeys", "BundleOffsets", "SharedKeys", "Entries")
FLOATS = ("Lse", "Parts", "PartLse", "Slopes")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(function, constants: dict, capability: int, dtype: torch.dtype, warps: int, stages: int):
    signature, given, aligned = {}, {}, {}
    for i, parameter in enumerate(function.params):
        name = parameter.name
        if name in constants:
            signature[name], given[(i,)] = "constexpr", constants[name]
        elif name[0].isupper():
            kind = "i32" if name in INTEGERS else "fp32" if name in FLOATS else NAMES[dtype]
            kind = "i64" if name in LONG_INTEGERS else kind
            signature[name], aligned[(i,)] = f"*{kind}", [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
            if name.partition("_")[0] in ("query", "key", "value", "out"):
                aligned[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": warps, "num_stages": stages}
    source = ASTSource(function, signature, given, aligned)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def attention(dims: tuple[int, int], dtype: torch.dtype, group: int, page: int, capability: int):
    """The kernels for small and for large tiles, with all options if keys are in pages of one row."""
    (head_dim, value_dim), every = dims, page == 1
    spec = AttentionSpec(torch.device("cpu"), dtype, group, 1, head_dim, value_dim, 0.125)
    small, large = launches.tile_rows(spec)
    tiles = [("all", small), ("all", large)]
    if page and group <= 16:
        tiles += [("other", small), ("shared", min(large, block_size(sharing.BUNDLE * group)))]
    for part, tile in tiles:
        constants = {"GROUP": group, "PAGE": page, "BLOCK": launches.BLOCKS[1], "EXACT": dtype == torch.float32}
        constants |= dict.fromkeys(("RAGGED", "UPPER_LEFT", "WIDE", "SOFTCAP", "ALIBI"), every)
        constants |= {"DIM": head_dim, "VALUE_DIM": value_dim}
        constants["BLOCK_D"], constants["REST_D"] = column_parts(head_dim)
        constants["BLOCK_V"], constants["REST_V"] = column_parts(value_dim)
        constants |= {
            "LINEAR": not every,
            "BLOCK_M": tile,
            "BLOCK_N": launches.block_of_keys(tile, spec),
            "PRECISION": "tf32x3",
            "PART": part,
        }
        warps, stages = launches.warps_of(tile, spec), launches.stages_of(tile, spec)
        yield tile, compiled(triton_kernels.attention_kernel, constants, capability, dtype, warps, stages)


CASES = [((256, 256), torch.bfloat16, 4, 1), ((256, 256), torch.float32, 4, 16), ((576, 512), torch.bfloat16, 8, 16)]
MORE_CASES = [((64, 64), torch.bfloat16, 1, 16), ((128, 128), torch.bfloat16, 4, 0), ((128, 128), torch.float32, 4, 1)]
MORE_CASES += [((128, 128), torch.float16, 71, 256), ((256, 256), torch.float32, 71, 1)]
MORE_CASES += [
    ((64, 128), torch.bfloat16, 4, 24),
    ((320, 320), torch.float16, 8, 1),
    ((512, 512), torch.bfloat16, 71, 0),
]


def main(capability: int, cases: list) -> None:
    for dims, dtype, group, page in cases:
        for tile, kernel in attention(dims, dtype, group, page, capability):
            wide = sum(map(kernel.asm["ptx"].count, ("cp.async.cg", "ld.global.v4")))  # 16 bytes each
            print("attention", *dims, NAMES[dtype], group, page, tile, wide, kernel.metadata.shared)
    constants = {"GROUP": 4, "BLOCK_M": 16, "UPPER_LEFT": False, "VALUE_DIM": 128}
    constants |= {"BLOCK_S": launches.SPLITS_AT_ONCE, "COLUMNS": launches.COLUMNS}
    constants |= {"BUNDLE": sharing.BUNDLE, "PAGE": 16, "RAGGED": True, "BLOCK": sharing.PAGES_AT_ONCE}
    more = (capability, torch.bfloat16)
    for part in ("all", "other"):
        constants["PART"] = part
        kernel = compiled(triton_kernels.combine_kernel, constants, *more, launches.COMBINE_WARPS, 1)
        print("combine", kernel.metadata.shared)
    print(
        "shared_keys", compiled(triton_kernels.shared_keys_kernel, constants, *more, sharing.WARPS, 1).metadata.shared
    )


if __name__ == "__main__":
    launches.shared_memory = lambda device: 1024 * int(sys.argv[2])
    main(int(sys.argv[1]), CASES + (MORE_CASES if sys.argv[3:] == ["all"] else []))
