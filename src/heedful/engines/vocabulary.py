"""The tokens of a model as another program names them."""

from collections.abc import Sequence
from dataclasses import dataclass

from heedful.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model by their ids, and those with a role; None: there is none.

    Attributes:
        source, target: of one stack, the same.
        start: what the decoder of two stacks reads first.
        adds_end: the program puts the end behind each source that it is given.
    """

    source: list[str]
    target: list[str]
    start: int | None = None
    end: int | None = None
    unknown: int | None = None
    adds_end: bool = False


def names_of(tokenizer: Tokenizer | None, count: int) -> list[str]:
    """A name for each of `count` ids, none of them twice; without a tokenizer their numbers."""
    pieces = [f"<id{i}>" if tokenizer is None else tokenizer.piece(i) for i in range(count)]
    first: dict[str, int] = {}
    return [p if first.setdefault(p, i) == i else f"{p}<id{i}>" for i, p in enumerate(pieces)]


def vocabulary_of(
    sizes: Sequence[int],
    tokenizers: Sequence[Tokenizer | None],
    *,
    start: Sequence[int] = (),
    end: Sequence[int] = (),
    adds_end: bool = False,
) -> Vocabulary:
    """Of a net's embeddings, of one stack or two, and the tokenizers that go with them."""
    names = [names_of(*side) for side in zip(tokenizers, sizes, strict=True)]
    target = tokenizers[-1]
    return Vocabulary(
        names[0],
        names[-1],
        start=start[0] if start else None,
        end=end[0] if end else None,
        unknown=None if target is None or target.unk_id < 0 else target.unk_id,
        adds_end=adds_end,
    )
