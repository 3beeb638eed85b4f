"""Opening a model directory: which of the model kinds it is follows from its net."""

from pathlib import Path
from typing import Any

from torch import nn

from heedful import plugins
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import plain_name, read_json
from heedful.inference.card import ModelCard
from heedful.inference.encoders import Classifier, Embedder, MaskedLanguageModel
from heedful.inference.language_model import LanguageModel
from heedful.inference.model import CONFIG, SIDES, SavedModel, choose_device
from heedful.inference.translator import Translator
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.heads import ClassificationHead, MaskedTokenHead
from heedful.zoo.names import set_weights
from heedful.zoo.saved import WEIGHTS, load_tensors, make_config, undrawn_net

AnyModel = Translator | LanguageModel | MaskedLanguageModel | Classifier | Embedder


def load(path: str | Path, *, device: str = "auto") -> Any:
    """Open a model directory: `config.json`, `model.safetensors` and tokenizer files.

    Gives a `Translator`, `LanguageModel`, `MaskedLanguageModel`, `Classifier` or `Embedder`, each
    with the bare module as `net`.

    Raises UserError where it is none, is truncated, or was written by something else.
    """
    directory = Path(path)
    if not directory.is_dir():
        problem = "is a file, not a model directory" if directory.exists() else "does not exist"
        raise UserError(f"{directory} {problem}; give the directory that a training wrote (--out)")
    content = read_json(directory / CONFIG)
    if "model_type" in content and "heedful" not in content:
        raise UserError(
            f"{directory} is in the Hugging Face format: run `heedful import hf {directory} OUT` "
            "and open OUT"
        )
    if isinstance(content, dict):
        plugins.require(map(str, content.get("plugins", ())), str(directory))
    try:
        config = make_config(content["architecture"], content["model"], str(directory / CONFIG))
        card = ModelCard.from_dict(content)
        tokenizers: list[Tokenizer | None] = [
            Tokenizer.load(directory / plain_name(name, directory / CONFIG))
            for name in dict.fromkeys(_files(content))
        ]
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory / CONFIG} was not written by heedful: {error}") from None
    weights = load_tensors(directory / WEIGHTS)
    net = undrawn_net(card.architecture, config)
    set_weights(net, weights, directory / WEIGHTS)
    net.to(choose_device(device)).eval()
    return open_net(net, config, card, *(tokenizers or [None]))


def open_net(
    net: nn.Module,
    config: Any,
    card: ModelCard,
    src_tokenizer: Tokenizer | None,
    tgt_tokenizer: Tokenizer | None = None,
) -> AnyModel:
    """The model kind of a net; without a second tokenizer the first serves both sides."""
    kind = kind_of(net)
    return kind(net, config, card, src_tokenizer, tgt_tokenizer or src_tokenizer)


def kind_of(net: nn.Module) -> type[AnyModel]:
    """What a net is, from its family and its head."""
    if isinstance(net, EncoderDecoder):
        return Translator
    if isinstance(net, DecoderOnly):
        return LanguageModel
    head = getattr(net, "head", None)
    if isinstance(head, MaskedTokenHead):
        return MaskedLanguageModel
    return Classifier if isinstance(head, ClassificationHead) else Embedder


def expect(model: SavedModel, kind: type[SavedModel], verb: str) -> None:
    """Refuse a model of another kind; raises UserError that says what it is."""
    if not isinstance(model, kind):
        raise UserError(
            f"{verb} needs a {kind.kind}, but this model is a {model.kind} ({model.card.task})"
        )


def _files(content: dict[str, Any]) -> list[str]:
    """The tokenizers' files, one for each side; none for a net without text."""
    files = content["tokenizers"]
    return [files[side] for side in SIDES] if files else []
