"""A saved model opened for use: the net, its tokenizers, and what one does with them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import heedful
from heedful.errors import UserError
from heedful.evaluation.metrics import perplexity, token_accuracy
from heedful.files import read_json, write_json
from heedful.generation import Hypothesis, Normalization, Stop, beam_search, greedy_search
from heedful.parts.cache import Cache
from heedful.parts.losses import LossSum
from heedful.tasks.translation import pair_loss
from heedful.text.batches import PairBatch, collate, plan_epoch
from heedful.text.store import PairStore, pack_ids
from heedful.text.tokenizer import Tokenizer
from heedful.zoo import architecture
from heedful.zoo.saved import (
    WEIGHTS,
    load_tensors,
    make_config,
    save_tensors,
    set_weights,
    weights_of,
)

CONFIG = "config.json"
TooLong = Literal["error", "truncate"]


@dataclass(frozen=True)
class Limits:
    """How long an output may be: ⌈factor · source tokens⌉ + offset, at most the net's length."""

    factor: float = 2.0
    offset: int = 10

    @classmethod
    def of(cls, src_lengths: np.ndarray, tgt_lengths: np.ndarray) -> "Limits":
        """Room for all but one in a thousand of the training pairs."""
        needed = (tgt_lengths - cls.offset) / src_lengths
        return cls(round(max(0.1, float(np.quantile(needed, 0.999))), 2))

    def of_source(self, length: int) -> int:
        """Most output tokens, EOS included, for a source of `length` tokens."""
        return math.ceil(self.factor * length) + self.offset


@dataclass(frozen=True)
class Card:
    """What `config.json` says of a model beside its architecture's own keys."""

    architecture: str
    task: str
    src_language: str | None = None
    tgt_language: str | None = None
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Translation:
    """One output. `finished` is False where the length limit cut it off."""

    text: str
    score: float
    finished: bool
    ids: list[int]


@dataclass(frozen=True)
class PairScore:
    """How likely a given target is: the sum of natural log-probabilities, EOS included."""

    log_prob: float
    num_tokens: int


class Translator:
    """A sequence-to-sequence net with its tokenizers: text in, text out.

    Attributes:
        net: the bare module, `net(src, tgt, src_lengths, tgt_lengths) -> logits`.
        num_truncated: sources cut to the net's length so far, where that was asked for.
    """

    def __init__(
        self,
        net: Any,
        config: Any,
        card: Card,
        src_tokenizer: Tokenizer,
        tgt_tokenizer: Tokenizer,
    ) -> None:
        self.net = net
        self.config = config
        self.card = card
        self.src_tokenizer = src_tokenizer
        self.tgt_tokenizer = tgt_tokenizer
        self.num_truncated = 0

    @property
    def device(self) -> torch.device:
        """Where the net is."""
        device: torch.device = next(self.net.parameters()).device
        return device

    def translate(self, texts: Sequence[str], *, beam_size: int = 5, **options: Any) -> list[str]:
        """The best translation of each text, in order. Options as of `search`."""
        found = self.search(texts, beam_size=beam_size, **options)
        return [translations[0].text for translations in found]

    def search(
        self,
        texts: Sequence[str],
        *,
        beam_size: int = 5,
        num_return: int = 1,
        length_penalty: float = 1.0,
        normalization: Normalization = "average",
        stop: Stop = "optimal",
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        no_repeat_ngram_size: int = 0,
        prefixes: Sequence[str] | None = None,
        too_long: TooLong = "error",
        batch_tokens: int = 8_192,
        first_number: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Translation]]:
        """Up to `num_return` translations of each text, best first; texts keep their order.

        A blank text has a blank translation. `beam_size` 1 is greedy. A result does not depend on
        what else is in `texts`.

        Args:
            max_new_tokens: longest output; default: from the training data (`Limits`).
            prefixes: how each translation must begin.
            too_long: what to do with a text longer than the net allows.
            batch_tokens: padded source tokens times beams that are searched at once.
            first_number: what the first text is called in an error (a line number).
            progress: called with the number of texts after each batch.

        Raises:
            UserError: an option out of range; a text that is too long, with its number and lengths.
        """
        if isinstance(texts, str):
            raise UserError("texts must be a list of strings; for one text write [text]")
        if prefixes is not None and len(prefixes) != len(texts):
            raise UserError(f"{len(prefixes)} prefixes for {len(texts)} texts")
        sources = self._encode_sources(texts, too_long, first_number)
        results = [[Translation("", 0.0, True, [])]] * len(texts)
        if progress is not None:
            progress(sum(not ids for ids in sources))
        options: dict[str, Any] = {
            "eos_id": self.tgt_tokenizer.eos_id,
            "min_new_tokens": min_new_tokens,
            "length_penalty": length_penalty,
            "normalization": normalization,
            "no_repeat_ngram_size": no_repeat_ngram_size,
        }
        for rows in _by_length(sources, max(1, batch_tokens // beam_size)):
            batch = [sources[row] for row in rows]
            options["max_new_tokens"] = [
                min(self.config.max_length, max_new_tokens or self.card.limits.of_source(len(ids)))
                for ids in batch
            ]
            if prefixes is not None:
                options["forced_prefix"] = [self.tgt_tokenizer.encode(prefixes[r]) for r in rows]
            found = self._search_batch(
                batch, beam_size, options | {"stop": stop, "num_return": num_return}
            )
            for row, hypotheses in zip(rows, found, strict=True):
                results[row] = [self._translation(hypothesis) for hypothesis in hypotheses]
            if progress is not None:
                progress(len(rows))
        return results

    @torch.inference_mode()
    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, too_long: TooLong = "error"
    ) -> list[PairScore]:
        """Log-probability of each target given its source, by teacher forcing."""
        store = self._encode_pairs(sources, targets, too_long)
        scores = [PairScore(0.0, 0)] * len(store)
        self.net.eval()
        for rows in evaluation_plan(store):
            batch = self.collate(store, rows)
            logits = self.net(batch.src, batch.tgt_in, batch.src_lengths, batch.tgt_lengths)
            log_probs = logits.log_softmax(-1).gather(-1, batch.tgt_out[..., None]).squeeze(-1)
            for index, row in enumerate(rows):
                length = int(batch.tgt_lengths[index])
                scores[row] = PairScore(float(log_probs[index, :length].sum()), length)
        return scores

    def teacher_forced(
        self, sources: Sequence[str], targets: Sequence[str], *, too_long: TooLong = "error"
    ) -> dict[str, float]:
        """Perplexity and token accuracy of the targets given their sources."""
        found = self.teacher_forced_sums(self._encode_pairs(sources, targets, too_long))
        return {
            "perplexity": perplexity(float(found.nll), found.tokens),
            "token_accuracy": token_accuracy(int(found.correct), found.tokens),
        }

    @torch.inference_mode()
    def teacher_forced_sums(self, store: PairStore, label_smoothing: float = 0.0) -> LossSum:
        """Loss, likelihood and correct tokens, summed over the pairs of a store."""
        self.net.eval()
        found = [
            pair_loss(
                self.net,
                self.collate(store, rows),
                label_smoothing=label_smoothing,
                count_correct=True,
            )
            for rows in evaluation_plan(store)
        ]
        return LossSum(
            torch.stack([part.loss for part in found]).double().sum(),
            torch.stack([part.nll for part in found]).double().sum(),
            torch.stack([part.correct for part in found]).sum(),
            sum(part.tokens for part in found),
        )

    def collate(self, store: PairStore, rows: np.ndarray) -> PairBatch:
        """Pairs of a store as a batch for this net, on its device."""
        tokenizer = self.tgt_tokenizer
        return collate(
            store, rows, bos_id=tokenizer.bos_id, pad_id=tokenizer.pad_id, device=self.device
        )

    def save(self, directory: Path) -> None:
        """Write `config.json`, `model.safetensors` and the tokenizers; the weights come last."""
        save_description(self, directory)
        save_tensors(directory / WEIGHTS, weights_of(self.net))

    def _encode_pairs(
        self, sources: Sequence[str], targets: Sequence[str], too_long: TooLong
    ) -> PairStore:
        if len(sources) != len(targets):
            raise UserError(f"{len(sources)} sources but {len(targets)} targets")
        if not sources:
            raise UserError("there are no pairs to score")
        sides = []
        for what, tokenizer, texts in (
            ("source line", self.src_tokenizer, sources),
            ("target line", self.tgt_tokenizer, targets),
        ):
            ids = [[*line, tokenizer.eos_id] for line in tokenizer.encode_batch(list(texts))]
            self._check_lengths(ids, what, too_long, tokenizer.eos_id)
            sides.append(pack_ids(ids, tokenizer.vocab_size))
        return PairStore(*sides)

    def _encode_sources(
        self, texts: Sequence[str], too_long: TooLong, first_number: int = 1
    ) -> list[list[int]]:
        """Ids with EOS; none for a blank text."""
        eos = self.src_tokenizer.eos_id
        encoded = self.src_tokenizer.encode_batch(list(texts))
        sources = [[*ids, eos] if ids else [] for ids in encoded]
        self._check_lengths(sources, "line", too_long, eos, first_number)
        return sources

    def _check_lengths(
        self,
        sequences: list[list[int]],
        what: str,
        too_long: TooLong,
        eos: int,
        first_number: int = 1,
    ) -> None:
        longest = self.config.max_length
        for number, ids in enumerate(sequences, first_number):
            if len(ids) <= longest:
                continue
            if too_long == "error":
                raise UserError(
                    f"{what} {number} has {len(ids)} tokens, but the model allows {longest}; "
                    'split it, or ask for it to be cut (--truncate, or too_long="truncate")'
                )
            ids[longest - 1 :] = [eos]
            self.num_truncated += 1

    @torch.inference_mode()
    def _search_batch(
        self, sources: list[list[int]], beam_size: int, options: dict[str, Any]
    ) -> list[list[Hypothesis]]:
        self.net.eval()
        lengths = torch.tensor([len(ids) for ids in sources], device=self.device)
        src = torch.full((len(sources), int(lengths.max())), self.src_tokenizer.pad_id)
        for row, ids in zip(src, sources, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        capacity = max(options["max_new_tokens"])
        cache = self.net.start(src.to(self.device), lengths, capacity=capacity)
        start = torch.full((len(sources), 1), self.tgt_tokenizer.bos_id, device=self.device)
        if beam_size == 1 and options["num_return"] == 1:
            options = {k: v for k, v in options.items() if k not in ("stop", "num_return")}
            return greedy_search(self._next, start, state=cache, **options)
        return beam_search(self._next, start, beam_size=beam_size, state=cache, **options)

    def _next(self, prefixes: Tensor, cache: Cache) -> Tensor:
        logits: Tensor = self.net.step(prefixes[:, -1:], cache)[:, -1]
        # Neither padding nor a second beginning may be written.
        logits[:, [self.tgt_tokenizer.pad_id, self.tgt_tokenizer.bos_id]] = -math.inf
        return logits.log_softmax(-1)

    def _translation(self, hypothesis: Hypothesis) -> Translation:
        text = self.tgt_tokenizer.decode(hypothesis.ids)
        return Translation(text, hypothesis.score, hypothesis.finished, hypothesis.ids)


def load(path: str | Path, *, device: str = "auto") -> Translator:
    """Open a model directory: `config.json`, `model.safetensors` and tokenizer files.

    Raises UserError where it is none, is truncated, or was written by something else.
    """
    directory = Path(path)
    if not directory.is_dir():
        problem = "is a file, not a model directory" if directory.exists() else "does not exist"
        raise UserError(f"{directory} {problem}; give the directory that a training wrote (--out)")
    content = read_json(directory / CONFIG)
    try:
        config = make_config(content["architecture"], content["model"], str(directory / CONFIG))
        card = Card(
            content["architecture"],
            content["task"],
            content["src_language"],
            content["tgt_language"],
            Limits(**content["limits"]),
        )
        files = content["tokenizers"]
        src = Tokenizer.load(directory / str(files["src"]))
        joint = files["src"] == files["tgt"]
        tgt = src if joint else Tokenizer.load(directory / str(files["tgt"]))
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory / CONFIG} was not written by heedful: {error}") from None
    weights = load_tensors(directory / WEIGHTS)
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are overwritten
        net = architecture(card.architecture).build(config)
    set_weights(net, weights, directory / WEIGHTS)
    net.to(choose_device(device)).eval()
    return Translator(net, config, card, src, tgt)


def save_description(model: Translator, directory: Path) -> None:
    """Everything of a model directory but the weights."""
    joint = model.src_tokenizer is model.tgt_tokenizer
    files = {side: "tokenizer.json" if joint else f"tokenizer.{side}.json" for side in SIDES}
    for side, tokenizer in zip(SIDES, (model.src_tokenizer, model.tgt_tokenizer), strict=True):
        tokenizer.save(directory / files[side])
    content = {
        "heedful": heedful.__version__,
        **asdict(model.card),
        "tokenizers": files,
        "model": asdict(model.config),
    }
    write_json(directory / CONFIG, content)


SIDES = ("src", "tgt")


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA, then MPS, then the CPU; anything else as torch names it."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"no device {name} here: {reason}; use auto or cpu") from None
    return device


def _by_length(sources: list[list[int]], budget: int) -> Iterator[list[int]]:
    """Rows of similar length together, longest first, so that memory is known at once."""
    rows = sorted((r for r, ids in enumerate(sources) if ids), key=lambda r: -len(sources[r]))
    while rows:
        count = max(1, budget // len(sources[rows[0]]))
        yield rows[:count]
        rows = rows[count:]


def evaluation_plan(store: PairStore, max_tokens: int = 8_192) -> list[np.ndarray]:
    """Batches of a held-out set, the longest first; a pair above the budget goes alone."""
    if not len(store):
        return []
    src, tgt = store.src_lengths, store.tgt_lengths
    return plan_epoch(
        src,
        tgt,
        max_tokens=max(max_tokens, int((src + tgt).max())),
        max_sentences=None,
        seed=0,
        epoch=0,
        shuffle=False,
    )


def parameter_count(net: nn.Module) -> int:
    """Parameters, those that are shared counted once."""
    return sum(parameter.numel() for parameter in net.parameters())
