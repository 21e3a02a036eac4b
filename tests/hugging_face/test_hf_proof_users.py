"""Classes of users' own: what a proof tries because their code may compare with anything, and what their key holds."""

import planted_users
import pytest
import torch
from planted_users import PLANTED, RIGHT
from proof_cases import BATCH, MASK

import nt_attention as nta

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_planted_in_classes_of_users(kind):
    with pytest.raises(ValueError, match="can't be packed"):
        nta.patch(planted_users.make(kind, **PLANTED[kind]))


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_right_classes_of_users_are_packed(kind):
    model = planted_users.make(kind, **RIGHT[kind])
    want = model(**BATCH)[0]
    with nta.patch(model, on_fallback="raise") as handle:
        got = model(**BATCH)[0]
    assert handle.calls == {None: 1}
    torch.testing.assert_close(got[MASK], want[MASK], rtol=2e-4, atol=2e-5)
