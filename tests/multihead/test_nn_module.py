"""VarlenMultiheadAttention against nn.MultiheadAttention on dense inputs, in random configurations and dtypes.

``check_configuration(7)`` runs configuration 7 alone. Dimensions: N sequences, L queries, S keys, E embed dim, H heads,
D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import oracle
import pytest
import torch
from parameters import with_random_parameters
from sweeps import sweep_except
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_layers import BATCH, BATCH_FIRST, EMBED, HEADS, LENGTH, double, padding, pair

import nt_attention as nta

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
CONFIGURATIONS, BLOCK = 1000, 50
TOLERANCE = 1e-8

# which of up to three tensors stand for query, key and value
SHARING = {
    "self": (0, 0, 0),
    "key is value": (0, 1, 1),
    "query is key": (0, 0, 1),
    "query is value": (0, 1, 0),
    "all different": (0, 1, 2),
}

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@dataclasses.dataclass(frozen=True)
class Configuration:
    number: int
    batch: int | None  # None: unbatched
    queries: int
    keys: int
    embed: int
    heads: int
    sharing: str
    widths: tuple[int, int, int]  # of the tensors that SHARING speaks of
    options: dict[str, Any]  # the constructor's
    training: bool
    mode: str
    need_weights: bool | None  # None: left out
    average: bool
    padding: str  # "", "bool" or "float"
    mask: str  # "", or one of these with the number of its dimensions
    causal: str  # "", "hint" (beside a causal mask) or "alone"
    open_key: int | None  # a key that no mask blocks; None: some rows may see nothing
    soft: bool  # float masks have large negative numbers too
    learned: bool  # float masks want gradients
    strided: bool
    positional: bool

    @classmethod
    def draw(cls, number: int) -> Configuration:
        r = random.Random(number)
        heads = r.randint(1, 4)
        embed = heads * r.randint(1, 5)
        fast = r.random() < 0.2  # one that stock's fast path takes in eval without gradients
        sharing = "self" if fast else r.choice([*SHARING, "self"])
        which = SHARING[sharing]
        queries = r.randint(1, 7)
        keys = queries if 0 in which[1:] else r.randint(1, 7)
        own_widths = r.random() < 0.4
        widths = (embed, *((r.randint(1, 11), r.randint(1, 11)) if own_widths else (embed, embed)))
        options: dict[str, Any] = {"batch_first": fast or r.random() < 0.5}
        for name, part in (("kdim", which[1]), ("vdim", which[2])):
            if widths[part] != embed or r.random() < 0.2:
                options[name] = widths[part]
        if not fast:
            for name, share in (("bias", 0.3), ("add_bias_kv", 0.3), ("add_zero_attn", 0.3)):
                if r.random() < share:
                    options[name] = name != "bias"
        training, mode = (False, r.choice(["no_grad", "inference"])) if fast else (r.random() < 0.5, "grad")
        if not fast and r.random() < 0.25:
            mode = r.choice(["no_grad", "inference"])
        if not training:
            options["dropout"] = r.choice([0.0, 0.3, 1.0])
        need_weights = r.choice([None, True, False, False])
        causal = r.choice(["", "", "", "hint", "alone"])
        if causal == "alone":
            mask, need_weights = "", False
        else:
            kinds = ["bool 2", "bool 3"] if fast else ["bool 2", "bool 3", "float 2", "float 3"]
            mask = r.choice([*kinds, *[""] * (0 if causal else len(kinds))])
        padding = r.choice(["", "bool", "bool", "bool" if fast else "float"])
        return cls(
            number,
            batch=r.randint(1, 4) if fast or r.random() < 0.75 else None,
            queries=queries,
            keys=keys,
            embed=embed,
            heads=heads,
            sharing=sharing,
            widths=widths,
            options=options,
            training=training,
            mode=mode,
            need_weights=need_weights,
            average=r.random() < 0.5,
            padding=padding,
            mask=mask,
            causal=causal,
            open_key=None if r.random() < 0.4 else 0 if causal else r.randrange(keys),
            soft=r.random() < 0.3,
            learned=mode == "grad" and causal != "hint" and r.random() < 0.3,
            strided=r.random() < 0.3,
            positional=r.random() < 0.3,
        )

    @property
    def skips_padding(self) -> bool:
        """Whether padded queries are not computed, as documented, so that their rows are 0."""
        asks_for_more = self.need_weights is not False or self.mask
        return self.sharing == "self" and self.padding == "bool" and not asks_for_more

    @property
    def hides_added_keys(self) -> bool:
        """Whether stock uses is_causal instead of the mask, so that the added keys, which are last, are hidden."""
        drops_the_mask = self.causal == "hint" and not self.padding and self.need_weights is False
        return drops_the_mask and bool({"add_bias_kv", "add_zero_attn"} & self.options.keys())

    @property
    def fast_path(self) -> bool:
        """Whether stock runs its fast path."""
        plain = not {"bias", "add_bias_kv", "add_zero_attn"} & self.options.keys()
        floats = "float" in self.padding + self.mask
        evaluates = not self.training and self.mode != "grad"
        batched = self.batch is not None and self.options["batch_first"]
        return plain and not floats and evaluates and batched and self.sharing == "self" and self.heads % 2 == 0


class Problem:
    """The tensors of a configuration: inputs and masks, and the merged mask."""

    def __init__(self, c: Configuration, dtype: torch.dtype = torch.float64) -> None:
        self.c, self.dtype = c, dtype
        self.generator = torch.Generator().manual_seed(c.number)
        self.count = c.batch or 1
        self.parts = [
            self._input(length, width).requires_grad_(c.mode == "grad")
            for length, width in zip((c.queries, c.keys, c.keys), c.widths, strict=True)
        ]
        self.parts = self.parts[: max(SHARING[c.sharing]) + 1]
        self.key_padding_mask = self._padding()
        self.attn_mask = self._mask()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (self.parts[i] for i in SHARING[self.c.sharing])
        return query, key, value

    @property
    def leaves(self) -> dict[str, Tensor]:
        """All tensors that need gradients, except parameters."""
        masks = {"key_padding_mask": self.key_padding_mask, "attn_mask": self.attn_mask}
        learned = {name: x for name, x in masks.items() if x is not None and x.requires_grad}
        return {f"input {i}": x for i, x in enumerate(self.parts)} | learned

    def _input(self, length: int, width: int) -> Tensor:
        shape = [length, width]
        if self.c.batch is not None:
            shape.insert(0 if self.c.options["batch_first"] else 1, self.c.batch)
        if self.c.strided:
            return self.random(shape[1], shape[0], *shape[2:]).transpose(0, 1)
        return self.random(*shape)

    def _blocked(self, *shape: int) -> Tensor:
        """A boolean mask (…, S), with a different density in each row."""
        densities = torch.tensor([0.0, 0.3, 0.3, 0.6, 1.0], dtype=torch.float64)
        rows = densities[torch.randint(5, (*shape[:-1], 1), generator=self.generator)]
        blocked = torch.rand(shape, generator=self.generator, dtype=torch.float64) < rows
        if self.c.open_key is not None:
            blocked[..., self.c.open_key] = False
        return blocked

    def _float(self, blocked: Tensor) -> Tensor:
        mask = self.random(*blocked.shape)
        if self.c.soft:
            mask[torch.rand(mask.shape, generator=self.generator) < 0.4] = -1e4
        return mask.masked_fill_(blocked, -torch.inf).requires_grad_(self.c.learned)

    def _padding(self) -> Tensor | None:
        if not self.c.padding:
            return None
        blocked = self._blocked(*([] if self.c.batch is None else [self.c.batch]), self.c.keys)
        return blocked if self.c.padding == "bool" else self._float(blocked)

    def _mask(self) -> Tensor | None:
        if not self.c.mask:
            return None
        kind, dims = self.c.mask.split()
        shape = [*([self.count * self.c.heads] if dims == "3" else []), self.c.queries, self.c.keys]
        if not self.c.causal:
            blocked = self._blocked(*shape)
            return blocked if kind == "bool" else self._float(blocked)
        blocked = torch.ones(shape, dtype=torch.bool).triu(1)
        return blocked if kind == "bool" else torch.zeros(shape, dtype=self.dtype).masked_fill(blocked, -torch.inf)

    def merged_mask(self) -> Tensor:
        """The number (N, H, L, S and the added keys) that is added to each score."""
        c = self.c

        def added(mask: Tensor) -> Tensor:
            floating = mask.is_floating_point()
            return mask.double() if floating else torch.zeros(mask.shape).double().masked_fill(mask, -torch.inf)

        merged = torch.zeros(self.count, c.heads, c.queries, c.keys, dtype=torch.float64)
        if self.attn_mask is not None:
            each = (self.count, c.heads) if self.attn_mask.dim() == 3 else (1, 1)
            merged = merged + added(self.attn_mask).view(*each, c.queries, c.keys)
        if c.causal == "alone":
            merged = merged + added(torch.ones(c.queries, c.keys, dtype=torch.bool).triu(1))
        if self.key_padding_mask is not None:
            merged = merged + added(self.key_padding_mask).view(self.count, 1, 1, c.keys)
        return F.pad(merged, (0, bool(c.options.get("add_bias_kv")) + bool(c.options.get("add_zero_attn"))))

    def real_queries(self) -> Tensor | None:
        """True where the output is computed, broadcast to its shape; None: everywhere."""
        if not self.c.skips_padding or self.key_padding_mask is None:
            return None
        real = ~self.key_padding_mask.unsqueeze(-1)
        return real if self.c.batch is None or self.c.options["batch_first"] else real.transpose(0, 1)

    def call(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Run the module. Where ours gets only is_causal, stock gets a causal mask."""
        c, mask, is_causal = self.c, self.attn_mask, bool(self.c.causal)
        if c.causal == "alone" and type(module) is nn.MultiheadAttention:
            mask, is_causal = torch.ones(c.queries, c.keys, dtype=torch.bool).triu(1), False
        if c.positional and c.need_weights is not None:
            return module(*self.inputs, self.key_padding_mask, c.need_weights, mask, c.average, is_causal)
        options: dict[str, Any] = {} if c.need_weights is None else {"need_weights": c.need_weights}
        masks = {"key_padding_mask": self.key_padding_mask, "attn_mask": mask}
        options |= {name: x for name, x in masks.items() if x is not None}
        if not c.average:
            options["average_attn_weights"] = False
        if is_causal:
            options["is_causal"] = True
        return module(*self.inputs, **options)

    def documented(self, module: nn.MultiheadAttention) -> tuple[Tensor, Tensor | None]:
        """The documented result in float64: a row without a visible key has weights 0."""
        c = self.c
        query, key, value = (x.double() for x in self.inputs)
        if c.batch is None:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not module.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if module.in_proj_weight is None:
            weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        else:
            weights = list(module.in_proj_weight.chunk(3))
        q, k, v = (x @ w.double().T for x, w in zip((query, key, value), weights, strict=True))
        if module.in_proj_bias is not None:
            q, k, v = (x + b.double() for x, b in zip((q, k, v), module.in_proj_bias.chunk(3), strict=True))
        if module.bias_k is not None and module.bias_v is not None:
            k = torch.cat([k, module.bias_k.double().expand(len(k), -1, -1)], 1)
            v = torch.cat([v, module.bias_v.double().expand(len(v), -1, -1)], 1)
        if module.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        q, k, v = (x.unflatten(-1, (c.heads, -1)).transpose(1, 2) for x in (q, k, v))
        mask = self.merged_mask()
        blind = (mask == -torch.inf).all(-1, keepdim=True)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + mask).masked_fill(blind, 0.0)
        probabilities = scores.softmax(-1).masked_fill(blind, 0.0)
        out = (probabilities @ v).transpose(1, 2).flatten(2) @ module.out_proj.weight.double().T
        if module.out_proj.bias is not None:
            out = out + module.out_proj.bias.double()
        returned = probabilities.mean(1) if c.average else probabilities
        if c.batch is None:
            out, returned = out.squeeze(0), returned.squeeze(0)
        elif not module.batch_first:
            out = out.transpose(0, 1)
        return out, None if c.need_weights is False else returned

    def solve(
        self,
        module: nn.MultiheadAttention,
        run: Callable[[nn.MultiheadAttention], tuple[Tensor, Tensor | None]],
        real: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The results of ``run`` and, with gradients enabled, all gradients. Rows where ``real`` is False become 0."""
        with MODES[self.c.mode]():
            found = run(module)
            assert isinstance(found, tuple)
            out, weights = found
            out = out if real is None else torch.where(real, out, 0.0)
        named = {"out": out} | ({} if weights is None else {"weights": weights})
        if self.c.mode != "grad":
            return named
        draw = torch.Generator().manual_seed(self.c.number + CONFIGURATIONS)
        above = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in named.values()]
        leaves = self.leaves | dict(module.named_parameters())
        grads = torch.autograd.grad(list(named.values()), list(leaves.values()), above, materialize_grads=True)
        return named | {f"gradient of {name}": x for name, x in zip(leaves, grads, strict=True)}


def modules(c: Configuration, dtype: torch.dtype = torch.float64) -> tuple[nn.MultiheadAttention, ...]:
    """The stock module and ours, equal at first, then with random parameters, loaded in both directions."""
    made = []
    for kind in (nn.MultiheadAttention, nta.VarlenMultiheadAttention):
        torch.manual_seed(c.number)
        made.append(kind(c.embed, c.heads, dtype=dtype, **c.options).train(c.training))
    stock, ours = made

    def same_parameters() -> None:
        a, b = stock.state_dict(), ours.state_dict()
        assert list(a) == list(b)
        assert [name for name, _ in stock.named_parameters()] == [name for name, _ in ours.named_parameters()]
        for name, x in a.items():
            assert torch.equal(x, b[name]), f"{name} differs"

    same_parameters()
    for source, target in ((stock, ours), (ours, stock)):
        for x in source.parameters():
            nn.init.normal_(x, std=0.7)
        target.load_state_dict(source.state_dict())
        same_parameters()
    return stock, ours


def check_configuration(number: int) -> None:
    """Ours gives what stock gives or, if a row has no visible key and stock may give NaN, what is documented."""
    c = Configuration.draw(number)
    stock, ours = modules(c)
    with MODES[c.mode]():
        problem = Problem(c)
    got = problem.solve(ours, problem.call)
    real = problem.real_queries()
    if real is not None:
        assert not got["out"].masked_fill(real, 0.0).any(), "a padded query's row is not 0"
    want = problem.solve(stock, problem.documented, real)
    blind = bool((problem.merged_mask() == -torch.inf).all(-1).any())
    if not blind:
        documented, want = want, problem.solve(stock, problem.call, real)
        if not c.hides_added_keys:
            oracle.assert_same(documented, want, TOLERANCE)
    assert [x.dtype for x in got.values()] == [torch.float64] * len(got)
    oracle.assert_same(got, want, TOLERANCE)


@pytest.mark.parametrize("first", sweep_except(range(0, CONFIGURATIONS, BLOCK), *range(0, CONFIGURATIONS, 4 * BLOCK)))
def test_random_configurations_give_what_nn_multihead_attention_gives(first):
    failures = []
    for number in range(first, first + BLOCK):
        try:
            check_configuration(number)
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            failures.append(f"{Configuration.draw(number)}\n    {type(error).__name__}: {text}")
    assert not failures, "\n".join([f"{len(failures)} of {BLOCK} differ:", *failures])


def test_random_configurations_cover_all_options():
    drawn = [Configuration.draw(i) for i in range(CONFIGURATIONS)]
    blind = [(Problem(c).merged_mask() == -torch.inf).all(-1).any().item() for c in drawn]
    met: Counter[Any] = Counter()
    for c, is_blind in zip(drawn, blind, strict=True):
        met["blind rows, weights"] += is_blind and c.need_weights is not False
        met["fast path", is_blind] += c.fast_path
        met["skipped padding", c.causal == "alone"] += c.skips_padding
        met["other lengths"] += c.queries != c.keys
        met["learned masks"] += c.learned and "float" in c.padding + c.mask
        met["hints without weights"] += c.causal == "hint" and c.need_weights is False
        fields = ("batch", "heads", "sharing", "training", "mode", "need_weights", "padding", "mask", "causal")
        met.update((field, getattr(c, field)) for field in fields)
        met.update(c.options.keys())
    assert met.keys() >= {"batch_first", "bias", "add_bias_kv", "add_zero_attn", "kdim", "vdim", "dropout"}
    assert not {what: times for what, times in met.items() if times < 20}


def test_float_mask_of_the_lowest_finite_number_hides_no_key():
    torch.manual_seed(3)
    stock, ours = modules(dataclasses.replace(Configuration.draw(0), embed=6, heads=3, options={"batch_first": True}))
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    lowest = torch.finfo(x.dtype).min
    padding = torch.zeros(2, 5, dtype=torch.float64)
    padding[1] = lowest
    for masks in ({"key_padding_mask": padding}, {"attn_mask": torch.full((5, 5), lowest, dtype=torch.float64)}):
        for need_weights in (True, False):
            got, want = (m(x, x, x, need_weights=need_weights, **masks) for m in (ours, stock))
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_random_configurations_in_float32_and_bfloat16(dtype, tolerance):
    for number in range(0, CONFIGURATIONS, 18):
        c = dataclasses.replace(Configuration.draw(number), soft=False, open_key=0)
        if c.hides_added_keys:
            continue
        stock, ours = modules(c, dtype)
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.mul_(0.5)
        stock.load_state_dict(ours.state_dict())
        with MODES[c.mode]():
            problem = Problem(c, dtype)
        got = problem.solve(ours, problem.call)
        want = problem.solve(stock, problem.documented, problem.real_queries())
        for name, x in want.items():
            assert got[name].dtype == dtype, f"{c}: {name}"
            error, size = (got[name].double() - x.double()).norm(), x.double().norm()
            assert error <= tolerance * (size + 1), f"{c}: {name} is off by {error:.2g}, of {size:.2g}"


def test_device_and_dtype_arguments():
    for made in (
        nta.VarlenMultiheadAttention(EMBED, HEADS, add_bias_kv=True, kdim=3, device="meta", dtype=torch.float16),
        nn.utils.skip_init(nta.VarlenMultiheadAttention, EMBED, HEADS, dtype=torch.float16).to_empty(device="meta"),
    ):
        assert {(p.device.type, p.dtype) for p in made.parameters()} == {("meta", torch.float16)}
    with torch.device("meta"):
        module = nta.VarlenMultiheadAttention(EMBED, HEADS)
    assert {p.device.type for p in module.to_empty(device="cpu").parameters()} == {"cpu"}
    x = torch.randn(2, 3, EMBED)
    assert with_random_parameters(module)(x, x, x)[0].isfinite().all()


@BATCH_FIRST
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_outputs_are_contiguous_where_those_of_nn_multihead_attention_are(masked, batch_first):
    x = double(BATCH, LENGTH, EMBED) if batch_first else double(LENGTH, BATCH, EMBED)
    hidden = padding([5, 2, 4], LENGTH) if masked else None
    stock, ours = (
        module(x, x, x, need_weights=False, key_padding_mask=hidden)[0] for module in pair(batch_first=batch_first)
    )
    assert ours.is_contiguous() or not stock.is_contiguous()


def test_dense_gradcheck():
    _, ours = pair(4, 2, batch_first=True, add_bias_kv=True)
    x, key = (double(2, 3, 4, requires_grad=True) for _ in range(2))
    hidden = padding([3, 1], 3)
    check = functools.partial(torch.autograd.gradcheck, fast_mode=True)
    assert check(lambda a: ours(a, a, a), (x,))
    assert check(lambda a: ours(a, a, a, key_padding_mask=hidden, need_weights=False)[0], (x,))
    assert check(lambda a, b: ours(a, b, b, key_padding_mask=hidden, need_weights=False)[0], (x, key))
    assert torch.autograd.gradgradcheck(lambda a: ours(a, a, a)[0], (x,), fast_mode=True)


@pytest.mark.parametrize("given", [{}, {"need_weights": True}], ids=["left out", "weights"])
@pytest.mark.parametrize("padding", [None, torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_is_causal_without_attn_mask_raises_where_weights_are_asked_for(training, padding, given):
    """Stock raises on its slow path, and its fast path ignores is_causal."""
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    mask = None if padding is None else torch.zeros(2, 5, dtype=padding)
    module = nta.VarlenMultiheadAttention(8, 4, batch_first=True, dtype=torch.float64).train(training)
    with torch.set_grad_enabled(training), pytest.raises(RuntimeError, match="pass attn_mask"):
        module(x, x, x, key_padding_mask=mask, is_causal=True, **given)
