"""Opens a backend of a model directory: the one given by name, or the fastest measured one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

from heedful.backends.base import Backend, Settings
from heedful.backends.ctranslate2.runtime import INSTALL, CTranslate2, CTranslate2Facts
from heedful.backends.hardware import cores
from heedful.backends.manifest import (
    FOLDER,
    PACKAGES,
    RECORD,
    SHORTLIST,
    WEIGHTS,
    Kind,
    Record,
    Use,
    digest,
    place_of,
)
from heedful.backends.shortlist import Shortlist
from heedful.errors import UserError

Name = Literal["auto", "eager", "compiled", "ctranslate2"]
Precision = Literal["auto", "float32", "bfloat16", "int8"]


def open_backend(
    model: Path,
    *,
    backend: str = "auto",
    precision: str = "auto",
    threads: int | None = None,
    use: Use = "latency",
    device: str = "auto",
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Backend, Kind] | Settings:
    """The backend of a model directory that was asked for or is best, and the model's kind.

    Settings: the net itself is to be run, with these: as measured where it was the best.

    Args:
        device: where it runs, as of `heedful.load`; measurements are of the CPU, so that `auto`
            takes the net where another is asked for.
        threads: of each worker; default: as measured; else one, or for the net by the size of the
            work.
        say: told in one line why `auto` finds nothing that holds here.

    Raises:
        UserError: a backend or a form asked for by name that is not there, is not installed, or
            was made for something else; more threads than cores.
    """
    if threads is not None and not 1 <= threads <= cores():
        raise UserError(f"threads must be from 1 to {cores()}, the cores here, not {threads}")
    for name, value, known in (("backend", backend, Name), ("precision", precision, Precision)):
        if value not in get_args(known):
            raise UserError(f"{name} must be {', '.join(get_args(known))}, not {value}")
    elsewhere = backend == "auto" and device not in ("auto", "cpu")
    if precision == "int8" and (backend == "eager" or elsewhere):
        raise UserError("the net itself has no int8; name another backend, or take bfloat16")
    if elsewhere:
        return Settings(threads)
    wanted = backend not in ("auto", "eager") or precision == "int8"
    try:
        record = Record.read(model)
        again = f"make it by `heedful optimize {model}`"
        if record is None:
            if wanted:
                raise UserError(f"{model} has no backend {backend} for {precision}: {again}")
            return Settings(threads)
        if reason := record.unfit(model):
            raise UserError(f"{model / FOLDER} {reason}: {again}")
        chosen = _chosen(model, record, backend, precision, threads, use)
        if isinstance(chosen, Settings):
            return chosen
        name, form, settings = chosen
        if reason := not_here(name, record.backends[name].version):
            raise UserError(f"{model / FOLDER} {reason}: {again}")
        record.check_files(model / FOLDER, place_of(model, name, form))
        on = "cpu" if device == "auto" else device
        facts = record.backends[name].facts
        return open_made(model, model, name, form, facts, settings, on), record.kind
    except UserError as error:
        if wanted:
            raise
        if backend == "auto":
            say(f"the model runs eager: {error}")
        return Settings(threads)


def open_made(
    model: Path,
    directory: Path,
    backend: str,
    precision: str,
    facts: dict[str, Any],
    settings: Settings,
    device: str = "cpu",
) -> Backend:
    """A form of a model that stands in the `backends` of a directory.

    Args:
        facts: of the net, as its record has them.

    Raises:
        UserError: facts that are none; a form that is damaged, or not for the device.
    """
    place = place_of(directory, backend, precision)
    try:
        if backend == CTranslate2.name:
            return CTranslate2(place, CTranslate2Facts(**facts), precision, settings, device)
        from heedful.backends.aot.compiled_net import CompiledFacts
        from heedful.backends.aot.decoder import Compiled
        from heedful.backends.aot.encoder import CompiledEncoder

        if device != "cpu":
            raise UserError(f"the compiled net runs on the CPU, not on {device}")
        is_encoder = facts.get("family") == "encoder_only"
        backend_class = CompiledEncoder if is_encoder else Compiled
        return backend_class(place, model / WEIGHTS, CompiledFacts(**facts), precision, settings)
    except TypeError as error:
        raise UserError(f"{directory / FOLDER / RECORD}: facts: {error}") from None


def not_here(backend: str, made_with: str) -> str | None:
    """Why what a backend made cannot be opened in this installation."""
    package = PACKAGES[backend]
    try:
        here = version(package)
    except PackageNotFoundError:
        return f"needs {package}, but {INSTALL}"
    parts = 2 if backend == CTranslate2.name else None  # a graph is of one torch alone
    if here.split(".")[:parts] != made_with.split(".")[:parts]:
        return f"was made with {package} {made_with}, this is {here}"
    return None


def _chosen(
    model: Path,
    record: Record,
    backend: str,
    precision: str,
    threads: int | None,
    use: Use,
) -> tuple[str, str, Settings] | Settings:
    """The backend, the precision and the settings to run a model with; settings alone: the net."""
    best = record.best.get(use)
    name = (
        backend if backend != "auto" else best.backend if best else next(iter(record.backends), "")
    )
    if backend == "auto" and precision == "int8" and name in ("eager", ""):
        name = next((n for n, forms in record.backends.items() if precision in forms.proofs), "")
        if not name:
            raise UserError(
                f"{model} has no backend with int8: it was not made, or failed its proof"
            )
    if best is not None and best.backend != name:
        best = None
    is_net = name in ("eager", "")
    settings = best.settings if best else Settings(None if is_net else 1)
    if threads is not None:
        settings = replace(settings, threads=threads, workers=1)
    if is_net:
        return settings
    forms = record.backends.get(name)
    if forms is None:
        raise UserError(
            f"{model} has no backend {name}, only {', '.join(record.backends) or 'none'}: "
            f"make it by `heedful optimize {model} --backend {name}`"
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


def open_shortlist(model: Path, tokenizers: Sequence[Path]) -> Shortlist | None:
    """The shortlist of a model directory; None: it has none. Raises UserError for another's."""
    path = model / FOLDER / SHORTLIST
    return Shortlist.load(path, digest(tokenizers)) if path.is_file() else None
