"""Dropout of the token-tiled kernels."""

import itertools

import oracle
import pytest
import torch
from oracle import Problem, assert_same
from token_tiled_cases import DEVICE, GPU, IGNORED_WARNINGS, exact, on_tiles, placed

pytestmark = IGNORED_WARNINGS


def dropped(case, dropout_p, seed=3, **options):
    """out, lse and gradients of a call that drops weights."""
    torch.manual_seed(seed)
    return case.solve(on_tiles(case, dropout_p=dropout_p, **options))


DROPOUT_LENGTHS = [61, 5, 0, 13, 29, 1]


@exact
@pytest.mark.parametrize("options", [{}, {"softcap": 1.3, "window_size": (19, 3)}], ids=["full", "softcap-window"])
def test_dropout_drops_the_same_weights_forward_and_backward(options):
    """With the identity as values, the output is the weights that were kept. The gradients must be of these weights."""
    case = placed(Problem(DROPOUT_LENGTHS, None, 4, 2, 11, max(DROPOUT_LENGTHS), dtype=torch.float32, options=options))
    eye = torch.eye(max(DROPOUT_LENGTHS), device=DEVICE)
    case.inputs["value"] = torch.cat([eye[:n] for n in DROPOUT_LENGTHS])[:, None].repeat(1, 2, 1)
    p = 0.31
    got = dropped(case, p)

    def by_hand(query, key, value, **options):
        outs, lses = [], []
        begins = itertools.accumulate(DROPOUT_LENGTHS, initial=0)
        for begin, n in zip(begins, DROPOUT_LENGTHS, strict=False):
            rows = slice(begin, begin + n)
            with DEVICE:
                weights, lse = oracle.attention(query[rows], key[rows], eye[:n, None].expand(-1, 2, -1), [n], **options)
            kept = got["out"][rows].detach() != 0
            weights = weights * kept / (1 - p)
            outs.append(torch.einsum("thj,jhd->thd", weights[..., :n], value[rows].double().repeat_interleave(2, 1)))
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    assert_same(got, case.solve(by_hand), 1e-4)


@pytest.mark.parametrize("p", [0.1, 0.75])
def test_dropout_drops_its_share_and_keeps_the_mean(p):
    n = 1021 if GPU else 61
    case = placed(Problem([n], None, 2, 2, 5, 5, dtype=torch.float32, options={"scale": 0.0}))
    with DEVICE:
        case.inputs["value"] = torch.eye(n)[:, None].repeat(1, 2, 1)[..., :256]
        function = on_tiles(case, dropout_p=p)
        torch.manual_seed(3)
        weights, _ = function(**case.inputs, **case.options)
        torch.manual_seed(3)
        again, _ = function(**case.inputs, **case.options)
        other, _ = function(**case.inputs, **case.options)
    kept = weights > 0
    torch.testing.assert_close(weights[kept] * n * (1 - p), torch.ones_like(weights[kept]))
    count = kept.numel()
    spread = (p * (1 - p) / count) ** 0.5
    assert abs(1 - kept.double().mean().item() - p) < 5 * spread
    # and not in step over heads, queries, keys or calls: two masks agree where both keep or both drop
    agree = p**2 + (1 - p) ** 2
    pairs = [(kept[:, 0], kept[:, 1]), (kept[1:], kept[:-1]), (kept[..., 1:], kept[..., :-1]), (kept, other > 0)]
    for one, two in pairs:
        found = (one == two).double().mean().item()
        assert abs(found - agree) < 5 * (agree * (1 - agree) / one.numel()) ** 0.5
    assert torch.equal(again, weights)
