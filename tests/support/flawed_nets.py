"""Small nets of one and of two stacks, correct without a flaw; one flaw for each check."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LABELS = 19, 32, 4, 3
LONGEST = 40  # the tokens that a net takes


class Attention(nn.Module):
    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.flaw = flaw
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        parts = zip((self.query, self.key, self.value), (x, memory, memory), strict=True)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f, y in parts)
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        return self.out((self.attend(scores, mask) @ v).transpose(1, 2).flatten(2))

    def attend(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Attention weights (B, H, T, S)."""
        fill = {"NaN on empty rows": -math.inf, "fp32 mask": torch.finfo(torch.float32).min}
        weights = scores.masked_fill(~mask, fill.get(self.flaw, -1e30)).softmax(-1)
        if self.flaw not in ("NaN on empty rows", "even on empty rows"):
            weights = weights * mask
        return weights


class TimeNorm(nn.Module):
    """A norm over the wrong dimension: over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


class OverTexts(nn.BatchNorm1d):
    """The features of all texts and positions, (B, T, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


NORMS: dict[str, Any] = {
    "norm over time": TimeNorm,
    "norm over the batch": lambda: OverTexts(WIDTH, track_running_stats=False),
    "norm over the batch in training": lambda: OverTexts(WIDTH),
    "norm over positions and features": lambda: nn.GroupNorm(1, WIDTH),
}


class Net(nn.Module):
    """Shared by both kinds: embeddings, positions, a tied head, and their flaws."""

    def __init__(self, flaw: str, labels: int | None) -> None:
        """labels: of a head for classes; 0: no head; None: a head over the vocabulary, tied."""
        super().__init__()
        torch.manual_seed(0)
        self.flaw = flaw
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.tokens.weight, std=WIDTH**-0.5)
        size = 160 if flaw == "leak at distance 100" else LONGEST
        self.positions = nn.Parameter(torch.randn(size, WIDTH))
        self.dropout = nn.Dropout(0.1)
        self.head: nn.Module = nn.Identity() if labels == 0 else nn.Linear(WIDTH, labels or VOCAB)
        if labels is None:
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
        self.more_norm: nn.Module = NORMS.get(flaw, nn.Identity)()
        self.kept: Tensor | None = None

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
        if self.flaw == "positions end early":
            places = places.clamp(max=20)
        if self.flaw == "positions begin again":
            places = places % 25
        x = x + self.positions[places * 0 if self.flaw == "no positions" else places]
        return F.dropout(x, 0.1) if self.flaw == "dropout in evaluation" else self.dropout(x)

    def causal(self, square: Tensor) -> Tensor:
        """The causal mask, (T, T)."""
        return {
            "causal mask off by one": square.tril(1),
            "inverted causal mask": square.triu(),
            "sees the later ones of the end": square.tril() | (torch.arange(len(square)) > 30),
            "sees the later ones of a block": square.tril()
            | (torch.arange(len(square))[:, None] // 16 == torch.arange(len(square)) // 16),
            "token before hidden": square.tril(-2) | torch.eye(len(square), dtype=torch.bool),
        }.get(self.flaw, square.tril())

    def leaked(self, x: Tensor, states: Tensor, real: Tensor) -> Tensor:
        """Flaws that only gradients show: a zero is added whose gradient is not zero."""
        wrong = {
            "hidden gradient from the future": x,
            "hidden gradient from padding": states * ~real[..., None],
        }.get(self.flaw)
        return x if wrong is None else x + (wrong - wrong.detach()).sum(1, keepdim=True)

    def mixed(self, x: Tensor) -> Tensor:
        """Flaws that mix rows, positions or calls."""
        flaw = self.flaw
        if flaw == "batch statistics":
            x = x + x.mean(0)
        if flaw == "mean of the whole text removed":
            x = x - x.mean(1, keepdim=True)
        if flaw == "shifted twice":
            x = F.pad(x[:, :-1], (0, 0, 1, 0))
        if flaw == "scaled by the width":
            x = x / x.size(1)
        if flaw.startswith("leak at distance"):
            distance = int(flaw.split()[-1])
            x = x + F.pad(x[:, distance:], (0, 0, 0, min(distance, x.size(1)))) / 2
        if flaw == "state of the last call":
            before, self.kept = self.kept, x.detach().mean((0, 1))
            x = x if before is None else x + before
        if flaw == "size of the first call":
            self.kept = torch.ones(x.size(1), 1) if self.kept is None else self.kept
            x = x * self.kept[: x.size(1)]
        if flaw in ("norm over positions and features",):
            return self.more_norm(x.transpose(1, 2)).transpose(1, 2)
        return self.more_norm(x)

    def finish(self, x: Tensor) -> Any:
        if self.flaw == "parameter times zero":
            x = x + 0 * self.dead
        if self.flaw == "detached":
            x = x.detach()
        out = self.head(x)
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


class TwoStacks(Net):
    """One encoder layer and one decoder layer."""

    def __init__(self, flaw: str = "") -> None:
        super().__init__(flaw, None)
        self.read, self.write, self.cross = (Attention(flaw) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

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
            "last token hidden": src_real & (torch.arange(src.size(1)) < src.size(1) - 1),
        }.get(flaw, src_real)[:, None, None]
        tgt_keys = torch.ones_like(tgt_real) if flaw == "target padding attended" else tgt_real
        square = torch.ones(size, size, dtype=torch.bool)
        causal = square if flaw == "mask of the other family" else self.causal(square)
        x = self.embed(src, src_real)
        lower = torch.ones(src.size(1), src.size(1), dtype=torch.bool).tril()
        read_keys = src_keys & lower if flaw == "causal encoder" else src_keys
        x = self.norms[0](x + self.read(x, x, read_keys))
        if flaw == "detached encoder":
            x = x.detach()
        y = self.embed(tgt, tgt_real)
        y = self.leaked(y, x, src_real)
        y = self.norms[1](y + self.write(y, y, causal & tgt_keys[:, None, None]))
        y = self.mixed(y)
        if flaw == "scaled by the padding":
            y = y / (1 + (~tgt_real).sum())
        if flaw == "cross-attention to padding":
            src_keys = torch.ones_like(src_keys)
        if flaw != "no cross-attention":
            y = self.norms[2](y + self.cross(y, x, src_keys))
        return self.finish(y)

    def start(
        self, src: Tensor, lengths: Tensor | None = None, *, capacity: int, padding_side="right"
    ) -> "Prefixes":
        return Prefixes(self.flaw, len(src), padding_side, capacity, source=src, lengths=lengths)

    def step(self, ids: Tensor, cache: "Prefixes") -> Tensor:
        read, given = cache.extended(ids), cache.given
        return self(given["source"], read, given["lengths"], padding_side=cache.side)[:, -1:]


class Renormalized(Attention):
    """Correct: softmax, then the mask, then weights with a sum of 1; hidden gradients cancel."""

    def attend(self, scores: Tensor, mask: Tensor) -> Tensor:
        weights = scores.softmax(-1) * mask
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)


class OneStack(Net):
    """One layer and the head of its kind: decoder, encoder, classifier or states."""

    def __init__(self, kind: str, flaw: str = "", window: int = 99) -> None:
        super().__init__(flaw, {"classifier": LABELS, "states": 0}.get(kind))
        self.kind, self.window = kind, window
        self.read = Attention(flaw)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(
        self, ids: Tensor, lengths: Tensor | None = None, *, padding_side: str = "right"
    ) -> Any:
        real = self.real(ids, lengths, padding_side)
        x = self.embed(ids, real)
        x = self.leaked(x, x, real)
        x = self.norm(x + self.read(x, x, self.mask(real)))
        x = self.mixed(x)
        if self.flaw == "scaled by the padding":
            x = x / (1 + (~real).sum())
        if self.flaw == "spoilt by an empty row" and not bool(real.any(1).all()):
            x = x / 2
        if self.kind == "classifier":
            first = real.int().argmax(1) * (self.flaw != "class of the first column")
            x = x[torch.arange(ids.size(0)), first]
        return self.finish(x)

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
            return self.causal(near) & keys
        if flaw == "window short ahead":
            near &= columns - columns[:, None] < self.window - 1
        if flaw == "looks ahead only":
            near = near.triu()
        if flaw == "halves apart":
            near = (columns[:, None] < size // 2) == (columns < size // 2)
        return near & keys

    def start(self, rows: int, *, capacity: int, starts: Tensor | None = None) -> "Prefixes":
        if starts is None or self.flaw == "cache without padding":
            starts = torch.zeros(rows, dtype=torch.int64)
        return Prefixes(self.flaw, rows, "left", capacity, starts=starts)

    def step(self, ids: Tensor, cache: "Prefixes") -> Tensor:
        read = cache.extended(ids)
        out = self(read, read.size(1) - cache.given["starts"], padding_side="left")
        out = out[:, -ids.size(1) :]
        # Fewer queries than keys: the first of the new ones attends to the keys of the last one.
        return out[:, -1:].expand_as(out) if self.flaw == "cache aligned to the end" else out


class Prefixes:
    """A cache for a net without one: stores ids, and runs the whole net at every step.

    `given` is, for each row, its source, its lengths or its start.
    """

    def __init__(
        self, flaw: str, rows: int, side: str, capacity: int, **given: Tensor | None
    ) -> None:
        self.flaw, self.side, self.capacity, self.given = flaw, side, capacity, given
        self.ids = torch.zeros(rows, 0, dtype=torch.int64)

    def extended(self, ids: Tensor) -> Tensor:
        """Append tokens; returns the ids to run the net on."""
        self.ids = torch.cat([self.ids, ids], dim=1)
        size = self.ids.size(1)
        if size > self.capacity:
            if self.flaw == "cache of a fixed size":
                raise IndexError(f"{size} tokens, but room for {self.capacity}")
            if self.flaw == "cache loses keys when it grows":
                self.ids[:, self.capacity - 1] = 0
            if self.flaw == "cache of a fixed size wraps":
                self.ids[:, :-1] = self.ids[:, 1:].clone()
            self.capacity = max(size, 2 * self.capacity)
        if self.flaw == "cache off by one":
            return torch.cat([self.ids[:, :1], self.ids], dim=1)
        if self.flaw.startswith("cache forgets after"):
            forgotten = max(0, size - ids.size(1) - int(self.flaw.split()[-1]))
            self.ids[:, :forgotten] = 0
        return self.ids

    def reorder(self, rows: Tensor) -> None:
        forgets = self.flaw == "reorder forgets what was given" and len(rows) <= len(self.ids)
        if self.flaw != "reorder forgets prefixes" or len(rows) != len(self.ids):
            self.ids = self.ids[rows]
        for name, of_rows in self.given.items():
            if of_rows is not None:
                self.given[name] = of_rows[: len(rows)] if forgets else of_rows[rows]


def net_of(kind: str, flaw: str = "") -> nn.Module:
    """A net by its kind: two stacks, decoder, encoder, classifier or states."""
    return TwoStacks(flaw) if kind == "two stacks" else OneStack(kind, flaw)
