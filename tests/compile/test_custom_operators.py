"""The custom operators: opcheck, fake implementations, strides, and arguments that do not fit."""

import pytest
import torch
from operators import BACKWARD, FORWARD, NAMES, call, case_of, described, given_back, operands
from sweeps import pairwise
from torch._subclasses.fake_tensor import FakeTensorMode

from nt_attention.kernels import custom_ops
from nt_attention.kernels.backend import HeadDims
from nt_attention.kernels.backends import cpu
from nt_attention.kernels.select import BACKENDS


def check(*arguments, grad_lse=False, **which):
    torch.library.opcheck(FORWARD, arguments, **which)
    results = FORWARD(*arguments)
    towards_lse = torch.randn_like(results[1]) if grad_lse else None
    torch.library.opcheck(BACKWARD, given_back(torch.randn_like(results[0]), towards_lse, results, arguments), **which)


@pairwise(
    {
        "backend": ["cpu", "reference", "auto"],
        "lengths": ["self", "cross"],
        "relative": [False, True],
        "grad_lse": [False, True],
    }
)
def test_opcheck(backend, lengths, relative, grad_lse):
    check(*operands(backend, lengths, alibi=grad_lse, relative=relative), grad_lse=grad_lse)


VARIANTS = {
    "plain": {},
    "padded": {"head_dims": HeadDims(multiple=8, equal=True)},
    "lower-right-alone": {"traits": {"lower_right_only"}},
    "no-fully-masked-rows": {"traits": {"no_fully_masked_rows"}, "features": cpu.BACKEND.features - {"window"}},
}


@pytest.mark.parametrize("past", [(0, 0), (3, 2)], ids=["whole", "rows-past-the-end"])
@pytest.mark.parametrize("heads_first", [False, True], ids=["tokens-first", "heads-first"])
@pytest.mark.parametrize("lower_right", [False, True], ids=["upper_left", "lower_right"])
@pytest.mark.parametrize("relative", [False, True], ids=["", "relative"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_with_adapters_and_rewrites(fake, variant, relative, lower_right, heads_first, past):
    """Gradients have the strides of their inputs, as compilers expect, also where rows were moved in between."""
    fake(**VARIANTS[variant])
    arguments = operands("fake", lower_right=lower_right, heads_first=heads_first, past=past, relative=relative)
    check(*arguments, grad_lse=True, test_utils="test_faketensor")


def as_meta(tensors):
    return [x.to("meta") if isinstance(x, torch.Tensor) else x for x in tensors]


@NAMES
@pytest.mark.parametrize("past", [(0, 0), (3, 2)], ids=["whole", "rows-past-the-end"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("relative", [False, True], ids=["", "relative"])
def test_shapes_and_strides_on_meta_and_fake_tensors(backend, relative, dtype, past):
    arguments = operands(backend, past=past, relative=relative)
    arguments = (*(x.to(dtype) for x in arguments[:3]), *arguments[3:])
    real = FORWARD(*arguments)
    assert real[1].dtype == torch.promote_types(dtype, torch.float32)
    gradients = BACKWARD(*given_back(real[0], real[1], real, arguments))
    assert described(FORWARD(*as_meta(arguments))) == described(real)
    assert described(BACKWARD(*as_meta(given_back(real[0], real[1], real, arguments)))) == described(gradients)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        faked = FORWARD(*given)
        assert described(faked) == described(real)
        faked_gradients = BACKWARD(*given_back(faked[0], faked[1], faked, given))
        assert described(faked_gradients) == described(gradients)


def test_attention_of_fake_tensors():
    case = case_of("self", "causal", "wide-values-gqa", dtype=torch.float32)
    function = call(case, "cpu")
    real = case.solve(lambda **kwargs: function(**{name: kwargs[name] for name in case.inputs}))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = {name: mode.from_tensor(x).requires_grad_() for name, x in case.inputs.items()}
        out, lse = function(**leaves)
        grads = torch.autograd.grad(out.sum() + lse.sum(), tuple(leaves.values()))
    assert described((out, lse, *grads)) == described(real.values())


WRONG = {
    "heads that do not divide": ({0: torch.randn(26, 5, 11)}, "query heads must be a multiple of key heads"),
    "a head dim": ({1: torch.randn(31, 3, 12)}, "query and key must have the same head dim"),
    "heads of the values": ({2: torch.randn(31, 2, 7)}, "key and value must have the same number of heads"),
    "too few values": ({2: torch.randn(30, 3, 7)}, "value has shape"),
    "dimensions": ({0: torch.randn(26, 66)}, "must be \\(tokens, heads, head dim\\)"),
    "a dtype": ({1: torch.randn(31, 3, 11).double()}, "must share one floating-point dtype"),
    "slopes": ({5: torch.rand(4)}, "alibi_slopes must be a tensor"),
    "sequences": ({4: torch.tensor([0, 31], dtype=torch.int32)}, "layout has 5 sequences"),
}


@NAMES
@pytest.mark.parametrize("wrong", WRONG)
def test_forward_operator_refuses_invalid_arguments(backend, wrong):
    changes, message = WRONG[wrong]
    arguments = list(operands(backend))
    for index, x in changes.items():
        arguments[index] = x
    with pytest.raises(ValueError, match=message):
        FORWARD(*arguments)


@NAMES
@pytest.mark.parametrize("which", range(4), ids=["grad", "grad_lse", "out", "lse"])
def test_backward_operator_refuses_invalid_shapes(backend, which):
    arguments = operands(backend)
    results = FORWARD(*arguments)
    given = list(given_back(torch.randn_like(results[0]), torch.randn_like(results[1]), results, arguments))
    given[which] = given[which][:-1]
    with pytest.raises(ValueError, match=f"{('grad', 'grad_lse', 'out', 'lse')[which]} must be"):
        BACKWARD(*given)


OPTIONS = {"softcap": 2.0, "dropout_p": 0.25, "window_size": (3, 3), "deterministic": True}


@pytest.mark.parametrize("backend", [*(name for name, x in BACKENDS.items() if x.backward is not None), "auto"])
@pytest.mark.parametrize("option", [*OPTIONS, "softcap and dropout_p"])
def test_fake_random_state_under_dropout(backend, option):
    arguments = list(operands(backend))
    for name in option.split(" and "):
        arguments[custom_ops.Arguments._fields.index(name)] = OPTIONS[name]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        state = FORWARD(*fakes)[2]
    assert state.shape == (2 if "dropout_p" in option else 0,)
