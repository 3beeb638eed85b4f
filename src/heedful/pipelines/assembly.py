"""`from_net`: a saved-model object around a net from any training loop, with its tokenizers."""

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack, get_args, overload

from torch import nn

from heedful import plugins
from heedful.data.labels import ProblemType
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError, describe
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.pipelines.encoders import Classifier, Embedder, MaskedLanguageModel
from heedful.pipelines.inputs import check_strings
from heedful.pipelines.kinds import AnyModel
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.metadata import GenerationIds, Limits, ModelMetadata
from heedful.pipelines.nets import kind_of, open_net
from heedful.pipelines.translation import Translator
from heedful.zoo.architectures import meta_net
from heedful.zoo.saved import weights_of

_TASKS = {
    "Translator": "translation",
    "LanguageModel": "language_modeling",
    "MaskedLanguageModel": "masked_lm",
    "Classifier": "classification",
    "Embedder": "embedding",
}


class _Settings(TypedDict, total=False):
    """The keyword arguments of `from_net`."""

    tgt_tokenizer: Tokenizer | None
    labels: Sequence[str]
    src_language: str | None
    tgt_language: str | None
    limits: Limits | None
    generation: GenerationIds | None
    problem: ProblemType


@overload
def from_net(
    net: EncoderDecoder,
    config: Any,
    tokenizer: Tokenizer | None = None,
    **more: Unpack[_Settings],
) -> Translator: ...


@overload
def from_net(
    net: DecoderOnly, config: Any, tokenizer: Tokenizer | None = None, **more: Unpack[_Settings]
) -> LanguageModel: ...


@overload
def from_net(
    net: EncoderOnly, config: Any, tokenizer: Tokenizer | None = None, **more: Unpack[_Settings]
) -> MaskedLanguageModel | Classifier | Embedder: ...


@overload
def from_net(
    net: nn.Module, config: Any, tokenizer: Tokenizer | None = None, **more: Unpack[_Settings]
) -> AnyModel: ...


def from_net(
    net: nn.Module,
    config: Any,
    tokenizer: Tokenizer | None = None,
    *,
    tgt_tokenizer: Tokenizer | None = None,
    labels: Sequence[str] = (),
    src_language: str | None = None,
    tgt_language: str | None = None,
    limits: Limits | None = None,
    generation: GenerationIds | None = None,
    problem: ProblemType = "single_label",
) -> AnyModel:
    """Make a model of a net that was trained in a loop of its user; the net is not copied.

    The model translates, generates, fills masks, classifies or embeds, by the family and the head
    of the net, and `model.save(directory)` writes what `heedful.load` opens. The net is put into
    eval mode; call `net.train()` before more training.

    Args:
        net: what the `build` of an architecture in `heedful.zoo`, or of a plugin, returned.
        config: the `Config` that it was built from.
        tokenizer: of the source, or of both sides; None: the model reads and writes token ids.
        tgt_tokenizer: of the target of an encoder-decoder; default: `tokenizer`.
        labels: the class names of a classifier in the order of its logits; default: 0, 1, ...
        src_language, tgt_language: language codes, for metrics and for other programs.
        limits: the length limit of a translation; default: that of `Limits`.
        generation: start, end and suppressed tokens; default: those of the tokenizer.
        problem: what the logits of a classifier mean: single_label (a softmax over the classes),
            multi_label (a sigmoid of each) or regression (values).

    Raises:
        UserError: a net or Config of no known architecture; a tokenizer with more entries than
            the net's embedding; labels for another number of classes.

    >>> import heedful
    >>> from heedful import zoo
    >>> tokenizer = heedful.train_tokenizer(["a dog runs", "a cat sleeps"], kind="word")
    >>> gpt2 = zoo.architecture("gpt2")
    >>> config = gpt2.config(tokenizer.vocab_size, d_model=32, num_heads=2, num_layers=1)
    >>> net = gpt2.build(config)  # and train it
    >>> heedful.from_net(net, config, tokenizer).save("mine")
    """
    if not isinstance(net, EncoderDecoder | DecoderOnly | EncoderOnly):
        raise UserError(
            f"net is a {type(net).__name__}; give a net of heedful.zoo or of a plugin, without "
            "wrappers such as DDP"
        )
    name = _architecture_of(config)
    _check_config(name, config, net)
    kind = kind_of(net)
    target = tgt_tokenizer or tokenizer
    if tokenizer is None and tgt_tokenizer is not None:
        raise UserError("tgt_tokenizer is given without tokenizer; give that of the source too")
    _check_tokenizers(config, tokenizer, target)
    for argument, value, of_type in (
        ("limits", limits, Limits),
        ("generation", generation, GenerationIds),
    ):
        if value is not None and not isinstance(value, of_type):
            raise UserError(f"{argument} must be {of_type.__name__}(...), not {describe(value)}")
    check_strings(labels, "labels")
    num_labels = getattr(config, "num_labels", 0) if kind.__name__ == "Classifier" else 0
    if labels and len(labels) != num_labels:
        raise UserError(f"{len(labels)} labels, but the net has {num_labels} classes")
    if len(set(labels)) < len(labels):
        raise UserError(f"two labels have the same name: {', '.join(labels)}")
    if problem not in get_args(ProblemType):
        raise UserError(f"problem must be {', '.join(get_args(ProblemType))}, not {problem!r}")
    if generation is None and isinstance(net, DecoderOnly) and tokenizer is not None:
        generation = continuation_ids(tokenizer)
    plugin = plugins.architecture.plugin_of(name)
    metadata = ModelMetadata(
        name,
        _TASKS[kind.__name__],
        src_language,
        tgt_language,
        limits or Limits(),
        tuple(labels),
        generation or GenerationIds(),
        plugins=() if plugin is None else (plugin,),
        problem=problem,
    )
    return open_net(net.eval(), config, metadata, tokenizer, target)


def continuation_ids(tokenizer: Tokenizer, ends: Sequence[int] = ()) -> GenerationIds:
    """The start, end and suppressed tokens of a language model with a tokenizer of heedful.

    Args:
        ends: ids that end an output, besides EOS.

    Raises:
        UserError: nothing ends an output.
    """
    specials = tokenizer.specials
    eos_ids = [*ends, *(() if ends and specials.eos_id is None else (tokenizer.eos_id,))]
    suppressed = {specials.pad_id, specials.bos_id} - {*eos_ids}
    return GenerationIds(
        decoder_start_ids=tokenizer.prefix_ids,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        suppressed_ids=tuple(sorted(token for token in suppressed if token is not None)),
    )


def _check_config(name: str, config: Any, net: nn.Module) -> None:
    """Refuse a Config that a net of other modules or sizes was built from.

    A module that was changed after the build (LoRA, int8) can lack parameters: these are ignored.
    """
    own, modules = weights_of(net), dict(net.named_modules(remove_duplicate=False))
    for parameter, tensor in weights_of(meta_net(name, config, "config")).items():
        present = own.get(parameter, tensor)
        if parameter.rpartition(".")[0] not in modules or present.shape != tensor.shape:
            raise UserError(
                f"config is not that of the net: by it, {parameter} has shape "
                f"{tuple(tensor.shape)}; give the Config that the net was built from"
            )


def _architecture_of(config: Any) -> str:
    """The name of the architecture that a Config is of."""
    for name in plugins.architecture.names():
        if plugins.architecture.get(name).config is type(config):
            return name
    raise UserError(
        f"config is a {type(config).__name__} of no known architecture; give the Config that the "
        f"net was built from ({', '.join(plugins.architecture.names())})"
    )


def _check_tokenizers(config: Any, source: Any, target: Any) -> None:
    """Refuse a tokenizer whose ids are not all rows of the net's embedding."""
    for side, tokenizer in (("src", source), ("tgt", target)):
        if tokenizer is None:
            continue
        if not isinstance(tokenizer, Tokenizer):
            raise UserError(
                f"the tokenizer is a {type(tokenizer).__name__}; give one of "
                "heedful.train_tokenizer or heedful.Tokenizer.load"
            )
        size = getattr(config, f"{side}_vocab_size", None) or getattr(config, "vocab_size", None)
        if size is not None and tokenizer.vocab_size > size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size:,} entries, but the net has an embedding "
                f"of {size:,}; build the net with the tokenizer's vocab_size"
            )
