"""Module hooks on VarlenMultiheadAttention: what they see and what they change."""

import pytest
import torch
from transformer_layers import (
    BATCH,
    EMBED,
    HEADS,
    KEYS,
    LENGTH,
    MEMORY_PADDED,
    SOME_PADDED,
    causal,
    close,
    decoder_layer,
    double,
    encoder_layer,
    pair,
    with_our_attention,
)


def test_forward_hooks_see_the_arguments_and_results_of_nn_multihead_attention():
    x, memory = double(BATCH, LENGTH, EMBED), double(BATCH, KEYS, EMBED)
    masks = {"tgt_mask": causal(LENGTH), "memory_key_padding_mask": MEMORY_PADDED}
    for stock, inputs, names, options in (
        (encoder_layer(), (x,), ["self_attn"], {"src_key_padding_mask": SOME_PADDED}),
        (encoder_layer(), (x,), ["self_attn"], {"src_mask": causal(LENGTH), "is_causal": True}),
        (decoder_layer(), (x, memory), ["self_attn", "multihead_attn"], masks),
    ):
        told = []
        for model in (stock, with_our_attention(stock)):
            seen = []
            for name in names:
                attention = model.get_submodule(name)
                attention.register_forward_pre_hook(
                    lambda module, args, kwargs, seen=seen: seen.append((args, kwargs)), with_kwargs=True
                )
                attention.register_forward_hook(
                    lambda module, args, kwargs, out, seen=seen: seen.append((args, kwargs, out)), with_kwargs=True
                )
            model.train()(*inputs, **options)
            assert len(seen) == 2 * len(names)
            assert all(isinstance(call[-1], tuple) and len(call[-1]) == 2 for call in seen[1::2])
            told.append(seen)
        close(*told)


def test_forward_hooks_change_arguments_and_results():
    stock = encoder_layer()
    x, kept = double(BATCH, LENGTH, EMBED), []

    def ask_for_weights(module, args, kwargs):
        return tuple(a * 2 for a in args), kwargs | {"need_weights": True, "average_attn_weights": False}

    def keep_and_double(module, args, out):
        kept.append(out[1])
        return 2 * out[0], None

    for model in (stock, with_our_attention(stock)):
        model.self_attn.register_forward_pre_hook(ask_for_weights, with_kwargs=True)
        model.self_attn.register_forward_hook(keep_and_double)
        kept.append(model(x, src_key_padding_mask=SOME_PADDED))
    close(kept[2:], kept[:2])
    assert kept[2].shape == (BATCH, HEADS, LENGTH, LENGTH)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_backward_hooks_change_no_result(masked):
    _, module = pair(batch_first=True)
    x, grads = double(BATCH, LENGTH, EMBED), []

    def run():
        leaf = x.clone().requires_grad_()
        out = module(leaf, leaf, leaf, need_weights=False, key_padding_mask=SOME_PADDED if masked else None)[0]
        return out, *torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])

    before = run()
    module.register_full_backward_hook(lambda module, grad_in, grad_out: grads.append((grad_in, grad_out)))
    close(run(), before)
    assert len(grads) == 1
