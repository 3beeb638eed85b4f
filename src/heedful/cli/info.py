"""`heedful info`: what a model directory holds, or what heedful runs on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from heedful.inference import SavedModel


def info(
    model: Annotated[
        Path | None, typer.Argument(help="A model directory. Default: the installation.")
    ] = None,
) -> None:
    """Describe a model, or the installation.

    Example: heedful info runs/dates
    """
    rows = _installation() if model is None else _model(model)
    for name, value in rows.items():
        typer.echo(f"{name:<22}{value}")


def _installation() -> dict[str, str]:
    import platform

    import torch

    import heedful
    from heedful.inference import choose_device

    return {
        "heedful": heedful.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "device (auto)": str(choose_device("auto")),
    }


def _model(path: Path) -> dict[str, str]:
    from dataclasses import asdict

    from heedful.inference import load, parameter_count

    model = load(path, device="cpu")
    card = model.card
    rows = {
        "kind": model.kind,
        "architecture": card.architecture,
        "task": card.task,
        **_text(model),
        "parameters": f"{parameter_count(model.net):,}",
    }
    for name, part in model.net.named_children():
        rows[f"  {name}"] = f"{parameter_count(part):,}"
    return rows | {name: str(value) for name, value in asdict(model.config).items()}


def _text(model: "SavedModel") -> dict[str, str]:
    """What goes in and what comes out."""
    from heedful.inference import Classifier, Translator

    card, rows = model.card, {}
    if isinstance(model, Translator):
        rows["languages"] = f"{card.src_language or '?'} → {card.tgt_language or '?'}"
        rows["output limit"] = f"{card.limits.factor:g} x source + {card.limits.offset} tokens"
    elif card.src_language:
        rows["language"] = card.src_language
    if isinstance(model, Classifier):
        rows["labels"] = ", ".join(model.labels)
    if not model.has_tokenizer:
        return rows | {"tokenizer": "none: lists of ids alone"}
    joint = model.src_tokenizer is model.tgt_tokenizer
    sides = [model.src_tokenizer] if joint else [model.src_tokenizer, model.tgt_tokenizer]
    named = " and ".join(f"{tokenizer.kind} of {tokenizer.vocab_size:,}" for tokenizer in sides)
    shared = " (joint)" if joint and isinstance(model, Translator) else ""
    return rows | {"tokenizer": named + shared}
