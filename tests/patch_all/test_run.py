"""``python -m nt_attention run``: programs run as under python."""

import argparse
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nt_attention.cli import run

# What a program sees of itself, and what its threads and processes find, when they still run at its end.
PROGRAM = """
import atexit, multiprocessing, os, pickle, sys, threading, time
assert "transformers" not in sys.modules
class Thing: pass
def add(x): return x + 1
def is_thing(): return type(pickle.loads(pickle.dumps(Thing()))) is Thing
def late():
    time.sleep(0.3)
    print("thread", is_thing(), flush=True)
if __name__ == "__main__":
    module = sys.modules["__main__"]
    names = {name: str(x)[:60] for name, x in sorted(vars(module).items()) if name.startswith("__")}
    names["__loader__"] = type(module.__loader__).__name__
    print(names, sys.argv, sys.path[0], vars(module) is globals(), sorted(os.environ), add.__code__.co_filename)
    for how in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(how, pool.map(add, [1, 2]), pool.apply(is_thing))
    assert sys.modules["__mp_main__"] is module
    atexit.register(lambda: print("exit", is_thing(), flush=True))
    threading.Thread(target=late).start()
"""


def python(*arguments, cwd, **more):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=120, **more
    )


@pytest.mark.parametrize("how", [["main.py", "--packing", "x"], ["-m", "main", "-m"]])
def test_programs_see_what_python_shows(how, tmp_path):
    (tmp_path / "main.py").write_text(PROGRAM)
    want = python(*how, cwd=tmp_path)
    got = python("-m", "nt_attention", "run", "--packing", "always", *how, cwd=tmp_path)
    assert want.returncode == 0, want.stderr
    assert got.stdout == want.stdout
    assert got.stderr == "nt_attention.patch_all:\n  no Hugging Face model was built\n"
    assert got.returncode == 0


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (["nosuch.py"], ""),
        (["-m", "no.such"], ""),
        (["."], ""),
        (["-", "a"], "import sys; print(sys.argv, __file__); sys.exit(3)"),
    ],
)
def test_errors_and_stdin_are_those_of_python(how, text, tmp_path):
    want = python(*how, cwd=tmp_path, input=text)
    got = python("-m", "nt_attention", "run", "--no-summary", *how, cwd=tmp_path, input=text)
    assert want.returncode != 0
    assert (got.returncode, got.stdout, got.stderr) == (want.returncode, want.stdout, want.stderr)


MODEL = """
import torch
from transformers import BertConfig, BertModel
model = BertModel(BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
model(torch.full((2, 3), 7), attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))
"""


def test_summary(tmp_path):
    (tmp_path / "main.py").write_text(MODEL)
    got = python("-m", "nt_attention", "run", "main.py", cwd=tmp_path)
    assert got.returncode == 0, got.stderr
    assert got.stderr.endswith(
        "  BertModel: 1 model patched\n    1 call ran packed: 5 tokens in 6 positions, pad ratio 1.20 (17% skipped)\n"
    )


def test_programs_that_accelerate_launches_run_in_it(monkeypatch):
    monkeypatch.setattr(run.atexit, "unregister", lambda function: None)
    seen = []
    file = SimpleNamespace(launch_command=seen.append)
    run._launch_patched(["run", "--packing", "always"], file)
    for module in (False, True):
        args = argparse.Namespace(no_python=False, module=module, training_script="a", training_script_args=["-b"])
        file.launch_command(args)
        assert (seen[-1].module, seen[-1].training_script) == (True, "nt_attention")
        name = ["-m", "a"] if module else ["a"]
        assert seen[-1].training_script_args == ["run", "--packing", "always", *name, "-b"]


def test_without_a_program(capsys):
    with pytest.raises(SystemExit):
        run.main(["--packing", "always"])
    assert "pass a file, - for stdin, or -m and a module" in capsys.readouterr().err
