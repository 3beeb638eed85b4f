"""Saved models in use: a net with its tokenizers, one module for each kind of model.

Importing a name does not import torch: a model opens its net at the first use.
"""

from typing import TYPE_CHECKING

from heedful.extras import lazily

if TYPE_CHECKING:
    from heedful.pipelines.assembly import from_net
    from heedful.pipelines.base import SavedModel, save_description
    from heedful.pipelines.encoders import (
        Classification,
        Classifier,
        Embedder,
        Encoder,
        MaskedLanguageModel,
    )
    from heedful.pipelines.ensembles import ensemble
    from heedful.pipelines.kinds import AnyModel
    from heedful.pipelines.language_model import LanguageModel
    from heedful.pipelines.loading import (
        expect,
        load,
        load_classifier,
        load_encoder,
        load_language_model,
        load_masked_language_model,
        load_translator,
    )
    from heedful.pipelines.metadata import GenerationIds, Limits, ModelMetadata
    from heedful.pipelines.nets import choose_device, kind_of, open_net, parameter_count
    from heedful.pipelines.scoring import TextScore
    from heedful.pipelines.text_generation import Generator
    from heedful.pipelines.translation import Translator

_NAMES = {
    "metadata": ("GenerationIds", "Limits", "ModelMetadata"),
    "encoders": ("Classification", "Classifier", "Embedder", "Encoder", "MaskedLanguageModel"),
    "ensembles": ("ensemble",),
    "scoring": ("TextScore",),
    "text_generation": ("Generator",),
    "language_model": ("LanguageModel",),
    "base": ("SavedModel", "save_description"),
    "assembly": ("from_net",),
    "nets": ("choose_device", "kind_of", "open_net", "parameter_count"),
    "kinds": ("AnyModel",),
    "loading": (
        *("expect", "load", "load_classifier", "load_encoder", "load_language_model"),
        *("load_masked_language_model", "load_translator"),
    ),
    "translation": ("Translator",),
}

__all__ = [
    "AnyModel",
    "Classification",
    "Classifier",
    "Embedder",
    "Encoder",
    "GenerationIds",
    "Generator",
    "LanguageModel",
    "Limits",
    "MaskedLanguageModel",
    "ModelMetadata",
    "SavedModel",
    "TextScore",
    "Translator",
    "choose_device",
    "ensemble",
    "expect",
    "from_net",
    "kind_of",
    "load",
    "load_classifier",
    "load_encoder",
    "load_language_model",
    "load_masked_language_model",
    "load_translator",
    "open_net",
    "parameter_count",
    "save_description",
]
if not TYPE_CHECKING:
    __getattr__ = lazily(__name__, _NAMES)
