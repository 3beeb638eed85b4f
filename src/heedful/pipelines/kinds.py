"""The kinds of saved models."""

from typing import get_args

from heedful.pipelines.encoders import Classifier, Embedder, MaskedLanguageModel
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.translation import Translator

AnyModel = Translator | LanguageModel | MaskedLanguageModel | Classifier | Embedder
KINDS: dict[str, type[AnyModel]] = {kind.__name__: kind for kind in get_args(AnyModel)}
