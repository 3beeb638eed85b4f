"""Shortlists: the target tokens that each source token can become, so that few logits are formed.

The candidate lists of Jean et al. 2015, "On Using Very Large Target Vocabulary for Neural Machine
Translation", sec. 3.3: for a sentence the most frequent target tokens and, for each of its tokens,
the likeliest translations. Their probabilities are IBM Model 1's (Brown et al. 1993, "The
Mathematics of Statistical Machine Translation", sec. 4.1), by EM over the training pairs' subwords.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from heedful.errors import UserError
from heedful.files import replace_whole

Ids = NDArray[np.int64]
Row = Sequence[int] | NDArray[np.integer[Any]]
Pairs = Sequence[tuple[Row, Row]]

FREQUENT, EACH = 500, 100  # target tokens for every sentence; at most for a source token
LEAST = 1e-4  # probability below which a translation is not listed
ITERATIONS = 5
MOST_PAIRS = 500_000  # that are counted: the first ones
_BLANKS = " \t\r\n"
_CHUNK = 20_000  # pairs whose links are formed at once


@dataclass(frozen=True)
class Shortlist:
    """Target ids by source id.

    Attributes:
        always: target ids that every sentence may have, rising.
        starts: (S + 1,), where the ids of a source token begin in `tokens`.
        tokens: target ids, rising for each source token.
        target_size: V, ids of the target vocabulary.
    """

    always: Ids
    starts: Ids
    tokens: Ids
    target_size: int

    def of(self, source: int) -> Ids:
        """What one source token can become, without `always`."""
        return self.tokens[self.starts[source] : self.starts[source + 1]]

    def words(self, sources: Iterable[int]) -> Ids:
        """The target ids that a sentence of these source ids may have, rising."""
        lists = [self.of(source) for source in set(sources)]
        return np.unique(np.concatenate([self.always, *lists]))

    def recall(self, pairs: Pairs) -> float:
        """The share of target tokens that are on the lists of their sentences."""
        found = total = 0
        for source, target in pairs:
            found += int(np.isin(target, self.words(source)).sum())
            total += len(target)
        return found / max(1, total)

    def mean_size(self, pairs: Pairs) -> float:
        """Target ids that a sentence of these may have, on average."""
        return float(np.mean([len(self.words(source)) for source, _ in pairs])) if pairs else 0.0

    def save(self, path: Path, tokenizers: str) -> None:
        """Write a safetensors file, whole or not at all; `tokenizers` tells whose ids these are."""
        content = {"always": self.always, "starts": self.starts, "tokens": self.tokens}
        content["sizes"] = np.array([self.target_size])
        content["tokenizers"] = np.frombuffer(tokenizers.encode(), np.uint8)
        with replace_whole(path) as beside:
            beside.write_bytes(save(content))

    @classmethod
    def load(cls, path: Path, tokenizers: str) -> "Shortlist":
        """Read one; raises UserError where it is none, or is of other tokenizers."""
        try:
            arrays = load(path.read_bytes())
            target, named = int(arrays["sizes"][0]), arrays["tokenizers"].tobytes()
            found = cls(arrays["always"], arrays["starts"], arrays["tokens"], target)
        except (OSError, SafetensorError, KeyError, IndexError) as error:
            raise UserError(f"{path} is no whole shortlist: {error}") from None
        found._check(path)
        if named != tokenizers.encode():
            raise UserError(
                f"{path} is of other tokenizers than the model's: make it again with "
                "`heedful optimize MODEL --shortlist`"
            )
        return found

    def vocabulary_map(self, source: Sequence[str], target: Sequence[str]) -> Iterator[str]:
        """The lines of CTranslate2's `vmap.txt`: a source token, a tab, and its target tokens.

        The line of the empty source token has those of every sentence. Raises UserError for names
        with blanks, which part them there.
        """
        lists = [("", self.always), *((name, self.of(id)) for id, name in enumerate(source))]
        for name, tokens in lists:
            names = [target[token] for token in tokens]
            if any(set(each) & set(_BLANKS) for each in (name, *names)):
                raise UserError(
                    "CTranslate2 knows no shortlist of tokens with blanks in their names"
                )
            if names:
                yield f"{name}\t{' '.join(names)}\n"

    def _check(self, path: Path) -> None:
        """Arrays that fit each other, so that a damaged file is not indexed with."""
        ids = np.concatenate([self.always, self.tokens])
        whole = all(array.dtype.kind == "i" and array.ndim == 1 for array in (self.starts, ids))
        fits = whole and len(self.starts) > 0 and self.starts[0] == 0
        fits = (
            fits and self.starts[-1] == len(self.tokens) and bool((np.diff(self.starts) >= 0).all())
        )
        if not fits or (len(ids) and not 0 <= ids.min() <= ids.max() < self.target_size):
            raise UserError(f"{path} is no whole shortlist: its arrays do not fit each other")


def make_shortlist(
    pairs: Pairs,
    source_size: int,
    target_size: int,
    *,
    always: Iterable[int] = (),
    shared: bool = False,
    frequent: int = FREQUENT,
    each: int = EACH,
) -> Shortlist:
    """Count a shortlist from the token ids of training pairs.

    Args:
        always: target ids that must be on every list, as EOS.
        shared: both sides have one vocabulary; a source token may then be copied.
        frequent: the most frequent target tokens, for every sentence.
        each: most target tokens for one source token.

    Raises:
        UserError: there are no pairs.
    """
    pairs = [(s, t) for s, t in pairs[:MOST_PAIRS] if len(s) and len(t)]
    if not pairs:
        raise UserError("a shortlist is counted from training pairs, but there are none")
    codes, chance = _translations(pairs, source_size, target_size)
    source, target = codes // target_size, codes % target_size
    order = np.lexsort((target, -chance, source))
    source, target, chance = source[order], target[order], chance[order]
    rank = np.arange(len(source)) - np.searchsorted(source, source)
    chosen = (rank < each) & (chance >= LEAST) & (source < source_size)
    source, target = source[chosen], target[chosen]
    if shared:
        same = np.arange(min(source_size, target_size))
        source, target = np.concatenate([source, same]), np.concatenate([target, same])
    listed = np.unique(source * target_size + target)
    starts = np.searchsorted(listed // target_size, np.arange(source_size + 1))
    counts = np.bincount(np.concatenate([t for _, t in pairs]), minlength=target_size)
    most = np.argsort(-counts, kind="stable")[:frequent]
    every = np.unique(np.concatenate([most[counts[most] > 0], np.fromiter(always, np.int64)]))
    return Shortlist(every, starts, listed % target_size, target_size)


def _translations(
    pairs: Pairs, source_size: int, target_size: int
) -> tuple[Ids, NDArray[np.float64]]:
    """IBM Model 1: codes source · V + target of what stands together, and p(target | source).

    Source id S is the empty word, which each sentence has. A link is a target token's place with
    one source token; every place has as many as its source has tokens, one more for the empty word.
    """
    chunks = [pairs[at : at + _CHUNK] for at in range(0, len(pairs), _CHUNK)]
    seen = [np.unique(_links(chunk, source_size, target_size)[0]) for chunk in chunks]
    codes = np.unique(np.concatenate(seen))
    owner = codes // target_size
    chance = 1.0 / np.bincount(owner, minlength=source_size + 1)[owner]
    for _ in range(ITERATIONS):
        expected = np.zeros(len(codes))
        for chunk in chunks:
            links, first = _links(chunk, source_size, target_size)
            index = np.searchsorted(codes, links)
            weight = chance[index]
            total = np.add.reduceat(weight, first)
            weight /= np.repeat(total, np.diff(np.append(first, len(links))))
            expected += np.bincount(index, weight, minlength=len(codes))
        chance = expected / np.bincount(owner, expected, minlength=source_size + 1)[owner]
    return codes, chance


def _links(pairs: Pairs, source_size: int, target_size: int) -> tuple[Ids, Ids]:
    """The code of every link, those of a place adjacent, and where each place's links begin."""
    sources = np.concatenate([np.append(source, source_size) for source, _ in pairs]).astype(int)
    targets = np.concatenate([np.asarray(target) for _, target in pairs]).astype(int)
    source_count = np.array([len(source) + 1 for source, _ in pairs])
    target_count = np.array([len(target) for _, target in pairs])
    links = np.repeat(source_count, target_count)  # of each place
    first = np.cumsum(links) - links
    begin = np.repeat(np.cumsum(source_count) - source_count, target_count)
    place = np.arange(links.sum()) - np.repeat(first - begin, links)
    return sources[place] * target_size + np.repeat(targets, links), first
