"""The results of `tools/verify_backends.py`: summarized, printed, saved; and the command."""

import dataclasses
import json
from importlib.metadata import version

import pytest
import torch
import verify_backends as check
from verified_cases import FEW, case, few_runs  # noqa: F401
from verify_backends import Case, Finding, main

from nt_attention.cli.calls import Workload
from nt_attention.cli.environment import device_name
from nt_attention.kernels import support, token_tiled
from nt_attention.kernels.backends import cpu, flash_attn_4, torch_flash
from nt_attention.kernels.call import AttentionSpec

COMMAND = "python tools/verify_backends.py"

pytestmark = pytest.mark.usefixtures("few_runs")

CPU = torch.device("cpu")


class TestResults:
    FOUND = (
        (torch.bfloat16, "features", "causal", 64, "both", "1.00 of PyTorch's own error"),
        (torch.bfloat16, "features", "causal", 128, "forward", "gradients off by 7.0 of PyTorch's own error"),
        (torch.bfloat16, "features", "cross", 128, "both", "…"),
        (torch.bfloat16, "features", "cross", 64, "no", "no kernel image"),
        (torch.bfloat16, "features", "window", 64, "both", "…"),
        (torch.bfloat16, "head dims", "8", 8, "both", "…"),
        (torch.bfloat16, "head dims", "16", 16, "forward", "gradients off by 3.0 of PyTorch's own error"),
        (torch.bfloat16, "head dims", "128", 128, "both", "…"),
        (torch.float16, "head dims", "8", 8, "both", "…"),
    )

    @staticmethod
    def finding(backend, dtype, kind, which, width, result, details):
        return Finding(
            Case(backend, dtype, kind, Workload(which, "", FEW, 4, 4, width, value_dim=width)), result, details
        )

    @pytest.fixture
    def findings(self):
        first = self.finding("token_tiled", torch.float32, "head dims", "64", 64, "both", "…")
        return [first, *(self.finding("flash_attn_4", *each) for each in self.FOUND)]

    def test_summary_has_the_worst_result_of_each_case(self, findings):
        assert check.summarize(findings) == {
            "token_tiled": {"float32": {"head dims": {"64": "both"}}},
            "flash_attn_4": {
                "bfloat16": {
                    "features": {"causal": "forward", "cross": "no", "window": "both"},
                    "head dims": {"8": "both", "16": "forward", "128": "both"},
                },
                "float16": {"head dims": {"8": "both"}},
            },
        }

    def test_results_are_printed(self, findings, capsys):
        check.print_results(check.summarize(findings), findings)
        assert capsys.readouterr().out.splitlines() == [
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

    def test_saved_results_become_the_verified_support(self, findings, tmp_path, monkeypatch, capsys):
        file, results = tmp_path / "verified" / "sm90.json", check.summarize(findings)
        file.parent.mkdir()
        check.save(results, CPU, file, COMMAND)
        assert f"saved in {file}" in capsys.readouterr().out
        written = json.loads(file.read_text())
        assert written["results"] == results
        assert written["versions"]["torch"] == version("torch")
        assert written["command"].startswith("python tools/verify_backends.py")
        assert len(written["date"].split("-")) == 3
        monkeypatch.setattr(support.resources, "files", lambda _: tmp_path)
        support.verified_on.cache_clear()
        try:
            checked = support.verified_on((9, 0))
        finally:
            support.verified_on.cache_clear()
        assert checked.gpu == device_name(CPU)
        spec = AttentionSpec(torch.device("cuda"), torch.bfloat16, 3, 3, 16, 16, 0.25)
        assert checked.head_dims(flash_attn_4.BACKEND, spec) == (16, 16)
        assert checked.head_dims(flash_attn_4.BACKEND, dataclasses.replace(spec, needs_grad=True)) == (128, 128)
        assert "was not run" in checked.reasons(torch_flash.BACKEND, spec)[0]


class TestCheckCommand:
    @pytest.fixture(autouse=True)
    def _few_cases(self, monkeypatch):
        real = check.cases_of
        few = ("16", "192", "grouped heads")

        def short(backend):
            found = (c for c in real(backend) if c.which in few and c.dtype == torch.float32)
            return (c for c in found if c.workload.head_dim < 128)

        monkeypatch.setattr(check, "cases_of", short)

    def test_check_prints_the_results(self, capsys):
        main(["--device", "cpu", "--backends", "cpu"])
        lines = capsys.readouterr().out.splitlines()
        assert lines[2] == f"cpu: {cpu.BACKEND.about}"
        assert lines[3].split() == ["float32", "head", "dims", "right:", "16"]
        assert lines[4].split() == ["float32", "features", "right:", "grouped", "heads"]
        assert len(lines) == 5

    def test_check_save_without_a_file_needs_a_gpu(self, capsys):
        with pytest.raises(SystemExit) as exit:
            main(["--device", "cpu", "--backends", "cpu", "--save"])
        assert exit.value.code == 2
        assert "--save without a file is for a CUDA device" in capsys.readouterr().err
