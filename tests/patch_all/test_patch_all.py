"""patch_all: which models are patched, and that the program does what it does without it."""

import copy
import inspect
import io
import pickle
import typing
import warnings
import weakref

import pytest
import tiny
import torch
import torch_models
from freeing import without_garbage_collector
from huggingface_hub import PyTorchModelHubMixin
from patched_models import close, every_kind, gradients, loss_of, make, make_batch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomModel,
    EncoderDecoderModel,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)

import nt_attention as nta
from nt_attention.hf.check import plans
from nt_attention.patching import building


def bert_config(**more):
    return BertConfig(**{**tiny.TEXT, **tiny.NO_DROPOUT, **more})


class Counted(BertModel):
    """A class of the user, whose code counts its calls."""

    calls = 0

    def forward(self, *args, **kwargs):
        Counted.calls += 1
        return super().forward(*args, **kwargs)


class Refused(BertModel):
    """It mixes the rows of a batch."""

    def forward(self, input_ids, attention_mask=None):
        out = super().forward(input_ids, attention_mask=attention_mask)
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.mean((0, 1))
        return out


class Secret(BertModel):
    """Nobody but the program can build it."""

    def __init__(self, config, secret=None):
        if secret is None:
            raise KeyError("secret")
        super().__init__(config)


@every_kind
def test_models_give_what_they_give_without_it(kind, tmp_path):
    model, batch = make(kind), make_batch(kind)
    want = gradients(model, batch)
    model.save_pretrained(tmp_path)
    with nta.patch_all(packing="always") as handle:
        built = [make(kind), type(model).from_pretrained(tmp_path)]
        built.append(type(model).from_pretrained(tmp_path, output_loading_info=True)[0])
        built.append(copy.deepcopy(built[0]))
        for one in built:
            close(gradients(one, batch), want)
            replica = one._replicate_for_data_parallel()  # of DataParallel
            assert type(replica) is type(one)
            assert replica.forward.module is replica
    assert handle.models == {type(model).__name__: 3}
    counts = handle.counts[type(model).__name__]
    assert counts.calls == {None: 4}
    assert (counts.tokens, counts.positions) == (4 * 40, 4 * 92)
    assert f"{type(model).__name__}: 3 models patched\n    4 calls ran packed: 160 tokens in 368" in str(handle)
    for one in built:
        assert one.config._attn_implementation == "sdpa"
        close(gradients(one, batch), want)
    assert counts.calls == {None: 4}  # after remove
    assert "forward" not in vars(make(kind))


def test_parts_that_were_built_before_are_as_the_model_around_them():
    """An encoder-decoder of two models is not packed as a whole. Its encoder is."""
    batch = make_batch("base")
    batch = {**batch, "labels": batch["input_ids"]}
    with nta.patch_all(packing="always") as handle:
        encoder = make("base")
        decoder = AutoModelForCausalLM.from_config(bert_config(is_decoder=True, add_cross_attention=True))
        model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
        model.config.decoder_start_token_id, model.config.pad_token_id = 2, tiny.PAD
        got = model(**batch).loss
    assert handle.models == {"EncoderDecoderModel": 1}
    assert handle.counts["EncoderDecoderModel"].calls == {
        None: 1,
        "it has encoder_hidden_states for cross-attention": 1,
    }
    assert not any("forward" in vars(part) for part in model.modules())
    close(got, model(**batch).loss)


@every_kind
def test_pickles_have_no_trace_of_it(kind):
    batch = make_batch(kind)
    with nta.patch_all():
        model = make(kind)
        for what in (model, model.config, nn.ModuleList([model]), copy.deepcopy(model), copy.deepcopy(model.config)):
            assert b"nt_attention" not in pickle.dumps(what)
        assert "nt_attention" not in repr([model.config.to_dict(), model.config.to_diff_dict()])
        loaded = pickle.loads(pickle.dumps(model))
        assert loaded.config._attn_implementation == "sdpa"
        assert "forward" not in vars(loaded)
        close(gradients(loaded, batch), gradients(model, batch))
        with nta.patch(model, packing="always"):  # the program asked for this one
            kept = pickle.loads(pickle.dumps(model))
    loss_of(kept, batch)
    assert kept.forward.handle.calls[None] == 1


def test_pickles_have_no_methods_of_it():
    with nta.patch_all():
        model = BloomModel(BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4))
        assert "build_alibi_tensor" in vars(model)
        assert b"nt_attention" not in pickle.dumps(model)


@pytest.mark.usefixtures("uncompared")
def test_code_of_the_user_is_checked_once_for_each_config(monkeypatch):
    monkeypatch.setattr(plans, "_kept", {})
    batch = make_batch("base")
    with nta.patch_all(packing="always") as handle:
        Counted(bert_config())
        assert Counted.calls > 0
        before = Counted.calls
        model = Counted(bert_config()).eval()
        assert Counted.calls == before
        got = loss_of(model, batch)
        Counted(bert_config(hidden_act="relu"))
        assert Counted.calls > before + 1
    close(got, loss_of(model, batch))
    assert handle.models == {"Counted": 3}
    assert handle.counts["Counted"].calls == {None: 1}


def test_models_that_are_not_patched_run_as_they_are():
    batch = make_batch("base")
    with nta.patch_all() as handle:
        models = [Refused(bert_config()).eval() for _ in range(2)]
        models.append(ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)))
        for model in models:
            assert "forward" not in vars(model)
            assert model.config._attn_implementation == "sdpa"
        for model in models[:2]:
            model(**batch)
    assert handle.left.keys() == {"Refused", "ViTModel"}
    assert str(handle).count("not patched: ") == 2
    assert "ViTModel: not patched: its images have equal lengths" in str(handle).splitlines()[-1]
    assert not handle.models


def test_a_model_that_only_the_program_can_build_is_patched():
    batch = make_batch("base")
    with nta.patch_all(packing="always") as handle:
        got = loss_of(model := Secret(bert_config(), 1).eval(), batch)
        with pytest.raises(KeyError):
            Secret(bert_config())
    assert handle.counts["Secret"].calls == {None: 1}
    close(got, loss_of(model, batch))


def test_programs_that_patch_themselves():
    batch = make_batch()
    with nta.patch_all(packing="always", on_fallback="silent") as outer:
        model = make()
        model.forward.handle.remove()  # nobody does this, but it works
        loss_of(model, batch)
        with nta.patch(model, packing="always") as own:
            loss_of(model, batch)
            assert model.forward.handle is own
        loss_of(model, batch)
        with nta.patch(make(), packing="always") as other:
            assert other.active
        with nta.patch_all(packing="always") as inner:
            second = make()
            loss_of(second, batch)
        loss_of(second, batch)
        third = make()
        loss_of(third, batch)
        assert third.forward.handle.on_fallback == "silent"  # the options of the outer one
    outer.remove()
    name = LlamaForCausalLM.__name__
    assert own.calls == inner.counts[name].calls == outer.counts[name].calls == {None: 1}


def test_models_are_freed_without_the_garbage_collector():
    with nta.patch_all(packing="always") as handle:
        model, stack = make(), encoder()
        loss_of(model, make_batch())
        output(stack)
        freed = weakref.ref(model), weakref.ref(stack)
        with without_garbage_collector():
            del model, stack
            assert freed[0]() is freed[1]() is None
    assert handle.counts["LlamaForCausalLM"].calls == handle.counts["TransformerEncoder"].calls == {None: 1}


def test_wrong_options_are_refused_at_once():
    for name, value in {"packing": "never", "on_fallback": "x", "cuda_graphs": "x"}.items():
        with pytest.raises(ValueError, match=f"{name} must be"):
            nta.patch_all(**{name: value})
    assert not building.has_listeners()


def test_numbers_that_the_program_draws_stay_the_same():
    for build in (lambda: BertModel(bert_config()), encoder, lambda: nn.Transformer(16, 2, 1, 1)):
        torch.manual_seed(0)
        want = build(), torch.rand(3)
        torch.manual_seed(0)
        with nta.patch_all():
            got = build(), torch.rand(3)
        assert torch.equal(got[1], want[1])
        assert all(map(torch.equal, got[0].parameters(), want[0].parameters()))


# Modules of torch.nn

PADDING = torch.arange(7) >= torch.tensor([[7], [3], [5]])


def layer(**options):
    return nn.TransformerEncoderLayer(16, 2, 24, **{"dropout": 0.0, "batch_first": True, **options})


def encoder(layers=2):
    return nn.TransformerEncoder(layer(), layers)


def output(model, **options):
    """What a model gives for tokens, with the same parameters in each call."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model(torch.randn(3, 7, 16), src_key_padding_mask=PADDING, **options)[~PADDING]


def attributes(model):
    """What a program can see of a model: the types, the names and the attributes of its modules."""
    return [(name, type(part), list(vars(part))) for name, part in model.named_modules()], list(model.state_dict())


class TwoStacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = encoder(), nn.TransformerEncoder(layer(), 1, nn.LayerNorm(16))

    def forward(self, x, src_key_padding_mask):
        return self.second(self.first(x, None, src_key_padding_mask), None, src_key_padding_mask)


class Built(nn.TransformerEncoder):
    """It adds its layers in its own constructor."""

    def __init__(self, layers):
        super().__init__(layer(), 1)
        self.layers = nn.ModuleList([layer(activation="gelu") for _ in range(layers)])


class OwnLayer(nn.TransformerEncoderLayer):
    def forward(self, x, *args, **kwargs):
        return super().forward(x, *args, **kwargs) + x.mean(1, keepdim=True)


@torch_models.every_kind
def test_modules_of_torch_give_what_they_give_without_it(kind):
    stock, rows, masks = torch_models.make(kind), torch_models.draw(), torch_models.masks_of(kind)
    want = torch_models.tokens_and_gradients(kind, stock, rows, **masks)
    with nta.patch_all() as handle:
        model = torch_models.KINDS[kind].make()
        for one in (model, copy.deepcopy(model)):
            one.load_state_dict(stock.state_dict())
            torch_models.close(torch_models.tokens_and_gradients(kind, one, rows, **masks), want)
            assert [type(part) for part in one.modules()] == [type(part) for part in stock.modules()]
        for what in (model, copy.deepcopy(model), nn.ModuleList([model])):
            assert b"nt_attention" not in pickle.dumps(what)
        assert "forward" not in vars(pickle.loads(pickle.dumps(model)))
    (counts,) = handle.counts.values()
    assert counts.calls == {None: 2 * torch_models.KINDS[kind].packed}
    for one in (model, copy.deepcopy(model)):
        assert attributes(one) == attributes(stock)
    torch_models.close(torch_models.tokens_and_gradients(kind, model, rows, **masks), want)
    assert counts.calls == {None: 2 * torch_models.KINDS[kind].packed}


def test_a_layer_of_which_a_stack_is_made_is_a_part_of_it():
    with nta.patch_all() as handle:
        single = layer()
        output(single)
        stacks = [nn.TransformerEncoder(single, 2), nn.TransformerEncoder(single, 3)]
        assert "forward" not in vars(single)
        for stack in stacks:
            output(stack)
        assert handle.models == {"TransformerEncoder": 2}
        assert handle.counts["TransformerEncoder"].calls == {None: 2}
        assert "Layer" not in str(handle)
        whole = nn.Transformer(16, 2, custom_encoder=stacks[0], custom_decoder=nn.Identity(), batch_first=True)
        assert handle.models == {"TransformerEncoder": 1, "Transformer": 1}
        assert whole.encoder.forward.handle is whole.forward.handle
        other = nn.TransformerEncoder(OwnLayer(16, 2, 24, batch_first=True), 2)
    assert "forward" not in vars(other)
    assert list(handle.left) == ["TransformerEncoder"]
    assert "OwnLayer overrides forward" in str(handle)


def test_each_stack_of_a_model_reports_for_itself():
    with nta.patch_all() as handle:
        model = TwoStacks()
        output(model)
        assert handle.models == {"TransformerEncoder": 2}
        assert handle.counts["TransformerEncoder"].calls == {None: 2}
        with nta.patch(model) as own:  # the options of the program count
            output(model)
        assert own.calls == {None: 2}
        assert not any("forward" in vars(part) for part in model.modules())
    assert handle.counts["TransformerEncoder"].calls == {None: 2}


def test_classes_of_the_user_are_patched_when_their_constructor_returns():
    want, constructors = output(Built(3)), (Built.__init__, nn.TransformerEncoder.__init__, BertModel.__init__)
    with nta.patch_all() as handle:
        close(output(Built(3)), want)
        assert (Built.__init__, nn.TransformerEncoder.__init__, BertModel.__init__) == constructors
        copy.deepcopy(Built(1))  # without its constructor
        Built(1)
        single = OwnLayer(16, 2, 24, batch_first=True)
    assert handle.models == {"Built": 3}
    assert handle.counts["Built"].calls == {None: 1}
    assert handle.left == {"OwnLayer": "overrides forward, _sa_block or _ff_block"}
    assert "forward" not in vars(single)


class Inside(BertModel):
    """A Hugging Face model of modules of torch.nn."""

    def __init__(self, config):
        super().__init__(config)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 3, 24, 0.0, batch_first=True), 1)

    def forward(self, input_ids, attention_mask=None):
        return (self.encoder(self.embeddings(input_ids), src_key_padding_mask=~attention_mask.bool()),)


def test_stacks_in_a_model_that_is_not_packed_are_packed():
    batch = make_batch("base")
    tokens = batch["attention_mask"].bool()
    with nta.patch_all() as handle:
        model = Inside(bert_config()).eval()
        got = model(**batch)[0][tokens]
    assert handle.counts["Inside"].calls == {None: 1}
    close(got, model(**batch)[0][tokens])


def hooked(model, found):
    for part in (model.layers[0], model.layers[0].linear1, model.layers[0].self_attn):
        part.register_forward_hook(lambda module, args, out: found.append(len(args) and args[0].shape))
    model.layers[0].norm1.register_full_backward_hook(lambda module, given, got: found.append(given[0].shape))


def with_loose_layers(model, found):
    model.layers = nn.ModuleList([layer(), layer()])  # each is patched by itself


def with_own_attention(model, found):
    attention = model.layers[0].self_attn
    attention.forward = lambda *args, **kwargs: nn.MultiheadAttention.forward(attention, *args, **kwargs)


CHANGES = {
    hooked: "hooks of modules in it get padded batches",
    with_loose_layers: "layers.0 was changed or added after the patch: it is not patched",
    with_own_attention: "its self_attn was changed",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_program_changes_runs_as_it_expects(change):
    """It does so with -W error too."""
    results = []
    for is_patched in (False, True):
        found, handle = [], nta.patch_all() if is_patched else None
        model = encoder()
        change(model, found)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = output(model)
        out.sum().backward()
        results.append([out, found])
        if handle is not None:
            handle.remove()
    close(results[1][0], results[0][0])
    assert results[1][1] == results[0][1]
    assert any(CHANGES[change] in str(reason) for reason in handle.counts["TransformerEncoder"].calls)


@pytest.mark.sweep
def test_a_program_that_wants_one_graph_gets_one():
    want = output(TwoStacks())
    with nta.patch_all() as handle:
        for options, packed in (({"fullgraph": True}, 0), ({}, 2)):
            torch.compiler.reset()
            model = TwoStacks()
            output(model)
            before = handle.counts["TransformerEncoder"].calls[None]
            close(output(torch.compile(model, backend="eager", **options)), want)
            assert handle.counts["TransformerEncoder"].calls == {None: before + packed}


def test_evaluation_gives_what_the_fast_path_gives():
    want = output(encoder().eval())
    rows = [torch.randn(3, 16), torch.randn(5, 16)]
    with nta.patch_all() as handle, torch.inference_mode():
        model = encoder().eval()
        close(output(model), want)
        assert model(torch.nested.nested_tensor(rows)).layout is torch.strided  # as without the patch
    assert handle.counts["TransformerEncoder"].calls == {None: 1}


def test_the_forward_of_a_patched_model_describes_itself_as_before():
    with nta.patch_all():
        for model in (encoder(), nn.Transformer(16, 2, 1, 1), BertModel(bert_config())):
            stock = type(model).forward.__get__(model)
            assert model.forward.__qualname__ == stock.__qualname__
            assert typing.get_type_hints(model.forward) == typing.get_type_hints(stock)
            assert inspect.signature(model.forward) == inspect.signature(stock)
            assert inspect.getsource(model.forward) == inspect.getsource(stock)
            assert not hasattr(model.forward, "__len__")
            assert not hasattr(model.forward, "some_attribute")


def test_torchscript_compiles_a_model_without_the_patch():
    want = output(encoder())
    with nta.patch_all():
        model = nn.Sequential()
        model.append(encoder())
        copied = copy.deepcopy(model)
        output(model[0])
        close(output(torch.jit.script(model)[0]), want)
    assert not any("forward" in vars(part) for part in (*model.modules(), *copied.modules()))


def test_modules_without_memory_and_saved_ones():
    stock = encoder()
    want = output(stock)
    with nta.patch_all() as handle:
        skipped = torch.nn.utils.skip_init(nn.TransformerEncoderLayer, 16, 2, 24, batch_first=True)
        assert skipped.linear1.weight.device.type == "cpu"
        with torch.device("meta"):
            model = encoder()
            assert model(torch.empty(3, 7, 16), src_key_padding_mask=PADDING.to("meta")).is_meta
        model.to_empty(device="cpu")
        model.load_state_dict(stock.state_dict())
        close(output(model), want)
        file = io.BytesIO()
        torch.save(model, file)
        assert b"nt_attention" not in file.getvalue()
    assert handle.counts["TransformerEncoder"].calls[None] == 1


class Sized(nn.TransformerEncoder):
    def __init__(self, layers: int = 1, heads: int = 2):
        super().__init__(nn.TransformerEncoderLayer(16, heads, 24), layers)


def test_models_with_a_mixin_of_the_hub_keep_their_config(tmp_path):
    with nta.patch_all() as handle:

        class First(PyTorchModelHubMixin, Sized):
            pass

        class Last(Sized, PyTorchModelHubMixin):
            pass

        class FirstOfBert(PyTorchModelHubMixin, BertModel):
            pass

        class LastOfBert(BertModel, PyTorchModelHubMixin):
            pass

        config = bert_config()
        for kind, arguments in ((First, (3,)), (Last, (3,)), (FirstOfBert, (config,)), (LastOfBert, (config,))):
            model = kind(*arguments)
            assert model._hub_mixin_config == (config if config in arguments else {"layers": 3, "heads": 2})
            model.save_pretrained(tmp_path / kind.__name__)
            loaded = kind.from_pretrained(tmp_path / kind.__name__)
            assert type(loaded._hub_mixin_config) is type(model._hub_mixin_config)
            assert all(map(torch.equal, model.parameters(), loaded.parameters()))
        assert str(inspect.signature(Sized)) == "(layers: int = 1, heads: int = 2)"
    assert handle.models == {"First": 2, "Last": 2, "FirstOfBert": 2, "LastOfBert": 2}


class Made(nn.TransformerEncoderLayer):
    """Its `__new__` has arguments, and does not pass them on."""

    def __new__(cls, width, *, note):
        made = super().__new__(cls)
        made.__dict__["note"] = note
        return made

    def __init__(self, width, *, note):
        super().__init__(width, 2)


class MadeAgain(Made):
    def __new__(cls, *args, **more):
        return super().__new__(cls, *args, **more)


class Refusing(Made):
    def __new__(cls, width, *, note):
        return super(Made, cls).__new__(cls, width)  # `object.__new__` takes no arguments from a class with its own


def test_classes_with_a_new_of_their_own():
    with nta.patch_all() as handle:
        for kind in (Made, MadeAgain):
            model = kind(8, note="x")
            assert (model.note, type(model)) == ("x", kind)
            assert str(inspect.signature(Made)) == "(width, *, note)"
        with pytest.raises(TypeError, match="takes exactly one argument"):
            Refusing(8, note="x")
    assert handle.models == {"Made": 1, "MadeAgain": 1}
