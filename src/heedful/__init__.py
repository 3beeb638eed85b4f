"""heedful: Transformers composed of one small set of parts, correct and fast.

Public names are imported on first access, so that `import heedful` is fast and imports no torch.
"""

from typing import TYPE_CHECKING

from heedful.extras import lazily

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022
    "UserError",
    "Translator",
    "LanguageModel",
    "MaskedLanguageModel",
    "Classifier",
    "Embedder",
    "load",
    "load_translator",
    "load_language_model",
    "load_masked_language_model",
    "load_classifier",
    "load_encoder",
    "ensemble",
    "from_net",
    "train_tokenizer",
    "Tokenizer",
    "load_recipe",
    "train",
    "TrainingRun",
    "import_hf",
    "export_hf",
    "verify",
]

if TYPE_CHECKING:
    from heedful.data.tokenizer import Tokenizer, train_tokenizer
    from heedful.errors import UserError
    from heedful.export.hf import export_hf, import_hf
    from heedful.insight import verify
    from heedful.pipelines import (
        Classifier,
        Embedder,
        LanguageModel,
        MaskedLanguageModel,
        Translator,
        ensemble,
        from_net,
        load,
        load_classifier,
        load_encoder,
        load_language_model,
        load_masked_language_model,
        load_translator,
    )
    from heedful.recipe_files import load_recipe
    from heedful.run import TrainingRun, train

if not TYPE_CHECKING:  # a type checker would take any attribute for known
    __getattr__ = lazily(
        __name__,
        {
            "data.tokenizer": ("Tokenizer", "train_tokenizer"),
            "errors": ("UserError",),
            "export.hf": ("export_hf", "import_hf"),
            "insight": ("verify",),
            "pipelines": (
                *("Classifier", "Embedder", "LanguageModel", "MaskedLanguageModel", "Translator"),
                *("ensemble", "from_net", "load", "load_classifier", "load_encoder"),
                *("load_language_model", "load_masked_language_model", "load_translator"),
            ),
            "recipe_files": ("load_recipe",),
            "run": ("TrainingRun", "train"),
        },
    )


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
