"""Compile token-tiled kernels for a GPU, which this machine need not have. A test runs this.

python tests/token_tiled/compile_token_tiled.py 90 forward query   # capability, kernels (all by default)
python tests/token_tiled/compile_token_tiled.py 86 99 256 512/2    # capability, KiB of shared memory, head dims / bytes

The second form compiles the kernels of the table for GPUs with so much shared memory, of an element of 2 bytes if no
other size is given. It prints the memory that each needs.
"""

import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from nt_attention.kernels import bounds_kernels
from nt_attention.kernels.token_tiled import plan_kernels, triton_kernels
from nt_attention.kernels.token_tiled.configs import H200, table_for
from nt_attention.kernels.triton_support import column_parts

KERNELS = ("forward", "query", "key", "fused")
INT_POINTERS = ("Tiles", "Lo", "Hi", "Own", "Buckets")
FLOAT_POINTERS = ("Lse", "Delta", "GradLse", "Slopes", "GradBias", "GradQueryBias", "GradKeyBias")
# switches → RELATIVE: no options, the same with bounds of the lengths, or all options, with the gradients of biases: in
# any order, the same between queries and keys that are the same tokens, and in a fixed order
SWITCHES = {"plain": 0, "bounded": 0, "all": 15, "same_tokens": 47, "ordered": 31}


def compiled(name: str, switches: str, capability: int, head_dim=64, itemsize=2, tile=None):
    """One kernel, with the tile of short sequences if no other is given."""
    plain = switches in ("plain", "bounded")
    function = getattr(triton_kernels, f"{name}_kernel")
    tile = tile or getattr(H200[64, 2][128, 48], name)
    constants = dict.fromkeys(("DIM", "VALUE_DIM"), head_dim)
    for columns in (("BLOCK_D", "REST_D"), ("BLOCK_V", "REST_V")):
        constants |= zip(columns, column_parts(head_dim), strict=True)
    constants |= {"GROUP": 2, "HEADS": 2, "UNIT": 16, "FAR": False, "EXACT": itemsize == 4, "PRECISION": "tf32x3"}
    constants |= {"BOUNDED": switches == "bounded"}
    constants |= {"LINEAR": plain} | dict.fromkeys(("SOFTCAP", "ALIBI", "DROPOUT", "LSE_GRADIENT"), not plain)
    constants |= {"RELATIVE": SWITCHES[switches]}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    signature, given, aligned = {}, {}, {}
    for i, parameter in enumerate(function.params):
        kind = parameter.name
        if kind in constants:
            signature[kind], given[(i,)] = "constexpr", constants[kind]
        elif kind[0].isupper():
            element = (
                "i64" if kind == "Seed" else "i32" if kind in INT_POINTERS else "bf16" if itemsize == 2 else "fp32"
            )
            signature[kind] = "*fp32" if kind in FLOAT_POINTERS else f"*{element}"
            aligned[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[kind] = "fp32" if kind in ("scale", "softcap", "dropout_p") else "i32"
    source = ASTSource(function, signature, given, aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages if plain else tile.stages_with_biases}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


# kernels without switches → their compile-time arguments
OTHERS = {
    triton_kernels.interval_kernel: [{"UPPER_LEFT": x, "BLOCK": 256} for x in (False, True)],
    bounds_kernels.check_kernel: [{"SAME": x, "BLOCK": 1024} for x in (False, True)],
    bounds_kernels.fill_kernel: [{"BLOCK": 1024}],
    plan_kernels.runs_kernel: [{"SAME": x, "SHARED": 64, "BLOCK": 1024} for x in (False, True)],
    plan_kernels.count_kernel: [{"ROWS": 64, "SHARED": 64, "KIND": x, "BLOCK": 1024} for x in (1, 2, 3)],
    plan_kernels.tile_kernel: [{"ROWS": 64, "KIND": x, "BLOCK": 256} for x in range(4)],
}


def compiled_other(function, constants: dict, capability: int):
    """A kernel of `OTHERS`."""
    kinds = {parameter.name: "*i32" if parameter.name[0].isupper() else "i32" for parameter in function.params}
    kinds |= {"Values": "*bf16"} if "Values" in kinds else {}
    signature = kinds | dict.fromkeys(constants, "constexpr")
    given = {(list(kinds).index(name),): value for name, value in constants.items()}
    return compile(ASTSource(function, signature, given), target=GPUTarget("cuda", capability, 32))


def print_memory(capability: int, kib: int, which: list[str]) -> None:
    """The shared memory of all tiles of some head dims."""
    for each in which:
        head_dim, _, itemsize = each.partition("/")
        at = int(head_dim), int(itemsize or 2)
        for name in KERNELS:
            configs = table_for(capability // 10, kib)[at].values()
            for tile in {getattr(config, name) for config in configs if name != "fused" or config.shared}:
                for switches in ("plain", "all"):
                    shared = compiled(name, switches, capability, *at, tile).metadata.shared
                    print(name, *at, *tile, switches, shared)


def main() -> None:
    capability = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    if sys.argv[2:3] and sys.argv[2].isdecimal():
        print_memory(capability, int(sys.argv[2]), sys.argv[3:])
        return
    names = sys.argv[2:] or (*KERNELS, "others")
    if "others" in names:
        for function, variants in OTHERS.items():
            for constants in variants:
                ptx = compiled_other(function, constants, capability).asm["ptx"]
                print(function.__name__, ptx.count("st.global"), "stores")
    for name in [name for name in names if name != "others"]:
        for switches in SWITCHES:
            kernel = compiled(name, switches, capability)
            ptx = kernel.asm["ptx"]
            matrix = sum(map(ptx.count, ("wgmma.mma_async", "mma.sync")))
            wide = sum(map(ptx.count, ("cp.async.cg", "ld.global.v4")))  # 16 bytes each
            print(name, switches, matrix, "matrix", wide, "wide", kernel.metadata.shared, "bytes")


if __name__ == "__main__":
    main()
