"""``python -m nt_attention run``: programs run as under python."""

import argparse
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from sweeps import sweep_except

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


OPTIONS = [["main.py", "--packing", "x"], ["-m", "main", "-m"]]


@pytest.mark.parametrize("how", sweep_except(OPTIONS, OPTIONS[1]))
def test_programs_see_what_python_shows(how, tmp_path):
    (tmp_path / "main.py").write_text(PROGRAM)
    want = python(*how, cwd=tmp_path)
    got = python("-m", "nt_attention", "run", "--packing", "always", *how, cwd=tmp_path)
    assert want.returncode == 0, want.stderr
    assert got.stdout == want.stdout
    assert got.stderr == "nt_attention.patch_all:\n  no Hugging Face model and no Transformer of torch.nn was built\n"
    assert got.returncode == 0


# What a program can ask about itself, and about a model that it builds. It has no __future__ import.
PROBE = """
import inspect, logging, sys, traceback, typing, warnings
import torch
from torch import nn
class Config:
    fp16: bool = False
    layers: int = 2
class Layer(nn.TransformerEncoderLayer):
    def __init__(self, width: int = 8, *, heads: int = 2):
        super().__init__(width, heads, 16, batch_first=True)
class Encoder(nn.TransformerEncoder): pass
def build(config: Config) -> nn.Module:
    torch.manual_seed(0)
    return Encoder(Layer(), config.layers)
def fail(): 1 / 0
size: int = 3
model = build(Config()).eval()
print("annotations", __annotations__, Config.__annotations__, build.__annotations__)
print("fp16 is", "on" if Config.__annotations__["fp16"] is not bool else "off")
print("globals", sorted(globals()), __name__, globals().get("__file__"), __package__, __doc__)
print("arguments", sys.argv, sys.path[0])
for kind in (Config, Layer, Encoder, nn.TransformerEncoder, nn.Transformer):
    print("class", kind.__name__, kind.__qualname__, kind.__module__, kind.__bases__, kind.__mro__, sorted(vars(kind)))
    for function in (kind, kind.__init__, *([kind.forward] if issubclass(kind, nn.Module) else [])):
        print(function.__qualname__, inspect.signature(function))
        if function is not object.__init__:
            print(inspect.getfullargspec(function))
print("source", inspect.getsource(nn.TransformerEncoder.__init__), inspect.getsource(model.forward))
print("hints", typing.get_type_hints(Layer.__init__), typing.get_type_hints(model.forward), model.forward.__qualname__)
print("modules", [(name, type(module)) for name, module in model.named_modules()], list(model.state_dict()))
x, padding = torch.ones(2, 3, 8), torch.tensor([[False, False, False], [False, True, True]])
print("called", model(x, src_key_padding_mask=padding).shape, torch.rand(1))
print("settings", warnings.filters, logging.root.level, logging.root.handlers, torch.get_default_dtype())
try:
    fail()
except ZeroDivisionError as error:
    print("error", [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)])
print("stack", [(frame.filename, frame.name) for frame in traceback.extract_stack()])
"""


def without_ours(output):
    """The output without the differences that must exist.

    These are frames of this command and of runpy, which a program that is run with -m has too; `__new__` in classes of
    torch; and a filter of warnings that sympy adds when torch imports it.
    """
    frames = r"\('<frozen runpy>', '\w+'\), |\('[^']*/nt_attention/[^']*', '[^']*'\), "
    return re.sub(rf"{frames}|'__new__', |\('once', None, <class 'sympy[^)]*\), | at 0x[0-9a-f]+", "", output)


HOW = [["main.py", "-x"], ["-m", "main", "x"], ["-", "x"], ["folder", "x"]]


@pytest.mark.parametrize("how", sweep_except(HOW, HOW[0]))
def test_programs_find_out_what_python_tells_them(how, tmp_path):
    (tmp_path / "main.py").write_text(PROBE)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(PROBE)
    want = python(*how, cwd=tmp_path, input=PROBE)
    got = python("-m", "nt_attention", "run", *how, cwd=tmp_path, input=PROBE)
    assert want.returncode == got.returncode == 0, want.stderr + got.stderr
    assert "fp16 is off" in want.stdout
    assert without_ours(got.stdout) == without_ours(want.stdout)
    calls = "1 call ran packed: 4 tokens in 6 positions, pad ratio 1.50 (33% skipped)"
    assert got.stderr == f"nt_attention.patch_all:\n  Encoder: 1 model patched\n    {calls}\n"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (["-", "a"], "import sys; print(sys.argv, __file__); sys.exit(3)"),
        *sweep_except([(["-m", "no.such"], ""), (["nosuch.py"], ""), (["."], "")]),
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


COMPARED = [([], "    first batch compared with the padded run: largest difference "), (["--check", "never"], "")]


@pytest.mark.parametrize(("options", "compared"), sweep_except(COMPARED), ids=["first", "never"])
def test_summary(options, compared, tmp_path):
    (tmp_path / "main.py").write_text(MODEL)
    got = python("-m", "nt_attention", "run", *options, "main.py", cwd=tmp_path)
    assert got.returncode == 0, got.stderr
    counts = "1 call ran packed: 5 tokens in 6 positions, pad ratio 1.20 (17% skipped)\n"
    _, shown, rest = got.stderr.partition(f"  BertModel: 1 model patched\n    {counts}")
    assert shown
    assert rest.startswith(compared)
    assert bool(rest) == bool(compared)


OF_TORCH = """
import sys, torch
from torch import nn
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.words, self.encoder, self.tags = nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)
    def forward(self, words):
        padding = words == 0
        tags = self.tags(self.encoder(self.words(words), None, padding))
        return nn.functional.cross_entropy(tags[~padding], words[~padding] % 3)
torch.manual_seed(0)
batches = torch.randint(1, 20, (4, 5, 9)) * (torch.arange(9) < torch.randint(1, 10, (4, 5, 1)))
if sys.argv[1:]:
    sys.modules["nt_attention"] = None
    model = torch.load("model.pt", weights_only=False)
    print(f"{model(batches[0]).item():.4f}", [type(part).__name__ for part in model.modules()])
else:
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for words in batches:
        optimizer.zero_grad()
        loss = model(words)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")
    print(f"{model(batches[0]).item():.4f}", [type(part).__name__ for part in model.modules()])
    torch.save(model, "model.pt")
assert "transformers" not in sys.modules
"""


@pytest.mark.sweep
def test_programs_with_modules_of_torch_train_and_save_as_before(tmp_path):
    (tmp_path / "main.py").write_text(OF_TORCH)
    want = python("main.py", cwd=tmp_path)
    got = python("-m", "nt_attention", "run", "main.py", cwd=tmp_path)
    assert want.returncode == got.returncode == 0, want.stderr + got.stderr
    assert got.stdout == want.stdout
    assert got.stderr.startswith(
        "nt_attention.patch_all:\n  TransformerEncoder: 1 model patched\n    5 calls ran packed: "
    )
    loaded = python("main.py", "load", cwd=tmp_path)
    assert loaded.stdout == want.stdout.splitlines(keepends=True)[-1], loaded.stderr


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
