"""`MODEL/backends/backends.json`: the forms of a model for its backends, and the choice of them."""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

import heedful
from heedful.backends.base import Settings
from heedful.backends.hardware import cores, instruction_set
from heedful.errors import UserError
from heedful.files import read_json, write_json

FOLDER, RECORD, WEIGHTS = "backends", "backends.json", "model.safetensors"
SHORTLIST = "shortlist.safetensors"
Use = Literal["latency", "throughput"]
Kind = Literal["Translator", "LanguageModel", "MaskedLanguageModel", "Classifier", "Embedder"]
# The package whose version a form depends on, by backend.
PACKAGES = {"ctranslate2": "ctranslate2", "compiled": "torch"}


@dataclass(frozen=True, kw_only=True)
class NetFacts:
    """Facts of a net that a backend needs to open its converted files.

    Attributes:
        num_types: token types of an encoder's embedding; 0: it has none.
    """

    family: Literal["encoder_decoder", "decoder_only", "encoder_only"]
    num_types: int = 0


@dataclass(frozen=True)
class Choice:
    """The backend, the form and the setting that were best for a use."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    backend: str
    precision: str
    threads: int | None = None
    workers: int = 1
    batch_tokens: int | None = None

    @property
    def settings(self) -> Settings:
        """How it is run."""
        return Settings(self.threads, self.workers, self.batch_tokens)


@dataclass(frozen=True)
class Weights:
    """Which weights the forms were made of; size and time spare the reading of the whole file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    sha256: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "Weights":
        """The digest, size and time of a file of weights."""
        stat = path.stat()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(digest, stat.st_size, stat.st_mtime_ns)

    def are(self, path: Path) -> bool:
        """Whether a file holds them."""
        stat = path.stat()
        if (self.size, self.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            return True
        return self.size == stat.st_size and self.sha256 == Weights.of(path).sha256


@dataclass(frozen=True)
class Forms:
    """The forms of a model for one backend.

    Attributes:
        version: of the backend that it was made with.
        facts: of the net, as its opening needs them.
        proofs: of each precision that was kept, what proved it (`heedful.deploy.prove`).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    version: str
    facts: dict[str, Any]
    proofs: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """The content of `backends.json`.

    Attributes:
        kind: of the model, as its class is called.
        instruction_set, cores: of the machine whose measurements chose `best`.
        backends: by name.
        best: for each use; none before anything is measured.
        files: of the forms, by their paths: a backend ends the process on some that are damaged.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    heedful: str
    kind: Kind
    weights: Weights
    instruction_set: str
    cores: int
    backends: dict[str, Forms]
    best: dict[Use, Choice] = field(default_factory=dict)
    files: dict[str, Weights] = field(default_factory=dict)

    @classmethod
    def new(cls, model: Path, kind: Kind) -> "Record":
        """A record for a model directory on this machine, without any form."""
        weights = Weights.of(model / WEIGHTS)
        return cls(heedful.__version__, kind, weights, instruction_set(), cores(), {})

    @classmethod
    def read(cls, model: Path) -> "Record | None":
        """None where there is none; raises UserError for a broken one."""
        path = model / FOLDER / RECORD
        if not path.is_file():
            return None
        try:
            return TypeAdapter(cls).validate_python(read_json(path))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{path}: {place}: {first['msg']}; make it again by `heedful optimize {model}`"
            ) from None

    def write(self, model: Path) -> None:
        """Write it, in place of the former."""
        write_json(model / FOLDER / RECORD, asdict(self))

    def with_form(
        self, backend: str, precision: str, facts: dict[str, Any], proof: dict[str, Any]
    ) -> "Record":
        """With one form more, or proved anew."""
        known = self.backends.get(backend)
        proofs = (known.proofs if known else {}) | {precision: proof}
        forms = Forms(version(PACKAGES[backend]), facts, proofs)
        return replace(self, backends=self.backends | {backend: forms})

    def with_files(self, folder: Path) -> "Record":
        """With what the files of all forms are."""
        found = sorted(path for path in folder.glob("*/**/*") if path.is_file())
        return replace(
            self, files={path.relative_to(folder).as_posix(): Weights.of(path) for path in found}
        )

    def check_files(self, folder: Path, place: Path) -> None:
        """Raises UserError where a form's files are not as they were written."""
        for name, weights in self.files.items():
            path = folder / name
            if path.is_relative_to(place) and not (path.is_file() and weights.are(path)):
                raise UserError(
                    f"{path} is not as it was written; make it again by `heedful optimize`"
                )

    def unfit(self, model: Path) -> str | None:
        """Why it does not hold here, if it does not."""
        if self.heedful != heedful.__version__:
            return f"was made by heedful {self.heedful}, this is {heedful.__version__}"
        if not self.weights.are(model / WEIGHTS):
            return "was made of other weights than the model's"
        if self.instruction_set != instruction_set():
            return f"was made for {self.instruction_set}, this machine has {instruction_set()}"
        return None


def place_of(model: Path, backend: str, precision: str) -> Path:
    """Where a form of the model stands."""
    return model / FOLDER / backend / precision


def digest(files: Iterable[Path]) -> str:
    """The SHA-256 of what files hold, one behind the other."""
    found = hashlib.sha256()
    for path in files:
        found.update(path.read_bytes())
    return found.hexdigest()
