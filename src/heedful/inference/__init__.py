"""Saved models opened for use: what one does with a net and its tokenizers, one file a kind.

None of the names imports torch by itself: a model opens its net when it is needed.
"""

from typing import TYPE_CHECKING

from heedful.lazy import lazily

if TYPE_CHECKING:
    from heedful.inference.card import GenerationIds, Limits, ModelCard
    from heedful.inference.encoders import (
        Classification,
        Classifier,
        Embedder,
        MaskedLanguageModel,
    )
    from heedful.inference.ensembles import ensemble
    from heedful.inference.generator import Generator, TextScore
    from heedful.inference.language_model import LanguageModel
    from heedful.inference.model import SavedModel, save_description
    from heedful.inference.nets import choose_device, kind_of, open_net, parameter_count
    from heedful.inference.opening import AnyModel, expect, load
    from heedful.inference.translator import Translator

_NAMES = {
    "card": ("GenerationIds", "Limits", "ModelCard"),
    "encoders": ("Classification", "Classifier", "Embedder", "MaskedLanguageModel"),
    "ensembles": ("ensemble",),
    "generator": ("Generator", "TextScore"),
    "language_model": ("LanguageModel",),
    "model": ("SavedModel", "save_description"),
    "nets": ("choose_device", "kind_of", "open_net", "parameter_count"),
    "opening": ("AnyModel", "expect", "load"),
    "translator": ("Translator",),
}

__all__ = [
    "AnyModel",
    "Classification",
    "Classifier",
    "Embedder",
    "GenerationIds",
    "Generator",
    "LanguageModel",
    "Limits",
    "MaskedLanguageModel",
    "ModelCard",
    "SavedModel",
    "TextScore",
    "Translator",
    "choose_device",
    "ensemble",
    "expect",
    "kind_of",
    "load",
    "open_net",
    "parameter_count",
    "save_description",
]
__getattr__ = lazily(__name__, _NAMES)
