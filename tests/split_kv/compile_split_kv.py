"""Compile the split_kv kernels for a GPU, which this machine need not have. A test runs this.

python tests/split_kv/compile_split_kv.py 90 all   # capability; without "all" only the kernels that need most memory
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from nt_attention.kernels.split_kv import launches, triton_kernels

INTEGERS = ("Table", "TableOffsets", "Offsets", "Lengths", "Ends")
FLOATS = ("Lse", "Parts", "PartLse", "Slopes")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SPLITTING = {"CHUNK": launches.CHUNK, "MOST_SPLITS": 128, "DOUBLINGS": 1}


def compiled(function, constants: dict, capability: int, dtype: torch.dtype, warps: int, stages: int):
    signature, given, aligned = {}, {}, {}
    for i, parameter in enumerate(function.params):
        name = parameter.name
        if name in constants:
            signature[name], given[(i,)] = "constexpr", constants[name]
        elif name[0].isupper():
            kind = "i32" if name in INTEGERS else "fp32" if name in FLOATS else NAMES[dtype]
            signature[name], aligned[(i,)] = f"*{kind}", [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
            if name.partition("_")[0] in ("query", "key", "value", "out"):
                aligned[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": warps, "num_stages": stages}
    source = ASTSource(function, signature, given, aligned)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def attention(head_dim: int, dtype: torch.dtype, group: int, page: int, capability: int):
    """The kernels for small and for large tiles, with all options if keys are in pages of one row."""
    blocks, every = (head_dim, head_dim), page == 1
    for tile in launches.tile_rows(group, head_dim, dtype.itemsize):
        constants = {"GROUP": group, "PAGE": page, "RAGGED": every, "UPPER_LEFT": every, "BLOCK": launches.BLOCK}
        constants |= dict.fromkeys(("DIM", "VALUE_DIM", "BLOCK_D", "BLOCK_V"), head_dim)
        constants |= {"SOFTCAP": every, "ALIBI": every, "EXACT": dtype == torch.float32, "PRECISION": "tf32x3"}
        constants |= {"BLOCK_M": tile, "BLOCK_N": launches.block_of_keys(blocks, dtype.itemsize), **SPLITTING}
        warps = launches.warps_of(tile, blocks)
        yield tile, compiled(triton_kernels.attention_kernel, constants, capability, dtype, warps, launches.STAGES)


CASES = [(256, torch.bfloat16, 4, 1), (256, torch.float32, 4, 16)]
MORE_CASES = [(64, torch.bfloat16, 1, 16), (128, torch.bfloat16, 4, 0), (128, torch.float32, 4, 1)]
MORE_CASES += [(128, torch.float16, 71, 16), (256, torch.float32, 71, 1)]


def main(capability: int, cases: list) -> None:
    for head_dim, dtype, group, page in cases:
        for tile, kernel in attention(head_dim, dtype, group, page, capability):
            wide = sum(map(kernel.asm["ptx"].count, ("cp.async.cg", "ld.global.v4")))  # 16 bytes each
            print("attention", head_dim, NAMES[dtype], group, page, tile, wide, kernel.metadata.shared)
    common = {"GROUP": 4, "BLOCK_M": 16, "UPPER_LEFT": False, **SPLITTING}
    others = {triton_kernels.plan_kernel: {"BLOCK": launches.BLOCK}}
    others[triton_kernels.combine_kernel] = {"VALUE_DIM": 128, "BLOCK_V": 128, "BLOCK_S": 16}
    for function, more in others.items():
        kernel = compiled(function, common | more, capability, torch.bfloat16, 4, 1)
        print(function.__name__, kernel.metadata.shared)


if __name__ == "__main__":
    main(int(sys.argv[1]), CASES + (MORE_CASES if sys.argv[2:] == ["all"] else []))
