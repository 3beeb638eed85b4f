"""Saved models opened for use: what one does with a net and its tokenizers, one file a kind."""

from heedful.inference.card import GenerationIds, Limits, ModelCard
from heedful.inference.encoders import (
    Classification,
    Classifier,
    Embedder,
    MaskedLanguageModel,
)
from heedful.inference.generator import Generator, TextScore
from heedful.inference.language_model import LanguageModel
from heedful.inference.model import (
    SavedModel,
    choose_device,
    parameter_count,
    save_description,
)
from heedful.inference.opening import AnyModel, expect, kind_of, load, open_net
from heedful.inference.translator import Translator

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
    "expect",
    "kind_of",
    "load",
    "open_net",
    "parameter_count",
    "save_description",
]
