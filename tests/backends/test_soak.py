"""`python tests/helpers/soak.py`: what its draws find, and the programs that it prints."""

import dataclasses

import pytest
import soak
import torch

import nt_attention as nta
from nt_attention.kernels.backend import Hooks
from nt_attention.kernels.backends import cpu, reference


def changed(call, **fields):
    return call._replace(spec=dataclasses.replace(call.spec, **fields))


def wider_window(call):
    left, right = call.spec.window_size
    return call if left < 0 else changed(call, window_size=(left + 1, right))


def plus(results, x):
    return (results[0] + x, *results[1:])


FORWARDS = {
    "window": lambda q, k, v, call: cpu.forward(q, k, v, wider_window(call)),
    "rows past the last": lambda q, k, v, call: plus(cpu.forward(q, k, v, call), 0 * k.sum()),
}
BACKWARDS = {  # a backward that hides other keys than its forward would raise an error, and not give other results
    "window": lambda saved, q, k, v, call: cpu.backward(saved, q, k, v, wider_window(call)),
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
        ("value dim", "'gradient of ", "cpu"),
        pytest.param("rows past the last", "'out': inf", "cpu", marks=pytest.mark.sweep),
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
