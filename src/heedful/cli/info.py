"""`heedful info`: what a model directory holds, or what heedful runs on."""

from pathlib import Path
from typing import Annotated

import typer


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
    from heedful.bundle import choose_device

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

    from heedful.bundle import load, parameter_count

    model = load(path, device="cpu")
    card = model.card
    languages = f"{card.src_language or '?'} → {card.tgt_language or '?'}"
    joint = model.src_tokenizer is model.tgt_tokenizer
    sides = [model.src_tokenizer] if joint else [model.src_tokenizer, model.tgt_tokenizer]
    rows = {
        "architecture": card.architecture,
        "task": card.task,
        "languages": languages,
        "tokenizer": " and ".join(f"{t.kind} of {t.vocab_size:,}" for t in sides)
        + (" (joint)" if joint else ""),
        "parameters": f"{parameter_count(model.net):,}",
        "output limit": f"{card.limits.factor:g} x source + {card.limits.offset} tokens",
    }
    groups = {
        "embeddings": model.net.tgt_embedding,
        "encoder": model.net.encoder,
        "decoder": model.net.decoder,
    }
    rows |= {f"  {name}": f"{parameter_count(part):,}" for name, part in groups.items()}
    return rows | {name: str(value) for name, value in asdict(model.config).items()}
