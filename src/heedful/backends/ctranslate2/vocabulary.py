"""The tokens of a model as another program names them."""

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
