"""heedful: Transformers put together from one small set of parts, right and fast.

The public names are handed out lazily, so that `import heedful` costs nothing and imports no torch.
"""

from typing import TYPE_CHECKING

from heedful.lazy import lazily

__version__ = "0.1.0"

_HOMES = {
    "load": "heedful.inference",
    "ensemble": "heedful.inference",
    "Translator": "heedful.inference",
    "LanguageModel": "heedful.inference",
    "MaskedLanguageModel": "heedful.inference",
    "Classifier": "heedful.inference",
    "Embedder": "heedful.inference",
    "train": "heedful.run",
    "load_recipe": "heedful.recipe_files",
    "import_hf": "heedful.export.hf",
    "export_hf": "heedful.export.hf",
    "UserError": "heedful.errors",
}
_ROOMS = (
    "parts",
    "models",
    "zoo",
    "data",
    "tasks",
    "generation",
    "engines",
    "evaluation",
    "insight",
    "training",
    "inference",
    "export",
)

__all__ = [  # noqa: RUF022
    "UserError",
    "Translator",
    "LanguageModel",
    "MaskedLanguageModel",
    "Classifier",
    "Embedder",
    "load",
    "ensemble",
    "load_recipe",
    "train",
    "import_hf",
    "export_hf",
]

if TYPE_CHECKING:
    from heedful.errors import UserError
    from heedful.export.hf import export_hf, import_hf
    from heedful.inference import (
        Classifier,
        Embedder,
        LanguageModel,
        MaskedLanguageModel,
        Translator,
        ensemble,
        load,
    )
    from heedful.recipe_files import load_recipe
    from heedful.run import train

__getattr__ = lazily(__name__, _HOMES | {room: f"heedful.{room}" for room in _ROOMS})
