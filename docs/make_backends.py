"""Writes docs/results/backends.md: which nets CTranslate2 supports, as the tests measure it."""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "backends.md"
HEAD = """# What CTranslate2 runs

<!-- Written by docs/make_backends.py from what tests/backends checks. Do not edit. -->

Of each architecture {tried} tiny configurations were drawn at random: sizes, heads, activations,
placements of norms, position schemes, windows, biases, ties. Each net is either written for
CTranslate2 and run there in float32, and then greedy decoding writes the same tokens and all
log-probabilities (of encoders: states) differ by {close:g} at most, or it is refused with every
reason.

| architecture | the same | refused | because of (configurations) |
|---|---|---|---|
"""
FOOT = """
Windows are kept to step by step: a prompt longer than a layer's window runs in torch.
Nets that are refused run on the backend `compiled` ([which is right](../guides/fast.md)).
"""


def render() -> str:
    """The current page; raises AssertionError if a supported net has other outputs there."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from backend_cases import CLOSE, TRIED, outcome, random_net
    from heedful.zoo import ARCHITECTURES

    lines = []
    for name in ARCHITECTURES:
        found = [outcome(random_net(name, seed)) for seed in range(TRIED)]
        run = [each.difference for each in found if each.difference is not None]
        assert max(run, default=0) <= CLOSE, f"{name}: {run}"
        reasons = Counter(reason for each in found for reason in each.reasons)
        told = "; ".join(f"{reason} ({count})" for reason, count in sorted(reasons.items()))
        lines.append(f"| {name} | {len(run)} | {TRIED - len(run)} | {told} |\n")
    return HEAD.format(tried=TRIED, close=CLOSE) + "".join(lines) + FOOT


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
