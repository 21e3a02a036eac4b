"""One patched model called from eight threads."""

import sys

import pytest
from eight_threads import run

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.patching.patch.NotPackedWarning")


@pytest.mark.parametrize("calls", [600, pytest.param(3000, marks=pytest.mark.sweep)])
def test_patched_and_registered_models_in_eight_threads(calls):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        counted, made = run(calls)
    finally:
        sys.setswitchinterval(before)
    through_the_patch = sum(count for kind, count in made.items() if not kind.startswith("registered"))
    assert counted == through_the_patch > calls / 2
