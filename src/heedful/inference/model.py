"""What all saved models share: a net, its tokenizers, its card, and how they are written."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import heedful
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import write_json
from heedful.inference.card import ModelCard
from heedful.options import TooLong
from heedful.parts.tokens import Tokens
from heedful.zoo.names import weights_of
from heedful.zoo.saved import WEIGHTS, save_tensors

CONFIG = "config.json"
SIDES = ("src", "tgt")
Pooling = Literal["mean", "first", "last"]
Texts = Sequence[str] | Sequence[Sequence[int]]


@dataclass(eq=False, repr=False)
class SavedModel:
    """A net with its tokenizers, opened for use.

    Attributes:
        net: the bare module.
        config: its architecture's frozen Config.
        card: what it is for.
        src_tokenizer, tgt_tokenizer: the same one where there is one side; None where the model
            came without.
        num_truncated: texts cut to the net's length so far, where that was asked for.
    """

    kind: ClassVar[str] = "model"

    net: Any
    config: Any
    card: ModelCard
    _src_tokenizer: Tokenizer | None
    _tgt_tokenizer: Tokenizer | None
    num_truncated: int = field(default=0, init=False)

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

    @property
    def device(self) -> torch.device:
        """Where the net is."""
        device: torch.device = next(self.net.parameters()).device
        return device

    def embed(
        self, texts: Texts, *, pooling: Pooling = "mean", batch_tokens: int = 8_192
    ) -> Float[Tensor, "N D"]:
        """One vector for each text: the mean of its tokens' states, or its first or last.

        Special tokens that the model expects around a text count as its tokens. Results do not
        depend on what else is in `texts`.

        Raises:
            UserError: an unknown pooling; a text that is longer than the net allows.
        """
        if pooling not in ("mean", "first", "last"):
            raise UserError(f"pooling must be mean, first or last, not {pooling!r}")
        rows = self.encode(texts)

        def vectors(_: list[int], ids: Tensor, lengths: Tensor) -> Tensor:
            return _pooled(self.states(ids, lengths), lengths, pooling)

        return self.in_batches(rows, self.config.d_model, vectors, batch_tokens)

    def in_batches(
        self,
        rows: list[list[int]],
        width: int,
        answers: Callable[[list[int], Tensor, Tensor], Float[Tensor, "B D"]],
        batch_tokens: int,
        progress: Callable[[int], None] | None = None,
    ) -> Float[Tensor, "N D"]:
        """What `answers(numbers of the rows, ids, lengths)` gives for each row, on the CPU."""
        found = torch.zeros(len(rows), width)
        self.net.eval()
        with torch.inference_mode():
            for chosen in by_length(rows, batch_tokens):
                ids, lengths = self.batch([rows[row] for row in chosen])
                found[chosen] = answers(chosen, ids, lengths).float().cpu()
                if progress is not None:
                    progress(len(chosen))
        return found

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
        return [
            around(self.src_tokenizer, next(encoded))
            if isinstance(text, str)
            else [int(token) for token in text]
            for text in texts
        ]

    def check_lengths(
        self, rows: list[list[int]], what: str, too_long: TooLong, first_number: int = 1
    ) -> None:
        """Refuse, or cut in place, what is longer than the net allows; a last special stays."""
        longest = self.config.max_length
        for number, ids in enumerate(rows, first_number):
            if len(ids) <= longest:
                continue
            if too_long == "error":
                raise UserError(
                    f"{what} {number} has {len(ids)} tokens, but the model allows {longest}; "
                    'split it, or ask for it to be cut (--truncate, or too_long="truncate")'
                )
            specials = self.src_tokenizer.special_ids if self.has_tokenizer else frozenset()
            suffix = ids[-1:] if ids[-1] in specials else []
            ids[longest - len(suffix) :] = suffix
            self.num_truncated += 1

    def batch(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Rows as ids padded on the right and their lengths, on the net's device."""
        lengths = torch.tensor([len(ids) for ids in rows], device=self.device)
        pad_id = self._src_tokenizer.pad_id if self._src_tokenizer is not None else 0
        ids = [torch.tensor(row, dtype=torch.long) for row in rows]
        return pad_sequence(ids, True, pad_id).to(self.device), lengths

    def states(self, ids: Tensor, lengths: Tensor) -> Float[Tensor, "B T D"]:
        """The states that `embed` pools."""
        states: Tensor = self.net.encode(Tokens.of(ids, lengths))
        return states

    def save(self, directory: Path) -> None:
        """Write `config.json`, `model.safetensors` and the tokenizers; the weights come last."""
        save_description(self, directory)
        save_tensors(directory / WEIGHTS, weights_of(self.net))

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
        **model.card.to_dict(),
        "tokenizers": files,
        "model": asdict(model.config),
    }
    write_json(directory / CONFIG, content)


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


def parameter_count(net: nn.Module) -> int:
    """Parameters, those that are shared counted once."""
    return sum(parameter.numel() for parameter in net.parameters())


def by_length(rows: Sequence[Sequence[int]], budget: int) -> Iterator[list[int]]:
    """Numbers of rows of similar length together, the longest first; empty rows are left out.

    So the most memory that is needed is known at once.
    """
    order = sorted((r for r, ids in enumerate(rows) if len(ids)), key=lambda r: -len(rows[r]))
    while order:
        count = max(1, budget // len(rows[order[0]]))
        yield order[:count]
        order = order[count:]


def _pooled(
    states: Float[Tensor, "B T D"], lengths: Tensor, pooling: Pooling
) -> Float[Tensor, "B D"]:
    if pooling == "first":
        return states[:, 0]
    if pooling == "last":
        return states[torch.arange(len(lengths), device=states.device), lengths - 1]
    real = torch.arange(states.size(1), device=states.device) < lengths[:, None]
    return (states * real[..., None]).sum(1) / lengths[:, None]
