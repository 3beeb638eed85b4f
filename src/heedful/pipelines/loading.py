"""Opening a model directory: which of the model kinds it is follows from its net."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from heedful import plugins
from heedful.backends.base import Settings
from heedful.backends.manifest import Use
from heedful.backends.registry import Name, Precision, open_backend, open_shortlist
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import plain_name, read_object
from heedful.pipelines.base import CONFIG, SIDES, SavedModel
from heedful.pipelines.kinds import KINDS
from heedful.pipelines.metadata import ModelCard

Kind = TypeVar("Kind", bound=SavedModel)


def load(
    path: str | Path,
    *,
    device: str = "auto",
    backend: Name | str = "auto",
    precision: Precision | str = "auto",
    threads: int | None = None,
    use: Use = "latency",
) -> Any:
    """Open a model directory: `config.json`, `model.safetensors` and tokenizer files.

    Gives a `Translator`, `LanguageModel`, `MaskedLanguageModel`, `Classifier` or `Embedder`, each
    with the bare module as `net`, which is opened when something needs it.

    Args:
        backend: what runs it; auto: what `heedful optimize` found best, where it holds here, and
            else the net itself, which is `eager`.
        precision: of the backend's form, or of the net (float32, bfloat16); auto: the best, or
            float32.
        threads: cores of the backend's worker, or of torch; default: as measured, or by
            the size of the work.
        use: whether one text at a time is waited for (latency) or many (throughput).

    Raises UserError where it is none, is truncated, or was written by something else; for a backend
    or a form that is asked for by name and is not there or does not hold here.
    """
    directory = Path(path)
    content = _description(directory)
    try:
        plugins.require(map(str, content.get("plugins", ())), str(directory))
        card, keys = ModelCard.from_dict(content), SimpleNamespace(**content["model"])
        files = tokenizer_files(directory, content)
        tokenizers: list[Tokenizer | None] = [Tokenizer.load(path) for path in files]
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory / CONFIG} was not written by heedful: {error}") from None
    num_labels = getattr(keys, "num_labels", None)
    if card.labels and num_labels != len(card.labels):
        raise UserError(
            f"{directory / CONFIG} names {len(card.labels)} labels, but its model.num_labels is "
            f"{num_labels}; it is damaged"
        )
    opened = open_backend(
        directory,
        backend=backend,
        precision=precision,
        threads=threads,
        use=use,
        device=device,
        warn=lambda line: logging.getLogger("heedful").warning(f"note: {line}"),
    )
    src, tgt = (tokenizers * 2)[:2] or (None, None)
    shortlist = open_shortlist(directory, files)

    def open_net(precision: str = "float32") -> tuple[Any, Any]:
        import torch

        from heedful.pipelines.nets import load_net

        return load_net(directory, content, device, getattr(torch, precision))

    if not isinstance(opened, Settings):
        runs, name = opened
        if not isinstance(vars(keys).get("max_length"), int):  # the rest is the net's to look at
            raise UserError(f"{directory / CONFIG} was not written by heedful: no model.max_length")
        model = KINDS[name](None, keys, card, src, tgt, backend=runs, open_net=open_net)
        model.settings = Settings(threads)
    else:
        from heedful.pipelines.nets import kind_of

        net, config = open_net("float32" if precision == "auto" else precision)
        model = kind_of(net)(net, config, card, src, tgt)
        # Settings are measured on a CPU.
        model.settings = opened if model.device.type == "cpu" else Settings(threads)
    model.shortlist = shortlist
    return model


def expect(model: SavedModel, kind: type[Kind], verb: str) -> Kind:
    """The model; raises UserError that says what it is where it is of another kind."""
    if not isinstance(model, kind):
        raise UserError(
            f"{verb} needs a {kind.kind}, but this model is a {model.kind} ({model.card.task})"
        )
    return model


def _description(directory: Path) -> Any:
    """What `config.json` says."""
    try:
        is_there = directory.is_dir()
    except OSError as error:  # a name that is too long
        raise UserError(f"cannot read {str(directory)[:99]}: {error.strerror}") from None
    if not is_there:
        problem = "is a file, not a model directory" if directory.exists() else "does not exist"
        raise UserError(f"{directory} {problem}; give the directory that a training wrote (--out)")
    content = read_object(directory / CONFIG)
    if "model_type" in content and "heedful" not in content:
        raise UserError(
            f"{directory} is in the Hugging Face format: run `heedful import hf {directory} OUT` "
            "and open OUT"
        )
    return content


def tokenizer_files(directory: Path, content: dict[str, Any] | None = None) -> list[Path]:
    """The files of a model directory's tokenizers: one for each side, or one that both have; none
    for a net without text. `content` is what `config.json` says, where that is known."""
    files = (content or _description(directory))["tokenizers"]
    names = dict.fromkeys(files[side] for side in SIDES) if files else {}
    return [directory / plain_name(name, directory / CONFIG) for name in names]
