"""A program: nets under compilation and export. Without checked shapes, which cannot be compiled.

`python compiled_nets.py serve|export decoder|two_stacks` fails where a law does not hold.
"""

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import single_stacks
from heedful.parts.cache import Cache
from heedful.parts.tokens import Tokens
from option_space import EXACT, VOCAB
from single_stacks import SCHEMES, Single

# How many texts and tokens a batch is padded to.
ROWS, WIDTHS = (1, 2, 4), (8, 16)
CAPACITY, BEAMS = 32, 2


def main(what: str, kind: str) -> None:
    torch.set_grad_enabled(False)
    {"serve": serve, "export": export}[what](getattr(single_stacks, kind), kind == "two_stacks")


def serve(build: Callable[..., Any], two: bool) -> None:
    """200 requests of any length compile nothing once every bucket has been seen."""
    single = Single("buckets" if two else "rotary", windows=(None, 3))
    net, compiled = build(single), build(single)
    for name in ("encode", "decode") if two else ("decode",):
        function = getattr(compiled, name)
        function = torch.compile(function, fullgraph=True, backend="eager", dynamic=False)
        setattr(compiled, name, function)
    torch._dynamo.config.recompile_limit = 32  # more than there are buckets
    sizes = [(rows, width) for rows in ROWS for width in WIDTHS]
    for rows, width in sizes:
        _request(compiled, two, rows, width, 0)
    draw = random.Random(1)
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in range(200):
            sizes_and_seed = (*draw.choice(sizes), draw.getrandbits(30))
            found = _request(compiled, two, *sizes_and_seed)
            if number % 10 == 0:
                expected = _request(net, two, *sizes_and_seed)
                torch.testing.assert_close(found, expected, **EXACT)


def _batch(rows: int, width: int) -> Tokens:
    """Random texts, some of them empty rows that only fill the bucket."""
    lengths = torch.randint(width + 1, (rows,))
    return Tokens.of(torch.randint(VOCAB, (rows, width)), lengths, "left")


def _begun(net: Any, two: bool, tokens: Tokens) -> tuple[Cache, Tensor]:
    """A cache that has read the sources or the prompts, and the position of the next tokens."""
    rows = tokens.ids.size(0)
    if two:
        return net.start(tokens, capacity=CAPACITY, beams=BEAMS), torch.zeros(rows).long()
    cache = net.start(rows, capacity=CAPACITY, beams=BEAMS)
    net.decode(tokens, cache)
    assert tokens.real is not None
    return cache, tokens.real.sum(1)


def _request(net: Any, two: bool, rows: int, width: int, seed: int) -> Tensor:
    """Read a batch and decode some tokens of it; returns the last logits."""
    torch.manual_seed(seed)
    cache, position = _begun(net, two, _batch(rows, width))
    for step in range(1 + seed % 3):
        cache.follow(torch.randint(BEAMS, (rows, BEAMS)))
        at = (position + step).repeat_interleave(BEAMS)[:, None]
        new = Tokens(torch.randint(VOCAB, at.shape), at, torch.rand(at.shape) < 0.9)
        states = net.decode(new, cache)
    return net.head(states)


class _Step(nn.Module):
    """Logits of new tokens."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tokens, cache: Cache) -> Tensor:
        return self.net.head(self.net.decode(tokens, cache))


class _Encode(nn.Module):
    """States of sources."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tokens) -> Tensor:
        return self.net.encode(tokens).states


def export(build: Callable[..., Any], two: bool) -> None:
    """Exported, a net encodes other sources and steps through other texts as it does itself."""
    torch.manual_seed(0)
    for scheme in SCHEMES:
        net = build(Single(scheme, windows=(None, 3)))
        tokens, others = _batch(2, 5), _batch(2, 5)
        if two:
            encode = torch.export.export(_Encode(net), (tokens,)).module()
            torch.testing.assert_close(encode(others), net.encode(others).states, **EXACT)
        (cache, _), (ours, position) = (_begun(net, two, each) for each in (tokens, others))
        theirs = copy.deepcopy(ours)
        real = torch.tensor([[True], [True], [False], [True]])
        new = [
            Tokens(torch.randint(VOCAB, (4, 1)), at.repeat_interleave(BEAMS)[:, None], real)
            for at in (position, position + 1)
        ]
        step = torch.export.export(_Step(net), (new[0], cache)).module()
        for more in new:
            torch.testing.assert_close(step(more, theirs), _Step(net)(more, ours), **EXACT)
        assert torch.equal(theirs.used, ours.used)


if __name__ == "__main__":
    main(*sys.argv[1:])
