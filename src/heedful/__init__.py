"""heedful: Transformers composed of one small set of parts, correct and fast.

Public names are imported on first access, so that `import heedful` is fast and imports no torch.
"""

from typing import TYPE_CHECKING

from heedful.lazy import lazily

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022
    "UserError",
    "Translator",
    "LanguageModel",
    "MaskedLanguageModel",
    "Classifier",
    "Embedder",
    "load",
    "ensemble",
    "from_net",
    "load_recipe",
    "train",
    "TrainingRun",
    "import_hf",
    "export_hf",
]

if TYPE_CHECKING:
    from heedful.errors import UserError
    from heedful.export.hf import export_hf, import_hf
    from heedful.pipelines import (
        Classifier,
        Embedder,
        LanguageModel,
        MaskedLanguageModel,
        Translator,
        ensemble,
        from_net,
        load,
    )
    from heedful.recipe_files import load_recipe
    from heedful.run import TrainingRun, train

__getattr__ = lazily(
    __name__,
    {
        "errors": ("UserError",),
        "export.hf": ("export_hf", "import_hf"),
        "pipelines": (
            *("Classifier", "Embedder", "LanguageModel", "MaskedLanguageModel", "Translator"),
            *("ensemble", "from_net", "load"),
        ),
        "recipe_files": ("load_recipe",),
        "run": ("TrainingRun", "train"),
    },
)
