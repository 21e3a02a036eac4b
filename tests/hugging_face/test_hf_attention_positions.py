"""position_ids in transformers' attention function: packed rows are read from them, once per forward."""

import gc

import pytest
import torch
from attention_function import LENGTHS, Grouped, call, expected, make, positions_of, random_states

import nt_attention as nta


@pytest.mark.parametrize("over", ["sdpa", "eager"])
def test_position_ids_that_do_not_show_packed_rows_are_ignored(over):
    q, k, v = random_states(rows=2, length=7)
    module = Grouped() if over == "sdpa" else make("llama").model.layers[0].self_attn
    want = expected(q, k, v, [7, 7], is_causal=True)
    packed = positions_of([3, 4], [3, 4])
    for positions in (
        packed.expand(3, -1, -1),  # M-RoPE's three axes
        packed[0],  # no rows
        positions_of([3, 5], [3, 5]),  # of other tokens
        packed[:1].expand(3, -1),  # of other rows
        torch.arange(7)[None],
        torch.arange(9, 16).expand(2, -1),
        None,
    ):
        for causal in ({}, {"is_causal": True}):
            got = call(q, k, v, module=module, over=over, position_ids=positions, **causal)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # eager's softmax is in float32


def test_position_ids_beside_a_cache_are_ignored():
    q, k, v = random_states(length=3, keys=7, kv_heads=6)
    mask = (torch.arange(7) <= torch.arange(3)[:, None] + 4)[None, None]
    want = expected(q, k, v, [3], [7], is_causal=True)
    got = call(q, k, v, mask, module=Grouped(groups=1), position_ids=torch.tensor([[4, 4, 4]]))
    torch.testing.assert_close(got, want)
    got = call(q, k, v, module=Grouped(groups=1), position_ids=torch.tensor([[4, 4, 4]]), is_causal=False)
    torch.testing.assert_close(got, expected(q, k, v, [3], [7]))
    q, k, v = random_states(length=1, keys=7)
    torch.testing.assert_close(
        call(q, k, v, module=Grouped(), position_ids=torch.tensor([[6]])), expected(q, k, v, [1], [7])
    )


def count_reads(monkeypatch):
    """A list with the positions of each read."""
    reads, read = [], nta.SequenceLayout.from_position_ids

    def note(positions):
        reads.append(positions)
        return read(positions)

    monkeypatch.setattr(nta.SequenceLayout, "from_position_ids", staticmethod(note))
    return reads


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_position_ids_are_read_once_per_forward(mode, monkeypatch):
    model = make("llama").float()
    model.set_attn_implementation(nta.hf.register())
    reads = count_reads(monkeypatch)
    with mode():
        for lengths in ([5, 1, 12, 3], [7, 14], [21], [5, 1, 12, 3]):
            ids, positions = torch.randint(101, (1, 21)), positions_of(lengths)
            reads.clear()
            got = model(ids, position_ids=positions, use_cache=False).logits
            assert len(reads) == 1
            for part, row in zip(got.split(lengths, 1), ids.split(lengths, 1), strict=True):
                want = model(row, use_cache=False).logits
                torch.testing.assert_close(part, want, rtol=1e-4, atol=1e-4)


WAYS = {
    "copy_": lambda x, new: x.copy_(new),
    ".data": lambda x, new: x.data.copy_(new),
    "NumPy": lambda x, new: x.numpy().__setitem__(..., new.numpy()),
}


@pytest.mark.parametrize("how", WAYS)
def test_mask_beside_position_ids_that_was_changed_in_place(how):
    """Hidden tokens decide which positions restart, so the sequences of the same positions are others."""
    model = make("llama").float()
    model.set_attn_implementation(nta.hf.register())
    ids, positions, mask = torch.randint(101, (2, 9)), positions_of([3, 6], [3, 6]), torch.ones(2, 9).bool()
    mask[1, 8] = False
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
        new = mask.clone()
        new[0, 3:6] = False
        want = model(ids, attention_mask=new, position_ids=positions.clone(), use_cache=False).logits
        WAYS[how](mask, new)
        got = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got[new], want[new])


def test_one_row_of_position_ids_for_several_batch_sizes():
    q, k, v = random_states(rows=3, length=7)
    positions = positions_of([3, 4])
    for rows in (3, 1, 2, 3):
        got = call(q[:rows], k[:rows], v[:rows], position_ids=positions)
        torch.testing.assert_close(got, expected(q[:rows], k[:rows], v[:rows], [3, 4] * rows, is_causal=True))


def test_position_ids_are_not_kept_alive():
    from nt_attention.layouts.cache import _entries

    q, k, v = random_states()
    before = len(_entries)
    for _ in range(3):
        call(q, k, v, position_ids=positions_of(LENGTHS))
    gc.collect()
    assert len(_entries) <= before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_position_ids_read_without_gradients_are_used_in_training(mode):
    positions = positions_of(LENGTHS)
    with mode():
        call(*random_states(), position_ids=positions)
    leaves = [x.requires_grad_() for x in random_states()]
    call(*leaves, position_ids=positions).sum().backward()
    assert all(x.grad is not None for x in leaves)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("first_layer", "how"), [(None, "copy_"), (0, "copy_"), (3, ".data"), (3, "NumPy")])
def test_position_ids_changed_in_place_are_read_again_at_any_first_layer(first_layer, how, mode, request):
    """In models with several kinds of layers, any layer may be the first with attention. On a GPU no value is read."""
    if how == "copy_":
        request.getfixturevalue("like_a_gpu")
    q, k, v = random_states()
    module = Grouped()
    with mode():
        positions = positions_of([21])
        for lengths in ([5, 16], [8, 13], [21]):
            WAYS[how](positions, positions_of(lengths))
            for layer in (first_layer, first_layer if first_layer is None else first_layer + 1):
                module.layer_idx = layer
                got = call(q, k, v, module=module, position_ids=positions)
                torch.testing.assert_close(got, expected(q, k, v, lengths, is_causal=True))
