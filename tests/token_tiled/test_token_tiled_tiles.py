"""The token-tiled kernels with any tile sizes, the tables of tile sizes, and one plan for all layers."""

import itertools

import pytest
import torch
from oracle import GEOMETRIES, Problem, assert_same
from sweeps import sweep_product
from token_tiled_cases import DEVICE, DTYPES, IGNORED_WARNINGS, case_of, cases_of, check, exact, on_tiles, placed, truth

import nt_attention as nta
from nt_attention.kernels.token_tiled import configs, ops
from nt_attention.kernels.token_tiled.configs import Config, Tile
from nt_attention.kernels.token_tiled.plan import Plan

pytestmark = IGNORED_WARNINGS

TILES = {
    "wide": Config(16, *[Tile(16, 32, 4, 1)] * 4),
    "tall": Config(16, *[Tile(32, 16, 4, 1)] * 4),
    "each-its-own": Config(32, Tile(16, 64, 4, 1), Tile(64, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 32, 4, 1)),
    "nothing-shared": Config(0, Tile(32, 16, 4, 1), Tile(16, 64, 4, 1), Tile(64, 16, 4, 1), Tile(16, 16, 4, 1)),
}


@exact
@cases_of("tiles, geometry, extra, dtype", 11, TILES, GEOMETRIES, ["plain", "all"], DTYPES)
def test_any_tile_sizes(monkeypatch, tiles, geometry, extra, dtype):
    monkeypatch.setattr(ops, "config_for", lambda *_: TILES[tiles])
    check(case_of("cross", geometry, extra, dtype=dtype))


@exact
@sweep_product(
    "tiles, window", ["tall", "nothing-shared"], [(2, -1), (-1, 2), (17, -1), (-1, 17), (23, 29), (3, 2**63 - 1)]
)
def test_windows_within_a_tile(monkeypatch, tiles, window):
    monkeypatch.setattr(ops, "config_for", lambda *_: TILES[tiles])
    check(placed(Problem([67], None, 1, 1, 5, 5, dtype=torch.float16, options={"window_size": window})))


@pytest.mark.parametrize("table", configs.TABLES.values(), ids=map(str, configs.TABLES))
def test_tile_size_tables_are_valid(table):
    assert set(table) == {*itertools.product([64, 128, 256], [2, 4]), (384, 2), (512, 2), (576, 2)}
    for profiles in table.values():
        assert list(profiles)[-1] == (configs.ANY, configs.ANY), "no batch is left out"
        for config in profiles.values():
            assert config.fused.block_n >= config.shared, "the keys of a fused tile are one block"
            for tile in (config.forward, config.query, config.key, config.fused):
                for size in (tile.block_m, tile.block_n):
                    assert size >= 16, "matrix instructions"
                    assert size & (size - 1) == 0, "tl.arange"


@pytest.mark.parametrize(
    ("capability", "kib", "table"),
    [(9, 227, "H200"), (10, 227, "B200"), (8, 163, "A100"), (8, 99, "SMALL"), (12, 99, "SMALL"), (9, 63, "SMALL")],
)
def test_table_of_a_gpu(capability, kib, table):
    assert configs.table_for(capability, kib) is getattr(configs, table)


def test_plan_is_shared_by_all_layers_and_both_directions(monkeypatch):
    made = []
    monkeypatch.setattr(Plan, "make", lambda *args, make=Plan.make: made.append(1) or make(*args))
    case = case_of("cross", "causal", "plain", dtype=torch.float16)
    function = on_tiles(case)
    for _ in range(2):
        case.solve(function)
    function(**case.inputs, **case.options, softcap=1.3, batch_invariant=True)
    assert len(made) == 1


def test_plans_of_one_query_layout_are_cached_separately():
    """Plans differ by key layout, alignment and window."""
    lengths = [5, 3, 17]
    layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
    key_layouts = {keys: nta.SequenceLayout.from_lengths(keys, device=DEVICE) for keys in ((7, 2, 19), (2, 7, 19))}
    for _ in range(2):
        for keys, name in itertools.product(key_layouts, ["causal", "causal-upper_left", "causal-window"]):
            case = placed(Problem(lengths, keys, 1, 1, 5, 5, dtype=torch.float32, options=GEOMETRIES[name]))
            out, lse = nta.varlen_attention(
                **case.inputs, **case.options, layout=layout, key_layout=key_layouts[keys], return_lse=True,
                backend="token_tiled",
            )  # fmt: skip
            want = truth(case)
            assert_same({"out": out, "lse": lse}, {name: want[name] for name in ("out", "lse")}, 1e-5)
