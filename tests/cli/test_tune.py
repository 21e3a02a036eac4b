"""`python -m nt_attention tune` without a GPU: what it measures, the fit, and the file that "auto" then reads."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nt_attention import SequenceLayout
from nt_attention.__main__ import main
from nt_attention.cli import timing, tune
from nt_attention.cli.calls import CAUSAL, CaseInputs, NotSupportedError, Workload
from nt_attention.kernels import cost_model, measurements
from nt_attention.kernels.call import AttentionSpec, Call
from nt_attention.kernels.call_size import CallSize
from nt_attention.kernels.cost_model import counts, kind_of
from nt_attention.kernels.measurements import Card
from nt_attention.kernels.select import BACKENDS, explain_spec

CPU = torch.device("cpu")

# µs for a call, ns for a head's sequence, token and 1000 pairs, a key of the longest query, and a key head's sequence
NUMBERS = {
    "token_tiled": (10.0, 0.0, 3.0, 40.0, 0.0, 0.0),
    "flash_attn_4": (20.0, 70.0, 0.0, 10.0, 3.0, 50.0),
    "torch_flash": (0.0, 0.0, 1.0, 90.0, 90.0, 0.0),
    "split_kv": (30.0, 0.0, 9.0, 1.0, 0.0, 20.0),
}

SMALL_GRID = (
    *(
        ("uniform:16", 512, 1.0, 1),
        ("equal:64", 256, 1.0, 4),
        ("lognormal:256", 512, 1.0, 1),
        ("equal:300", 300, 0.5, 1),
    ),
    *(("lognormal:128", 1024, 1.0, 4), ("equal:17", 680, 1.0, 1), ("uniform:200", 400, 1.0, 1)),
)

SMALL_FEW = tuple(
    (n, queries, f"lognormal:{most}", group)
    for n, queries, most in ((3, 1, 64), (9, 1, 200), (1, 1, 500), (5, 2, 90))
    for group in (1, 4, 8)
)


def spec_and_size(workload, dtype, backward):
    layout = SequenceLayout.from_lengths(workload.lengths)
    keys = layout if workload.key_lengths is None else SequenceLayout.from_lengths(workload.key_lengths)
    shapes = ((1, n, workload.head_dim) for n in (workload.heads, workload.kv_heads, workload.kv_heads))
    options = dict(workload.options)
    more = {
        "needs_grad": backward,
        "equal_lengths": keys is layout,
        "keyless": False,
        "sinks": options.pop("sinks", False),
    }
    spec = AttentionSpec.of(CPU, dtype, tuple(shapes), {"scale": None} | options, **more)
    return spec, CallSize.of(Call(layout, keys, None, spec))


@pytest.mark.parametrize("dtype", tune.BACKENDS, ids=str)
@pytest.mark.parametrize("dims", ["32", "192/128", "512"])
@pytest.mark.parametrize("kind", tune.KINDS)
def test_batches_are_of_their_kind_and_have_different_sizes(kind, dims, dtype):
    rows = []
    for workload in tune.workloads(dtype, dims, kind):
        for backward in {cost_model.FEW_QUERIES: (False,), "sinks": (True,)}.get(kind, (False, True)):
            spec, size = spec_and_size(workload, dtype, backward)
            assert kind_of(spec, size) == kind, workload
        assert workload.heads % workload.kv_heads == 0
        rows.append(counts(spec, size))
    assert len(rows) >= 10
    assert np.linalg.matrix_rank(np.array(rows) / np.max(rows, axis=0)) == 6


def test_units_are_all_and_the_most_important_come_first():
    units = list(tune.units())
    assert len(set(units)) == len(units)
    assert {dim for dtype, dim, _ in units[:18] if dtype == torch.bfloat16} == {"64", "128"}
    assert [kind for _, _, kind in units[:4]] == ["causal", "causal", "full", "full"]
    assert all(dim not in ("384", "512") for dtype, dim, _ in units if dtype == torch.float32)


def test_times_are_at_least_zero_where_a_linear_fit_would_not_be():
    source = np.random.default_rng(3)
    for _ in range(20):
        a, truth = source.uniform(0, 1, (12, 6)), source.uniform(-1, 1, 6)
        b = a @ truth
        x = tune.nonnegative_least_squares(a, b)
        assert (x >= 0).all()
        gradient = a.T @ (a @ x - b)  # the conditions of Karush, Kuhn and Tucker
        assert (gradient > -1e-9).all()
        assert abs(gradient[x > 0]).max(initial=0) < 1e-9


def test_fit_finds_the_numbers_and_its_error():
    source = np.random.default_rng(5)
    rows = [(float(x @ NUMBERS["flash_attn_4"]), *x) for x in source.uniform(0, 9, (11, 6))]
    numbers, median, largest = tune.fit(rows)
    assert numbers == pytest.approx(NUMBERS["flash_attn_4"], rel=1e-4, abs=1e-6)
    assert median <= largest < 1e-6
    rows[0] = (2 * rows[0][0], *rows[0][1:])
    assert tune.fit(rows)[2] > 0.1


@pytest.fixture
def stubbed(monkeypatch):
    """No kernel runs. A clock returns the times of `NUMBERS`. Returns the calls that were timed."""
    timed = []

    def chosen(name, inputs, backward):
        if name not in NUMBERS:
            raise NotSupportedError("not installed")

    def prepare(name, inputs):
        return SimpleNamespace(forward=(name, inputs, False), both=(name, inputs, True))

    def clock(call, repeats, seconds):
        name, inputs, backward = call
        timed.append((name, inputs, backward))
        row = tune.counts(inputs, backward)
        return (3 if backward else 1) * sum(a * b for a, b in zip(NUMBERS[name], row, strict=True)) / 1000

    monkeypatch.setattr(tune, "chosen", chosen)
    monkeypatch.setattr(tune, "attention", prepare)
    monkeypatch.setattr(timing, "device_ms", clock)
    monkeypatch.setattr(tune, "GRID", SMALL_GRID)
    monkeypatch.setattr(tune, "FEW_QUERIES", SMALL_FEW)
    return timed


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """The cache of the user is empty, and this machine's GPU is one that nobody measured."""
    card = Card(100, 1500.0, 2000, 1.0)
    monkeypatch.setenv("NT_ATTENTION_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H199")
    monkeypatch.setattr(Card, "of", lambda device: card)
    monkeypatch.setattr(cost_model, "LEAST_US", {"forward": 0.0, "both": 0.0})
    caches = measurements.tables_for, cost_model._find
    for cache in caches:
        cache.cache_clear()
    yield {"gpu": "NVIDIA H199", "card": card._asdict(), "versions": measurements.versions()}
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def run(monkeypatch):
    def run(header, file, units, seconds=1e9):
        monkeypatch.setattr(tune, "units", lambda: [(torch.bfloat16, *unit) for unit in units])
        tune.tune(header, tune.read_file(file, "NVIDIA H199"), file, seconds, CPU)

    return run


def test_auto_reads_the_file_that_was_written(run, stubbed, gpu, tmp_path, capsys):
    file = measurements.user_file("NVIDIA H199")
    file.parent.mkdir()
    run(gpu, file, [("64", "causal"), ("64", cost_model.FEW_QUERIES)])
    assert f"saved in {file}" in capsys.readouterr().out
    spec = AttentionSpec(torch.device("cuda"), torch.bfloat16, 8, 2, 64, 64, 0.125, is_causal=True)
    for needs_grad, size in itertools.product(
        (False, True), (CallSize(500, 9e3, 1e5, 40, 40), CallSize(1, 4e3, 8e6, 4e3, 4e3))
    ):
        spec = AttentionSpec(
            *(torch.device("cuda"), torch.bfloat16, 8, 2, 64, 64, 0.125), is_causal=True, needs_grad=needs_grad
        )
        explanation = explain_spec(spec, size)
        assert explanation.times == "measured on this GPU"
        got, row = cost_model.expected_us(spec, size), counts(spec, size)
        want = {n: (3 if needs_grad else 1) * np.dot(NUMBERS[n], row) for n in NUMBERS if n != "split_kv"}
        assert got == pytest.approx(want, rel=1e-3)
    decoding = AttentionSpec(
        *(torch.device("cuda"), torch.bfloat16, 8, 2, 64, 64, 0.125), is_causal=True, equal_lengths=False
    )
    size = CallSize(9, 5000.0, 9991.0, 1, 3000.0)
    got = cost_model.expected_us(decoding, size)
    assert got == pytest.approx({n: np.dot(NUMBERS[n], counts(decoding, size)) for n in NUMBERS}, rel=1e-3)
    other = AttentionSpec(torch.device("cuda"), torch.bfloat16, 8, 2, 512, 512, 0.125, is_causal=True)
    assert cost_model.costs_of(other, size).about.startswith("estimated for this GPU from ")


def test_sinks_are_measured_with_gradients_alone(run, stubbed, gpu, tmp_path):
    run(gpu, tmp_path / "file.json", [("64", "sinks")])
    assert {backward for _, _, backward in stubbed} == {True}
    assert all(inputs.options["sinks"].shape == (inputs.qkv[0].shape[1],) for _, inputs, _ in stubbed)
    assert json.loads((tmp_path / "file.json").read_text())["costs"]["16-bit"].keys() == {"both"}


def test_numbers_of_other_runs_are_kept_and_those_of_a_unit_replaced(run, stubbed, gpu, tmp_path, monkeypatch):
    file = tmp_path / "file.json"
    run(gpu, file, [("64", "causal"), ("128", "full")])
    first = json.loads(file.read_text())["costs"]["16-bit"]["forward"]
    monkeypatch.setitem(NUMBERS, "flash_attn_4", (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    monkeypatch.delitem(NUMBERS, "torch_flash")
    run(gpu, file, [("64", "causal")])
    second = json.loads(file.read_text())["costs"]["16-bit"]["forward"]
    assert second["full"] == first["full"]
    assert first["causal"]["64"].keys() == {"token_tiled", "flash_attn_4", "torch_flash"}
    assert second["causal"]["64"] == {
        "token_tiled": first["causal"]["64"]["token_tiled"],
        "flash_attn_4": pytest.approx([1, 2, 3, 4, 5, 6], rel=1e-3),
    }


def test_run_ends_when_the_time_is_over(run, stubbed, gpu, tmp_path, capsys):
    run(gpu, tmp_path / "file.json", [("64", "causal"), ("128", "causal"), ("96", "full")], seconds=0)
    assert "the time is over before causal calls of head dims 128 in 16-bit" in capsys.readouterr().out
    assert json.loads((tmp_path / "file.json").read_text())["costs"]["16-bit"]["both"]["causal"].keys() == {"64"}


def test_kernel_that_fails_is_left_out(run, stubbed, gpu, tmp_path, monkeypatch, capsys):
    clock = timing.device_ms

    def failing(call, repeats, seconds):
        if call[0] == "flash_attn_4":
            raise torch.OutOfMemoryError("no memory\nis left")
        return clock(call, repeats, seconds)

    monkeypatch.setattr(timing, "device_ms", failing)
    run(gpu, tmp_path / "file.json", [("64", "causal")])
    assert "flash_attn_4 failed on uniform:16 × 64, causal: no memory\n" in capsys.readouterr().out
    costs = json.loads((tmp_path / "file.json").read_text())["costs"]
    assert costs["16-bit"]["forward"]["causal"]["64"].keys() == {"token_tiled", "torch_flash"}


def test_file_of_another_gpu_is_not_changed(tmp_path):
    file = tmp_path / "nvidia_h200.json"
    tune.read_file(file, "NVIDIA H200")
    file.write_text(json.dumps({"gpu": "NVIDIA H200"}))
    tune.read_file(file, "NVIDIA H200")
    with pytest.raises(ValueError, match="has times of NVIDIA H200, and this GPU is NVIDIA H199: pass another file"):
        tune.read_file(file, "NVIDIA H199")
    for text in ("{", "[]", "{}"):
        file.write_text(text)
        with pytest.raises(ValueError, match="can't be read: delete it"):
            tune.read_file(file, "NVIDIA H200")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "tune is for a GPU"),
        (["--minutes", "two"], "invalid float value: 'two'"),
    ],
)
def test_arguments_that_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "--device", "cpu", *arguments])
    assert message in capsys.readouterr().err


def test_counts_of_inputs_are_those_of_the_call():
    workload = Workload("", "", (5, 17), 4, 2, 16, CAUSAL)
    inputs = CaseInputs.random(workload, CPU, torch.float32)
    assert tune.counts(inputs, True) == pytest.approx((1.0, 0.008, 4e-3 * 22, 4e-6 * (15 + 153), 17e-3, 0.004))


def test_every_measured_backend_exists():
    names = {name for each in tune.BACKENDS.values() for name in each} | {*tune.ABOVE_256, "split_kv"}
    assert names < BACKENDS.keys()
