"""Export encoders for sentence-transformers: the Hugging Face format, and how vectors are made."""

from os import PathLike
from pathlib import Path
from typing import get_args

from heedful.errors import UserError
from heedful.export.hf import OnNotice, export_hf
from heedful.files import write_json
from heedful.pipelines.base import Pooling
from heedful.pipelines.encoders import Encoder
from heedful.pipelines.kinds import AnyModel

# heedful's pooling -> the key of sentence-transformers, in the spelling that all versions read.
_KEYS = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}
_MODULES = "sentence_transformers.models"


def export_sentence_transformers(
    model: AnyModel,
    out: str | PathLike[str],
    *,
    pooling: str = "mean",
    precision: str = "float32",
    overwrite: bool = False,
    on_notice: OnNotice = lambda line: None,
) -> None:
    """Write a directory for `SentenceTransformer(out)`, whose vectors equal those of `embed`.

    Args:
        pooling: state of a text: the mean over its tokens (special ones too), the first or last.
        precision, overwrite, on_notice: as in `export_hf`.

    Raises:
        UserError: a model that is no encoder, or has no tokenizer; and as in `export_hf`.
    """
    check_pooling(pooling)
    if not isinstance(model, Encoder) or not model.has_tokenizer:
        raise UserError("sentence-transformers needs an encoder-only model with a tokenizer")

    def write_modules(directory: Path) -> None:
        """Write the pooling module and the list of modules."""
        folder = "1_Pooling"
        (directory / folder).mkdir()
        keys = {f"pooling_mode_{key}": name == pooling for name, key in _KEYS.items()}
        width = {"word_embedding_dimension": model.config.d_model}
        write_json(directory / folder / "config.json", width | keys)
        lengths = {"max_seq_length": model.config.max_length, "do_lower_case": False}
        write_json(directory / "sentence_bert_config.json", lengths)
        modules = [("", "Transformer"), (folder, "Pooling")]
        content = [
            {"idx": i, "name": str(i), "path": path, "type": f"{_MODULES}.{name}"}
            for i, (path, name) in enumerate(modules)
        ]
        write_json(directory / "modules.json", content)

    export_hf(
        model,
        out,
        precision=precision,
        overwrite=overwrite,
        on_notice=on_notice,
        write_more=write_modules,
    )


def check_pooling(pooling: str) -> None:
    """Raise UserError for an unknown pooling."""
    if pooling not in get_args(Pooling):
        raise UserError(f"pooling must be {', '.join(get_args(Pooling))}, not {pooling}")
