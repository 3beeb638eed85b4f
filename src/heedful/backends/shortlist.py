"""Shortlists: the target tokens of each source token, so that fewer logits are computed.

The candidate lists of Jean et al. 2015, "On Using Very Large Target Vocabulary for Neural Machine
Translation", sec. 3.3: for a sentence the most frequent target tokens and, for each of its tokens,
the most probable translations. Their probabilities are IBM Model 1's (Brown et al. 1993, "The
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
from heedful.files import atomic_replace

Ids = NDArray[np.int64]
Row = Sequence[int] | NDArray[np.integer[Any]]
Pairs = Sequence[tuple[Row, Row]]

NUM_FREQUENT, NUM_TRANSLATIONS = 500, 100  # target tokens of every sentence; of a source token
MIN_PROBABILITY = 1e-4  # of a translation in the list
ITERATIONS = 5
MAX_PAIRS = 500_000  # later pairs are not counted
_BLANKS = " \t\r\n"
_CHUNK = 20_000  # pairs whose links are in memory at once


@dataclass(frozen=True)
class Shortlist:
    """Target ids by source id.

    Attributes:
        always: target ids allowed for every sentence, ascending.
        starts: (S + 1,), index in `tokens` of the first id of each source token.
        tokens: target ids, ascending for each source token.
        target_size: V, the size of the target vocabulary.
    """

    always: Ids
    starts: Ids
    tokens: Ids
    target_size: int

    def translations(self, source: int) -> Ids:
        """The target ids of one source token, without `always`."""
        return self.tokens[self.starts[source] : self.starts[source + 1]]

    def allowed_ids(self, sources: Iterable[int]) -> Ids:
        """The target ids allowed for a sentence of these source ids, ascending."""
        lists = [self.translations(source) for source in set(sources)]
        return np.unique(np.concatenate([self.always, *lists]))

    def recall(self, pairs: Pairs) -> float:
        """The share of target tokens that are allowed for their sentences."""
        allowed = total = 0
        for source, target in pairs:
            allowed += int(np.isin(target, self.allowed_ids(source)).sum())
            total += len(target)
        return allowed / max(1, total)

    def mean_size(self, pairs: Pairs) -> float:
        """The mean number of target ids allowed for a sentence."""
        return (
            float(np.mean([len(self.allowed_ids(source)) for source, _ in pairs])) if pairs else 0.0
        )

    def save(self, path: Path, tokenizers: str) -> None:
        """Write a safetensors file atomically, with the digest of the tokenizers' files."""
        content = {"always": self.always, "starts": self.starts, "tokens": self.tokens}
        content["sizes"] = np.array([self.target_size])
        content["tokenizers"] = np.frombuffer(tokenizers.encode(), np.uint8)
        with atomic_replace(path) as temporary:
            temporary.write_bytes(save(content))

    @classmethod
    def load(cls, path: Path, tokenizers: str) -> "Shortlist":
        """Read a file; raises UserError for a damaged one, and for one of other tokenizers."""
        try:
            arrays = load(path.read_bytes())
            target, digest = int(arrays["sizes"][0]), arrays["tokenizers"].tobytes()
            shortlist = cls(arrays["always"], arrays["starts"], arrays["tokens"], target)
        except (OSError, SafetensorError, KeyError, IndexError) as error:
            raise UserError(f"{path} is damaged, or not a shortlist: {error}") from None
        shortlist._check(path)
        if digest != tokenizers.encode():
            raise UserError(
                f"{path} was made with other tokenizers than the model's: make it again with "
                "`heedful optimize MODEL --shortlist`"
            )
        return shortlist

    def vocabulary_map(self, source: Sequence[str], target: Sequence[str]) -> Iterator[str]:
        """The lines of CTranslate2's `vmap.txt`: a source token, a tab, and its target tokens.

        The line of the empty source token has those of every sentence. Raises UserError for tokens
        with blanks, which separate tokens there.
        """
        translations = ((name, self.translations(id)) for id, name in enumerate(source))
        lists = [("", self.always), *translations]
        for name, tokens in lists:
            names = [target[token] for token in tokens]
            if any(set(token) & set(_BLANKS) for token in (name, *names)):
                raise UserError("CTranslate2 supports no shortlist of tokens with blanks in them")
            if names:
                yield f"{name}\t{' '.join(names)}\n"

    def _check(self, path: Path) -> None:
        """Raises UserError for arrays that do not fit each other."""
        ids = np.concatenate([self.always, self.tokens])
        are_integers = all(
            array.dtype.kind == "i" and array.ndim == 1 for array in (self.starts, ids)
        )
        fits = are_integers and len(self.starts) > 0 and self.starts[0] == 0
        fits = (
            fits and self.starts[-1] == len(self.tokens) and bool((np.diff(self.starts) >= 0).all())
        )
        if not fits or (len(ids) and not 0 <= ids.min() <= ids.max() < self.target_size):
            raise UserError(f"{path} is damaged: its arrays do not fit each other")


def make_shortlist(
    pairs: Pairs,
    source_size: int,
    target_size: int,
    *,
    always: Iterable[int] = (),
    shared: bool = False,
    num_frequent: int = NUM_FREQUENT,
    num_translations: int = NUM_TRANSLATIONS,
) -> Shortlist:
    """Count a shortlist from the token ids of training pairs.

    Args:
        always: target ids allowed for every sentence, as EOS.
        shared: source and target have one vocabulary; each source token is then also a translation
            of itself.
        num_frequent: most frequent target tokens, allowed for every sentence.
        num_translations: most target tokens of one source token.

    Raises:
        UserError: no pairs.
    """
    pairs = [(s, t) for s, t in pairs[:MAX_PAIRS] if len(s) and len(t)]
    if not pairs:
        raise UserError("a shortlist is counted from training pairs: the model has none")
    codes, chance = _translations(pairs, source_size, target_size)
    source, target = codes // target_size, codes % target_size
    order = np.lexsort((target, -chance, source))
    source, target, chance = source[order], target[order], chance[order]
    rank = np.arange(len(source)) - np.searchsorted(source, source)
    selected = (rank < num_translations) & (chance >= MIN_PROBABILITY) & (source < source_size)
    source, target = source[selected], target[selected]
    if shared:
        same = np.arange(min(source_size, target_size))
        source, target = np.concatenate([source, same]), np.concatenate([target, same])
    codes = np.unique(source * target_size + target)
    starts = np.searchsorted(codes // target_size, np.arange(source_size + 1))
    counts = np.bincount(np.concatenate([t for _, t in pairs]), minlength=target_size)
    most = np.argsort(-counts, kind="stable")[:num_frequent]
    every = np.unique(np.concatenate([most[counts[most] > 0], np.fromiter(always, np.int64)]))
    return Shortlist(every, starts, codes % target_size, target_size)


def _translations(
    pairs: Pairs, source_size: int, target_size: int
) -> tuple[Ids, NDArray[np.float64]]:
    """IBM Model 1: codes source · V + target of co-occurring tokens, and p(target | source).

    Source id S is the empty word, which each sentence has. A link connects a target token's
    position with one source token; every position has a link to each source token and to the empty
    word.
    """
    chunks = [pairs[at : at + _CHUNK] for at in range(0, len(pairs), _CHUNK)]
    chunk_codes = [np.unique(_links(chunk, source_size, target_size)[0]) for chunk in chunks]
    codes = np.unique(np.concatenate(chunk_codes))
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
    """The code of every link, those of one position adjacent, and each position's first link."""
    sources = np.concatenate([np.append(source, source_size) for source, _ in pairs]).astype(int)
    targets = np.concatenate([np.asarray(target) for _, target in pairs]).astype(int)
    source_count = np.array([len(source) + 1 for source, _ in pairs])
    target_count = np.array([len(target) for _, target in pairs])
    links = np.repeat(source_count, target_count)  # of each position
    first = np.cumsum(links) - links
    begin = np.repeat(np.cumsum(source_count) - source_count, target_count)
    index = np.arange(links.sum()) - np.repeat(first - begin, links)
    return sources[index] * target_size + np.repeat(targets, links), first
