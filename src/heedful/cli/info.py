"""`heedful info`: a description of a model, or of the installation."""

from pathlib import Path

import typer

from heedful import pipelines
from heedful.cli.flags import Json
from heedful.cli.shared import print_json


def info(
    model: Path | None = typer.Argument(
        None, metavar="MODEL", help="Model directory.", show_default="the installation"
    ),
    json: Json = False,
) -> None:
    """Describe a model, or the installation.

    Example: heedful info runs/dates

    Example: heedful info --json
    """
    rows = _installation() if model is None else _model(model)
    if json:
        print_json(_with_unique_names(rows))
        return
    for name, value in rows.items():
        typer.echo(f"{name:<22}{value}")


def _with_unique_names(rows: dict[str, str]) -> dict[str, str]:
    """Rows by unique names: the indented ones are prefixed by "parameters"."""
    return {
        f"parameters.{name.strip()}" if name.startswith(" ") else name: value
        for name, value in rows.items()
    }


def _installation() -> dict[str, str]:
    import os
    import platform
    from importlib.metadata import version

    import heedful

    torch = version("torch")
    device = "cpu"
    if not torch.endswith("+cpu"):  # the devices of this machine are known to torch only
        device = str(pipelines.choose_device("auto"))
    return {
        "heedful": heedful.__version__,
        "torch": torch,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "device (auto)": device,
    }


def _model(path: Path) -> dict[str, str]:
    from dataclasses import asdict

    model = pipelines.load(path, device="cpu", backend="eager")
    metadata = model.metadata
    rows = {
        "kind": model.kind,
        "architecture": metadata.architecture,
        "task": metadata.task,
        **_text(model),
        **_base(path),
        "parameters": f"{pipelines.parameter_count(model.net):,}",
    }
    for name, part in model.net.named_children():
        rows[f"  {name}"] = f"{pipelines.parameter_count(part):,}"
    keys = {name: str(value) for name, value in asdict(model.config).items()}
    return rows | _backends(path) | keys


def _base(path: Path) -> dict[str, str]:
    """The base model, which has the weights that this one lacks, and the adapter."""
    from heedful.files import read_object
    from heedful.pipelines.base import CONFIG
    from heedful.pipelines.nets import read_lora
    from heedful.zoo.saved import Base

    content = read_object(path / CONFIG)
    base, lora = Base.read(content, path / CONFIG), read_lora(content, path / CONFIG)
    rows = {} if base is None else {"base": f"{base.path}, SHA-256 {base.sha256}"}
    if lora is not None:
        targets = ", ".join(lora.targets)
        rows["adapter"] = f"LoRA of rank {lora.rank}, alpha {lora.alpha:g} on {targets}"
    return rows


def _backends(path: Path) -> dict[str, str]:
    """Backends of the model, and the measured choice among them."""
    from heedful.backends.manifest import Manifest

    manifest = Manifest.read(path)
    if manifest is None:
        return {"backends": "eager alone (the torch module)"}
    rows = {
        "backends": ", ".join(
            f"{name} {forms.version} ({', '.join(forms.proofs)})"
            for name, forms in manifest.backends.items()
        )
    }
    if reason := manifest.mismatch_reason(path):
        rows["  not used"] = reason
    for use, best in manifest.best.items():
        size = f"{best.workers} x {best.threads or 'all'}"
        rows[f"  {use}"] = f"{best.backend} {best.precision}, workers x threads {size}"
    return rows


def _text(model: "pipelines.SavedModel") -> dict[str, str]:
    """Languages, labels and tokenizers."""
    metadata, rows = model.metadata, {}
    if isinstance(model, pipelines.Translator):
        targets = ", ".join(f"{code} ({tag})" for code, tag in metadata.language_tags.items())
        target = targets or metadata.tgt_language or "?"
        rows["languages"] = f"{metadata.src_language or '?'} → {target}"
        if codes := metadata.language_codes:
            own = (metadata.src_language or "any", metadata.tgt_language or "any")
            rows["languages"] = f"{' → '.join(own)} of {', '.join(codes)}"
        rows["output limit"] = (
            f"{metadata.limits.factor:g} x source + {metadata.limits.offset} tokens"
        )
    elif metadata.src_language:
        rows["language"] = metadata.src_language
    if isinstance(model, pipelines.Classifier):
        rows["labels"] = ", ".join(model.labels)
    if not model.has_tokenizer:
        return rows | {"tokenizer": "none: lists of ids alone"}
    joint = model.src_tokenizer is model.tgt_tokenizer
    sides = [model.src_tokenizer] if joint else [model.src_tokenizer, model.tgt_tokenizer]
    named = " and ".join(f"{tokenizer.kind} of {tokenizer.vocab_size:,}" for tokenizer in sides)
    shared = " (joint)" if joint and isinstance(model, pipelines.Translator) else ""
    return rows | {"tokenizer": named + shared}
