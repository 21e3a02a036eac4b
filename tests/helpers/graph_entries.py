"""What can run as CUDA graphs: an entry is a call of a model, and a pair compares it with the same call without graphs.

Dimensions: B sequences, L positions in a padded row, T tokens, E = 32 features.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import peft
import pytest
import tiny
import torch
import transformers
from cuda_graphs import DEVICE, GPU, leaves
from torch import nn

import nt_attention as nta
from nt_attention.graphs import policy
from nt_attention.graphs.cache import CapturedCalls
from nt_attention.hf.families import CACHE

TOLERANCE = 2e-3 if GPU else 1e-4  # matrix products of other sizes run other kernels
MODES = {"inference": True, "training": "training", "auto": "auto"}
BATCHES = ([5, 2, 9], [1], [3, 3, 3, 3, 3], [9, 0, 4], [16, 17], [5, 2, 9])
FEW = ([5, 2, 9], [8, 16, 1, 4])
OF_AUTO = {policy.SELDOM, policy.NO_GAIN, policy.DEVICE_BOUND}  # why a call with cuda_graphs="auto" may be no graph


def packed(lengths):
    return {"x": torch.randn(sum(lengths), 32, device=DEVICE), "lengths": lengths}


def padded(lengths):
    padding = (torch.arange(max(lengths) + 2) >= torch.tensor(lengths)[:, None]).to(DEVICE)  # True at padding
    return {"x": torch.randn(*padding.shape, 32, device=DEVICE), "padding": padding}


def both_padded(lengths):
    """Source, and target with other lengths."""
    target = padded([n % 5 + 1 for n in lengths])
    return {**padded(lengths), "target": target["x"], "target_padding": target["padding"]}


def tokens(lengths, side="right", labels=False, embeds=False, at_padding=tiny.PAD):
    lengths = torch.tensor(lengths)[:, None]
    length = int(lengths.max()) + 2
    position = torch.arange(length)
    mask = position < lengths if side == "right" else position >= length - lengths
    ids = torch.randint(5, tiny.VOCABULARY, mask.shape).masked_fill(~mask, at_padding).to(DEVICE)
    batch = {"input_ids": ids, "attention_mask": mask.long().to(DEVICE)}
    if embeds:
        del batch["input_ids"]
        batch |= {"inputs_embeds": torch.randn(*ids.shape, 48, device=DEVICE), "token_type_ids": ids % 2}
    return batch | ({"labels": ids % 3} if labels else {})


def sides(lengths, kind="ids"):
    """A source and a target, of which one or the other is longer.

    `kind`: as "ids", "embeds", or "labels", some of which are ignored.
    """
    target, source = tokens([3 * n % 20 + 1 for n in lengths], embeds=kind == "embeds"), tokens(lengths)
    if kind == "labels":
        labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
        labels[-1, 0] = -100
        return source | {"labels": labels}
    name = "inputs_embeds" if kind == "embeds" else "input_ids"
    return source | {f"decoder_{x}": target[x] for x in (name, "attention_mask")}


def layout_of(lengths):
    return nta.SequenceLayout.from_lengths(lengths, device=DEVICE)


def mha(**options):
    return nta.VarlenMultiheadAttention(32, 4, batch_first=True, device=DEVICE, **options)


def attend(m, x, lengths, **options):
    return m(x, x, x, layout=layout_of(lengths), **options)[0]


def attend_across(m, x, lengths, same=None):
    """Other key lengths. `same`: the key, or key and value, are the tensor of the queries, which has two layouts."""
    key_lengths = lengths[::-1] if same else [n + 1 for n in lengths]
    other = x.roll(1, 0).repeat(2, 1)[: sum(key_lengths)]
    key, value = {None: (other, 2 * other), "key": (x, other), "value": (other, x), "both": (x, x)}[same]
    return m(x, key, value, layout=layout_of(lengths), key_layout=layout_of(key_lengths))[0]


def attend_nested(m, x, lengths):
    nested = torch.nested.nested_tensor_from_jagged(x, layout_of(lengths).offsets)
    out = m(nested, nested, nested)[0]
    assert out.offsets() is nested.offsets()
    return out.values()


def attend_list(m, x, lengths):
    parts = list(x.split(lengths))
    return torch.cat(m(parts, parts, parts)[0])


def attend_past_the_end(m, x, lengths, queries=None):
    """Rows past the last token give 0. `queries`: how many of them queries have."""
    rows = torch.cat([x, x[:1], x[:1]])
    return m(rows[: queries and len(x) + queries], rows, rows, layout=layout_of(lengths))[0]


def attend_padded(m, x, padding):
    return m(x, x, x, key_padding_mask=padding, need_weights=False)[0].masked_fill(padding[..., None], 0)


class Block(nn.Module):
    """Attention that the patch replaces."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True, device=DEVICE)
        self.linear = nn.Linear(32, 32, device=DEVICE)

    def forward(self, x, padding):
        return x + self.linear(attend_padded(self.attention, x, padding))


def layer_of(kind, **more):
    return kind(32, 2, 48, **({"batch_first": True, "dropout": 0.0} | more))


def encoder(compiled=False, **more):
    stack = nn.TransformerEncoder(layer_of(nn.TransformerEncoderLayer, **more), 2, enable_nested_tensor=False)
    for layer in stack.layers[:1] if compiled else ():
        layer.compile(backend="inductor" if GPU else "aot_eager", dynamic=True)
    return stack.to(DEVICE)


def encode(m, x, padding):
    return m(x, src_key_padding_mask=padding)


def encode_causal(m, x, padding):
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=DEVICE) < 0
    return m(x, mask=mask, src_key_padding_mask=padding, is_causal=True)


def encode_nested(m, x, lengths):
    return m(torch.nested.nested_tensor_from_jagged(x, layout_of(lengths).offsets)).values()


def decode(m, x, padding, target, target_padding):
    return m(target, x, tgt_key_padding_mask=target_padding, memory_key_padding_mask=padding)


def translate(m, x, padding, target, target_padding):
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=DEVICE) < 0
    return m(x, target, tgt_mask=causal, tgt_is_causal=True, tgt_key_padding_mask=target_padding, **masks)


def model_of(model_type="bert", name="BertModel", **more):
    implementation = "eager" if model_type == "gemma2" else "sdpa"
    return tiny.make(model_type, name, implementation=implementation, **more).to(DEVICE)


def with_their_own_attention(kind, **more):
    config = getattr(transformers, f"{kind}Config")(**(tiny.TEXT | more))
    zero = {name: 0.0 for name in vars(config) if "dropout" in name and isinstance(getattr(config, name), float)}
    config.update(zero)
    return getattr(transformers, f"{kind}Model")(config).to(DEVICE)


def encoder_decoder(kind, name="ForConditionalGeneration", **more):
    """A T5 or a BART."""
    sizes = {"d_model": 48, "d_kv": 8, "d_ff": 53, "num_layers": 2, "num_heads": 6, "dropout_rate": 0.0}
    if kind == "Bart":
        heads = {f"{side}_attention_heads": 6 for side in ("encoder", "decoder")}
        sizes = {"d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0, **heads}
    common = {"vocab_size": tiny.VOCABULARY, "pad_token_id": tiny.PAD, "decoder_start_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(**common, **sizes, **more)
    return getattr(transformers, kind + name)(config).to(DEVICE)


def lora():
    config = peft.LoraConfig(target_modules=["query", "dense"], init_lora_weights=False, r=2)
    return peft.get_peft_model(model_of(), config)


def partly_frozen():
    model = model_of("llama", "LlamaForCausalLM")
    model.model.layers[0].requires_grad_(False)
    return model


def run(m, **inputs):
    return m(**inputs)


def run_as_tuple(m, **inputs):
    return m(**inputs, output_hidden_states=True, return_dict=False)


def run_masked(m, input_ids, attention_mask):
    """ESM scales embeddings by the share of masked tokens in a sequence. Rows of the bucket are in none."""
    ids = torch.where(torch.arange(input_ids.shape[1], device=DEVICE) % 2 == 0, m.config.mask_token_id, input_ids)
    return m(input_ids=ids, attention_mask=attention_mask)


def run_with_items(m, kind, **inputs):
    """The number of items is another one in each batch, but not another graph."""
    return m(**inputs, num_items_in_batch=kind(inputs["input_ids"].sum().item()))


def run_with_logits(m, **inputs):
    out = m(**inputs)
    assert out.logits.shape[:2] == inputs["input_ids"].shape
    return out.loss, out.logits


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A call.

    Attributes:
        make: the model, before a patch.
        draw: inputs for some lengths, by name.
        call: of the model and these. It returns tensors in a structure.
        leaf: the input that gets a gradient.
        graphs: the number of graphs in a call.
        probe: a `Linear` of the model that its forward calls.
        target: what is patched.
        batches: lengths for which it is compared.
        first: calls that change the model: transformers sets attributes of modules whose hidden states it collects.
    """

    make: Callable[..., nn.Module]
    draw: Callable[..., dict[str, Any]] = tokens
    call: Callable[..., Any] = run
    leaf: str = "x"
    graphs: int = 1
    probe: Callable[[Any], nn.Module] = lambda m: m.encoder.layer[0].intermediate.dense
    target: Callable[[Any], nn.Module] = lambda m: m
    batches: tuple[list[int], ...] = BATCHES
    first: int = 0


def of_module(call=attend, **options):
    return Entry(make=partial(mha, **options), draw=packed, call=call, probe=lambda m: m.out_proj)


def of_stack(make, call, draw=padded, probe=lambda m: m.layers[0].linear1, **more):
    return Entry(make=make, call=call, draw=draw, probe=probe, **more)


def of_t5(draw="labels", call=run, name="ForConditionalGeneration", **more):
    return Entry(
        make=partial(encoder_decoder, "T5", name),
        draw=partial(sides, kind=draw),
        call=call,
        probe=lambda m: m.decoder.block[0].layer[2].DenseReluDense.wo,
        **more,
    )


def of_bart(draw="labels", call=run, **more):
    return Entry(
        make=partial(encoder_decoder, "Bart"),
        draw=partial(sides, kind=draw),
        call=call,
        probe=lambda m: m.model.decoder.layers[0].fc1,
        **more,
    )


def of_llama(call=run, **more):
    return Entry(
        make=partial(model_of, "llama", "LlamaForCausalLM"),
        draw=partial(tokens, labels=True),
        call=call,
        probe=lambda m: m.model.layers[0].mlp.down_proj,
        **more,
    )


ENTRIES = {
    "module": of_module(),
    "module, causal": of_module(partial(attend, is_causal=True)),
    "module, grouped": of_module(num_kv_heads=2, head_dim=16),
    "module, window": of_module(window_size=(3, 1), softcap=2.0, scale=0.3),
    "module, sinks": of_module(sinks=True, alibi=True),
    "module, rotary": of_module(partial(attend, is_causal=True), rotary=nta.Rotary(), qk_norm="rms"),
    "module, added keys": of_module(add_bias_kv=True, add_zero_attn=True),
    "module, nested": of_module(attend_nested),
    "module, list": of_module(attend_list),
    "module, rows past the end": of_module(attend_past_the_end),
    "module, more rows of keys": of_module(partial(attend_past_the_end, queries=1)),
    "module, padded": Entry(make=mha, draw=padded, call=attend_padded),
    "module, cross": of_module(attend_across),
    "module, cross, key is query": of_module(partial(attend_across, same="key")),
    "module, cross, value is query": of_module(partial(attend_across, same="value")),
    "module, cross, one tensor": of_module(partial(attend_across, same="both")),
    "attention": of_stack(Block, run, probe=lambda m: m.attention.out_proj),
    "encoder": of_stack(encoder, encode),
    "encoder, causal": of_stack(partial(encoder, norm_first=True, activation="gelu"), encode_causal),
    "encoder, nested": of_stack(encoder, encode_nested, packed),
    "encoder, rows first": of_stack(
        partial(encoder, batch_first=False), lambda m, x, padding: encode(m, x.transpose(0, 1), padding)
    ),
    "encoder layer, compiled": of_stack(partial(encoder, compiled=True), encode),
    "decoder": of_stack(
        lambda: nn.TransformerDecoder(layer_of(nn.TransformerDecoderLayer), 2).to(DEVICE), decode, both_padded
    ),
    "decoder layer": of_stack(lambda: layer_of(nn.TransformerDecoderLayer).to(DEVICE), decode, both_padded),
    "transformer": of_stack(
        lambda: nn.Transformer(32, 2, 1, 1, 48, dropout=0.0, batch_first=True).to(DEVICE),
        translate, both_padded, graphs=2, probe=lambda m: m.decoder.layers[0].linear1,
    ),
    "bert": Entry(make=model_of),
    "bert, padded left": Entry(make=model_of, draw=partial(tokens, side="left", at_padding=-100)),
    "bert, invalid ids": Entry(make=model_of, draw=partial(tokens, at_padding=-100)),
    "bert, embeddings": Entry(make=model_of, draw=partial(tokens, embeds=True), leaf="inputs_embeds"),
    "bert, no mask": Entry(make=model_of, call=lambda m, input_ids, attention_mask: m(input_ids.clamp(min=5))),
    "bert, tuple": Entry(make=model_of, call=run_as_tuple, first=1),
    "bert, hidden states": Entry(make=model_of, call=partial(run, output_hidden_states=True), first=1),
    "bert, logits": Entry(
        make=partial(model_of, "bert", "BertForMaskedLM"), draw=partial(tokens, labels=True), call=run_with_logits,
    ),
    "esm, masked": Entry(make=partial(model_of, "esm", "EsmModel"), call=run_masked),
    "llama": of_llama(),
    "llama, logits": of_llama(run_with_logits),
    "llama, items": of_llama(partial(run_with_items, kind=float)),
    "llama, items in a tensor": of_llama(partial(run_with_items, kind=lambda n: torch.tensor([n]))),
    "llama, base": Entry(
        make=partial(model_of, "llama", "LlamaForCausalLM"), call=lambda m, **inputs: m.model(**inputs)
    ),
    "llama, partly frozen": Entry(make=partly_frozen, draw=partial(tokens, labels=True)),
    "lora": Entry(make=lora, target=lambda m: m.get_base_model()),
    "mpnet": Entry(make=partial(with_their_own_attention, "MPNet"), batches=FEW),
    "deberta": Entry(
        make=partial(
            with_their_own_attention, "DebertaV2",
            relative_attention=True, pos_att_type=["c2p", "p2c"], norm_rel_ebd="layer_norm",
        ),
        batches=FEW,
    ),
    "bloom": Entry(
        make=partial(with_their_own_attention, "Bloom", hidden_size=48, n_head=6, n_layer=2),
        call=partial(run, use_cache=False),
        batches=FEW,
    ),
    "t5": of_t5(),
    "t5, target": of_t5("ids", name="Model", batches=FEW),
    "t5, embeddings": of_t5("embeds", name="Model", leaf="decoder_inputs_embeds", batches=FEW),
    "t5, tuple": of_t5(call=run_as_tuple, first=1, batches=FEW),
    "bart": of_bart(batches=FEW),
    "bart, target": of_bart("ids", batches=FEW),
}  # fmt: skip
TYPES = ("gpt2", "llama", "modernbert", "roberta", "esm", "gemma2", "albert", "mistral", "qwen3", "bert")
HEADS = {
    f"{model_type}, {name}": Entry(
        make=partial(model_of, model_type, name),
        draw=partial(
            tokens,
            labels=name.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel", "TokenClassification")),
        ),
        batches=FEW,
    )
    for model_type in TYPES
    for name in tiny.classes(model_type)
}
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
NO_GRAPHS = {  # each call needs the lengths on the host
    "rope by length": Entry(
        make=partial(model_of, "llama", "LlamaModel", max_position_embeddings=8, rope_parameters=ROPE),
        probe=lambda m: m.layers[0].mlp.down_proj,
    )
}
OWN_MASKS = ("mpnet", "deberta", "bloom", "t5", "bart")
MAIN = ("module", "encoder", "bert")


class Pair:
    """A model with graphs, and a copy that packs without them.

    Attributes:
        mode: a key of `MODES`.
        model, other: both.
        graphs, handle: the graphs of the model, and of its patch; None without a patch.
        grad: whether calls have gradients.
        replays: the number of calls that must have been graphs.
    """

    def __init__(self, name, mode):
        self.entry = name if isinstance(name, Entry) else (ENTRIES | HEADS | NO_GRAPHS)[name]
        self.mode, self.replays = mode, 0
        self.grad, self.handle = mode != "inference", None
        torch.manual_seed(3)
        self.model = self.entry.make().train(self.grad)
        self.other = copy.deepcopy(self.model)
        if isinstance(self.model, nta.VarlenMultiheadAttention):
            self.graphs = self.model.graphs = CapturedCalls.of_option(MODES[mode])
            return
        nta.patch(self.entry.target(self.other), packing="always")
        self.handle = nta.patch(self.entry.target(self.model), packing="always", cuda_graphs=MODES[mode])
        self.graphs = self.handle.graphs

    @property
    def both(self):
        return self.model, self.other

    def probes(self):
        return [self.entry.probe(model) for model in self.both]

    def draw(self, lengths):
        return self.entry.draw(lengths)

    def start(self, model, inputs, call=None):
        """The outputs, and the input that gets a gradient."""
        given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        leaf = given.get(self.entry.leaf)
        with torch.set_grad_enabled(self.grad):
            if leaf is not None and self.grad:
                leaf.requires_grad_()
            return (call or self.entry.call)(model, **given), leaf

    def solve(self, model, inputs, call=None):
        """The outputs, and the gradients of the input and of the parameters."""
        model.zero_grad()
        out, leaf = self.start(model, inputs, call)
        if self.grad:
            loss_of(out).backward()
        return as_dict(out), None if leaf is None else leaf.grad, gradients(model)

    def check(self, inputs=(5, 2, 9), call=None, is_graph=True):
        """The same results from both, for lengths or inputs. Returns them."""
        inputs = inputs if isinstance(inputs, dict) else self.draw(list(inputs))
        for _ in range(policy.OFTEN + self.entry.first if self.mode == "auto" and is_graph else 0):
            self.solve(self.model, inputs, call)
        before = self.graphs.calls[None]
        got, want = (self.solve(model, inputs, call) for model in self.both)
        assert_close(got, want)
        if is_graph:
            assert self.graphs.calls[None] == before + self.entry.graphs, self.graphs.calls
        self.replays += self.entry.graphs * is_graph
        return got

    def assert_only_graphs(self):
        """Each call was one, but for those that "auto" looks at."""
        calls = self.graphs.counted()
        if self.mode == "auto":
            assert calls.keys() <= {None} | OF_AUTO, calls
            assert calls[None] >= self.replays
        else:
            assert calls == {None: self.replays}

    def assert_captured(self, count):
        """How many graphs were captured, for each in a call."""
        assert self.graphs.captured == count * self.entry.graphs


def as_dict(out):
    """Outputs by name, without a cache."""
    if not isinstance(out, dict):
        return {"": out}
    return {name: x for name, x in out.items() if name not in CACHE}


def loss_of(out):
    """The loss, or a number that depends on all outputs."""
    if isinstance(out, dict) and "loss" in out:
        return out["loss"]
    tensors = [x for x in leaves(list(as_dict(out).values())) if x.requires_grad]
    weights = [
        torch.linspace(0.5, 1.5, x.shape[-1] if x.dim() else 1, device=x.device).view(x.shape[-1:]) for x in tensors
    ]
    return sum((x * weight).sum() for x, weight in zip(tensors, weights, strict=True))


def gradients(model):
    return {name: x.grad for name, x in model.named_parameters()}


def assert_close(got, want, times=1):
    torch.testing.assert_close(got, want, rtol=10 * times * TOLERANCE, atol=times * TOLERANCE, equal_nan=True)


def law(*names, modes=tuple(MODES), more=(), seldom=()):
    """Parameters of a law: entries and modes.

    Args:
        more: entries that `make test` does not run.
        seldom: modes that it runs for the main entries only.
    """
    cases = [(name, mode) for name in (*(names or MAIN), *more) for mode in modes]
    rare = {(name, mode) for name, mode in cases if name in more or (mode in seldom and name not in MAIN)}
    marks = {case: pytest.mark.sweep if case in rare else () for case in cases}
    params = [pytest.param(case, marks=marks[case], id=" ".join(case)) for case in cases]
    return pytest.mark.parametrize("pair", params, indirect=True)
