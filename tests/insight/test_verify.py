"""Every check of `insight.verify` fails for a small net with exactly that defect."""

import inspect
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import flawed_nets
from checked_shapes import check_shapes
from flawed_nets import (
    HEADS,
    VOCAB,
    WIDTH,
    Attention,
    OneStack,
    Renormalized,
    TwoStacks,
    net_of,
)
from heedful.errors import UserError
from heedful.insight import Report, learning_checks, verify
from heedful.insight.checks import gradient_beyond_rounding
from heedful.insight.verification import CHECKS, checks_of
from single_stacks import Single, decoder

UNASKED = {"one batch overfits"}
NO_LEFT = {"source padding, left", "target padding, left"}
NO_WINDOW = {"attention window"}
# Of each kind of net, what does not apply to it.
SKIPPED: dict[str, set[str]] = {
    "two stacks": set(),
    "decoder": {"bidirectional attention"},
    "encoder": {"causality", "cached = uncached"},
    "classifier": {"causality", "bidirectional attention", "cached = uncached"},
    "states": {"causality", "cached = uncached", "initial loss", "one batch overfits"},
}
for kind, of_kind in SKIPPED.items():
    of_kind |= NO_WINDOW if kind != "two stacks" else set()
ALL: dict[str, set[str]] = {
    **{flaw: {"output shape"} for flaw in ("a tuple", "NaN", "integers")},
    "squeezed": {"one row, one token"},
    "state of the last call": {"no state between calls"},
    "size of the first call": {"no state between calls"},
    "dropout in evaluation": {"no dropout in evaluation"},
    "batch statistics": {"batch independence"},
    "unused parameter": {"gradient flow"},
    "parameter times zero": {"gradient flow"},
    "equal but not tied": {"weight tying"},
    "tied by memory": {"weight tying"},
    "fp32 mask": {"bf16"},
    "inverted padding mask": {"mask polarity", "gradient flow"},
    "hidden gradient from padding": {"no gradient from padding"},
    "NaN on empty rows": {"empty rows"},
    "no positions": {"position awareness"},
}
LEARNT: dict[str, set[str]] = {
    "loud start": {"initial loss"},
    "cannot learn": {"one batch overfits"},
    "detached": {"gradient flow", "one batch overfits"},
}
PADDED: dict[str, set[str]] = {
    "spoilt by an empty row": {"empty rows"},
    "positions count padding": {"padding, left"},
    "scaled by the padding": {"padding, right"},
}
CAUSAL: dict[str, set[str]] = {
    "mask of the other family": {"causality"},
    "causal mask off by one": {"causality"},
    "hidden gradient from the future": {"causality"},
    "inverted causal mask": {"causality", "mask polarity"},
    "leak at distance 1": {"causality"},
    "leak at distance 12": {"causality"},
    "leak at distance 100": {"causality"},
    "sees the later ones of a block": {"causality"},
    "sees the later ones of the end": {"causality"},
    "mean of the whole text removed": {"causality"},
    "scaled by the width": {"causality"},
    "norm over time": {"normalization", "causality", "one row, one token"},
    "norm over positions and features": {"normalization", "causality"},
    "norm over the batch": {
        *("normalization", "causality", "one row, one token", "batch independence"),
    },
    "norm over the batch in training": {"normalization"},
    "cache loses keys when it grows": {"cached = uncached"},
    "cache of a fixed size wraps": {"cached = uncached"},
    "cache forgets after 12": {"cached = uncached"},
    "token before hidden": {"mask polarity"},
    "shifted twice": {"mask polarity"},
    "sequence first": {"output shape"},
    "cache off by one": {"cached = uncached"},
    "reorder forgets prefixes": {"cached = uncached"},
    "reorder forgets what was given": {"cached = uncached"},
}
FLAWS: dict[str, dict[str, set[str]]] = {
    "two stacks": {
        **ALL | LEARNT | CAUSAL,
        "last token hidden": {"mask polarity"},
        "no cross-attention": {"mask polarity", "gradient flow"},
        "source padding attended": {"source padding, right"},
        "positions count padding": NO_LEFT,
        "target padding attended": {"target padding, left"},
        "scaled by the padding": {"target padding, right"},
        "cross-attention to padding": {"source padding, right"},
        "causal encoder": {"bidirectional attention"},
        "positions end early": {"position awareness"},
        "positions begin again": {"position awareness"},
        "even on empty rows": {"empty rows"},
        "detached encoder": {"gradient flow"},
    },
    "decoder": {
        **ALL | LEARNT | PADDED | CAUSAL,
        # Right padding is hidden by causality alone.
        "padding attended": {"padding, left"},
        "left taken for right": {"padding, left"},
        "cache without padding": {"cached = uncached"},
        "cache aligned to the end": {"cached = uncached"},
    },
    "encoder": {
        **ALL | LEARNT | PADDED,
        "scaled by the width": {"padding, right"},
        "norm over time": {"normalization", "one row, one token", "padding, right"},
        "positions end early": {"position awareness"},
        "positions begin again": {"position awareness"},
        "sequence first": {"output shape"},
        "mask of the other family": {"bidirectional attention"},
        "last token hidden": {"bidirectional attention"},
        "looks ahead only": {"bidirectional attention"},
        "halves apart": {"mask polarity"},
        "padding attended": {"padding, right"},
        "left taken for right": {"padding, left"},
    },
    "classifier": {
        **ALL | LEARNT | PADDED,
        "mask of the other family": {"mask polarity", "gradient flow"},
        "last token hidden": {"mask polarity"},
        "norm over time": {"normalization", "one row, one token", "padding, right"},
        "padding attended": {"padding, right"},
        "class of the first column": {"padding, left"},
    },
    "states": {
        **ALL | PADDED,
        "norm over the batch": {
            *("normalization", "one row, one token", "batch independence"),
        },
        "sequence first": {"output shape"},
        "mask of the other family": {"bidirectional attention"},
        "detached": {"gradient flow"},
        "padding attended": {"padding, right"},
    },
}
# Several flaws fail one check alike, which other kinds of nets have all: here one of each.
LEFT_OUT: dict[str, set[str]] = {
    "two stacks": {  # whose targets are checked as the tokens of a decoder
        *("leak at distance 12", "sees the later ones of the end", "shifted twice"),
        *("norm over positions and features", "cache of a fixed size wraps"),
    },
    "decoder": set(),
    "encoder": {
        *("a tuple", "integers", "size of the first call", "equal but not tied"),
        "parameter times zero",
    },
    "classifier": {
        *("a tuple", "NaN", "state of the last call", "tied by memory"),
        "unused parameter",
    },
    "states": {
        *("NaN", "integers", "size of the first call", "equal but not tied"),
        "parameter times zero",
    },
}
for kind, left_out in LEFT_OUT.items():
    FLAWS[kind] = {flaw: FLAWS[kind][flaw] for flaw in FLAWS[kind] if flaw not in left_out}
# Flaws that only long texts show.
OF_LONG_TEXTS = {
    "leak at distance 100",
    "sees the later ones of the end",
    "positions end early",
    "positions begin again",
}

# The last words of a failed check, with its observation.
SEEN = {
    ("two stacks", "inverted padding mask"): "mask inverted",
    ("two stacks", "inverted causal mask"): "mask inverted",
    ("two stacks", "no cross-attention"): "the source does not change the logits",
    ("two stacks", "unused parameter"): "unused",
    ("decoder", "inverted causal mask"): "mask inverted",
    ("decoder", "token before hidden"): "token 0 does not change the logits at 1",
    ("decoder", "shifted twice"): "token 0 does not change the logits at 0",
    ("decoder", "cache without padding"): "the prompt padded on the left",
    ("decoder", "leak at distance 100"): "with token 100",
    ("decoder", "norm over time"): "more_norm (TimeNorm) mixes positions",
    ("decoder", "norm over the batch"): "more_norm (OverTexts) mixes rows and positions",
    ("decoder", "norm over the batch in training"): (
        "more_norm (OverTexts) mixes rows and positions in training"
    ),
    ("decoder", "cache loses keys when it grows"): "begins with room for one token",
    ("two stacks", "cache forgets after 12"): "begins with room for one token",
    ("two stacks", "causal encoder"): "no later source token changes the states of the encoder",
    ("decoder", "sequence first"): "ids (3, 6) gave (6, 3, 19), not (3, 6, 19)",
    ("encoder", "inverted padding mask"): "mask inverted",
    ("encoder", "mask of the other family"): "no later token changes the logits at any position",
    ("encoder", "looks ahead only"): "no earlier token changes the logits at any position",
    ("encoder", "halves apart"): "tokens 2 and 3 do not change each other's logits",
    ("encoder", "last token hidden"): "token 5 does not change the logits at 4",
    ("classifier", "inverted padding mask"): "mask inverted",
    ("classifier", "last token hidden"): "token 5 does not change the logits",
    ("states", "sequence first"): "ids (3, 6) gave (6, 3, 32), not (3, 6, D)",
}


def verify_keywords(kind: str) -> dict[str, Any]:
    """Arguments of `verify` for a net whose outputs do not determine its kind."""
    if kind == "two stacks":
        return {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB}
    outputs = {"classifier": "classes", "states": "states"}.get(kind, "tokens")
    return {"causal": kind == "decoder", "outputs": outputs, "vocab_size": VOCAB}


def causal_of(kind: str) -> dict[str, bool]:
    return {} if kind == "two stacks" else {"causal": kind == "decoder"}


def failures(report: Report) -> set[str]:
    return {result.name for result in report.failed}


def skips(report: Report) -> set[str]:
    return {result.name for result in report if result.status == "skipped"}


def checks(kind: str) -> list[str]:
    return [check.name for check in checks_of(single_stack=kind != "two stacks")]


@pytest.mark.parametrize("kind", SKIPPED)
def test_a_correct_net_passes_every_check_of_its_kind(kind: str) -> None:
    report = verify(net_of(kind), **causal_of(kind), overfit_seconds=600.0)
    assert report.ok, str(report)
    assert skips(report) == SKIPPED[kind], str(report)
    assert [result.name for result in report] == checks(kind)


@pytest.mark.parametrize(("kind", "flaw"), [(kind, flaw) for kind in FLAWS for flaw in FLAWS[kind]])
def test_a_flaw_fails_exactly_its_checks(
    kind: str, flaw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overfit = flaw in ("cannot learn", "detached")
    monkeypatch.setattr(learning_checks, "OVERFIT_STEPS", 40)  # what cannot learn needs no more
    report = verify(
        net_of(kind, flaw),
        overfit=overfit,
        overfit_seconds=600.0,
        long_length=160 if flaw in OF_LONG_TEXTS else 16,
        **verify_keywords(kind),
    )
    assert failures(report) == FLAWS[kind][flaw], str(report)
    assert not report.ok
    if (kind, flaw) in SEEN:
        parts = SEEN[kind, flaw]
        assert any(result.detail.endswith(parts) for result in report.failed), str(report)
    for result in report:
        assert bool(result.hint) == (result.status == "failed")
        assert result.requirement
        assert result.detail or result.status != "failed"
        assert "{" not in result.requirement + result.hint


@pytest.mark.parametrize("kind", FLAWS)
def test_every_check_fails_for_a_flaw_of_each_kind(kind: str) -> None:
    assert LEFT_OUT[kind] <= FLAWS["decoder"].keys()
    assert set().union(*FLAWS[kind].values()) == set(checks(kind)) - SKIPPED[kind]


def test_tied_parameters_are_counted_once() -> None:
    distinct = len(list(TwoStacks().parameters()))
    detail = verify(TwoStacks(), overfit=False)["gradient flow"].detail
    assert f"all {distinct} parameters" in detail


@pytest.mark.parametrize("kind", ["decoder", "encoder", "states"])
def test_nets_with_windows_pass(kind: str) -> None:
    report = verify(OneStack(kind, window=2), causal=kind == "decoder", overfit=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", ["two stacks", "decoder", "encoder"])
@pytest.mark.parametrize("scores", [1.0, 2.0])
def test_a_mask_after_the_softmax_passes_if_weights_are_renormalized(
    kind: str, scores: float
) -> None:
    """Gradients of hidden tokens cancel up to rounding; sharp weights have more of it."""
    net = net_of(kind)
    for layer in net.modules():
        if isinstance(layer, Attention):
            layer.__class__ = Renormalized
            layer.query.weight.data *= scores
    report = verify(net, overfit=False, **causal_of(kind))
    assert report.ok, str(report)


EPS32, EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


@pytest.mark.parametrize(
    ("in_fp32", "in_fp64", "leaks"),
    [
        (0.0, None, False),
        (5e-9, 10 * EPS64, False),  # rounding of both
        (5e-9, -3e-9, False),  # rounding of operations in fp32
        (5e-9, 5e-9, True),  # a small leak
        (1e-3, -1e-3, True),  # too large for rounding
        (10 * EPS32, None, False),  # a net that runs in fp32 only
        (1e-4, None, True),
        (float("nan"), 0.0, True),
    ],
)
def test_a_gradient_within_rounding_is_none(
    in_fp32: float, in_fp64: float | None, leaks: bool
) -> None:
    class At:
        """What the function needs of a probe."""

        net = nn.Linear(1, 1)
        generator = torch.Generator()

        def to_double(self) -> Any:
            return None if in_fp64 is None else "fp64"

    def gradient_of(probe: Any) -> Tensor:
        probe_value = in_fp64 if probe == "fp64" else in_fp32
        return torch.tensor([[[1.0], [probe_value]]], dtype=torch.float64)

    forbidden = torch.tensor([[False, True]])
    plain = inspect.unwrap(gradient_beyond_rounding)
    leak = plain(At(), gradient_of, forbidden)
    assert (leak != 0.0) == leaks


@pytest.mark.parametrize("vocab_size", [2, 3, 4, 9])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "classifier"])
def test_the_batch_to_overfit_has_one_label_for_equal_inputs(
    kind: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right net with few tokens failed, since two rows began alike and went on otherwise."""
    monkeypatch.setattr(flawed_nets, "VOCAB", vocab_size)
    found: list[tuple[Tensor, Tensor]] = []
    training_batch = learning_checks._training_batch

    def keep(probe: Any, size: int) -> Any:
        batch, labels = training_batch(probe, size)
        found.append((batch.ids["ids"], labels))
        return batch, labels

    monkeypatch.setattr(learning_checks, "_training_batch", keep)
    only = [learning_checks.one_batch_overfits]
    monkeypatch.setattr("heedful.insight.verification.checks_of", lambda **kinds: only)
    for seed in range(9):
        verify(
            OneStack(kind), vocab_size=vocab_size, seed=seed, overfit_seconds=0, **causal_of(kind)
        )
    assert len(found) == 9
    for ids, labels in found:
        seen: dict[Any, int] = {}
        for row, targets in zip(ids.tolist(), labels.tolist(), strict=True):
            for position, label in enumerate(targets):
                given = row[: position + 1] if kind == "decoder" else [*row, position]
                assert seen.setdefault(tuple(given), label) == label


def test_a_window_that_is_too_short_ahead_alone_fails() -> None:
    net = OneStack("encoder", "window short ahead", window=5)
    report = verify(net, causal=False, max_distance=4, overfit=False, long_length=32)
    assert failures(report) == {"attention window"}, str(report)
    assert "do not change with a token 4 after" in report["attention window"].detail


@pytest.mark.parametrize("window", [2, 5])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "states"])
def test_windows_off_by_one_fail(kind: str, window: int) -> None:
    for wrong, seen in ((0, None), (1, "with a token {} before, but"), (-1, "do not change with")):
        report = verify(
            OneStack(kind, window=window + wrong),
            causal=kind == "decoder",
            max_distance=window - 1,
            overfit=False,
            long_length=32,
        )
        if wrong and window + wrong > 1:
            assert failures(report) == {"attention window"}, str(report)
            assert str(seen).format(window) in report["attention window"].detail
        elif not wrong:
            assert report.ok, str(report)
            assert f"distance of {window - 1}" in report["attention window"].detail


@pytest.mark.parametrize("kind", ["two stacks", "decoder"])
def test_a_cache_of_a_fixed_size_may_raise(kind: str) -> None:
    report = verify(net_of(kind, "cache of a fixed size"), overfit=False, **verify_keywords(kind))
    assert report.ok, str(report)
    assert "beyond its capacity the cache raises IndexError" in report["cached = uncached"].detail


def test_the_tested_lengths_are_stated() -> None:
    net = OneStack("decoder")
    net.positions = nn.Parameter(torch.randn(200, WIDTH))
    report = verify(net, causal=True, overfit=False)
    assert report["causality"].detail.endswith("in texts of 160 tokens")
    assert report["cached = uncached"].detail.endswith("in texts of 160 tokens")
    net.positions = nn.Parameter(net.positions[:45].detach())
    shorter = verify(net, causal=True, overfit=False)
    assert shorter.ok, str(shorter)
    assert shorter["causality"].detail.endswith(
        "in texts of 45 tokens, the most that the net takes"
    )
    assert (shorter.length, shorter.long_length) == (10, 45)
    assert "tested with texts of up to 10 tokens; distant tokens in texts of 45" in str(shorter)


@pytest.mark.parametrize("length", [8, 24])
@pytest.mark.parametrize("kind", SKIPPED)
def test_length_limits_the_sequences(kind: str, length: int) -> None:
    num_rows: list[int] = []

    def call(net: nn.Module, *ids: Tensor, src_lengths: Any = None, lengths: Any = None) -> Any:
        num_rows.extend(item.size(1) for item in ids)
        return net(*ids, src_lengths if lengths is None else lengths)

    sizes = {"length": length, "long_length": length}
    report = verify(net_of(kind), call=call, overfit=False, **sizes, **verify_keywords(kind))
    assert report.ok, str(report)
    # The adapter gets the lengths that it names, and no others.
    padded = "source padding, right" if kind == "two stacks" else "padding, right"
    assert report[padded].status == "passed"
    left = NO_LEFT | {"target padding, right"} if kind == "two stacks" else {"padding, left"}
    assert skips(report) >= left
    assert max(num_rows) == length


def test_a_net_that_takes_fewer_tokens_is_told_to_pass_a_smaller_length() -> None:
    """That its second call raised was reported as state between calls."""

    class Short(OneStack):
        def forward(self, ids: Tensor, *args: Any, **keywords: Any) -> Any:
            if ids.size(1) > 8:
                raise ValueError("too long")
            return super().forward(ids, *args, **keywords)

    report = verify(Short("decoder"), causal=True, overfit=False)
    assert failures(report) == {"output shape"}
    detail = report["output shape"].detail
    assert detail.startswith("texts of 10 tokens raised ValueError: too long; pass a smaller")
    assert verify(Short("decoder"), causal=True, overfit=False, length=8).ok


@pytest.mark.parametrize("kind", ["two stacks", "encoder"])
def test_padding_checks_are_skipped_for_nets_without_padding(kind: str) -> None:
    def call(net: nn.Module, *ids: Tensor) -> Any:
        return net(*ids)

    report = verify(net_of(kind), call=call, overfit=False, **verify_keywords(kind))
    assert report.ok, str(report)
    of_padding = {name for name in checks(kind) if "padding" in name} | {"empty rows"}
    assert skips(report) == of_padding | UNASKED | SKIPPED[kind]
    assert "and no pad_id was given" in report["empty rows"].detail


@pytest.mark.parametrize("kind", SKIPPED)
def test_sixteen_bit_nets_have_a_larger_tolerance(kind: str) -> None:
    report = verify(net_of(kind).to(torch.bfloat16), overfit=False, **causal_of(kind))
    assert report.ok, str(report)
    if kind == "encoder":
        flat = net_of(kind, "no positions").to(torch.bfloat16)
        assert failures(verify(flat, causal=False, overfit=False)) == {"position awareness"}


# --- nets of other origins ------------------------------------------------------------------


class TorchNet(nn.Module):
    """`torch.nn.Transformer`, which recognizes padding by its id."""

    def __init__(self, pad_id: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pad_id = pad_id
        self.src = nn.Embedding(VOCAB, WIDTH, padding_idx=pad_id)
        self.tgt = nn.Embedding(VOCAB + 4, WIDTH, padding_idx=pad_id)
        self.positions = nn.Embedding(32, WIDTH)
        self.body = nn.Transformer(WIDTH, HEADS, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB + 4)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        hidden = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), dtype=torch.bool)
        x, y = (
            embedding(ids) + self.positions(torch.arange(ids.size(1)))
            for embedding, ids in ((self.src, src), (self.tgt, tgt))
        )
        src_pad, tgt_pad = src == self.pad_id, tgt == self.pad_id
        return self.head(
            self.body(
                x,
                y,
                tgt_mask=hidden,
                src_key_padding_mask=src_pad,
                tgt_key_padding_mask=tgt_pad,
                memory_key_padding_mask=src_pad,
            )
        )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("pad_id", [0, 5])
def test_torch_transformer_passes_all_checks_that_apply(pad_id: int) -> None:
    report = verify(TorchNet(pad_id), pad_id=pad_id, overfit_seconds=600.0)
    assert report.ok, str(report)
    assert skips(report) == {*NO_LEFT, "cached = uncached"}
    # Its positions count padding: held to left padding, it fails.
    left = verify(TorchNet(pad_id), pad_id=pad_id, left_padding=True, overfit=False)
    assert failures(left) == NO_LEFT, str(left)


@pytest.mark.parametrize("kind", ["decoder", "encoder", "classifier"])
def test_padding_of_one_stack_can_be_passed_as_pad_id(kind: str) -> None:
    """An adapter derives lengths from the id; a net that attends to padding fails."""

    def call(net: nn.Module, ids: Tensor) -> Any:
        return net(ids, (ids != 0).sum(1))

    both = {"pad_id": 0, "overfit": False, **verify_keywords(kind)}
    report = verify(net_of(kind), call=call, **both)
    assert report.ok, str(report)
    assert report["padding, right"].status == "passed"
    assert skips(report) >= {*SKIPPED[kind], "padding, left", *UNASKED}
    if kind != "decoder":  # whose causal mask hides the tokens on the right
        flawed = verify(net_of(kind, "padding attended"), call=call, **both)
        assert failures(flawed) == {"padding, right"}, str(flawed)


def test_vocabulary_sizes_are_inferred_without_an_embedding_module() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = (nn.Parameter(torch.randn(n, 8)) for n in (11, 13))

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            return F.embedding(tgt, self.target).cumsum(1) @ self.target.t() + (
                F.embedding(src, self.source).sum(1, keepdim=True) @ self.target.t()
            )

    report = verify(Plain(), overfit=False)
    assert report["output shape"].status == "passed"
    assert report["position awareness"].status == "failed"
    assert "gradients" not in report["causality"].detail  # the lookup was recorded


def test_vocabulary_sizes_of_source_and_target_imply_two_stacks() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TwoStacks()

        def forward(self, src: Tensor, tgt: Tensor | None = None) -> Tensor:
            return self.inner(src, tgt)

    sizes = {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB}
    report = verify(Optional(), overfit=False, **sizes)
    assert report.ok, str(report)
    assert len(report) == len(checks("two stacks"))
    with pytest.raises(UserError, match="pass causal=True"):
        verify(Optional())


def test_outputs_distinguishes_vectors_from_classes() -> None:
    class Vectors(OneStack):
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
    assert "vectors" in report["output shape"].requirement


def test_verify_does_not_change_the_net() -> None:
    net = TwoStacks("unused parameter")
    net.statistics = nn.BatchNorm1d(4)
    net.dropout.eval()
    net.head.weight.grad = torch.full_like(net.head.weight, 3.0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = {name: module.training for name, module in net.named_modules()}
    random = torch.get_rng_state()
    with torch.no_grad():
        verify(net)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random)
    assert {name: module.training for name, module in net.named_modules()} == modes
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.head.weight is net.tokens.weight
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert set(grads) == {"tokens.weight"}
    assert bool((grads["tokens.weight"] == 3.0).all())


class SmallLeak(OneStack):
    """A zero of the later tokens is added, with a gradient of 1e-6."""

    def leaked(self, x: Tensor, states: Tensor, real: Tensor) -> Tensor:
        return x + 1e-6 * (x - x.detach()).sum(1, keepdim=True)


def test_a_tiny_gradient_from_later_tokens_fails() -> None:
    report = verify(SmallLeak("decoder"), causal=True, overfit=False)
    assert failures(report) == FLAWS["decoder"]["hidden gradient from the future"]


def test_equal_matrices_other_than_embeddings_are_no_failure() -> None:
    net = OneStack("decoder")
    net.first, net.second = nn.Linear(4, 4), nn.Linear(4, 4)
    net.second.load_state_dict(net.first.state_dict())
    report = verify(net, causal=True, overfit=False)
    assert failures(report) <= {"gradient flow"}  # neither is used


def test_equal_tables_of_positions_that_are_frozen_are_no_failure() -> None:
    """Marian and Pegasus have one for each stack."""
    net = OneStack("decoder")
    for name in ("first", "second"):
        setattr(net, name, nn.Embedding.from_pretrained(torch.arange(12.0).view(3, 4), freeze=True))
    assert verify(net, causal=True, overfit=False).ok
    net.second.weight.requires_grad_()
    assert "weight tying" in failures(verify(net, causal=True, overfit=False))


def test_the_same_net_gives_the_same_report() -> None:
    assert verify(TwoStacks(), overfit=False) == verify(TwoStacks(), overfit=False)


def test_checks_are_skipped_by_arguments_and_training_ends_in_time() -> None:
    report = verify(TwoStacks("loud start"), fresh=False, overfit=False)
    assert skips(report) == {"initial loss", "one batch overfits"}
    assert report.ok
    hurried = verify(TwoStacks("cannot learn"), overfit_seconds=0.0)["one batch overfits"]
    assert hurried.status == "skipped"
    assert "overfit_seconds" in hurried.detail


def test_frozen_parameters_need_no_gradients() -> None:
    net = TwoStacks("unused parameter")
    net.unused.requires_grad_(False)
    report = verify(net, overfit=False)
    assert report.ok, str(report)
    assert report["gradient flow"].detail.endswith("1 are frozen")
    frozen = verify(TwoStacks().requires_grad_(False))
    assert frozen.ok, str(frozen)
    assert {"gradient flow", "one batch overfits"} <= skips(frozen)


def test_a_net_that_raises_fails_with_the_first_line_of_its_error() -> None:
    class Raising(nn.Module):
        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            raise RuntimeError("no kernel\nand many more lines")

    report = verify(Raising(), src_vocab_size=9, tgt_vocab_size=9)
    assert failures(report) == {"output shape"}
    assert report["output shape"].detail == "raised RuntimeError: no kernel"


def test_a_net_that_cannot_be_copied_is_refused() -> None:
    net = TwoStacks()
    net.generator = (n for n in range(3))
    with pytest.raises(UserError, match="works on a copy"):
        verify(net)


class Args(nn.Module):
    def forward(self, *ids: Tensor) -> Tensor:
        raise AssertionError("never called")


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: OneStack("decoder"), {}, "pass causal=True"),
        (Args, {}, "pass stacks=2"),
        (Args, {"vocab_size": 9}, "pass causal=True"),
        (Args, {"stacks": 1, "causal": True}, "pass vocab_size="),
        (Args, {"stacks": 2}, "pass src_vocab_size="),
        (TwoStacks, {"vocab_size": 9}, "vocab_size= is not for a net with two stacks"),
        (TwoStacks, {"causal": True}, "causal= is not for a net with two stacks"),
        (lambda: decoder(Single()), {"tgt_vocab_size": 9}, "is not for a net with one stack"),
        (lambda: OneStack("encoder"), {"causal": False, "length": 7}, "at least 8"),
        (lambda: OneStack("encoder"), {"causal": False, "max_distance": 0}, "at least 1, not 0"),
        (TwoStacks, {"max_distance": 3}, "is not for a net with two stacks"),
        (lambda: nn.Bilinear(2, 2, 2), {}, "pass src_vocab_size="),
        (TwoStacks, {"tgt_vocab_size": 2, "pad_id": 0}, "fewer than two tokens"),
        (lambda: OneStack("encoder"), {"causal": False, "pad_id": VOCAB}, f"pad_id {VOCAB}"),
        (lambda: OneStack("encoder"), {"stacks": 3}, "stacks must be 1 or 2, not 3"),
        (lambda: OneStack("encoder"), {"outputs": "words"}, "not words"),
    ],
)
def test_missing_and_wrong_arguments_are_errors_of_one_line(
    make: Callable[[], nn.Module], arguments: dict[str, Any], message: str
) -> None:
    check_shapes(False)  # which refuses a wrong choice by its type
    with pytest.raises(UserError, match=message) as raised:
        verify(make(), **arguments)
    assert "\n" not in str(raised.value)


# --- the report -----------------------------------------------------------------------------


def test_each_check_comes_after_those_that_it_needs() -> None:
    known: set[str] = set()
    for check in CHECKS:
        assert known.issuperset(check.needs), check.name
        assert check.name not in known
        known.add(check.name)


def test_checks_of_two_stacks_name_their_side() -> None:
    report = verify(TwoStacks(), overfit=False)
    assert report["causality"].requirement == (
        "logits at a target position do not depend on later target tokens"
    )
    assert report["output shape"].detail == ("src (3, 7), tgt (3, 6) gave (3, 6, 19)")
    padding = report["no gradient from padding"].requirement
    assert padding.startswith("the loss of the real target tokens")
    assert report["initial loss"].requirement.endswith("above ln V")


def test_the_report_as_json_as_table_and_as_text() -> None:
    calls = []
    report = verify(TwoStacks("causal mask off by one"), overfit=False, on_result=calls.append)
    assert tuple(calls) == report.results
    loaded = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert loaded["ok"] is False
    assert [row["name"] for row in loaded["checks"]] == checks("two stacks")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.table())
    text = console.export_text()
    for result in report:
        assert result.name in text
        assert f"{result.name}: {result.detail}" in str(report)
    assert report["causality"].hint[:40] in text
    with pytest.raises(KeyError):
        report["no such check"]
