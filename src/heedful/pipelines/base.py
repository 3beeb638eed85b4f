"""The base of all saved models: a net with tokenizers and metadata, and how they are saved."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

import heedful
from heedful import openmp
from heedful.backends.base import Backend, Capability, Settings
from heedful.backends.shortlist import Shortlist
from heedful.data.rows import is_blank, without_invisible
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import as_path, in_hf_format, read_object, write_directory, write_json
from heedful.options import TooLong
from heedful.pipelines.batching import in_batches
from heedful.pipelines.inputs import LengthError, as_batch, check_list, row_ids
from heedful.pipelines.keywords import INTERNAL
from heedful.pipelines.metadata import ModelMetadata
from heedful.pipelines.pooling import Pooling, check_pooling, find_prompt, pool

if TYPE_CHECKING:
    from heedful.models.adapters import LoRA
    from heedful.zoo.saved import Base

CONFIG = "config.json"
NUM_WARNINGS = 10  # of texts that are left out, and of outputs with a failure
SIDES = ("src", "tgt")
Texts = Sequence[str] | Sequence[Sequence[int]]


class SavedModel:
    """A net with its tokenizers and metadata.

    Args:
        net: the torch module; None: opened by `open_net` at its first use.
        backend: runs the requests that it supports in place of the net.
        open_net: returns the net and its Config.

    Attributes:
        config: the frozen Config of the architecture.
        metadata: task, languages and defaults.
        src_tokenizer, tgt_tokenizer: one object where the model has a single tokenizer.
        shortlist: the target tokens that each source can become; None: all.
        settings: of the net as a backend.
        backend_is_named: the backend was given by name: it, and not the net, runs every request
            whose options it supports, and others are refused.
        adapter: of the net, while it is not merged; `load` merges it.
        num_truncated: texts cut to the net's length so far (`too_long="truncate"`).
        num_left_out: texts without output so far (`too_long="leave_out"`).
        num_unknown: texts so far with characters that the vocabulary lacks.
        failures: outputs so far that do not meet their constraints, by `Failure`.
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
        openmp.watch()
        self._net = net
        self.config = config
        self.metadata = metadata
        self._src_tokenizer = src_tokenizer
        self._tgt_tokenizer = tgt_tokenizer
        self.backend = backend
        self._open_net = open_net
        self.shortlist: Shortlist | None = None
        self.settings = Settings()
        self.backend_is_named = False
        self.adapter: LoRA | None = None
        self.num_truncated = self.num_left_out = self.num_unknown = 0
        self.failures: dict[str, int] = {}

    def __repr__(self) -> str:
        """The kind, architecture, size, languages and backend; `torch` is not imported for it."""
        parts = [self.metadata.architecture]
        if self._net is not None:
            count = sum(parameter.numel() for parameter in self._net.parameters())
            parts.append(f"{count:,} parameters")
        languages = self.metadata.src_language, self.metadata.tgt_language
        if any(languages):
            parts.append(" to ".join(language or "?" for language in dict.fromkeys(languages)))
        if self.backend is not None:
            parts.append(f"{self.backend.name} {self.backend.precision}")
        elif self._net is not None:
            parts.append(f"eager {self.eager.precision} on {self.device}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def __dir__(self) -> list[str]:
        """The public names, which an editor or `dir` lists."""
        return [name for name in super().__dir__() if name[0] != "_" and name not in INTERNAL]

    @property
    def net(self) -> Any:
        """The torch module."""
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
        """The model accepts texts; else only ids."""
        return self._src_tokenizer is not None

    @property
    def src_tokenizer(self) -> Tokenizer:
        """The tokenizer of inputs; raises UserError for a model without tokenizers."""
        return self._or_error(self._src_tokenizer)

    @property
    def tgt_tokenizer(self) -> Tokenizer:
        """The tokenizer of outputs."""
        return self._or_error(self._tgt_tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of inputs, and the only one of most models."""
        return self.src_tokenizer

    def backend_with(self, capability: Capability) -> Any:
        """The backend where it has a capability, else the net as one."""
        has_it = self.backend is not None and capability in self.backend.capabilities
        return self.backend if has_it else self.eager

    @property
    def device(self) -> Any:
        """The `torch.device` of the net."""
        return self.eager.device

    def embed(
        self,
        texts: str | Sequence[int] | Texts,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        batch_tokens: int | None = None,
    ) -> Any:
        """A tensor (D) for one text, (N, D) for a list of texts; see `vectors`.

        Example: `model.embed(["a red bicycle", "a blue car"], pooling="mean")`
        """
        import torch

        batch, is_single = as_batch(texts)
        keys: Any = {"prompt": prompt, "prompt_name": prompt_name, "batch_tokens": batch_tokens}
        vectors = self.vectors(batch, pooling=pooling, normalize=normalize, **keys)
        return torch.from_numpy(vectors[0] if is_single else vectors)

    def vectors(
        self,
        texts: Texts,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        too_long: TooLong = "error",
        batch_tokens: int | None = None,
        first_number: int = 1,
    ) -> NDArray[np.float32]:
        """Vectors (N, D) of texts: the mean, first, last or maximum of the last layer's states.

        The special tokens around a text count as its tokens. A vector does not depend on the other
        texts. Empty texts and texts that are left out have zeros.

        Args:
            pooling: None: that of an imported model of sentence-transformers, else the mean.
            normalize: divide each vector by its length; None: as that model, else not.
            prompt, prompt_name: of `with_prompt`.
            first_number: of the first text, in messages.

        Raises:
            UserError: an unknown pooling or prompt; a text that is too long.
        """
        kind = self.metadata.pooling if pooling is None else pooling
        check_pooling(kind, normalize)
        is_normal = self.metadata.normalize if normalize is None else normalize
        texts = self.with_prompt(texts, prompt, prompt_name)
        rows = self.encode(texts, too_long=too_long, first_number=first_number)
        backend = self.backend_with("states")

        def vectors(indices: list[int]) -> list[np.ndarray]:
            states = backend.states([rows[index] for index in indices])
            return [pool(row_states, kind, normalize=is_normal) for row_states in states]

        return in_batches(backend, rows, self.config.d_model, vectors, batch_tokens)

    def with_prompt(
        self, texts: Texts, prompt: str | None = None, prompt_name: str | None = None
    ) -> Texts:
        """Texts after a prompt, or after the model's prompt of a name; None: its default one.

        Lists of ids are unchanged.
        """
        names = self.metadata.prompts, self.metadata.default_prompt
        if not (start := find_prompt(*names, prompt, prompt_name)):
            return texts
        check_list(texts, "texts")
        return [start + text if isinstance(text, str) else text for text in texts]  # type: ignore[return-value]

    def encode(
        self, texts: Texts, *, too_long: TooLong = "error", first_number: int = 1
    ) -> list[list[int]]:
        """Ids of each text with the model's special tokens; lists of ids are unchanged."""
        rows = self.rows_of(texts, Tokenizer.add_special_tokens)
        self.check_lengths(rows, "text", too_long, count(first_number))
        return rows

    def rows_of(
        self, texts: Texts, add_special_tokens: Callable[[Tokenizer, list[int]], list[int]]
    ) -> list[list[int]]:
        """Ids of each text after `add_special_tokens`; lists of ids are unchanged.

        A text of invisible characters alone has the ids of an empty one.
        """
        check_list(texts, "texts")
        words = [
            without_invisible(text) if is_blank(text) else text
            for text in texts
            if isinstance(text, str)
        ]
        encoded = iter(self.src_tokenizer.encode_batch(words) if words else ())
        rows = [
            add_special_tokens(self.src_tokenizer, next(encoded))
            if isinstance(text, str)
            else row_ids(text)
            for text in texts
        ]
        self.check_ids(rows, "src_")
        return rows

    def check_ids(self, rows: Iterable[Sequence[int]], side: Literal["src_", "tgt_"]) -> None:
        """Raises UserError for ids outside a side's vocabulary."""
        size: Any = getattr(self.config, f"{side}vocab_size", None)
        size = size or getattr(self.config, "vocab_size", None) or math.inf
        for row in rows:
            if row and (min(row) < 0 or max(row) >= size):
                token = min(row) if min(row) < 0 else max(row)
                raise UserError(
                    f"token id {token} is outside the model's vocabulary of {size:,}: the ids, or "
                    "the tokenizer, are of another model"
                )

    def check_lengths(
        self,
        rows: list[list[int]],
        noun: str,
        too_long: TooLong,
        numbers: Iterable[int] | None = None,
        *,
        longest: int | None = None,
        tokenizer: Tokenizer | None = None,
        cut_start: bool = False,
    ) -> None:
        """Check rows: cut or empty those that are too long, in place; count those with `<unk>`.

        A special token at the end of a cut row is kept, or those of the template at its start.

        Args:
            noun, numbers: of the rows, in messages; numbers are from 1 by default.
            longest: most tokens of a row; None: the net's length.
            tokenizer: of the rows; None: the source's.
            cut_start: a row that is cut loses its first tokens, not its last ones.

        Raises:
            UserError: a row that is too long, with `too_long="error"`.
        """
        if too_long not in get_args(TooLong):
            raise UserError(f"too_long must be {', '.join(get_args(TooLong))}, not {too_long!r}")
        longest, tokenizer = longest or self.config.max_length, tokenizer or self._src_tokenizer
        self.num_unknown += sum(getattr(tokenizer, "unk_id", -1) in ids for ids in rows)
        for ids, number in zip(rows, numbers or count(1), strict=False):
            if len(ids) <= longest:
                continue
            problem = f"{noun} {number} has {len(ids)} tokens, but the model allows {longest}"
            if too_long == "error":
                raise LengthError(problem, len(ids), longest)
            if too_long == "leave_out":
                self.leave_out(problem)
                ids.clear()
                continue
            self.num_truncated += 1
            if cut_start:
                prefix = [] if tokenizer is None else [*tokenizer.prefix_ids]
                kept = len(prefix) if len(prefix) < longest and ids[: len(prefix)] == prefix else 0
                del ids[kept : len(ids) - longest + kept]
                continue
            specials = frozenset() if tokenizer is None else tokenizer.special_ids
            suffix = ids[-1:] if ids[-1] in specials else []
            ids[longest - len(suffix) :] = suffix

    def leave_out(self, reason: str) -> None:
        """Count a text without output, and log a warning for the first ones."""
        self.num_left_out += 1
        if self.num_left_out <= NUM_WARNINGS:
            logging.getLogger("heedful").warning(f"{reason}: left out")
        if self.num_left_out == NUM_WARNINGS:
            logging.getLogger("heedful").warning("more that are left out are counted, not named")

    def add_adapter(self, lora: "LoRA") -> None:
        """Add a low-rank adapter to the net, to be trained; all other weights are frozen.

        `save` then needs the base model, from which the net was loaded.

        Raises:
            UserError: the net has an adapter; a target that matches no layer.
        """
        from heedful.models.adapters import add_lora

        add_lora(self.net, lora)
        self.adapter = lora

    def merge_adapter(self) -> None:
        """Merge the adapter into the weights of the net, which is then a plain one."""
        from heedful.models.adapters import merge_lora

        merge_lora(self.net)
        self.adapter = None

    def save(
        self, directory: str | PathLike[str], *, base: str | PathLike[str] | None = None
    ) -> None:
        """Write `config.json`, `model.safetensors` and the tokenizers atomically.

        An existing model of heedful is replaced.

        Args:
            base: directory of a model with the same frozen weights (those that require no
                gradient): only the other weights are written, with the base's path and SHA-256. The
                path from `directory` to the base must stay the same. None: write all weights.

        Raises:
            UserError: a directory with other files, in the Hugging Face format, or that cannot be
                written; a net whose tensors are not those of its architecture.
        """
        target = as_path(directory, "directory")
        base_path = None if base is None else as_path(base, "base")
        if _holds_hf_model(target):
            raise UserError(
                f"{directory} holds a model in the Hugging Face format, which is not replaced; "
                "name another directory"
            )
        write_directory(target, self.file_writer(target, base_path))

    def file_writer(self, target: Path, base: Path | None = None) -> Callable[[Path], None]:
        """A function that writes the model's files into an empty folder, which becomes `target`.

        Args:
            base: as in `save`.

        Raises:
            UserError: as `save`, before anything is written.
        """
        from heedful.models.adapters import without_factors
        from heedful.zoo import saved

        weights = saved.weights_of(self.net)  # which opens the net, and so its Config
        plain, entry = without_factors(self.net, weights), None
        saved.check_parameters(self.metadata.architecture, self.config, plain)
        if base is not None:
            entry = saved.Base.create(base, target)
            saved.check_frozen(plain, saved.trainable(self.net), base)
            weights = dict(saved.trainable(self.net))
        elif self.adapter is not None:
            raise UserError(
                "the net has an adapter; give the directory of its base model (base=), or merge it "
                "first: model.merge_adapter()"
            )

        def fill(folder: Path) -> None:
            save_description(self, folder, entry)
            saved.save_tensors(folder / saved.WEIGHTS, weights)

        return fill

    def _or_error(self, tokenizer: Tokenizer | None) -> Tokenizer:
        if tokenizer is None:
            raise UserError(
                "this model has no tokenizer: give lists of ids instead of text, or open or "
                "import it again from a directory that holds the tokenizer's files"
            )
        return tokenizer


def _holds_hf_model(directory: Path) -> bool:
    try:
        return in_hf_format(read_object(directory / CONFIG))
    except UserError:  # no `config.json`, or a damaged one
        return False


def save_description(model: SavedModel, directory: Path, base: "Base | None" = None) -> None:
    """Write a model directory without its weights.

    Args:
        base: the model that has the weights which are not written; None: all are.
    """
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
    for name, entry in (("base", base), ("adapter", model.adapter)):
        if entry is not None:
            content[name] = asdict(entry)
    write_json(directory / CONFIG, content)
