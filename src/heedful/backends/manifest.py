"""`MODEL/backends/backends.json`: a model's conversions for its backends, and the fastest of them.

A conversion is a model's files for one backend in one precision.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

import heedful
from heedful.backends.base import Settings
from heedful.errors import UserError
from heedful.files import read_json, write_json
from heedful.hardware import cores, instruction_set

FOLDER, MANIFEST, WEIGHTS = "backends", "backends.json", "model.safetensors"
SHORTLIST = "shortlist.safetensors"
Family = Literal["encoder_decoder", "decoder_only", "encoder_only"]
Use = Literal["latency", "throughput"]
Kind = Literal["Translator", "LanguageModel", "MaskedLanguageModel", "Classifier", "Embedder"]
# The package whose version a conversion depends on, by backend.
PACKAGES = {"ctranslate2": "ctranslate2", "compiled": "torch"}


@dataclass(frozen=True, kw_only=True)
class NetFacts:
    """Facts of a net that a backend needs to open its converted files.

    Attributes:
        num_types: token types of an encoder's embedding; 0: it has none.
    """

    family: Family
    num_types: int = 0

    def __post_init__(self) -> None:
        """Raise TypeError, as for a wrong keyword, for an unknown family."""
        if self.family not in get_args(Family):
            raise TypeError(f"family must be {', '.join(get_args(Family))}, not {self.family!r}")


@dataclass(frozen=True)
class BackendChoice:
    """A backend, a precision and settings: the fastest ones for a use, or candidates."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    backend: str
    precision: str
    threads: int | None = None
    workers: int = 1
    batch_tokens: int | None = None

    @property
    def settings(self) -> Settings:
        """The run-time settings."""
        return Settings(self.threads, self.workers, self.batch_tokens, may_reduce=True)


@dataclass(frozen=True)
class FileDigest:
    """The SHA-256 of a file; an equal size and time of change spare reading it again."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    sha256: str
    size: int
    mtime_ns: int

    @classmethod
    def from_file(cls, path: Path) -> "FileDigest":
        """The digest, size and time of change of a file."""
        stat = path.stat()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(digest, stat.st_size, stat.st_mtime_ns)

    def matches(self, path: Path) -> bool:
        """The content of a file has this digest."""
        stat = path.stat()
        if (self.size, self.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            return True
        return self.size == stat.st_size and self.sha256 == FileDigest.from_file(path).sha256


@dataclass(frozen=True)
class Conversions:
    """The conversions of a model for one backend.

    Attributes:
        version: of the backend's package at the time of conversion.
        facts: `NetFacts` of the net.
        proofs: the fields of each kept precision's `heedful.deploy.prove.Proof`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    version: str
    facts: dict[str, Any]
    proofs: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Manifest:
    """The content of `backends.json`.

    Attributes:
        kind: name of the model's class.
        weights: of the model's own file.
        instruction_set, cores: of the machine that `best` was measured on.
        backends: conversions by the backend's name.
        best: the fastest choice for each use; empty before measurement.
        files: the conversions' files by path: some backends end the process on a damaged file.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    heedful: str
    kind: Kind
    weights: FileDigest
    instruction_set: str
    cores: int
    backends: dict[str, Conversions]
    best: dict[Use, BackendChoice] = field(default_factory=dict)
    files: dict[str, FileDigest] = field(default_factory=dict)

    @classmethod
    def new(cls, model: Path, kind: Kind) -> "Manifest":
        """A manifest for a model directory on this machine, without conversions."""
        weights = FileDigest.from_file(model / WEIGHTS)
        return cls(heedful.__version__, kind, weights, instruction_set(), cores(), {})

    @classmethod
    def read(cls, model: Path) -> "Manifest | None":
        """The manifest of a model directory; None: it has none. Raises UserError for a bad one."""
        path = model / FOLDER / MANIFEST
        if not path.is_file():
            return None
        try:
            return TypeAdapter(cls).validate_python(read_json(path))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{path}: {key}: {first['msg']}; make it again by `heedful optimize {model}`"
            ) from None

    def write(self, model: Path) -> None:
        """Write the manifest of a model directory, replacing a former one."""
        write_json(model / FOLDER / MANIFEST, asdict(self))

    def with_conversion(
        self, backend: str, precision: str, facts: dict[str, Any], proof: dict[str, Any]
    ) -> "Manifest":
        """The manifest with a conversion added or replaced."""
        known = self.backends.get(backend)
        proofs = (known.proofs if known else {}) | {precision: proof}
        conversions = Conversions(version(PACKAGES[backend]), facts, proofs)
        return replace(self, backends=self.backends | {backend: conversions})

    def with_files(self, folder: Path) -> "Manifest":
        """The manifest with the digests of all conversions' files."""
        paths = sorted(path for path in folder.glob("*/**/*") if path.is_file())
        digests = {
            path.relative_to(folder).as_posix(): FileDigest.from_file(path) for path in paths
        }
        return replace(self, files=digests)

    def check_files(self, folder: Path, conversion: Path) -> None:
        """Raises UserError where a file of a conversion is missing or has changed."""
        for name, digest in self.files.items():
            path = folder / name
            if path.is_relative_to(conversion) and not (path.is_file() and digest.matches(path)):
                raise UserError(
                    f"{path} is missing or has changed; make it again by `heedful optimize`"
                )

    def mismatch_reason(self, model: Path) -> str | None:
        """The reason why the conversions cannot be used here; None: they can."""
        if self.heedful != heedful.__version__:
            return f"was made by heedful {self.heedful}, this is {heedful.__version__}"
        if not self.weights.matches(model / WEIGHTS):
            return "was converted from other weights than the model's"
        if self.instruction_set != instruction_set():
            return f"was made for {self.instruction_set}, this machine has {instruction_set()}"
        return None


def conversion_path(model: Path, backend: str, precision: str) -> Path:
    """The folder of a conversion of a model."""
    return model / FOLDER / backend / precision


def sha256_of(files: Iterable[Path]) -> str:
    """The SHA-256 of the concatenated contents of files."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()
