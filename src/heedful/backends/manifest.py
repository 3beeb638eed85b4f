"""What stands in `MODEL/engines`: the model in other forms, which of them to take, and for what."""

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

import heedful
from heedful.backends.base import Backend, Settings
from heedful.backends.ctranslate2.runtime import INSTALL, CTranslate2, Facts
from heedful.backends.shortlist import Shortlist
from heedful.errors import UserError
from heedful.files import read_json, write_json

FOLDER, RECORD, WEIGHTS = "engines", "engines.json", "model.safetensors"
SHORTLIST = "shortlist.safetensors"
Name = Literal["auto", "eager", "compiled", "ctranslate2"]
Precision = Literal["auto", "float32", "bfloat16", "int8"]
Use = Literal["latency", "throughput"]
Kind = Literal["Translator", "LanguageModel", "MaskedLanguageModel", "Classifier", "Embedder"]
# What each engine is a version of.
PACKAGES = {"ctranslate2": "ctranslate2", "compiled": "torch"}
# Instructions that change which kernel is fastest, the best first.
_INSTRUCTIONS = ("amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "asimddp")


@dataclass(frozen=True)
class Choice:
    """The engine, the form and the setting that were best for a use."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    engine: str
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
        """Of a model's weights."""
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
    """What an engine has of the model.

    Attributes:
        version: of the engine that it was made with.
        facts: of the net, as its opening needs them.
        proofs: of each precision that was kept, what proved it (`heedful.deploy.convert`).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    version: str
    facts: dict[str, Any]
    proofs: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """What `engines.json` says.

    Attributes:
        kind: of the model, as its class is called.
        instruction_set, cores: of the machine whose measurements chose `best`.
        engines: by name.
        best: for each use; none before anything is measured.
        files: of the forms, by their paths: an engine ends the process on some that are damaged.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    heedful: str
    kind: Kind
    weights: Weights
    instruction_set: str
    cores: int
    engines: dict[str, Forms]
    best: dict[Use, Choice] = field(default_factory=dict)
    files: dict[str, Weights] = field(default_factory=dict)

    @classmethod
    def new(cls, model: Path, kind: Kind) -> "Record":
        """Of a model directory, on this machine, without any form."""
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
        self, engine: str, precision: str, facts: dict[str, Any], proof: dict[str, Any]
    ) -> "Record":
        """With one form more, or proved anew."""
        known = self.engines.get(engine)
        proofs = (known.proofs if known else {}) | {precision: proof}
        forms = Forms(version(PACKAGES[engine]), facts, proofs)
        return replace(self, engines=self.engines | {engine: forms})

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


def place_of(model: Path, engine: str, precision: str) -> Path:
    """Where a form of the model stands."""
    return model / FOLDER / engine / precision


def open_shortlist(model: Path, tokenizers: Sequence[Path]) -> Shortlist | None:
    """The shortlist of a model directory; None: it has none. Raises UserError for another's."""
    path = model / FOLDER / SHORTLIST
    return Shortlist.load(path, digest(tokenizers)) if path.is_file() else None


def digest(files: Iterable[Path]) -> str:
    """The SHA-256 of what files hold, one behind the other."""
    found = hashlib.sha256()
    for path in files:
        found.update(path.read_bytes())
    return found.hexdigest()


def instruction_set() -> str:
    """What this processor multiplies with: a machine's kind, and its best instructions."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    lines = (line for line in info.splitlines() if line.lower().startswith(("flags", "features")))
    flags = set(next(lines, "").split())
    best = next((each for each in _INSTRUCTIONS if each in flags), None)
    return platform.machine() if best is None else f"{platform.machine()} {best}"


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def open_engine(
    model: Path,
    *,
    engine: str = "auto",
    precision: str = "auto",
    threads: int | None = None,
    use: Use = "latency",
    device: str = "auto",
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Backend, Kind] | Settings:
    """The engine of a model directory that was asked for or is best, and the model's kind.

    Settings: the net itself is to be run, with these: as measured where it was the best.

    Args:
        device: where it runs, as of `heedful.load`; measurements are of the CPU, so that `auto`
            takes the net where another is asked for.
        threads: of each worker; default: as measured; else one, or for the net by the size of the
            work.
        say: told in one line why `auto` finds nothing that holds here.

    Raises:
        UserError: an engine or a form asked for by name that is not there, is not installed, or
            was made for something else; more threads than cores.
    """
    if threads is not None and not 1 <= threads <= cores():
        raise UserError(f"threads must be from 1 to {cores()}, the cores here, not {threads}")
    for name, value, known in (("engine", engine, Name), ("precision", precision, Precision)):
        if value not in get_args(known):
            raise UserError(f"{name} must be {', '.join(get_args(known))}, not {value}")
    elsewhere = engine == "auto" and device not in ("auto", "cpu")
    if precision == "int8" and (engine == "eager" or elsewhere):
        raise UserError("the net itself has no int8; name another engine, or take bfloat16")
    if elsewhere:
        return Settings(threads)
    wanted = engine not in ("auto", "eager") or precision == "int8"
    try:
        record = Record.read(model)
        again = f"make it by `heedful optimize {model}`"
        if record is None:
            if wanted:
                raise UserError(f"{model} has no engine {engine} for {precision}: {again}")
            return Settings(threads)
        if reason := record.unfit(model):
            raise UserError(f"{model / FOLDER} {reason}: {again}")
        chosen = _chosen(model, record, engine, precision, threads, use)
        if isinstance(chosen, Settings):
            return chosen
        name, form, settings = chosen
        if reason := not_here(name, record.engines[name].version):
            raise UserError(f"{model / FOLDER} {reason}: {again}")
        record.check_files(model / FOLDER, place_of(model, name, form))
        on = "cpu" if device == "auto" else device
        facts = record.engines[name].facts
        return open_made(model, model, name, form, facts, settings, on), record.kind
    except UserError as error:
        if wanted:
            raise
        if engine == "auto":
            say(f"the model runs eager: {error}")
        return Settings(threads)


def open_made(
    model: Path,
    directory: Path,
    engine: str,
    precision: str,
    facts: dict[str, Any],
    settings: Settings,
    device: str = "cpu",
) -> Backend:
    """A form of a model that stands in the `engines` of a directory.

    Args:
        facts: of the net, as its record has them.

    Raises:
        UserError: facts that are none; a form that is damaged, or not for the device.
    """
    place = place_of(directory, engine, precision)
    try:
        if engine == CTranslate2.name:
            return CTranslate2(place, Facts(**facts), precision, settings, device)
        from heedful.backends.aot.decoder import Compiled, CompiledFacts
        from heedful.backends.aot.encoder import CompiledEncoder

        if device != "cpu":
            raise UserError(f"the compiled net runs on the CPU, not on {device}")
        kind = CompiledEncoder if facts.get("family") == "encoder_only" else Compiled
        return kind(place, model / WEIGHTS, CompiledFacts(**facts), precision, settings)
    except TypeError as error:
        raise UserError(f"{directory / FOLDER / RECORD}: facts: {error}") from None


def not_here(engine: str, made_with: str) -> str | None:
    """Why what an engine made cannot be opened in this installation."""
    package = PACKAGES[engine]
    try:
        here = version(package)
    except PackageNotFoundError:
        return f"needs {package}, but {INSTALL}"
    parts = 2 if engine == CTranslate2.name else None  # a graph is of one torch alone
    if here.split(".")[:parts] != made_with.split(".")[:parts]:
        return f"was made with {package} {made_with}, this is {here}"
    return None


def _chosen(
    model: Path,
    record: Record,
    engine: str,
    precision: str,
    threads: int | None,
    use: Use,
) -> tuple[str, str, Settings] | Settings:
    """The engine, the precision and the settings to run a model with; settings alone: the net."""
    best = record.best.get(use)
    name = engine if engine != "auto" else best.engine if best else next(iter(record.engines), "")
    if engine == "auto" and precision == "int8" and name in ("eager", ""):
        name = next((n for n, forms in record.engines.items() if precision in forms.proofs), "")
        if not name:
            raise UserError(
                f"{model} has no engine with int8: it was not made, or failed its proof"
            )
    if best is not None and best.engine != name:
        best = None
    is_net = name in ("eager", "")
    settings = best.settings if best else Settings(None if is_net else 1)
    if threads is not None:
        settings = replace(settings, threads=threads, workers=1)
    if is_net:
        return settings
    forms = record.engines.get(name)
    if forms is None:
        raise UserError(
            f"{model} has no engine {name}, only {', '.join(record.engines) or 'none'}: "
            f"make it by `heedful optimize {model} --engine {name}`"
        )
    wanted = precision
    if wanted == "auto":
        wanted = best.precision if best else next(iter(forms.proofs))
    if wanted not in forms.proofs:
        raise UserError(
            f"{model} has no {name} in {wanted}, only in {', '.join(forms.proofs)}: it was not "
            "made, or did not pass its proof"
        )
    return name, wanted, settings
