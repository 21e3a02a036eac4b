"""What ``python -m nt_attention check`` finds and prints. A few small cases: the whole takes a minute."""

import dataclasses
import itertools
import json

import pytest
import torch

from nt_attention.__main__ import main
from nt_attention.cli import cases, check
from nt_attention.cli.cases import Case, Finding, cases_of, run_case
from nt_attention.cli.support_table import SupportTable
from nt_attention.kernels import support, token_tiled
from nt_attention.kernels.backend import HeadDims
from nt_attention.kernels.backends import cpu, flash_attn_4, reference, torch_flash
from nt_attention.kernels.call import FEATURES, AttentionSpec
from nt_attention.kernels.select import BACKENDS

COMMAND = "python -m nt_attention check"
CPU = torch.device("cpu")
CAUSAL = {"is_causal": True}
FEW_KEYS = [4, 13, 3, 0, 19]


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch):
    monkeypatch.setattr(cases, "LENGTHS", [1, 17, 0, 5, 31])
    monkeypatch.setattr(cases, "DETERMINISTIC_RUNS", 3)


@pytest.fixture
def fake(enlist):
    """Puts a backend with a fault on the list: what its kernel gives goes through ``out`` and ``grads``."""

    def make(out=None, grads=None, **changes):
        def forward(query, key, value, problem):
            given, lse = cpu.forward(query, key, value, problem)
            return given if out is None else out(given, query, problem), lse

        def backward(*args):
            given = cpu.backward(*args)
            return given if grads is None else tuple(grads(*given))

        enlist(cpu.BACKEND, "fake", **{"forward": forward, "backward": backward} | changes)

    return make


def case(which="64", backend="fake", dtype=torch.float32, **fields):
    kind = "features" if which in FEATURES else "head dims"
    return Case(backend, dtype, kind, which, **{"head_dim": 16, "value_dim": 16, "options": CAUSAL} | fields)


class TestTheCPU:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dims", [(16, 16), (8, 24)], ids=str)
    def test_is_right(self, dtype, dims):
        found = run_case(case(backend="cpu", dtype=dtype, head_dim=dims[0], value_dim=dims[1]), CPU)
        assert found.result == "both", found.details
        assert found.details.endswith(" of PyTorch's own error")
        assert 0 < float(found.details.split()[0]) <= cases.SLACK

    @pytest.mark.parametrize("feature", sorted(cpu.BACKEND.features))
    def test_is_right_in_all_that_it_declares(self, feature):
        (first, *_) = (c for c in cases_of(cpu.BACKEND) if c.which == feature and c.dtype == torch.float32)
        keys = {} if first.key_lengths is None else {"key_lengths": FEW_KEYS}
        found = run_case(dataclasses.replace(first, **keys), CPU)
        assert found.result == "both", found.details
        assert found.case.which == feature

    def test_is_not_right_in_what_it_refuses(self):
        found = run_case(case("softcap", "cpu", options={"softcap": 5.0}), CPU)
        assert found.result == "no"
        assert found.details == "backend='cpu': it can't run this call."


def scaled(which, factor):
    """Gradients of which one is off by a factor."""
    return lambda *grads: (g * factor if i == which else g for i, g in enumerate(grads))


def with_nan(x):
    """In the last number that belongs to a sequence."""
    x = x.clone()
    x[sum(cases.LENGTHS) - 1, -1, -1] = torch.nan
    return x


class TestAFault:
    def test_none(self, fake):
        fake()
        assert run_case(case(), CPU).result == "both"

    @pytest.mark.parametrize("which", range(3), ids=["dq", "dk", "dv"])
    @pytest.mark.parametrize("factor", [1.01, 0.0, -1.0, torch.nan])
    def test_in_one_gradient(self, fake, which, factor):
        fake(grads=scaled(which, factor))
        found = run_case(case(), CPU)
        assert found.result == "forward"
        assert found.details.startswith("gradients off by ")

    @pytest.mark.parametrize("which", range(3), ids=["dq", "dk", "dv"])
    def test_in_the_last_number_of_one_gradient(self, fake, which):
        fake(grads=lambda *grads: (with_nan(g) if i == which else g for i, g in enumerate(grads)))
        assert run_case(case(), CPU) == Finding(case(), "forward", "gradients off by inf of PyTorch's own error")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_in_the_output(self, fake, dtype):
        fake(out=lambda out, query, problem: out * 1.05)
        found = run_case(case(dtype=dtype), CPU)
        assert found.result == "no"
        assert found.details.startswith("output off by ")

    def test_in_one_row_of_the_output(self, fake):
        def one_row(out, query, problem):
            out[problem.layout.total - 1] = 0
            return out

        fake(out=one_row)
        assert run_case(case(), CPU).result == "no"

    def test_in_one_number_of_the_output(self, fake):
        fake(out=lambda out, query, problem: with_nan(out))
        assert run_case(case(), CPU) == Finding(case(), "no", "output off by inf of PyTorch's own error")

    def test_that_grouped_heads_alone_show(self, fake):
        fake(grads=lambda dq, dk, dv: (dq, dk if dk.shape[1] == dq.shape[1] else dk * 0.5, dv))
        assert run_case(case(), CPU).result == "both"
        assert run_case(case("grouped heads", kv_heads=2), CPU).result == "forward"

    @pytest.mark.parametrize("value", [1.0, torch.nan])
    def test_that_is_written_past_the_end(self, fake, value):
        """Where nothing above the kernel clears it."""

        def forward(query, key, value_, problem):
            out, lse = reference.forward(query, key, value_, problem)
            past = torch.arange(len(out)) >= problem.layout.total
            return out.masked_fill(past[:, None, None], value), lse

        fake(forward=forward, backward=None)
        assert run_case(case(), CPU) == Finding(case(), "no", "rows past the last offset are not 0")

    def test_that_is_read_past_the_end(self, fake):
        fake(out=lambda out, query, problem: out + 0 * query[-1, 0, 0])
        assert run_case(case(), CPU).result == "no"

    def test_of_other_bits_each_time(self, fake):
        times = itertools.count()
        fake(grads=lambda dq, dk, dv: (dq, dk * (1 + 2**-22 * (next(times) % 2)), dv))
        found = run_case(case("deterministic", options={"deterministic": True}), CPU)
        assert (found.result, found.details) == ("forward", "the same call gave other bits")
        assert run_case(case(), CPU).result == "both"  # where nobody asks for it

    def test_of_other_bits_in_another_batch(self, fake):
        changes = {"features": cpu.BACKEND.features | {"batch_invariant"}}
        fake(out=lambda out, query, problem: out * (1 + 2**-22 * (problem.layout.batch_size > 1)), **changes)
        found = run_case(case("batch_invariant", options={"batch_invariant": True}), CPU)
        assert (found.result, found.details) == ("forward", "a sequence alone gave other bits than in the batch")

    @pytest.mark.parametrize(
        ("error", "details"),
        [
            (RuntimeError("no kernel image\nis available"), "no kernel image"),
            (ValueError("x" * 1000), "x" * 120),
            (NotImplementedError("not for 80"), "not for 80"),
            (AssertionError(), "AssertionError"),
            (
                TypeError("varlen_fwd(): incompatible function arguments"),
                "varlen_fwd(): incompatible function arguments",
            ),
        ],
        ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "",
    )
    @pytest.mark.parametrize("when", ["forward", "backward"])
    def test_that_is_raised(self, fake, error, details, when):
        def failing(*_):
            raise error

        fake(**{"out" if when == "forward" else "grads": failing})
        found = run_case(case(), CPU)
        assert (found.result, found.details) == ("no" if when == "forward" else "forward", details)


DROPPED = {"options": {"dropout_p": 0.2}, "head_dim": 8, "value_dim": 8}


class TestDropout:
    """The reference drops weights; ``fake`` says that it does."""

    @pytest.fixture(autouse=True)
    def _more_tokens(self, monkeypatch):
        monkeypatch.setattr(cases, "LENGTHS", [1, 129, 0, 17, 300])

    def test_that_is_right(self):
        assert run_case(case("dropout", "reference", **DROPPED), CPU).result == "both"

    def test_that_never_happens(self, fake):
        fake(features=cpu.BACKEND.features | {"dropout"})
        found = run_case(case("dropout", **DROPPED), CPU)
        assert (found.result, found.details) == ("no", "nothing was dropped")

    @pytest.mark.parametrize(
        ("factor", "result"), [((1.1, 1.0), "no"), ((1.0, 1.1), "forward")], ids=["not-rescaled", "wrong-gradient"]
    )
    def test_that_is_wrong(self, fake, factor, result):
        def forward(query, key, value, problem):
            forth, back = factor
            value = value * back - (value * (back - 1)).detach()  # its gradient is off, and it is not
            out, lse = reference.forward(query, key, value, problem)
            return out * forth, lse

        fake(forward=forward, backward=None, features=cpu.BACKEND.features | {"dropout"})
        assert run_case(case("dropout", **DROPPED), CPU).result == result


class TestCases:
    @pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
    def test_are_what_a_backend_has(self, name):
        backend = BACKENDS[name]
        found = list(cases_of(backend))
        assert {c.backend for c in found} == {backend.name}
        assert {c.dtype for c in found} == set(backend.dtypes) - {torch.float64}
        for dtype in {c.dtype for c in found}:
            rows = {
                kind: [c for c in found if (c.dtype, c.kind) == (dtype, kind)] for kind in ("head dims", "features")
            }
            assert sorted(c.which for c in rows["features"]) == sorted([*backend.features] * 2)
            assert len({c.which for c in rows["head dims"]}) == len(rows["head dims"])
        for c in found:
            assert max(c.head_dim, c.value_dim) <= backend.head_dims.most
            if c.kind == "head dims":
                assert c.which == (str(c.head_dim) if c.head_dim == c.value_dim else f"{c.head_dim}/{c.value_dim}")
                assert c.head_dim % backend.head_dims.multiple == c.value_dim % backend.head_dims.multiple == 0
                assert c.head_dim == c.value_dim or not backend.head_dims.equal

    @pytest.mark.parametrize("feature", FEATURES)
    def test_ask_for_what_they_verify(self, feature):
        """By what a spec says of the same call, so that support is read from the row where it was written."""
        backend = dataclasses.replace(cpu.BACKEND, features=frozenset(FEATURES))
        for c in (c for c in cases_of(backend) if c.which == feature):
            options = {name: x for name, x in c.options.items() if name in AttentionSpec.__dataclass_fields__}
            assert options == c.options
            lengths, keys = cases.LENGTHS, c.key_lengths
            spec = AttentionSpec(
                *(CPU, c.dtype, c.heads, c.kv_heads, c.head_dim, c.value_dim),
                **{"scale": 0.3, "alibi": c.alibi, "needs_grad": True} | options,
                equal_lengths=keys is None,
                keyless=not min(keys or lengths),
            )
            assert feature in spec.features

    def test_of_a_list_go_beyond_it(self):
        """What an implementation documents is to be found out."""
        verified = {c.which for c in cases_of(flash_attn_4.BACKEND) if c.kind == "head dims"}
        assert {"16", "80", "64/128", "192/128"} <= verified

    def test_there_are_none_for_the_reference(self):
        assert not list(cases_of(reference.BACKEND))

    @pytest.mark.parametrize(("dims", "listed"), [((16, 24), "16/24"), ((64, 64), "64")])
    def test_a_head_dim_is_verified_as_it_is(self, dims, listed, fake):
        """Not padded to one that is known to be right."""
        seen = []

        def forward(query, key, value, problem):
            seen.append((query.shape[2], value.shape[2]))
            raise RuntimeError("seen")

        fake(forward=forward, head_dims=HeadDims(only=((64, 64), (128, 128))))
        found = run_case(case(listed, head_dim=dims[0], value_dim=dims[1]), CPU)
        assert (found.result, found.details) == ("no", "seen")
        assert seen == [dims]


class TestTable:
    FOUND = (
        (torch.bfloat16, "features", "causal", 64, "both", "1.00 of PyTorch's own error"),
        (torch.bfloat16, "features", "causal", 128, "forward", "gradients off by 7.0 of PyTorch's own error"),
        (torch.bfloat16, "features", "cross", 128, "both", "…"),
        (torch.bfloat16, "features", "cross", 64, "no", "no kernel image"),
        (torch.bfloat16, "features", "window", 64, "both", "…"),
        (torch.bfloat16, "head dims", "128", 128, "both", "…"),
        (torch.bfloat16, "head dims", "16", 16, "forward", "gradients off by 3.0 of PyTorch's own error"),
        (torch.bfloat16, "head dims", "8", 8, "both", "…"),
        (torch.float16, "head dims", "8", 8, "both", "…"),
    )

    @pytest.fixture
    def table(self):
        findings = [
            Finding(Case("flash_attn_4", dtype, kind, which, width, width), result, details)
            for dtype, kind, which, width, result, details in self.FOUND
        ]
        findings.append(Finding(Case("token_tiled", torch.float32, "head dims", "64"), "both", "…"))
        return SupportTable.of(reversed(findings), CPU)  # they come as processes end

    def test_has_the_worst_of_each(self, table):
        assert table.results == {
            "token_tiled": {"float32": {"head dims": {"64": "both"}}},
            "flash_attn_4": {
                "bfloat16": {
                    "features": {"causal": "forward", "cross": "no", "window": "both"},
                    "head dims": {"8": "both", "16": "forward", "128": "both"},
                },
                "float16": {"head dims": {"8": "both"}},
            },
        }
        assert list(table.results) == ["token_tiled", "flash_attn_4"], "as on the list"
        assert list(table.results["flash_attn_4"]["bfloat16"]["head dims"]) == ["8", "16", "128"], "by number"

    def test_is_printed(self, table):
        lines = str(table).splitlines()
        assert f"torch {torch.__version__}" in lines[0]
        assert lines[1:] == [
            "",
            f"token_tiled: {token_tiled.BACKEND.about}",
            "  float32   head dims  right: 64",
            "",
            f"flash_attn_4: {flash_attn_4.BACKEND.about}",
            "  bfloat16  features   right: window",
            "  bfloat16  features   right without gradients: causal",
            "  bfloat16  features   not right: cross",
            "  bfloat16  head dims  right: 8, 128",
            "  bfloat16  head dims  right without gradients: 16",
            "  float16   head dims  right: 8",
            "    bfloat16, features causal at 128/128: gradients off by 7.0 of PyTorch's own error",
            "    bfloat16, features cross at 64/64: no kernel image",
            "    bfloat16, head dims 16 at 16/16: gradients off by 3.0 of PyTorch's own error",
        ]

    def test_is_written_and_becomes_the_verified_support(self, table, tmp_path, monkeypatch, capsys):
        file = tmp_path / "verified" / "sm90.json"
        table.write(file, COMMAND)
        assert f"written to {file}" in capsys.readouterr().out
        written = json.loads(file.read_text())
        assert written["results"] == table.results
        assert written["versions"]["torch"] == torch.__version__
        assert written["command"].startswith("python -m nt_attention")
        assert len(written["date"].split("-")) == 3
        monkeypatch.setattr(support.resources, "files", lambda _: tmp_path)
        support.verified_on.cache_clear()
        try:
            checked = support.verified_on((9, 0))
        finally:
            support.verified_on.cache_clear()
        assert checked.gpu == table.device
        spec = AttentionSpec(torch.device("cuda"), torch.bfloat16, 3, 3, 16, 16, 0.25)
        assert checked.head_dims(flash_attn_4.BACKEND, spec) == (16, 16)
        assert checked.head_dims(flash_attn_4.BACKEND, dataclasses.replace(spec, needs_grad=True)) == (128, 128)
        assert "was not run" in checked.reasons(torch_flash.BACKEND, spec)[0]

    def test_what_was_not_run_this_time_stays(self, table, tmp_path):
        file = tmp_path / "sm90.json"
        table.write(file, COMMAND)
        row = [Finding(Case("flash_attn_4", torch.bfloat16, "head dims", "16", 16, 16), "both", "…")]
        SupportTable.of(row, CPU).write(file, COMMAND)
        want = json.loads(json.dumps(table.results))
        want["flash_attn_4"]["bfloat16"]["head dims"]["16"] = "both"
        assert json.loads(file.read_text())["results"] == want


class TestTheCommand:
    @pytest.fixture(autouse=True)
    def _few_cases(self, monkeypatch):
        real = check.cases_of
        few = ("16", "192", "grouped heads")

        def short(backend):
            return (c for c in real(backend) if c.which in few and c.dtype == torch.float32 and c.head_dim < 128)

        monkeypatch.setattr(check, "cases_of", short)

    def test_prints_the_results(self, capsys):
        assert main(["check", "--device", "cpu", "--backends", "cpu"]) == 0
        table, waiting = capsys.readouterr()
        lines = table.splitlines()
        assert lines[2] == f"cpu: {cpu.BACKEND.about}"
        assert lines[3].split() == ["float32", "features", "right:", "grouped", "heads"]
        assert lines[4].split() == ["float32", "head", "dims", "right:", "16"]
        assert len(lines) == 5
        assert "2 of 2: cpu, torch.float32, features grouped heads: both" in waiting

    def test_saves_to_a_file(self, tmp_path, capsys):
        file = tmp_path / "held.json"
        assert main(["check", "--device", "cpu", "--backends", "cpu", "--which", "16", "--save", str(file)]) == 0
        assert json.loads(file.read_text())["results"] == {"cpu": {"float32": {"head dims": {"16": "both"}}}}
        assert f"written to {file}" in capsys.readouterr().out

    def test_prints_what_is_not_right(self, capsys, monkeypatch):
        details = "gradients off by 9.0 of PyTorch's own error"
        monkeypatch.setattr(check, "run_case", lambda case, device: Finding(case, "forward", details))
        main(["check", "--device", "cpu", "--backends", "cpu", "--which", "16"])
        lines = capsys.readouterr().out.splitlines()
        assert lines[3].split() == ["float32", "head", "dims", "right", "without", "gradients:", "16"]
        assert lines[4].strip() == f"float32, head dims 16 at 16/16: {details}"

    def test_verified_support_is_kept_for_gpus_alone(self, capsys):
        with pytest.raises(SystemExit) as refusal:
            main(["check", "--device", "cpu", "--backends", "cpu", "--save"])
        assert refusal.value.code == 2
        assert "--save without a file is for a CUDA device" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "details"),
        [(["--backends", "nobody"], "invalid choice: 'nobody'"), (["--which", "17"], "nothing to run")],
    )
    def test_bad_arguments_are_refused_before_anything_runs(self, arguments, details, capsys):
        with pytest.raises(SystemExit) as refusal:
            main(["check", "--device", "cpu", *arguments])
        assert refusal.value.code == 2
        assert details in capsys.readouterr().err
