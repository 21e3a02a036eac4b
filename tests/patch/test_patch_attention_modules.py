"""patch on models with nn.MultiheadAttention in their own modules: replaced layer by layer, and restored."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import nt_attention as nta

EMBED, HEADS, LENGTHS, LENGTH, KEYS = 12, 3, [5, 2, 7], 7, 11
PADDING = torch.arange(LENGTH) >= torch.tensor(LENGTHS)[:, None]
MEMORY_PADDING = torch.arange(KEYS) >= torch.tensor([3, 11, 6])[:, None]


class VisionBlock(nn.Module):
    """As in torchvision: batch first, self-attention without weights."""

    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(EMBED)
        self.self_attention = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(EMBED), nn.Linear(EMBED, EMBED), nn.GELU())

    def forward(self, x, padding):
        y = self.ln(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        return x + y + self.mlp(x + y)


class ResidualBlock(nn.Module):
    """As in CLIP: length first, and a causal mask that is a buffer of the block."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(EMBED, HEADS)
        self.ln_1 = nn.LayerNorm(EMBED)
        self.register_buffer("attn_mask", torch.full((LENGTH, LENGTH), -torch.inf).triu(1))

    def forward(self, x, padding):
        y = self.ln_1(x).transpose(0, 1)
        mask = self.attn_mask.to(y.dtype)
        return x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0].transpose(0, 1)


class QueryDecoder(nn.Module):
    """As in DETR: queries with positions added, and cross-attention to a padded memory, whose weights are used."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(LENGTH, 1, EMBED))
        self.self_attn = nn.MultiheadAttention(EMBED, HEADS, dropout=0.1)
        self.cross = nn.ModuleDict({"attn": nn.MultiheadAttention(EMBED, HEADS, kdim=5, vdim=5, add_bias_kv=True)})
        self.memory = nn.Parameter(torch.randn(KEYS, 3, 5))

    def forward(self, x, padding):
        x = x.transpose(0, 1)
        q = x + self.positions
        x = x + self.self_attn(q, q, value=x, key_padding_mask=padding, need_weights=False)[0]
        y, weights = self.cross["attn"](x, self.memory, self.memory, key_padding_mask=MEMORY_PADDING)
        return (x + y + weights.sum(-1).t().unsqueeze(-1)).transpose(0, 1)


MODELS = {"vision": VisionBlock, "residual": ResidualBlock, "query": QueryDecoder}


def make(kind):
    torch.manual_seed(0)
    return nn.Sequential(MODELS[kind]()).double()


def run(model, x):
    """Real tokens and the gradients of x and the parameters."""
    leaf = x.clone().requires_grad_()
    out = model[0](leaf, PADDING)[~PADDING]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), [leaf, *model.parameters()])]


@pytest.mark.parametrize("kind", MODELS)
def test_model_gives_what_it_gave_and_is_restored(kind):
    model = make(kind).eval()
    x = torch.randn(3, LENGTH, EMBED, dtype=torch.float64)
    objects, names = dict(model.named_modules()), list(model.state_dict())
    want = run(model, x)
    with nta.patch(model) as handle:
        swapped = [name for name, module in model.named_modules() if isinstance(module, nta.VarlenMultiheadAttention)]
        assert swapped == list(handle.layers) == [n for n, m in objects.items() if type(m) is nn.MultiheadAttention]
        assert list(model.state_dict()) == names
        torch.testing.assert_close(run(model, x), want, rtol=1e-9, atol=1e-10)
        with torch.no_grad():
            torch.testing.assert_close(model[0](x, PADDING)[~PADDING], want[0].detach(), rtol=1e-9, atol=1e-10)
    assert all(a is b for a, b in zip(objects.values(), model.modules(), strict=True))
    for a, b in zip(run(model, x), want, strict=True):
        assert torch.equal(a, b)


def test_patched_block_takes_nested_tensors():
    model = make("vision").eval()
    values = torch.randn(sum(LENGTHS), EMBED, dtype=torch.float64)
    nested = nta.SequenceLayout.from_lengths(LENGTHS).to_nested(values)
    with nta.patch(model):
        out = model[0](nested, None)
    for got, part in zip(out.unbind(), values.split(LENGTHS), strict=True):
        torch.testing.assert_close(got, model[0](part[None], None)[0])


def test_forward_hooks_stay_on_replaced_attention():
    model, seen = make("residual"), []
    attention = model[0].attn
    kept = attention.register_forward_hook(lambda *_: seen.append("kept"))
    attention.register_forward_pre_hook(lambda _, args, kwargs: seen.append(sorted(kwargs)), with_kwargs=True)
    with nta.patch(model):
        model[0](torch.randn(3, LENGTH, EMBED).double(), PADDING)
        assert seen == [["attn_mask", "need_weights"], "kept"]
        kept.remove()
        model[0].attn.register_forward_hook(lambda *_: seen.append("later"))
        model[0](torch.randn(3, LENGTH, EMBED).double(), PADDING)
    assert seen[2:] == [["attn_mask", "need_weights"], "later"]
    model[0](torch.randn(3, LENGTH, EMBED).double(), PADDING)
    assert seen[-1] == "later"


def test_attention_that_can_not_be_replaced_is_named():
    class Own(nn.MultiheadAttention):
        pass

    model = nn.ModuleDict(
        {
            "own": Own(EMBED, HEADS),
            "parametrized": parametrizations.weight_norm(nn.MultiheadAttention(EMBED, HEADS), "in_proj_weight"),
            "pruned": prune.identity(nn.MultiheadAttention(EMBED, HEADS), "in_proj_weight"),
            "plain": nn.MultiheadAttention(EMBED, HEADS),
        }
    )
    with nta.patch(model) as handle:
        assert list(handle.layers) == ["plain"]
        assert handle.left["own"] == "Own is not nn.MultiheadAttention."
        assert handle.left["parametrized"] == "ParametrizedMultiheadAttention is not nn.MultiheadAttention."
        assert "in_proj_weight_mask" in handle.left["pruned"]
        with pytest.raises(ValueError, match="already patched"):
            nta.patch(model)


def test_shared_attention_is_replaced_under_all_names():
    shared = nn.MultiheadAttention(EMBED, HEADS)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": shared})
    with nta.patch(model) as handle:
        assert list(handle.layers) == ["a", "b.0", "c"]
        assert model["a"] is model["b"][0] is model["c"]
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
        assert len(list(model.parameters())) == 4
    assert model["a"] is model["b"][0] is model["c"] is shared


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_a_patched_model_have_their_own_parameters(way):
    model = make("query").eval()
    x = torch.randn(3, LENGTH, EMBED, dtype=torch.float64)
    handle = nta.patch(model)
    copied = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    want = run(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(run(copied, x), want)
    handle.remove()


@pytest.mark.parametrize("when", ["before", "while"])
def test_backward_and_state_dict_hooks_stay_on_replaced_attention(when):
    model, seen = make("vision"), []
    attention = model[0].self_attention

    def hook(attention):
        attention.register_full_backward_hook(lambda *_: seen.append("backward"))
        attention.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({prefix + "more": 1}))

    if when == "before":
        hook(attention)
    handle = nta.patch(model)
    if when == "while":
        hook(model[0].self_attention)
    for active in (True, False):
        model[0](torch.randn(3, LENGTH, EMBED, dtype=torch.float64, requires_grad=True), None).sum().backward()
        assert seen == ["backward"]
        assert "0.self_attention.more" in model.state_dict()
        seen.clear()
        if active:
            handle.remove()


def test_attributes_and_buffers_of_replaced_attention():
    model = make("vision")
    model[0].self_attention.tag = "mine"
    with nta.patch(model):
        assert model[0].self_attention.tag == "mine"
        model[0].self_attention.dropout = 0.25
    assert model[0].self_attention.dropout == 0.25
    model[0].self_attention.register_buffer("steps", torch.tensor(3))
    with pytest.raises(ValueError, match=r"self_attention: MultiheadAttention has steps, which would be lost"):
        nta.patch(model)


def test_parametrization_under_the_patch_stays_after_remove():
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model, x = make("vision").eval(), torch.randn(3, LENGTH, EMBED, dtype=torch.float64)
    handle = nta.patch(model)
    parametrize.register_parametrization(model[0].self_attention, "in_proj_weight", Twice())
    want = model[0](x, None)
    with pytest.warns(UserWarning, match="parametrized or extended while it was patched"):
        handle.remove()
    assert torch.equal(model[0](x, None), want)


def test_patching_a_copy_of_a_patched_model_is_refused():
    model = make("vision")
    handle = nta.patch(model)
    copied = copy.deepcopy(model)
    handle.remove()
    with pytest.raises(ValueError, match="it is already a VarlenMultiheadAttention"):
        nta.patch(copied)


def test_a_model_without_attention_modules_is_told_to_call_varlen_attention():
    with pytest.raises(ValueError, match=r"found nothing to change.*call nt_attention\.varlen_attention \(docs/coming"):
        nta.patch(nn.Sequential(nn.Linear(3, 3)))
