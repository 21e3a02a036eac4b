"""One patched model called from eight threads, and while another thread compiles or exports something else."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch
from eight_threads import run

import nt_attention as nta

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.NotPackedWarning")


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


@pytest.fixture
def another_thread_exports(monkeypatch):
    """While a thread compiles or exports, PyTorch sets these flags for all threads."""
    for flag in ("_is_compiling_flag", "_is_exporting_flag"):
        monkeypatch.setattr(torch.compiler, flag, True)


def test_models_run_while_another_thread_exports(another_thread_exports):
    mask = torch.arange(9) < torch.tensor([7, 3, 9])[:, None]
    model = tiny.make("bert", "BertModel", "sdpa")
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    ids, x = torch.randint(5, tiny.VOCABULARY, mask.shape), torch.randn(3, 9, 32)
    with torch.no_grad():
        want = model(ids, attention_mask=mask.long())[0][mask], encoder(x, src_key_padding_mask=~mask)[mask]
        with nta.patch(model, on_fallback="raise") as handle, nta.patch(encoder, on_fallback="raise") as other:
            got = model(ids, attention_mask=mask.long())[0][mask], encoder(x, src_key_padding_mask=~mask)[mask]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    assert handle.calls == other.calls == {None: 1}


def test_models_that_are_patched_at_a_time_are_checked_one_after_another():
    """Checks draw random numbers from the generator that all threads have in common."""
    models = [tiny.make("bert", "BertModel", intermediate_size=64 + n, hidden_dropout_prob=0.1) for n in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert all(handle.active for handle in pool.map(nta.patch, models))
