"""Export encoders for sentence-transformers: the Hugging Face format, and how vectors are made."""

from os import PathLike
from pathlib import Path

from heedful.errors import UserError
from heedful.export.hf import OnNotice, export_hf, log_notice
from heedful.files import write_json
from heedful.pipelines.encoders import Encoder
from heedful.pipelines.kinds import AnyModel
from heedful.pipelines.pooling import MODULES, PROMPTS, SETTINGS, ST_KEYS, check_pooling

POOLING, NORMALIZE = "1_Pooling", "2_Normalize"
_MODULES = "sentence_transformers.models"


def export_sentence_transformers(
    model: AnyModel,
    out: str | PathLike[str],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    precision: str = "float32",
    overwrite: bool = False,
    on_notice: OnNotice = log_notice,
) -> None:
    """Write a directory for `SentenceTransformer(out)`, whose vectors equal those of `embed`.

    Args:
        pooling: state of a text: the mean or maximum over its tokens (special ones too), the first
            or last; None: the model's own, as of `embed`.
        normalize: divide vectors by their lengths; None: as the model does.
        precision, overwrite, on_notice: as in `export_hf`.

    Raises:
        UserError: a model that is no encoder, or has no tokenizer; and as in `export_hf`.
    """
    if pooling is not None:
        check_pooling(pooling)
    if not isinstance(model, Encoder) or not model.has_tokenizer:
        raise UserError("sentence-transformers needs an encoder-only model with a tokenizer")

    kind = model.metadata.pooling if pooling is None else pooling
    is_normal = model.metadata.normalize if normalize is None else normalize

    def write_modules(directory: Path) -> None:
        """Write the modules after the net, and the list of modules."""
        folder = POOLING
        (directory / folder).mkdir()
        keys = {key: name == kind for name, key in ST_KEYS.items()}
        width = {"word_embedding_dimension": model.config.d_model}
        write_json(directory / folder / "config.json", width | keys)
        lengths = {"max_seq_length": model.config.max_length, "do_lower_case": False}
        write_json(directory / SETTINGS, lengths)
        if model.metadata.prompts:
            default = model.metadata.default_prompt
            prompts = {"prompts": model.metadata.prompts, "default_prompt_name": default}
            write_json(directory / PROMPTS, prompts)
        modules = [("", "Transformer"), (folder, "Pooling")]
        if is_normal:
            (directory / NORMALIZE).mkdir()
            modules.append((NORMALIZE, "Normalize"))
        content = [
            {"idx": i, "name": str(i), "path": path, "type": f"{_MODULES}.{name}"}
            for i, (path, name) in enumerate(modules)
        ]
        write_json(directory / MODULES, content)

    export_hf(
        model,
        out,
        precision=precision,
        overwrite=overwrite,
        on_notice=on_notice,
        write_more=write_modules,
    )
