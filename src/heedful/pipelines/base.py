"""What all saved models share: a net, its tokenizers, its metadata, and how they are written."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

import heedful
from heedful.backends.base import Backend, Capability, Settings
from heedful.backends.shortlist import Shortlist
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import write_directory, write_json
from heedful.options import DEFAULTS, TooLong
from heedful.pipelines.metadata import ModelMetadata

CONFIG = "config.json"
_TOLD = 10  # texts that are left out
SIDES = ("src", "tgt")
Pooling = Literal["mean", "first", "last"]
Texts = Sequence[str] | Sequence[Sequence[int]]


class SavedModel:
    """A net with its tokenizers, opened for use.

    Args:
        net: the bare module; None where it is yet to be opened.
        backend: runs what it supports in place of the net.
        open_net: gives the net and its Config, called when something needs torch.

    Attributes:
        config: its architecture's frozen Config.
        metadata: what it is for.
        src_tokenizer, tgt_tokenizer: the same one where there is one side; None where the model
            came without.
        shortlist: the target tokens that a source can become; None: all.
        settings: that the net itself is run with.
        num_truncated: texts cut to the net's length so far, where that was asked for.
        num_left_out: texts that have no output (`leave_out`).
    """

    kind: ClassVar[str] = "model"
    has_net = True  # False: of ensembles
    _eager: Any = None
    _eager_key: tuple[Any, ...] = ()

    def __init__(
        self,
        net: Any,
        config: Any,
        metadata: ModelMetadata,
        src_tokenizer: Tokenizer | None,
        tgt_tokenizer: Tokenizer | None,
        backend: Backend | None = None,
        open_net: Callable[[], tuple[Any, Any]] | None = None,
    ) -> None:
        self._net = net
        self.config = config
        self.metadata = metadata
        self._src_tokenizer = src_tokenizer
        self._tgt_tokenizer = tgt_tokenizer
        self.backend = backend
        self._open_net = open_net
        self.shortlist: Shortlist | None = None
        self.settings = Settings()
        self.num_truncated = 0
        self.num_left_out = 0

    @property
    def net(self) -> Any:
        """The bare module."""
        if self._net is None and self._open_net is not None:
            self._net, self.config = self._open_net()
        return self._net

    @net.setter
    def net(self, net: Any) -> None:
        self._net = net

    @property
    def eager(self) -> Any:
        """The net as a backend (`heedful.backends.torch.eager.Eager`)."""
        from heedful.backends.torch.eager import Eager

        key = (self.net, self.config.max_length, self.shortlist, self.settings)
        if self._eager is None or any(
            a is not b for a, b in zip(self._eager_key, key, strict=True)
        ):
            self._eager_key, self._eager = key, Eager(*key)
        return self._eager

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be given; else only ids."""
        return self._src_tokenizer is not None

    @property
    def src_tokenizer(self) -> Tokenizer:
        """The tokenizer of what goes in; raises UserError where the model came without."""
        return self._or_error(self._src_tokenizer)

    @property
    def tgt_tokenizer(self) -> Tokenizer:
        """The tokenizer of what comes out."""
        return self._or_error(self._tgt_tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a model of one side."""
        return self.src_tokenizer

    def backend_with(self, capability: Capability) -> Any:
        """The backend where it has a capability, else the net as one."""
        has_it = self.backend is not None and capability in self.backend.capabilities
        return self.backend if has_it else self.eager

    @property
    def device(self) -> Any:
        """Where the net is, as a `torch.device`."""
        return self.eager.device

    def embed(
        self, texts: Texts, *, pooling: Pooling = "mean", batch_tokens: int | None = None
    ) -> Any:
        """One vector for each text, a tensor (N, D); see `vectors`."""
        import torch

        return torch.from_numpy(self.vectors(texts, pooling=pooling, batch_tokens=batch_tokens))

    def vectors(
        self,
        texts: Texts,
        *,
        pooling: Pooling = "mean",
        too_long: TooLong = "error",
        batch_tokens: int | None = None,
    ) -> NDArray[np.float32]:
        """(N, D): a vector for each text, the mean of its tokens' states, or its first or last.

        Special tokens that the model expects around a text count as its tokens. Results do not
        depend on what else is in `texts`. An empty text, and one that is left out, has zeros.

        Raises:
            UserError: an unknown pooling; a text that is longer than the net allows.
        """
        if pooling not in ("mean", "first", "last"):
            raise UserError(f"pooling must be mean, first or last, not {pooling!r}")
        rows = self.encode(texts, too_long=too_long)
        runner = self.backend_with("states")

        def pooled(chosen: list[int]) -> list[np.ndarray]:
            states = runner.states([rows[row] for row in chosen])
            if pooling == "mean":
                return [of_row.mean(0, dtype=np.float32) for of_row in states]
            return [of_row[0 if pooling == "first" else -1] for of_row in states]

        return in_batches(runner, rows, self.config.d_model, pooled, batch_tokens)

    def encode(self, texts: Texts, *, too_long: TooLong = "error") -> list[list[int]]:
        """Ids of each text with what the model expects around it; ids stay as they are."""
        rows = self.rows_of(texts, Tokenizer.add_special_tokens)
        self.check_lengths(rows, "text", too_long)
        return rows

    def rows_of(
        self, texts: Texts, around: Callable[[Tokenizer, list[int]], list[int]]
    ) -> list[list[int]]:
        """Ids of each text with what `around` puts around them; those given as ids stay."""
        if isinstance(texts, str):
            raise UserError("texts must be a list of strings, or of ids; for one text write [text]")
        words = [text for text in texts if isinstance(text, str)]
        encoded = iter(self.src_tokenizer.encode_batch(words) if words else ())
        rows = [
            around(self.src_tokenizer, next(encoded))
            if isinstance(text, str)
            else list(map(int, text))
            for text in texts
        ]
        self.check_ids(rows, "src_")
        return rows

    def check_ids(self, rows: Iterable[Sequence[int]], side: Literal["src_", "tgt_"]) -> None:
        """Refuse ids that the net's table of a side has no place for; raises UserError."""
        size: Any = getattr(self.config, f"{side}vocab_size", None)
        size = size or getattr(self.config, "vocab_size", None) or math.inf
        for row in rows:
            if row and (min(row) < 0 or max(row) >= size):
                token = min(row) if min(row) < 0 else max(row)
                raise UserError(
                    f"token {token} is outside the model's table of {size:,}: the ids, or its "
                    "tokenizer, are of another model"
                )

    def check_lengths(
        self,
        rows: list[list[int]],
        what: str,
        too_long: TooLong,
        first_number: int = 1,
        *,
        longest: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Refuse, empty or cut in place what is longer than the net allows.

        A special token at the end of a row that is cut stays.

        Args:
            longest: most tokens of a row; default: the net's length.
            tokenizer: of the rows; default: the source's.
        """
        longest, tokenizer = longest or self.config.max_length, tokenizer or self._src_tokenizer
        for number, ids in enumerate(rows, first_number):
            if len(ids) <= longest:
                continue
            told = f"{what} {number} has {len(ids)} tokens, but the model allows {longest}"
            if too_long == "error":
                raise UserError(
                    f"{told}; split it, or ask for it to be cut (--truncate, or "
                    'too_long="truncate")'
                )
            if too_long == "leave_out":
                self.leave_out(told)
                ids.clear()
                continue
            specials = frozenset() if tokenizer is None else tokenizer.special_ids
            suffix = ids[-1:] if ids[-1] in specials else []
            ids[longest - len(suffix) :] = suffix
            self.num_truncated += 1

    def leave_out(self, reason: str) -> None:
        """Count a text that has no output, and tell of each of the first ones."""
        self.num_left_out += 1
        if self.num_left_out <= _TOLD:
            logging.getLogger("heedful").warning(f"{reason}: left out")

    def save(self, directory: str | Path, *, base: str | Path | None = None) -> None:
        """Write `config.json`, `model.safetensors` and the tokenizers, all of them or nothing.

        A model that is there is replaced. Raises UserError where the directory holds anything else,
        or cannot be written, and for a net that could not be loaded again: one whose tensors are
        not those of its architecture.

        Args:
            base: directory of a model that has the same frozen weights, those that require no
                gradient: only the others are written, with the base's path and SHA-256. The base
                must stay where it is, seen from `directory`. Default: all weights are written.
        """
        from heedful.zoo.added_weights import save_added
        from heedful.zoo.names import trainable, weights_of
        from heedful.zoo.saved import WEIGHTS, check_parameters, save_tensors

        weights = weights_of(self.net)  # which opens the net, and so its Config
        check_parameters(self.metadata.architecture, self.config, weights)

        def fill(beside: Path) -> None:
            save_description(self, beside)
            file = beside / WEIGHTS
            if base is None:
                save_tensors(file, weights)
            else:
                save_added(file, weights, trainable(self.net), Path(base), Path(directory))

        write_directory(Path(directory), fill)

    def _or_error(self, tokenizer: Tokenizer | None) -> Tokenizer:
        if tokenizer is None:
            raise UserError(
                "this model has no tokenizer: give lists of ids instead of text, or import it "
                "again from a directory that holds the tokenizer's files"
            )
        return tokenizer


def save_description(model: SavedModel, directory: Path) -> None:
    """Everything of a model directory but the weights."""
    files: dict[str, str] = {}
    if model.has_tokenizer:
        joint = model.src_tokenizer is model.tgt_tokenizer
        files = {side: "tokenizer.json" if joint else f"tokenizer.{side}.json" for side in SIDES}
        for side, tokenizer in zip(SIDES, (model.src_tokenizer, model.tgt_tokenizer), strict=True):
            tokenizer.save(directory / files[side])
    content = {
        "heedful": heedful.__version__,
        **asdict(model.metadata),
        "tokenizers": files,
        "model": asdict(model.config),
    }
    write_json(directory / CONFIG, content)


def by_length(rows: Sequence[Sequence[int]], budget: int, workers: int = 1) -> Iterator[list[int]]:
    """Numbers of rows of similar length together, the longest first; empty rows are left out.

    So the most memory that is needed is known at once. Each of the workers gets a part of every
    batch (`split_among`), of at most `budget` padded tokens or a single row.
    """
    lengths = [len(ids) for ids in rows]
    real = filter(lengths.__getitem__, range(len(rows)))
    order = sorted(real, key=lengths.__getitem__, reverse=True)
    while order:
        count = workers * max(1, budget // lengths[order[0]])
        yield order[:count]
        order = order[count:]


def split_among(workers: int, batches: Iterable[list[int]]) -> list[list[int]]:
    """One batch for each worker out of every batch, its rows taken in turn.

    Neighbours in a batch of `by_length` are of similar length, so that all workers have equal work
    and are done together. A batch of fewer rows than there are workers gives as many of one row.
    """
    return [batch[k::workers] for batch in batches for k in range(min(workers, len(batch)))]


def in_batches(
    runner: Backend,
    rows: list[list[int]],
    width: int,
    answers: Callable[[list[int]], list[np.ndarray]],
    batch_tokens: int | None,
    progress: Callable[[int], None] | None = None,
) -> NDArray[np.float32]:
    """(N, D): what `answers(numbers of rows)` gives for each row, by all workers of its runner."""
    from concurrent.futures import ThreadPoolExecutor

    found = np.zeros((len(rows), width), np.float32)
    workers = runner.settings.workers
    budget = batch_tokens or runner.settings.batch_tokens or DEFAULTS["batch_tokens"]
    batches = split_among(workers, by_length(rows, budget, workers))
    pool = ThreadPoolExecutor(workers)
    try:
        each = pool.map if workers > 1 else map
        for chosen, answer in zip(batches, each(answers, batches), strict=True):
            found[chosen] = answer
            if progress is not None:
                progress(len(chosen))
    finally:
        pool.shutdown(cancel_futures=True)
    return found
