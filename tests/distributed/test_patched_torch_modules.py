"""`patch(model, mesh=...)` for the modules of torch.nn, and models that consist of several patched parts."""

import pytest
import torch
from processes import run_in_processes
from ranks import average, check_same
from test_patched_models import batch_of, make
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import nt_attention as nta

E, LENGTHS, TARGETS = 16, [9, 1, 14, 6], [4, 7, 2, 3]


def layer_of(kind):
    return kind(E, 4, 20, dropout=0.0, batch_first=True, dtype=torch.float64)


class Chain(nn.Module):
    """Two encoders one after the other, between linear layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Linear(E, E, dtype=torch.float64) for _ in range(2))
        layers = [layer_of(nn.TransformerEncoderLayer) for _ in range(2)]
        stacks = [nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) for layer in layers]
        self.stacks = nn.ModuleList(stacks)

    def forward(self, x, padding):
        x = self.first(x)
        for stack in self.stacks:
            x = stack(x, src_key_padding_mask=padding)
        return self.last(x)


class InModel(nn.Module):
    """A Hugging Face model whose outputs are the inputs of an encoder."""

    def __init__(self):
        super().__init__()
        self.bert, self.chain = make("bert"), Chain()
        self.narrow = nn.Linear(32, E, dtype=torch.float64)

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.chain(self.narrow(hidden), attention_mask == 0)


def call(kind):
    """A model, the arguments of a call, and the padding of its output."""
    torch.manual_seed(1)
    padding, target_padding = (torch.arange(max(x)) >= torch.tensor(x)[:, None] for x in (LENGTHS, TARGETS))
    x, y = (torch.randn(*p.shape, E, dtype=torch.float64, requires_grad=True) for p in (padding, target_padding))
    if kind == "chain":
        return Chain(), (x, padding), {}, padding
    if kind == "in a model":
        batch = batch_of("bert")
        return InModel(), (), batch, batch["attention_mask"] == 0
    if kind == "transformer":
        options = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
        model = nn.Transformer(E, 4, 1, 1, 20, **options)
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=torch.float64)
        named = {"tgt_mask": mask, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        return model, (x, y), named | {"tgt_key_padding_mask": target_padding}, target_padding
    if kind == "decoder":
        model = nn.TransformerDecoder(layer_of(nn.TransformerDecoderLayer), 2)
        named = {"tgt_key_padding_mask": target_padding, "memory_key_padding_mask": padding}
        return model, (y, x), named, target_padding
    model = nn.TransformerEncoder(layer_of(nn.TransformerEncoderLayer), 2, enable_nested_tensor=False)
    if kind == "without padding":
        return model, (x,), {}, torch.zeros_like(padding)
    if kind == "nested":
        return model, (nta.SequenceLayout.from_lengths(LENGTHS).to_nested(x[~padding]),), {"is_causal": True}, None
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
    return model, (x,), {"mask": mask, "is_causal": True, "src_key_padding_mask": padding}, padding


def step(kind, patch, mean, share=None):
    model, args, named, padding = call(kind)
    patch(model)
    out = model(*args, **named)
    out = out.values() if padding is None else out.masked_fill(padding[..., None], 0)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    loss = (out * weights * (1 if share is None else share(out))).sum()
    loss.backward()
    gradients = {name: mean(x.grad) for name, x in model.named_parameters() if x.grad is not None}
    inputs = {str(i): mean(x.grad) for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.grad is not None}
    return {"out": out.detach()} | gradients | inputs


def on_each_rank(kind, divides_loss):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def share(out):
        """Each rank's loss has other positions of the output. The mean of the losses is that of one process."""
        is_own = torch.arange(out.numel()) % mesh.size() == mesh.get_local_rank()
        return (is_own * mesh.size()).view_as(out)

    patch = lambda model: nta.patch(model, mesh=mesh, on_fallback="raise")  # noqa: E731
    return step(kind, patch, average, share if divides_loss else None)


def check(world, kind, divides_loss=False):
    # PyTorch's encoder takes no NestedTensors in training
    patch = nta.patch if kind == "nested" else lambda model: None
    want = step(kind, patch, lambda x: x)
    for found in run_in_processes(world, on_each_rank, kind, divides_loss):
        check_same(found, want)


@pytest.mark.parametrize("kind", ["encoder", "without padding", "nested", "decoder"])
def test_two_ranks(kind):
    check(2, kind)


@pytest.mark.parametrize(("kind", "world"), [("chain", 4), ("transformer", 2), ("in a model", 2)])
def test_ranks_with_different_losses(kind, world):
    check(world, kind, divides_loss=True)
