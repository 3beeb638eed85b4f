"""Every check of `insight.verify` is proven by a small net that is broken in just that way."""

import io
import json
import math
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import UserError
from heedful.insight import Report, verify
from heedful.insight.table import CHECKS

VOCAB, WIDTH, HEADS = 19, 32, 4
NO_LEFT = {"source padding, left", "target padding, left"}


class Attention(nn.Module):
    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.flaw = flaw
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        parts = zip((self.query, self.key, self.value), (x, memory, memory), strict=True)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f, y in parts)
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        fill = {"NaN on empty rows": -math.inf, "fp32 mask": torch.finfo(torch.float32).min}
        weights = scores.masked_fill(~mask, fill.get(self.flaw, -1e30)).softmax(-1)
        if self.flaw not in ("NaN on empty rows", "even on empty rows"):
            weights = weights * mask
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Prefixes:
    """A cache for a net that remembers ids only, and reads them again at every step."""

    def __init__(self, src: Tensor, lengths: Tensor | None, side: str, flaw: str) -> None:
        self.src, self.lengths, self.side, self.flaw = src, lengths, side, flaw
        self.tgt = src[:, :0]

    def reorder(self, rows: Tensor) -> None:
        if self.flaw != "reorder forgets prefixes" or rows.numel() != self.tgt.size(0):
            self.tgt = self.tgt[rows]
        if self.flaw != "reorder forgets sources" or rows.numel() > self.src.size(0):
            self.src = self.src[rows]
            self.lengths = None if self.lengths is None else self.lengths[rows]
        self.src = self.src[: self.tgt.size(0)]
        self.lengths = None if self.lengths is None else self.lengths[: self.tgt.size(0)]


class Net(nn.Module):
    """One encoder layer and one decoder layer, right unless given a flaw."""

    def __init__(self, flaw: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flaw = flaw
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.tokens.weight, std=WIDTH**-0.5)
        self.positions = nn.Parameter(torch.randn(32, WIDTH))
        self.read, self.write, self.cross = (Attention(flaw) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if flaw == "equal but not tied":
            self.head.weight = nn.Parameter(self.tokens.weight.detach().clone())
        elif flaw == "tied by memory":
            self.head.weight = nn.Parameter(self.tokens.weight.detach())
        else:
            self.head.weight = self.tokens.weight
        if flaw == "loud start":
            nn.init.normal_(self.tokens.weight)
        if flaw == "unused parameter":
            self.unused = nn.Parameter(torch.ones(3))
        if flaw == "parameter times zero":
            self.dead = nn.Parameter(torch.ones(WIDTH))
        if flaw == "batch statistics":
            self.batch_norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_lengths: Tensor | None = None,
        tgt_lengths: Tensor | None = None,
        *,
        padding_side: str = "right",
    ) -> Any:
        flaw, size = self.flaw, tgt.size(1)
        src_real = self.real(src, src_lengths, padding_side)
        tgt_real = self.real(tgt, tgt_lengths, padding_side)
        src_keys = {
            "inverted padding mask": ~src_real,
            "source padding attended": torch.ones_like(src_real),
            "last source token hidden": src_real & (torch.arange(src.size(1)) < src.size(1) - 1),
        }.get(flaw, src_real)[:, None, None]
        tgt_keys = torch.ones_like(tgt_real) if flaw == "target padding attended" else tgt_real
        square = torch.ones(size, size, dtype=torch.bool)
        causal = {
            "no causal mask": square,
            "causal mask off by one": square.tril(1),
            "inverted causal mask": square.triu(),
        }.get(flaw, square.tril())
        x = self.embed(src, src_real)
        x = self.norms[0](x + self.read(x, x, src_keys))
        if flaw == "batch statistics":
            x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        if flaw == "detached encoder":
            x = x.detach()
        y = self.embed(tgt, tgt_real)
        if flaw == "hidden gradient from the future":
            total = y.sum(1, keepdim=True)
            y = y + (total - total.detach())
        if flaw == "hidden gradient from padding":
            total = (x * ~src_real[..., None]).sum(1, keepdim=True)
            y = y + (total - total.detach())
        y = self.norms[1](y + self.write(y, y, causal & tgt_keys[:, None, None]))
        if flaw == "scaled by the width":
            y = y / size
        if flaw != "no cross-attention":
            y = self.norms[2](y + self.cross(y, x, src_keys))
        return self.finish(y)

    def finish(self, y: Tensor) -> Any:
        if self.flaw == "parameter times zero":
            y = y + 0 * self.dead
        if self.flaw == "detached decoder":
            y = y.detach()
        logits = self.head(y)
        outputs = {
            "sequence first": logits.transpose(0, 1),
            "squeezed": logits.squeeze(),
            "a tuple": (logits, None),
            "NaN": logits * math.nan,
            "cannot learn": logits.tanh() / 2,
        }
        return outputs.get(self.flaw, logits)

    def real(self, ids: Tensor, lengths: Tensor | None, side: str) -> Tensor:
        columns = torch.arange(ids.size(1))
        if side == "left":
            columns = columns.flip(0)
        return columns.expand_as(ids) < (ids.size(1) if lengths is None else lengths[:, None])

    def embed(self, ids: Tensor, real: Tensor) -> Tensor:
        places = (real.cumsum(1) - 1).clamp(min=0)
        if self.flaw == "positions count padding":
            places = torch.arange(ids.size(1)).expand_as(ids)
        x = self.tokens(ids) * math.sqrt(WIDTH)
        x = x + self.positions[places * 0 if self.flaw == "no positions" else places]
        return F.dropout(x, 0.1) if self.flaw == "dropout in evaluation" else self.dropout(x)

    def start(
        self, src: Tensor, lengths: Tensor | None = None, *, capacity: int, padding_side="right"
    ) -> Prefixes:
        return Prefixes(src, lengths, padding_side, self.flaw)

    def step(self, ids: Tensor, cache: Prefixes) -> Tensor:
        cache.tgt = torch.cat([cache.tgt, ids], dim=1)
        read = cache.tgt
        if self.flaw == "cache off by one":
            read = torch.cat([read[:, :1], read], dim=1)
        return self(cache.src, read, cache.lengths, padding_side=cache.side)[:, -1:]


FLAWS: dict[str, set[str]] = {
    "sequence first": {"output shape"},
    "squeezed": {"output shape"},
    "a tuple": {"output shape"},
    "NaN": {"output shape"},
    "dropout in evaluation": {"dropout off in evaluation"},
    "no causal mask": {"causality"},
    "causal mask off by one": {"causality"},
    "hidden gradient from the future": {"causality"},
    "inverted causal mask": {"causality", "mask polarity"},
    "inverted padding mask": {"mask polarity", "gradient flow"},
    "last source token hidden": {"mask polarity"},
    "no cross-attention": {"mask polarity", "gradient flow"},
    "no positions": {"position awareness"},
    "batch statistics": {"batch independence"},
    "source padding attended": {"source padding, right"},
    "positions count padding": NO_LEFT,
    "target padding attended": {"target padding, left"},
    "scaled by the width": {"target padding, right"},
    "NaN on empty rows": {"empty rows"},
    "even on empty rows": {"empty rows"},
    "cache off by one": {"cached = uncached"},
    "reorder forgets prefixes": {"cached = uncached"},
    "reorder forgets sources": {"cached = uncached"},
    "unused parameter": {"gradient flow"},
    "parameter times zero": {"gradient flow"},
    "detached encoder": {"gradient flow"},
    "detached decoder": {"gradient flow", "one batch overfits"},
    "hidden gradient from padding": {"no gradient from padding"},
    "equal but not tied": {"weight tying"},
    "tied by memory": {"weight tying"},
    "fp32 mask": {"bf16"},
    "loud start": {"initial loss"},
    "cannot learn": {"one batch overfits"},
}


def failures(report: Report) -> set[str]:
    return {result.name for result in report.failed}


def skips(report: Report) -> set[str]:
    return {result.name for result in report if result.status == "skipped"}


def test_a_right_net_passes_every_check() -> None:
    report = verify(Net(), overfit_seconds=600.0)
    assert report.ok, str(report)
    assert not skips(report), str(report)
    assert len(report) == len(CHECKS)


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_fails_exactly_its_checks(flaw: str) -> None:
    sizes = {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB}
    overfit = flaw in ("cannot learn", "detached decoder")
    report = verify(Net(flaw), overfit=overfit, overfit_seconds=600.0, **sizes)
    assert failures(report) == FLAWS[flaw], str(report)
    assert not report.ok
    for result in report:
        assert bool(result.hint) == (result.status == "failed")


def test_every_check_is_proven_by_a_flaw() -> None:
    caught = set().union(*FLAWS.values())
    assert caught == {check.name for check in CHECKS}


def test_the_inverted_padding_mask_is_told_from_an_ignored_source() -> None:
    inverted = verify(Net("inverted padding mask"), overfit=False)["mask polarity"]
    ignored = verify(Net("no cross-attention"), overfit=False)["mask polarity"]
    flipped = verify(Net("inverted causal mask"), overfit=False)["mask polarity"]
    assert inverted.detail.endswith("mask inverted")
    assert flipped.detail.endswith("mask inverted")
    assert ignored.detail == "the source does not change the logits"


def test_gradient_flow_names_the_parameters_and_counts_tied_ones_once() -> None:
    assert verify(Net("unused parameter"), overfit=False)["gradient flow"].detail.endswith("unused")
    distinct = len(list(Net().parameters()))
    assert f"all {distinct} parameters" in verify(Net(), overfit=False)["gradient flow"].detail


class TorchNet(nn.Module):
    """`torch.nn.Transformer`, which knows padding by its id."""

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
def test_torch_transformer_passes_what_can_be_asked_of_it(pad_id: int) -> None:
    report = verify(TorchNet(pad_id), pad_id=pad_id, overfit_seconds=600.0)
    assert report.ok, str(report)
    assert skips(report) == {*NO_LEFT, "cached = uncached"}
    # Its positions count padding: held to left padding, it fails.
    left = verify(TorchNet(pad_id), pad_id=pad_id, left_padding=True, overfit=False)
    assert failures(left) == NO_LEFT, str(left)


def test_without_a_way_to_show_padding_its_checks_are_skipped_not_passed() -> None:
    report = verify(TorchNet(), overfit=False)
    padding = {"source padding, right", "target padding, right", "empty rows"}
    assert padding <= skips(report)
    assert "pad_id" in report["source padding, right"].detail


class SequenceFirst(nn.Module):
    """A net that is called in its own way, and answers in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, sources: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"scores": self.inner(sources.t(), targets.t()).transpose(0, 1)}


def test_a_call_adapter_serves_nets_of_another_interface() -> None:
    def call(net: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        return net(src.t(), tgt.t())["scores"].transpose(0, 1)

    sizes = {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB}
    report = verify(SequenceFirst(), call=call, overfit=False, **sizes)
    assert report.ok, str(report)
    assert not verify(SequenceFirst(), overfit=False, **sizes).ok


def test_vocabularies_are_found_without_an_embedding_module() -> None:
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
    assert "gradients" not in report["causality"].detail  # the lookup was seen


def test_an_adapter_that_names_lengths_is_given_them() -> None:
    def call(net: nn.Module, src: Tensor, tgt: Tensor, src_lengths: Tensor | None = None) -> Tensor:
        return net(src, tgt, src_lengths)

    report = verify(Net(), call=call, overfit=False)
    assert report["source padding, right"].status == "passed"
    assert skips(report) >= {*NO_LEFT, "target padding, right"}


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"norm_placement": "pre", "tie_embeddings": "none", "activation": "gelu"},
        {"norm_placement": "output", "positions": "learned", "tie_embeddings": "decoder"},
        {"bias": False, "num_encoder_layers": 1, "num_decoder_layers": 3, "dropout": 0.0},
    ],
)
def test_the_transformer_of_2017_passes_every_check(choices: dict[str, Any]) -> None:
    vaswani2017 = pytest.importorskip("heedful.zoo.vaswani2017")
    sizes = {"d_model": 32, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
    torch.manual_seed(1)
    net = vaswani2017.build(vaswani2017.Config(23, 23, **{**sizes, "d_ff": 64} | choices))
    report = verify(net, overfit_seconds=600.0)
    assert report.ok, str(report)
    assert not skips(report), str(report)


def test_the_transformer_without_positions_fails_on_positions_alone() -> None:
    vaswani2017 = pytest.importorskip("heedful.zoo.vaswani2017")
    sizes = {"d_model": 32, "num_heads": 4, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = vaswani2017.Config(23, 29, **sizes, positions="none", tie_embeddings="decoder")
    assert failures(verify(vaswani2017.build(config), overfit=False)) == {"position awareness"}


def test_nothing_of_the_net_is_changed() -> None:
    net = Net("unused parameter")
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


def test_the_same_net_gives_the_same_report() -> None:
    assert verify(Net(), overfit=False) == verify(Net(), overfit=False)


def test_arguments_skip_what_they_say_and_time_ends_training() -> None:
    report = verify(Net("loud start"), fresh=False, overfit=False)
    assert skips(report) == {"initial loss", "one batch overfits"}
    assert report.ok
    hurried = verify(Net("cannot learn"), overfit_seconds=0.0)["one batch overfits"]
    assert hurried.status == "skipped"
    assert "overfit_seconds" in hurried.detail


def test_frozen_parameters_are_not_held_to_gradients() -> None:
    net = Net("unused parameter")
    net.unused.requires_grad_(False)
    report = verify(net, overfit=False)
    assert report.ok, str(report)
    assert report["gradient flow"].detail.endswith("1 are frozen")
    frozen = verify(Net().requires_grad_(False))
    assert frozen.ok, str(frozen)
    assert {"gradient flow", "one batch overfits"} <= skips(frozen)


@pytest.mark.parametrize("length", [8, 24])
def test_the_longest_sequence_may_be_chosen(length: int) -> None:
    longest = 0

    def call(net: nn.Module, src: Tensor, tgt: Tensor, src_lengths: Any = None) -> Tensor:
        nonlocal longest
        longest = max(longest, src.size(1), tgt.size(1))
        return net(src, tgt, src_lengths)

    report = verify(Net(), call=call, length=length, overfit=False)
    assert report.ok, str(report)
    assert longest == length


def test_a_net_that_raises_fails_with_the_first_line_of_what_it_said() -> None:
    class Raising(nn.Module):
        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            raise RuntimeError("no kernel\nand many more lines")

    report = verify(Raising(), src_vocab_size=9, tgt_vocab_size=9)
    assert failures(report) == {"output shape"}
    assert report["output shape"].detail == "raised RuntimeError: no kernel"


def test_a_net_that_cannot_be_copied_is_refused() -> None:
    net = Net()
    net.generator = (n for n in range(3))
    with pytest.raises(UserError, match="works on a copy"):
        verify(net)


def test_a_half_precision_net_is_given_the_tolerance_of_its_type() -> None:
    report = verify(Net().to(torch.bfloat16), overfit=False)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: nn.Bilinear(2, 2, 2), {}, "pass src_vocab_size="),
        (Net, {"length": 4}, "at least 8"),
        (Net, {"pad_id": VOCAB}, f"pad_id {VOCAB}"),
        (Net, {"tgt_vocab_size": 2, "pad_id": 0}, "no two tokens"),
    ],
)
def test_what_cannot_be_verified_is_said_in_one_line(
    make: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        verify(make(), **arguments)
    assert "\n" not in str(raised.value)


def test_the_report_as_json_as_table_and_as_text() -> None:
    seen = []
    report = verify(Net("no causal mask"), overfit=False, on_result=seen.append)
    assert tuple(seen) == report.results
    loaded = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert loaded["ok"] is False
    assert [row["name"] for row in loaded["checks"]] == [check.name for check in CHECKS]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.table())
    text = console.export_text()
    for result in report:
        assert result.name in text
        assert f"{result.name}: {result.detail}" in str(report)
    assert report["causality"].hint[:40] in text
    with pytest.raises(KeyError):
        report["no such check"]
