"""`python tests/helpers/soak.py`: what its draws find, and the programs that it prints."""

import dataclasses

import pytest
import soak
import torch

import nt_attention as nta
from nt_attention.kernels.backend import Hooks
from nt_attention.kernels.backends import cpu, reference

LEAK = []


def changed(call, **fields):
    return call._replace(spec=dataclasses.replace(call.spec, **fields))


def wider_window(call):
    left, right = call.spec.window_size
    return call if left < 0 else changed(call, window_size=(left + 1, right))


def other_alignment(call):
    return changed(call, causal_alignment="lower_right") if call.spec.is_upper_left else call


def plus(results, x):
    return (results[0] + x, *results[1:])


def memory_of(x):
    """All numbers of a tensor's memory, also those that are not its own."""
    storage = x.untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(storage, 0, (storage.nbytes() // x.itemsize,))


def leak(x):
    LEAK.append(x.new_zeros(1))
    return 0


FORWARDS = {
    "window": lambda q, k, v, call: cpu.forward(q, k, v, wider_window(call)),
    "upper left": lambda q, k, v, call: cpu.forward(q, k, v, other_alignment(call)),
    "rows past the last": lambda q, k, v, call: plus(cpu.forward(q, k, v, call), 0 * k.sum()),
    "memory around": lambda q, k, v, call: plus(cpu.forward(q, k, v, call), 0 * memory_of(v).sum()),
    "leak": lambda q, k, v, call: plus(cpu.forward(q, k, v, call), leak(q)),
}
BACKWARDS = {  # a backward that hides other keys than its forward would raise an error, and not give other results
    "window": lambda saved, q, k, v, call: cpu.backward(saved, q, k, v, wider_window(call)),
    "upper left": lambda saved, q, k, v, call: cpu.backward(saved, q, k, v, other_alignment(call)),
    "value dim": lambda saved, q, k, v, call: [
        x * (1.01 if call.spec.head_dim != call.spec.value_dim else 1) for x in cpu.backward(saved, q, k, v, call)
    ],
    "other bits": lambda *inputs: [x * (1 + 1e-6 * torch.rand(())) for x in cpu.backward(*inputs)],
}


def drops_too_few(q, k, v, call):
    """The output is right on average."""
    p = call.spec.dropout_p
    out, lse, *seed = reference.forward(q, k, v, changed(call, dropout_p=p / 2))
    return out * (1 - p / 2) / (1 - p), lse, *seed


def depends_on_the_batch(q, k, v, call):
    out, *more = cpu.forward(q, k, v, call)
    return out * (1 + 1.2e-7 * call.layout.batch_size), *more


OTHER_FIELDS = {
    "batch": {"features": cpu.BACKEND.features | {"batch_invariant"}, "forward": depends_on_the_batch},
    "dropout": {
        "features": cpu.BACKEND.features | {"dropout"},
        "forward": drops_too_few,
        "backward": None,
        "traits": {"differentiable"},
    },
}


def planted(name):
    fields = {"forward": FORWARDS.get(name, cpu.forward), "backward": BACKWARDS.get(name, cpu.backward)}
    fields |= {"dtypes": (torch.float32,), "hooks": Hooks()} | OTHER_FIELDS.get(name, {})
    return dataclasses.replace(cpu.BACKEND, name="planted", **fields)


def check(*arguments):
    return soak.main(["--device", "cpu", *arguments])


def program_in(printed):
    return printed.partition("This program repeats it, in tests/helpers:\n\n")[2].partition("\n\n")[0]


@pytest.mark.parametrize(
    ("name", "message", "right"),
    [
        ("window", "'out'", "cpu"),
        pytest.param("upper left", "'out'", "cpu", marks=pytest.mark.sweep),
        ("value dim", "'gradient of ", "cpu"),
        pytest.param("rows past the last", "'out': inf", "cpu", marks=pytest.mark.sweep),
        pytest.param("memory around", "'out': inf", "cpu", marks=pytest.mark.sweep),
        pytest.param("other bits", "the same call gave other bits: gradient of ", "cpu", marks=pytest.mark.sweep),
        ("dropout", r"a share of 0.8\d\d weights is kept", "reference"),
        pytest.param("batch", r"sequence \d alone has other bits than in the batch", "", marks=pytest.mark.sweep),
    ],
)
def test_planted_error_is_found_and_its_program_repeats_it(name, message, right, capsys):
    with nta.register_backend(planted(name)):
        assert check("--backends", "planted", "--draws", "60", "--seed", "3") == 1
        printed = capsys.readouterr().out
        program = program_in(printed)
        with pytest.raises(AssertionError, match=message) as raised:
            exec(program, {})
    assert f": AssertionError: {raised.value}\n" in printed
    assert printed.splitlines()[-1].startswith("planted ")
    assert printed.splitlines()[-1].endswith(" failed")
    assert len(program.splitlines()) <= 16
    if right:
        exec(program.replace("planted", right), {})


def test_refused_calls_are_skipped(capsys):
    def refuses(spec):
        return ["no."] if spec.is_causal else []

    with nta.register_backend(dataclasses.replace(planted(""), refuses=refuses)):
        assert check("--backends", "planted", "--draws", "20") == 0
    _, draws, skipped, _ = capsys.readouterr().out.splitlines()[-1].split()
    assert draws == "20"
    assert 0 < int(skipped) < 20


@pytest.mark.sweep
def test_memory_that_grows_is_found(capsys, monkeypatch):
    monkeypatch.setattr(soak, "WARM_UP", 5)
    monkeypatch.setattr(soak, "LEFT_OVER", (10, 0))
    with nta.register_backend(planted("leak")):
        assert check("--backends", "planted", "--draws", "25") == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("memory grew: ")
    LEAK.clear()
