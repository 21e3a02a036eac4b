"""One patched model called from eight threads, and while another thread compiles or exports something else."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch

import nt_attention as nta

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.NotPackedWarning")
LENGTHS, LENGTH = [7, 1, 5, 11], 13


def models():
    """A patched model and a registered one, the base model under the first, and the handle."""
    patched = tiny.make("llama", "LlamaForCausalLM", "sdpa", num_hidden_layers=1)
    registered = tiny.make("llama", "LlamaForCausalLM", nta.hf.register(), num_hidden_layers=1)
    handle = nta.patch(patched)
    return {"patched": patched, "its base model": patched.model, "registered": registered}, handle


def batches():
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, tiny.VOCABULARY, mask.shape)
    padded = {"input_ids": ids, "attention_mask": mask.long()}
    left = {"input_ids": ids.flip(1), "attention_mask": mask.long().flip(1)}
    packed = {"input_ids": ids[mask][None], "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    return {
        "padded": padded, "padded, with a cache": {**padded, "use_cache": True}, "left": left,
        "packed": {**packed, "use_cache": False}, "no padding": {"input_ids": ids},
    }  # fmt: skip


def fresh(batch):
    """Copies, as from a data loader: otherwise cached layouts would be found."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def run(calls: int, threads: int = 8) -> tuple[int, dict[str, int]]:
    """Make this number of calls in total, and compare each with the first of its kind.

    Returns:
        how many calls the handle has counted, and how many calls of each kind were made.
    """
    torch.manual_seed(0)
    of, handle = models()
    kinds = [(name, form, batch) for name in of for form, batch in batches().items()]
    with torch.no_grad():
        wanted = {(name, form): of[name](**fresh(batch))[0] for name, form, batch in kinds}
    counted, made = sum(handle.calls.values()), dict.fromkeys(wanted, 0)
    start, lock = threading.Barrier(threads), threading.Lock()

    def work(which: int) -> None:
        start.wait()
        for call in range(which, calls, threads):
            name, form, batch = kinds[call // threads * 7 % len(kinds)]
            with torch.no_grad():
                got = of[name](**fresh(batch))[0]
            torch.testing.assert_close(got, wanted[name, form], rtol=1e-4, atol=1e-5)
            with lock:
                made[name, form] += 1

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, which) for which in range(threads)]:
            done.result()
    assert sum(made.values()) == calls
    in_all = {f"{name}, {form}": count for (name, form), count in made.items()}
    return sum(handle.calls.values()) - counted, in_all


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
