"""Saved models opened for use: what one does with a net and its tokenizers, one file a kind."""

from heedful.inference.card import Card, GenerationIds, Limits
from heedful.inference.encoders import (
    Classification,
    Classifier,
    Embedder,
    Encoder,
    Filling,
    MaskedLanguageModel,
)
from heedful.inference.language_model import LanguageModel, TextScore
from heedful.inference.model import (
    SavedModel,
    TooLong,
    choose_device,
    parameter_count,
    save_description,
)
from heedful.inference.opening import AnyModel, expect, kind_of, load, open_net
from heedful.inference.translator import Translation, Translator, evaluation_plan
from heedful.inference.writing import Generation, GenerationOptions, Writer

__all__ = [
    "AnyModel",
    "Card",
    "Classification",
    "Classifier",
    "Embedder",
    "Encoder",
    "Filling",
    "Generation",
    "GenerationIds",
    "GenerationOptions",
    "LanguageModel",
    "Limits",
    "MaskedLanguageModel",
    "SavedModel",
    "TextScore",
    "TooLong",
    "Translation",
    "Translator",
    "Writer",
    "choose_device",
    "evaluation_plan",
    "expect",
    "kind_of",
    "load",
    "open_net",
    "parameter_count",
    "save_description",
]
