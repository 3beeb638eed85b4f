"""Nets under compilation and export, in a process without checked shapes, which cannot be compiled.

`main` fails if a property does not hold for these architectures; `schemes` means the position
schemes of `SCHEMES`.
"""

import copy
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from architectures import one_layer, tiny
from heedful.backends.aot.compile import decoder_graphs
from heedful.backends.torch.cached_net import DecodingState
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.cache import Cache
from heedful.parts.losses import LossSum, cross_entropy
from heedful.parts.tokens import Tokens
from heedful.training.step import LossNet
from option_space import EXACT, VOCAB
from single_stacks import Single, decoder

# Each with modules or options that the others of its family lack. Graphs are traced from modules:
# an architecture without such ones adds nothing (`options_of`, tests/models/test_compiled.py).
ENCODERS = ("bert", "modernbert")
NETS = (*ENCODERS, "bart", "pegasus", "t5", "gpt", "gpt3", "qwen3", "gemma3", "mixtral")
# The position schemes that none of `NETS` decodes with, without those that differ from one of these
# or theirs in the numbers of a table that is not computed in a graph: sines in halves, an offset,
# scaled frequencies, other buckets.
SCHEMES = ("none", "rotary-interleaved", "rotary-YarnScaling", "alibi")
# All layers are equal: one is compiled.
ALIKE = {"bert", "bart", "pegasus", "gpt", "qwen3", "mixtral"}
# How many texts and tokens a batch is padded to; most nets are compiled for the first number alone.
ROWS, WIDTH = (2, 4), 8
SEVERAL_SIZES = {"gpt", "bert", "pegasus"}
CAPACITY, BEAMS = 32, 2
REQUESTS = 15  # every third is compared


def main(names: list[str]) -> None:
    torch.set_grad_enabled(False)
    torch._dynamo.config.recompile_limit = 32  # more than there are buckets
    for name in names:
        print(name, file=sys.stderr)
        if name == "schemes":
            for scheme in SCHEMES:
                export(decoder(Single(scheme, windows=(3,))))
            continue
        net = tiny(name, **(one_layer(name) if name in ALIKE else {}))
        rows = ROWS if name in SEVERAL_SIZES else ROWS[:1]
        export_for_any_batch(net)
        if name in ENCODERS:
            serve_encoder(net, rows)
            continue
        if name == "mixtral":
            train(tiny(name))
        serve(net, rows)
        export(net)
        if name == "gemma3":
            export_for_any_size(net.float())


def options_of(net: nn.Module) -> set[tuple[str, ...]]:
    """What a graph of a net depends on beside sizes: the attributes of its modules.

    Of each the family, the class, and the attribute's value if it is a choice, else its type.
    """
    return {
        (type(net).__name__, type(module).__name__, name, str(value))
        for module in net.modules()
        for name, held in {**vars(module), **module._parameters, **module._modules}.items()
        if not name.startswith("_") and not name.isdigit()
        for value in [held if isinstance(held, bool | str) else type(held).__name__]
    }


@torch.enable_grad()
def train(net: Any) -> None:
    """A training step with its balance loss is one graph, with the uncompiled results."""

    def loss(net: Any, batch: Any) -> LossSum:
        logits = net.head(net.decode(batch.tokens)).flatten(0, 1)
        return cross_entropy(logits, batch.tokens.ids.flatten())

    loss_net = LossNet(net, loss)
    batch = SimpleNamespace(tokens=_batch(4, 8))
    actual = torch.compile(loss_net, fullgraph=True, backend="eager")(batch).loss
    assert actual > loss(net, batch).loss
    torch.testing.assert_close(actual, loss_net(batch).loss, rtol=1e-6, atol=0)
    actual.backward()


def serve(net: Any, rows: tuple[int, ...]) -> None:
    """Requests of any length compile nothing once every bucket is compiled."""
    compiled = copy.deepcopy(net)
    for name in ("encode", "decode") if isinstance(net, EncoderDecoder) else ("decode",):
        _compile(compiled, name)
    _hold(net, compiled, _request, rows)


def serve_encoder(net: Any, rows: tuple[int, ...]) -> None:
    """The same of an encoder."""
    compiled = copy.deepcopy(net)
    _compile(compiled, "encode")

    def request(net: Any, rows: int, width: int, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return net.head(net.encode(_batch(rows, width)))

    _hold(net, compiled, request, rows)


def _compile(net: Any, name: str) -> None:
    function = torch.compile(getattr(net, name), fullgraph=True, backend="eager", dynamic=False)
    setattr(net, name, function)


def _hold(net: Any, compiled: Any, request: Callable[..., Tensor], rows: tuple[int, ...]) -> None:
    sizes = [(count, WIDTH) for count in rows]
    for size in sizes:
        request(compiled, *size, 0)
    draw = random.Random(1)
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in range(REQUESTS):
            sizes_and_seed = (*draw.choice(sizes), draw.getrandbits(30))
            actual = request(compiled, *sizes_and_seed)
            if number % 3 == 0:
                torch.testing.assert_close(actual, request(net, *sizes_and_seed), **EXACT)


def _batch(rows: int, width: int) -> Tokens:
    """Random texts, some of them empty rows that only fill the bucket."""
    lengths = torch.randint(width + 1, (rows,))
    return Tokens.from_ids(torch.randint(VOCAB, (rows, width)), lengths, "left")


def _begun(net: Any, tokens: Tokens) -> tuple[Cache, Tensor]:
    """A cache that has read the sources or the prompts, and the position of the next tokens."""
    rows = tokens.ids.size(0)
    if isinstance(net, EncoderDecoder):
        return net.start(tokens, capacity=CAPACITY, branches=BEAMS), torch.zeros(rows).long()
    cache = net.start(rows, capacity=CAPACITY, branches=BEAMS)
    net.decode(tokens, cache)
    assert tokens.real is not None
    return cache, tokens.real.sum(1)


def _request(net: Any, rows: int, width: int, seed: int) -> Tensor:
    """Read a batch and decode some tokens of it; returns the last logits."""
    torch.manual_seed(seed)
    cache, position = _begun(net, _batch(rows, width))
    for step in range(1 + seed % 3):
        cache.reorder(torch.randint(BEAMS, (rows, BEAMS)))
        at = (position + step).repeat_interleave(BEAMS)[:, None]
        new = Tokens(torch.randint(VOCAB, at.shape), at, torch.rand(at.shape) < 0.9)
        states = net.decode(new, cache)
    return net.head(states)


def export_for_any_batch(net: Any) -> None:
    """A whole net with lengths, exported from one batch, accepts others of any size."""
    torch.manual_seed(0)
    example = _arguments(net, 3, 6)
    auto = torch.export.Dim.AUTO
    shapes = tuple(dict.fromkeys(range(item.dim()), auto) for item in example)
    exported = torch.export.export(net, example, dynamic_shapes=shapes).module()
    for rows, width in ((3, 6), (5, 9), (2, 4)):
        other = _arguments(net, rows, width)
        torch.testing.assert_close(exported(*other), net(*other), **EXACT)


def _arguments(net: Any, rows: int, width: int) -> tuple[Any, ...]:
    """Random ids and lengths, with an empty row, as arguments of `net`."""
    lengths = torch.randint(width + 1, (rows,))
    lengths[0], lengths[-1] = width, 0
    ids = torch.randint(VOCAB, (rows, width))
    if isinstance(net, EncoderDecoder):
        return torch.randint(VOCAB, (rows, width)), ids, lengths, lengths
    return ids, lengths


def export_for_any_size(net: Any) -> None:
    """The compiled step takes caches whose layers have dropped different numbers of tokens."""
    module, example, shapes = decoder_graphs(net)["step"]
    step = torch.export.export(module, example, dynamic_shapes=(shapes,)).module()
    decoding = DecodingState(net, net.start(2, capacity=16, branches=BEAMS), longest=48)
    decoding.next_log_probs(torch.randint(VOCAB, (2, 5)), decoding)
    for _ in range(20):
        ids = torch.randint(VOCAB, (2 * BEAMS, 1))
        new = decoding.tokens(ids)
        groups = [
            (group.stores, group.positions, group.used, group.visible)
            for group in copy.deepcopy(decoding.cache.groups)
        ]
        positions = new.positions.expand(2, BEAMS).contiguous()
        actual = step(ids.view(2, BEAMS), positions, (groups, [], None))
        expected = net.head(net.decode(new, decoding.cache))[:, 0]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert len({group.capacity for group in decoding.cache.groups}) > 1


class _Step(nn.Module):
    """Logits of new tokens."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tokens, cache: Cache) -> Tensor:
        return self.net.head(self.net.decode(tokens, cache))


def export(net: Any) -> None:
    """Exported, a net steps through other texts as it does itself.

    That it encodes other sources `export_for_any_batch` shows.
    """
    torch.manual_seed(0)
    tokens, others = _batch(2, 5), _batch(2, 5)
    (cache, _), (ours, position) = (_begun(net, item) for item in (tokens, others))
    reference = copy.deepcopy(ours)
    real = torch.tensor([[True], [True], [False], [True]])
    new = [
        Tokens(torch.randint(VOCAB, (4, 1)), at.repeat_interleave(BEAMS)[:, None], real)
        for at in (position, position + 1)
    ]
    step = torch.export.export(_Step(net), (new[0], cache)).module()
    for more in new:
        torch.testing.assert_close(step(more, reference), _Step(net)(more, ours), **EXACT)
    for mine, other in zip(ours.groups, reference.groups, strict=True):
        assert torch.equal(mine.used, other.used)
