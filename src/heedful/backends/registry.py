"""Opens a backend of a model directory: the one given by name, or the fastest measured one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

from heedful import extras
from heedful.backends.base import Backend, Settings
from heedful.backends.manifest import (
    FOLDER,
    MANIFEST,
    PACKAGES,
    SHORTLIST,
    WEIGHTS,
    Kind,
    Manifest,
    Use,
    conversion_path,
    sha256_of,
)
from heedful.backends.shortlist import Shortlist
from heedful.errors import UserError
from heedful.hardware import cores

BackendName = Literal["auto", "eager", "compiled", "ctranslate2"]
Precision = Literal["auto", "float32", "bfloat16", "int8"]


def open_backend(
    model: Path,
    *,
    backend: str = "auto",
    precision: str = "auto",
    threads: int | None = None,
    use: Use = "latency",
    device: str = "auto",
    trust_compiled: bool = False,
    warn: Callable[[str], None] = lambda line: None,
) -> tuple[Backend, Kind] | Settings:
    """A converted backend of a model directory with the model's kind, or settings of the net.

    Settings: the net itself is to be run, with these (as measured where it was the fastest).

    Args:
        backend: auto: the fastest one of `heedful optimize`, or the net where no conversion can be
            used here.
        device: as in `heedful.load`; auto: the CPU. Measurements are of the CPU, so that backend
            auto is the net on every other device.
        threads: of each worker; None: as measured, else 1, or for the net by the size of each pass.
        trust_compiled: run the native code of a compiled net even if it was not compiled here.
        warn: called with one line where backend auto cannot use a conversion.

    Raises:
        UserError: a backend or precision by name that the model lacks, whose package is missing, or
            that was converted for another machine, or compiled elsewhere; more threads than cores.
    """
    check_names(backend, precision, threads, use)
    is_net_for_device = backend == "auto" and device not in ("auto", "cpu")
    if precision == "int8" and (backend == "eager" or is_net_for_device):
        raise UserError("the net itself has no int8; name another backend, or take bfloat16")
    if is_net_for_device:
        return Settings(threads)
    needs_conversion = backend not in ("auto", "eager") or precision == "int8"
    try:
        manifest = Manifest.read(model)
        remedy = f"make it by `heedful optimize {model}`"
        if manifest is None:
            if needs_conversion:
                missing = "int8" if backend == "auto" else backend
                raise UserError(f"{model} has no backend {missing}: {remedy}")
            return Settings(threads)
        if reason := manifest.mismatch_reason(model):
            raise UserError(f"{model / FOLDER} {reason}: {remedy}")
        choice = _choose(model, manifest, backend, precision, threads, use)
        if isinstance(choice, Settings):
            return choice
        name, chosen_precision, settings = choice
        if reason := version_mismatch(name, manifest.backends[name].version):
            raise UserError(f"{model / FOLDER} {reason}: {remedy}")
        manifest.check_files(model / FOLDER, conversion_path(model, name, chosen_precision))
        on = "cpu" if device == "auto" else device
        facts = manifest.backends[name].facts
        opened = open_conversion(
            *(model, model, name, chosen_precision, facts, settings, on),
            trust_compiled=trust_compiled,
        )
        return opened, manifest.kind
    except UserError as error:
        if needs_conversion:
            raise
        if backend == "auto":
            warn(f"the model runs eager: {error}")
        return Settings(threads)


def check_names(backend: str, precision: str, threads: int | None, use: str) -> None:
    """Raises UserError for unknown names, and for more threads than cores."""
    is_count = threads is None or (isinstance(threads, int) and 1 <= threads <= cores())
    if not is_count:
        raise UserError(f"threads must be from 1 to {cores()}, the cores here, not {threads!r}")
    for name, value, known in (
        *(("backend", backend, BackendName), ("precision", precision, Precision)),
        ("use", use, Use),
    ):
        if value not in get_args(known):
            raise UserError(f"{name} must be {', '.join(get_args(known))}, not {value}")


def open_conversion(
    model: Path,
    directory: Path,
    backend: str,
    precision: str,
    facts: dict[str, Any],
    settings: Settings,
    device: str = "cpu",
    *,
    trust_compiled: bool = False,
) -> Backend:
    """Open a conversion of a model.

    Args:
        model: the model's own directory.
        directory: whose folder `backends` has the conversion.
        facts: fields of `NetFacts`, as in the manifest.
        trust_compiled: as in `open_backend`.

    Raises:
        UserError: an unknown backend; wrong facts; a conversion that is damaged, not for the
            device, or compiled elsewhere.
    """
    if backend not in PACKAGES:
        raise UserError(f"conversions are for {', '.join(PACKAGES)}, not for {backend}")
    path = conversion_path(directory, backend, precision)
    try:
        if backend == "ctranslate2":
            from heedful.backends.ctranslate2.runtime import CTranslate2, CTranslate2Facts

            ctranslate2_facts = CTranslate2Facts(**facts)
            return CTranslate2(path, ctranslate2_facts, precision, settings, device)
        from heedful.backends.aot.compiled_net import CompiledFacts
        from heedful.backends.aot.decoder import Compiled
        from heedful.backends.aot.encoder import CompiledEncoder

        if device != "cpu":
            raise UserError(f"the compiled net runs on the CPU, not on {device}")
        is_encoder = facts.get("family") == "encoder_only"
        backend_class = CompiledEncoder if is_encoder else Compiled
        compiled_facts = CompiledFacts(**facts)
        return backend_class(
            *(path, model / WEIGHTS, compiled_facts, precision, settings), trusted=trust_compiled
        )
    except TypeError as error:
        raise UserError(f"{directory / FOLDER / MANIFEST}: facts: {error}") from None


def version_mismatch(backend: str, converted_with: str) -> str | None:
    """The reason why the installed package cannot open a conversion; None: it can."""
    package = PACKAGES.get(backend)
    if package is None:
        return f"is for the backend {backend}, which this version of heedful does not have"
    try:
        installed = version(package)
    except PackageNotFoundError:
        return f"needs {package}: {extras.install_command('fast')}"
    parts = None if backend == "compiled" else 2  # compiled graphs need the exact torch
    if installed.split(".")[:parts] != converted_with.split(".")[:parts]:
        return f"was made with {package} {converted_with}, this is {installed}"
    return None


def _choose(
    model: Path,
    manifest: Manifest,
    backend: str,
    precision: str,
    threads: int | None,
    use: Use,
) -> tuple[str, str, Settings] | Settings:
    """The backend, precision and settings to run a model with; settings alone: the net."""
    best = manifest.best.get(use)
    first = next(iter(manifest.backends), "")
    name = backend if backend != "auto" else best.backend if best else first
    if backend == "auto" and precision == "int8" and name in ("eager", ""):
        known = manifest.backends.items()
        name = next((n for n, conversions in known if precision in conversions.proofs), "")
        if not name:
            raise UserError(
                f"{model} has no backend with int8: it was not made, or failed its proof"
            )
    if best is not None and best.backend != name:
        best = None
    is_net = name in ("eager", "")
    settings = best.settings if best else Settings(None if is_net else 1)
    if threads is not None:
        settings = replace(settings, threads=threads, workers=1, may_reduce=False)
    if is_net:
        return settings
    conversions = manifest.backends.get(name)
    if conversions is None:
        raise UserError(
            f"{model} has no backend {name}, only {', '.join(manifest.backends) or 'none'}: "
            f"make it by `heedful optimize {model} --backend {name}`"
        )
    if precision == "auto":
        precision = best.precision if best else next(iter(conversions.proofs))
    if precision not in conversions.proofs:
        raise UserError(
            f"{model} has no {name} in {precision}, only in {', '.join(conversions.proofs)}: it "
            "was not made, or did not pass its proof"
        )
    return name, precision, settings


def open_shortlist(model: Path, tokenizers: Sequence[Path]) -> Shortlist | None:
    """The shortlist of a model directory; None: it has none.

    Raises UserError for a damaged one, and for one of other tokenizers.
    """
    path = model / FOLDER / SHORTLIST
    return Shortlist.load(path, sha256_of(tokenizers)) if path.is_file() else None
