"""Opens model directories of heedful and of the Hugging Face format."""

import logging
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, Unpack

from heedful import plugins
from heedful.backends.base import Settings
from heedful.backends.manifest import Use
from heedful.backends.registry import (
    BackendName,
    Precision,
    check_names,
    open_backend,
    open_shortlist,
)
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import as_path, in_hf_format, plain_name, read_object
from heedful.pipelines.base import CONFIG, SIDES, SavedModel
from heedful.pipelines.encoders import Classifier, Encoder, MaskedLanguageModel
from heedful.pipelines.keywords import LoadKeywords
from heedful.pipelines.kinds import KINDS, AnyModel
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.metadata import ModelMetadata
from heedful.pipelines.translation import Translator

Kind = TypeVar("Kind", bound=SavedModel)


def load(
    path: str | PathLike[str],
    *,
    device: str = "auto",
    backend: BackendName | str = "auto",
    precision: Precision | str = "auto",
    threads: int | None = None,
    use: Use = "latency",
    trust_compiled: bool = False,
) -> AnyModel:
    """Open a model directory: `config.json`, `model.safetensors` and tokenizer files.

    Returns a `Translator`, `LanguageModel`, `MaskedLanguageModel`, `Classifier` or `Embedder`, by
    the family and head of the net. A directory in the Hugging Face format is converted in memory,
    as by `heedful.import_hf`, which has more arguments; `model.save` writes it in heedful's.

    Args:
        device: as in `choose_device`.
        backend: auto: the fastest that `heedful optimize` found, if it can be used here, else
            eager (the net itself), which also runs requests that the backend does not support; or
            eager, compiled, ctranslate2, where options that it does not support are an error.
        precision: float32, bfloat16, or int8 of a converted backend; auto: the fastest, or float32.
        threads: of the backend's workers, or of torch; None: as measured, or by the size of each
            pass.
        use: optimize for one text at a time (latency) or for many (throughput).
        trust_compiled: run the native code of the backend compiled even if it was not compiled by
            this user on this machine (SECURITY.md).

    Raises:
        UserError: a directory that is incomplete, damaged or of another format; a model type that
            is not supported; a backend or precision by name that the model lacks or that cannot be
            used here.

    >>> import heedful
    >>> model = heedful.load("runs/mine", backend="eager", device="cpu")
    >>> model.kind
    'translator'
    >>> len(model.generate(["A dog runs.", "A cat sleeps."], beam_size=2))
    2
    """
    directory = as_path(path, "path")
    check_names(backend, precision, threads, use)
    content = _description(directory)
    if in_hf_format(content):
        return _load_hf(directory, device, backend, precision, threads)
    try:
        plugins.require(map(str, content.get("plugins", ())), str(directory))
        metadata, keys = ModelMetadata.from_dict(content), SimpleNamespace(**content["model"])
        files = tokenizer_files(directory, content)
        tokenizers: list[Tokenizer | None] = [Tokenizer.load(path) for path in files]
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory / CONFIG} was not written by heedful: {error}") from None
    _check_labels(metadata, getattr(keys, "num_labels", None), directory / CONFIG)
    opened = open_backend(
        directory,
        backend=backend,
        precision=precision,
        threads=threads,
        use=use,
        device=device,
        trust_compiled=trust_compiled,
        warn=lambda line: logging.getLogger("heedful").warning(f"note: {line}"),
    )
    src, tgt = (tokenizers * 2)[:2] or (None, None)
    shortlist = open_shortlist(directory, files)

    def open_net(precision: str = "float32") -> tuple[Any, Any]:
        import torch

        from heedful.pipelines.nets import load_net

        return load_net(directory, content, device, getattr(torch, precision))

    if not isinstance(opened, Settings):
        converted, name = opened
        if not isinstance(vars(keys).get("max_length"), int):  # the net checks the other keys
            raise UserError(f"{directory / CONFIG} was not written by heedful: no model.max_length")
        model = KINDS[name](None, keys, metadata, src, tgt, backend=converted, open_net=open_net)
        model.settings = Settings(threads)
        model.backend_is_named = backend != "auto"
    else:
        from heedful.pipelines.nets import kind_of

        net, config = open_net("float32" if precision == "auto" else precision)
        model = kind_of(net)(net, config, metadata, src, tgt)
        # Settings are measured on a CPU.
        model.settings = opened if model.device.type == "cpu" else Settings(threads)
    model.shortlist = shortlist
    return model


def load_translator(path: str | PathLike[str], **settings: Unpack[LoadKeywords]) -> Translator:
    """Open an encoder-decoder; settings as in `load`. Raises UserError for other kinds.

    >>> import heedful
    >>> translator = heedful.load_translator("runs/mine")
    >>> translations = translator.translate(["A dog runs.", "A cat sleeps."])
    >>> len(translations)
    2
    """
    return expect(load(path, **settings), Translator, "load_translator")


def load_language_model(
    path: str | PathLike[str], **settings: Unpack[LoadKeywords]
) -> LanguageModel:
    """Open a decoder-only model; settings as in `load`. Raises UserError for other kinds.

    >>> import heedful
    >>> model = heedful.load_language_model("runs/novel")
    >>> text = model.generate("A dog", max_new_tokens=20, temperature=0.8, seed=1)
    >>> model.score(["A dog runs."])[0].log_prob < 0
    True
    """
    return expect(load(path, **settings), LanguageModel, "load_language_model")


def load_masked_language_model(
    path: str | PathLike[str], **settings: Unpack[LoadKeywords]
) -> MaskedLanguageModel:
    """Open a masked language model; settings as in `load`. Raises UserError for other kinds.

    >>> import heedful
    >>> model = heedful.load_masked_language_model("runs/masked")
    >>> [fillings] = model.fill("A <mask> runs.", top_k=3)
    >>> len(fillings)
    3
    """
    return expect(load(path, **settings), MaskedLanguageModel, "load_masked_language_model")


def load_classifier(path: str | PathLike[str], **settings: Unpack[LoadKeywords]) -> Classifier:
    """Open a text classifier; settings as in `load`. Raises UserError for other kinds.

    >>> import heedful
    >>> model = heedful.load_classifier("runs/labels")
    >>> model.labels
    ('good', 'bad')
    >>> model.classify("A warm and funny film.").label in model.labels
    True
    """
    return expect(load(path, **settings), Classifier, "load_classifier")


def load_encoder(path: str | PathLike[str], **settings: Unpack[LoadKeywords]) -> Encoder:
    """Open an encoder-only model with any head; settings as in `load`.

    Raises UserError for other kinds.

    >>> import heedful
    >>> model = heedful.load_encoder("runs/masked")
    >>> model.embed(["A dog.", "A cat.", "A car."], normalize=True).shape[0]
    3
    """
    return expect(load(path, **settings), Encoder, "load_encoder")


def expect(model: SavedModel, kind: type[Kind], purpose: str) -> Kind:
    """The model; raises UserError where it is of another kind than `purpose` needs."""
    if not isinstance(model, kind):
        article = "an" if kind.kind.startswith(("a", "e", "i", "o", "u")) else "a"
        raise UserError(
            f"{purpose} needs {article} {kind.kind}, but this model is a {model.kind} "
            f"({model.metadata.task})"
        )
    return model


def _load_hf(
    directory: Path, device: str, backend: str, precision: str, threads: int | None
) -> AnyModel:
    """The model of a directory in the Hugging Face format; arguments as in `load`."""
    if backend not in ("auto", "eager") or precision == "int8":
        raise UserError(
            f"{directory} is in the Hugging Face format, which has no converted backends: run "
            f"`heedful import hf {directory} OUT` and `heedful optimize OUT`, and open OUT"
        )
    import torch

    from heedful.pipelines.hf_models import model_from_hf
    from heedful.pipelines.nets import place_net

    model, notices = model_from_hf(directory)
    for line in notices:
        logging.getLogger("heedful").warning(f"note: {line}")
    place_net(
        model.net, device, torch.float32 if precision == "auto" else getattr(torch, precision)
    )
    model.settings = Settings(threads)
    return model


def _check_labels(metadata: ModelMetadata, num_labels: object, where: Path) -> None:
    """Raises UserError for labels of another number of classes."""
    if metadata.labels and num_labels != len(metadata.labels):
        raise UserError(
            f"{where} names {len(metadata.labels)} labels, but its model.num_labels is "
            f"{num_labels}; it is damaged"
        )


def check_own_format(directory: Path) -> None:
    """Raises UserError for a directory in the Hugging Face format."""
    if in_hf_format(_description(directory)):
        raise UserError(
            f"{directory} is in the Hugging Face format: import it first, by `heedful import hf "
            f"{directory} OUT`, and name OUT"
        )


def _description(directory: Path) -> dict[str, Any]:
    """The content of `config.json`."""
    try:
        exists = directory.is_dir()
    except OSError as error:  # a name that is too long
        raise UserError(f"cannot read {str(directory)[:99]}: {error.strerror}") from None
    if not exists:
        problem = "is a file, not a model directory" if directory.exists() else "does not exist"
        raise UserError(f"{directory} {problem}; give the directory that a training wrote")
    if not (directory / CONFIG).exists():
        raise UserError(
            f"{directory / CONFIG} does not exist, so this is not a model; give the directory that "
            "a training wrote"
        )
    return read_object(directory / CONFIG)


def tokenizer_files(directory: Path, content: dict[str, Any] | None = None) -> list[Path]:
    """The tokenizer files of a model directory: one for each side, or one for both; none for a net
    without tokenizers.

    Args:
        content: of `config.json`; None: read it.
    """
    if content is None:
        check_own_format(directory)
        content = _description(directory)
    files = content["tokenizers"]
    names = dict.fromkeys(files[side] for side in SIDES) if files else {}
    return [directory / plain_name(name, directory / CONFIG) for name in names]
