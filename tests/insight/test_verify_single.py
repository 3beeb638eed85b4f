"""`insight.verify` of one stack: every check is proven by a small net that is broken in its way."""

import math
from collections.abc import Callable
from typing import Any

import jaxtyping
import pytest
import torch
from test_verify import VOCAB, WIDTH, Attention, failures, skips
from test_verify import Net as TwoStacks
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import UserError
from heedful.insight import learning_checks, verify
from heedful.insight.table import CHECKS, SINGLE_CHECKS
from single_stacks import Single, decoder

LABELS = 3
UNASKED = {"one batch overfits"}
# Of each kind of net, what does not apply to it.
SKIPPED: dict[str, set[str]] = {
    "decoder": {"sees both sides"},
    "encoder": {"causality", "cached = uncached"},
    "classifier": {"causality", "sees both sides", "cached = uncached"},
    "states": {"causality", "cached = uncached", "initial loss", "one batch overfits"},
}


class Texts:
    """A cache for a net that remembers ids only, and reads them again at every step."""

    def __init__(self, starts: Tensor, flaw: str) -> None:
        self.ids = torch.zeros(starts.numel(), 0, dtype=torch.int64)
        self.starts, self.flaw = starts, flaw

    def reorder(self, rows: Tensor) -> None:
        if self.flaw != "reorder forgets texts" or rows.numel() != self.ids.size(0):
            self.ids = self.ids[rows]
        forgets = self.flaw == "reorder forgets padding" and rows.numel() < self.starts.numel()
        self.starts = self.starts[: rows.numel()] if forgets else self.starts[rows]


class Net(nn.Module):
    """One layer and a head, right for its kind unless given a flaw."""

    def __init__(self, kind: str, flaw: str = "", window: int = 99) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.flaw, self.window = kind, flaw, window
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.tokens.weight, std=WIDTH**-0.5)
        self.positions = nn.Parameter(torch.randn(32, WIDTH))
        self.read = Attention(flaw)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)
        if kind == "classifier":
            self.head = nn.Linear(WIDTH, LABELS)
        elif kind != "states":
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
            self.head.weight = self.tokens.weight
        copies = {
            "equal but not tied": lambda: self.tokens.weight.detach().clone(),
            "tied by memory": self.tokens.weight.detach,
        }
        self.more = nn.Parameter(copies[flaw]()) if flaw in copies else None
        if flaw == "unused parameter":
            self.unused = nn.Parameter(torch.ones(3))
        if flaw == "parameter times zero":
            self.dead = nn.Parameter(torch.ones(WIDTH))

    def forward(
        self, ids: Tensor, lengths: Tensor | None = None, *, padding_side: str = "right"
    ) -> Any:
        real = self.real(ids, lengths, padding_side)
        x = self.embed(ids, real)
        added = {
            "hidden gradient from the future": x.sum(1, keepdim=True),
            "hidden gradient from padding": (x * ~real[..., None]).sum(1, keepdim=True),
        }.get(self.flaw)
        if added is not None:
            x = x + (added - added.detach())
        x = self.norm(x + self.read(x, x, self.mask(real)))
        if self.flaw == "batch statistics":
            x = x + x.mean(0)
        if self.flaw == "scaled by the width":
            x = x / ids.size(1)
        if self.flaw == "spoilt by an empty row" and not bool(real.any(1).all()):
            x = x / 2
        if self.flaw == "parameter times zero":
            x = x + 0 * self.dead
        if self.flaw == "detached":
            x = x.detach()
        if self.kind == "classifier":
            first = real.int().argmax(1) * (self.flaw != "class of the first column")
            x = x[torch.arange(ids.size(0)), first]
        return self.finish(x if self.kind == "states" else self.head(x))

    def mask(self, real: Tensor) -> Tensor:
        size, flaw = real.size(1), self.flaw
        columns = torch.arange(size)
        near = (columns[:, None] - columns).abs() < self.window
        keys = {
            "inverted padding mask": ~real,
            "padding attended": torch.ones_like(real),
            "last token hidden": real & (columns < size - 1),
        }.get(flaw, real)[:, None, None]
        if (self.kind == "decoder") == (flaw != "mask of the other family"):
            causal = {
                "causal mask off by one": near.tril(1),
                "inverted causal mask": near.triu(),
                "token before hidden": near.tril(-2) | torch.eye(size, dtype=torch.bool),
            }.get(flaw, near.tril())
            return causal & keys
        if flaw == "looks ahead only":
            near = near.triu()
        if flaw == "halves apart":
            near = (columns[:, None] < size // 2) == (columns < size // 2)
        return near & keys

    def finish(self, out: Tensor) -> Any:
        outputs = {
            "sequence first": lambda: out.transpose(0, 1),
            "squeezed": out.squeeze,
            "a tuple": lambda: (out, None),
            "NaN": lambda: out * math.nan,
            "integers": out.long,
            "loud start": lambda: out * 40,
            "cannot learn": lambda: out.tanh() / 2,
        }
        return outputs.get(self.flaw, lambda: out)()

    def real(self, ids: Tensor, lengths: Tensor | None, side: str) -> Tensor:
        columns = torch.arange(ids.size(1))
        if side == "left" and self.flaw != "left taken for right":
            columns = columns.flip(0)
        return columns.expand_as(ids) < (ids.size(1) if lengths is None else lengths[:, None])

    def embed(self, ids: Tensor, real: Tensor) -> Tensor:
        places = (real.cumsum(1) - 1).clamp(min=0)
        if self.flaw == "positions count padding":
            places = torch.arange(ids.size(1)).expand_as(ids)
        x = self.tokens(ids) * math.sqrt(WIDTH)
        if self.more is not None:
            x = x + F.embedding(ids, self.more)
        x = x + self.positions[places * 0 if self.flaw == "no positions" else places]
        return F.dropout(x, 0.1) if self.flaw == "dropout in evaluation" else self.dropout(x)

    def start(self, rows: int, *, capacity: int, starts: Tensor | None = None) -> Texts:
        if starts is None or self.flaw == "cache without padding":
            starts = torch.zeros(rows, dtype=torch.int64)
        return Texts(starts, self.flaw)

    def step(self, ids: Tensor, cache: Texts) -> Tensor:
        cache.ids = torch.cat([cache.ids, ids], dim=1)
        read = cache.ids
        if self.flaw == "cache off by one":
            read = torch.cat([read[:, :1], read], dim=1)
        out = self(read, read.size(1) - cache.starts, padding_side="left")[:, -ids.size(1) :]
        # Fewer queries than keys: the first of the new ones sees what the last one sees.
        return out[:, -1:].expand_as(out) if self.flaw == "cache aligned to the end" else out


SHAPES: dict[str, set[str]] = {
    flaw: {"output shape"} for flaw in ("squeezed", "a tuple", "NaN", "integers")
}
ALL: dict[str, set[str]] = {
    "dropout in evaluation": {"dropout off in evaluation"},
    "batch statistics": {"batch independence"},
    "unused parameter": {"gradient flow"},
    "parameter times zero": {"gradient flow"},
    "equal but not tied": {"weight tying"},
    "tied by memory": {"weight tying"},
    "fp32 mask": {"bf16"},
}
PADDED: dict[str, set[str]] = {
    "inverted padding mask": {"mask polarity", "gradient flow"},
    "hidden gradient from padding": {"no gradient from padding"},
    "NaN on empty rows": {"empty rows"},
    "spoilt by an empty row": {"empty rows"},
    "positions count padding": {"padding, left"},
    "scaled by the width": {"padding, right"},
    "no positions": {"position awareness"},
}
LEARNT: dict[str, set[str]] = {
    "loud start": {"initial loss"},
    "cannot learn": {"one batch overfits"},
    "detached": {"gradient flow", "one batch overfits"},
}
FLAWS: dict[str, dict[str, set[str]]] = {
    "decoder": {
        **SHAPES | ALL | PADDED | LEARNT,
        "sequence first": {"output shape"},
        "mask of the other family": {"causality"},
        "causal mask off by one": {"causality"},
        "hidden gradient from the future": {"causality"},
        "inverted causal mask": {"causality", "mask polarity"},
        "token before hidden": {"mask polarity"},
        # Right padding is hidden by causality alone.
        "padding attended": {"padding, left"},
        "left taken for right": {"padding, left"},
        "cache off by one": {"cached = uncached"},
        "cache without padding": {"cached = uncached"},
        "cache aligned to the end": {"cached = uncached"},
        "reorder forgets texts": {"cached = uncached"},
        "reorder forgets padding": {"cached = uncached"},
    },
    "encoder": {
        **SHAPES | ALL | PADDED | LEARNT,
        "sequence first": {"output shape"},
        "mask of the other family": {"sees both sides"},
        "last token hidden": {"sees both sides"},
        "looks ahead only": {"sees both sides"},
        "halves apart": {"mask polarity"},
        "padding attended": {"padding, right"},
        "left taken for right": {"padding, left"},
    },
    "classifier": {
        **SHAPES | ALL | PADDED | LEARNT,
        "mask of the other family": {"mask polarity", "gradient flow"},
        "last token hidden": {"mask polarity"},
        "padding attended": {"padding, right"},
        "class of the first column": {"padding, left"},
    },
    "states": {
        **SHAPES | ALL | PADDED,
        "sequence first": {"output shape"},
        "mask of the other family": {"sees both sides"},
        "detached": {"gradient flow"},
        "padding attended": {"padding, right"},
    },
}
OUTPUTS = {"decoder": "tokens", "encoder": "tokens", "classifier": "classes", "states": "states"}


def told(kind: str) -> dict[str, Any]:
    return {"causal": kind == "decoder", "outputs": OUTPUTS[kind], "vocab_size": VOCAB}


@pytest.mark.parametrize("kind", SKIPPED)
def test_a_right_net_passes_every_check_of_its_kind(kind: str) -> None:
    report = verify(Net(kind), causal=kind == "decoder", overfit_seconds=600.0)
    assert report.ok, str(report)
    assert skips(report) == SKIPPED[kind], str(report)
    assert [result.name for result in report] == [check.name for check in SINGLE_CHECKS]


@pytest.mark.parametrize(("kind", "flaw"), [(kind, flaw) for kind in FLAWS for flaw in FLAWS[kind]])
def test_a_flaw_fails_exactly_its_checks(
    kind: str, flaw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overfit = flaw in ("cannot learn", "detached")
    monkeypatch.setattr(learning_checks, "OVERFIT_STEPS", 40)  # what cannot learn needs no more
    report = verify(Net(kind, flaw), overfit=overfit, overfit_seconds=600.0, **told(kind))
    assert failures(report) == FLAWS[kind][flaw], str(report)
    for result in report:
        assert bool(result.hint) == (result.status == "failed")
        assert result.holds
        assert "{" not in result.holds + result.hint


@pytest.mark.parametrize("kind", FLAWS)
def test_every_check_is_proven_by_a_flaw_of_each_kind(kind: str) -> None:
    caught = set().union(*FLAWS[kind].values())
    assert caught == {check.name for check in SINGLE_CHECKS} - SKIPPED[kind]


def test_a_failure_says_what_was_seen() -> None:
    def seen(kind: str, flaw: str, check: str) -> str:
        return verify(Net(kind, flaw), overfit=False, **told(kind))[check].detail

    assert seen("encoder", "inverted padding mask", "mask polarity").endswith("mask inverted")
    assert seen("classifier", "inverted padding mask", "mask polarity").endswith("mask inverted")
    assert seen("decoder", "inverted causal mask", "mask polarity").endswith("mask inverted")
    other = "mask of the other family"
    assert seen("encoder", other, "sees both sides") == (
        "no later token changes the logits at any position"
    )
    assert seen("encoder", "looks ahead only", "sees both sides") == (
        "no earlier token changes the logits at any position"
    )
    assert seen("encoder", "halves apart", "mask polarity") == (
        "tokens 2 and 3 do not change each other's logits"
    )
    assert seen("states", "last token hidden", "sees both sides") == (
        "token 5 does not change the states at 4"
    )
    assert seen("classifier", "last token hidden", "mask polarity") == (
        "token 5 does not change the logits"
    )
    assert seen("decoder", "token before hidden", "mask polarity") == (
        "token 0 does not change the logits at 1"
    )
    padded = seen("decoder", "cache without padding", "cached = uncached")
    assert padded.endswith("the prompt padded on the left")
    assert seen("decoder", "sequence first", "output shape") == (
        "ids (3, 6) gave (6, 3, 19), not (3, 6, 19)"
    )
    assert seen("states", "sequence first", "output shape") == (
        "ids (3, 6) gave (6, 3, 32), not (3, 6, D)"
    )


@pytest.mark.parametrize("kind", ["decoder", "encoder", "states"])
def test_a_window_is_no_failure(kind: str) -> None:
    report = verify(Net(kind, window=2), causal=kind == "decoder", overfit=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("length", [8, 24])
def test_the_longest_text_may_be_chosen(length: int) -> None:
    for kind in SKIPPED:
        seen = []

        class Measured(Net):
            def forward(self, ids: Tensor, *more: Any, seen: list[int] = seen, **named: Any) -> Any:
                seen.append(ids.size(1))
                return super().forward(ids, *more, **named)

        def call(
            net: nn.Module, ids: Tensor, lengths: Any = None, *, padding_side: str = "right"
        ) -> Any:
            return net(ids, lengths, padding_side=padding_side)

        net, causal = Measured(kind), kind == "decoder"
        report = verify(net, call=call, causal=causal, length=length, overfit=False)
        assert report.ok, str(report)
        assert skips(report) == SKIPPED[kind] | UNASKED
        assert max(seen) == length - 1  # the written side is one shorter than a source


def test_where_the_net_takes_no_padding_its_checks_are_skipped_not_passed() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net("encoder")

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids)

    report = verify(Plain(), causal=False, overfit=False)
    assert report.ok, str(report)
    assert skips(report) == {
        *SKIPPED["encoder"],
        "padding, right",
        "padding, left",
        "empty rows",
        "no gradient from padding",
        "one batch overfits",
    }
    assert "takes no lengths and no pad_id" in report["padding, right"].detail


# --- nets of other origins ------------------------------------------------------------------


class TorchStack(nn.Module):
    """`torch.nn.TransformerEncoder`, which knows padding by its id; causal where told."""

    def __init__(self, pooled: bool = False, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pooled, self.causal = pooled, causal
        self.tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.positions = nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, LABELS if pooled else VOCAB)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        ids, hidden = x, None
        if self.causal:
            size = ids.size(1)
            hidden = nn.Transformer.generate_square_subsequent_mask(size, dtype=torch.bool)
        states = self.tokens(ids) + self.positions(torch.arange(ids.size(1)))
        states = self.body(states, mask=hidden, src_key_padding_mask=ids == 0)
        return self.head(states.mean(1) if self.pooled else states)


def test_torch_stacks_are_verified_by_what_is_told_and_what_is_seen() -> None:
    causal = verify(TorchStack(causal=True), causal=True, pad_id=0, overfit=False)
    assert causal.ok, str(causal)
    assert skips(causal) == {*SKIPPED["decoder"], "padding, left", *UNASKED, "cached = uncached"}
    encodes = verify(TorchStack(), causal=False, overfit=False)
    assert encodes.ok, str(encodes)
    mixed_up = verify(TorchStack(), causal=True, overfit=False)
    assert failures(mixed_up) == {"causality"}
    classes = verify(TorchStack(pooled=True), causal=False, overfit=False)
    assert classes.ok, str(classes)
    assert skips(classes) >= SKIPPED["classifier"]
    flawed = verify(Net("classifier", "last token hidden"), causal=False, overfit=False)
    assert failures(flawed) == {"mask polarity"}, str(flawed)
    # Its mean counts padding as well.
    padded = verify(TorchStack(pooled=True), causal=False, pad_id=0, overfit=False)
    assert failures(padded) == {"padding, right"}, str(padded)


def test_an_adapter_serves_nets_of_another_interface() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net("decoder")

        def forward(self, *, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"scores": self.inner(batch["ids"], batch.get("lengths"))}

    def call(net: nn.Module, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        return net(batch={"ids": ids, "lengths": lengths})["scores"]

    report = verify(Odd(), call=call, causal=True, overfit=False)
    assert report.ok, str(report)
    assert report["padding, right"].status == "passed"
    assert skips(report) == {
        "sees both sides",
        "padding, left",
        "cached = uncached",
        "one batch overfits",
    }
    with pytest.raises(UserError, match="cannot tell from the arguments of forward"):
        verify(Odd())


def test_sizes_of_source_and_target_say_that_there_are_two_stacks() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TwoStacks()

        def forward(self, src: Tensor, tgt: Tensor | None = None) -> Tensor:
            return self.inner(src, tgt)

    sizes = {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB}
    report = verify(Optional(), overfit=False, **sizes)
    assert report.ok, str(report)
    assert len(report) == len(CHECKS)
    with pytest.raises(UserError, match="pass causal=True"):
        verify(Optional())


def test_vectors_are_told_from_classes_by_the_caller() -> None:
    class Vectors(Net):
        def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
            real = self.real(ids, lengths, "right")
            states = super().forward(ids, lengths)
            mean = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
            return F.normalize(mean + 1e-6, dim=-1)

    report = verify(Vectors("states"), causal=False, outputs="vectors")
    assert report.ok, str(report)
    assert skips(report) == {
        *SKIPPED["classifier"],
        "padding, left",
        "initial loss",
        "one batch overfits",
    }
    assert "vectors" in report["output shape"].holds


def test_sixteen_bit_nets_are_given_the_tolerance_of_their_type() -> None:
    for kind in SKIPPED:
        report = verify(Net(kind).to(torch.bfloat16), causal=kind == "decoder", overfit=False)
        assert report.ok, str(report)
    flat = verify(Net("encoder", "no positions").to(torch.bfloat16), causal=False, overfit=False)
    assert failures(flat) == {"position awareness"}


class Args(nn.Module):
    def forward(self, *ids: Tensor) -> Tensor:
        raise AssertionError("never called")


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: Net("decoder"), {}, "pass causal=True"),
        (Args, {}, "pass stacks=2"),
        (Args, {"vocab_size": 9}, "pass causal=True"),
        (Args, {"stacks": 1, "causal": True}, "pass vocab_size="),
        (Args, {"stacks": 2}, "pass src_vocab_size="),
        (TwoStacks, {"vocab_size": 9}, "vocab_size= is not for a net of two stacks"),
        (TwoStacks, {"causal": True}, "causal= is not for a net of two stacks"),
        (lambda: decoder(Single()), {"tgt_vocab_size": 9}, "is not for a net of one stack"),
        (lambda: Net("encoder"), {"causal": False, "length": 7}, "at least 8"),
        (lambda: Net("encoder"), {"causal": False, "pad_id": VOCAB}, f"pad_id {VOCAB}"),
    ],
)
def test_what_cannot_be_told_is_asked_for_in_one_line(
    make: Callable[[], nn.Module], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        verify(make(), **arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("choice", "message"),
    [({"stacks": 3}, "stacks must be 1 or 2, not 3"), ({"outputs": "words"}, "not words")],
)
def test_a_choice_that_there_is_not_is_refused(choice: dict[str, Any], message: str) -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # which would refuse them by their type
    try:
        with pytest.raises(UserError, match=message):
            verify(Net("encoder"), **choice)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


# --- two stacks, as they were ---------------------------------------------------------------


def test_two_stacks_are_asked_what_they_were() -> None:
    report = verify(TwoStacks(), overfit=False)
    assert [result.name for result in report] == [
        "output shape",
        "dropout off in evaluation",
        "causality",
        "mask polarity",
        "position awareness",
        "batch independence",
        "source padding, right",
        "source padding, left",
        "target padding, right",
        "target padding, left",
        "empty rows",
        "cached = uncached",
        "gradient flow",
        "no gradient from padding",
        "weight tying",
        "bf16",
        "initial loss",
        "one batch overfits",
    ]
    assert report["causality"].holds == (
        "logits at a target position do not depend on later target tokens"
    )
    assert report["output shape"].detail == (
        "src (1, 2), tgt (1, 1) gave (1, 1, 19), and larger batches likewise"
    )
    assert report["no gradient from padding"].holds.startswith("the loss of the real target tokens")
    assert report["initial loss"].holds.endswith("above ln V")
