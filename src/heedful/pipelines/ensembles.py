"""Ensembles: several models that generate from the mean of their probabilities."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from heedful.errors import UserError, describe
from heedful.pipelines.base import SavedModel
from heedful.pipelines.text_generation import Generator

AnyGenerator = TypeVar("AnyGenerator", bound=Generator)


def ensemble(
    models: Sequence[AnyGenerator], weights: Sequence[float] | None = None
) -> AnyGenerator:
    """A model that generates and scores with several models of one vocabulary.

    The probability of a token is the weighted mean over the models (Sutskever et al. 2014, sec.
    3.6), in searches, in `score` and in `teacher_forced`. Default options and output limits are
    those of the first model. The backend is torch. Methods that need a single net (`embed`, `save`,
    `export`, drafts and others) raise UserError.

    Args:
        models: translators or language models, of any architectures and sizes.
        weights: of the models, up to a common factor; None: equal.

    Raises:
        UserError: no model; models of different kinds, vocabularies or special tokens; wrong
            weights.

    >>> import heedful
    >>> models = [heedful.load_translator(path) for path in ("runs/mine", "runs/other")]
    >>> both = heedful.ensemble(models, weights=[2, 1])
    >>> len(both.translate(["A dog runs."], beam_size=4))
    1
    """
    from heedful.backends.torch.ensemble import Ensemble

    items: Any = models  # which may be of other types than it is annotated with
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise UserError(f"an ensemble needs a list of models, not {describe(items)}")
    if not items:
        raise UserError("an ensemble needs at least one model")
    for model in items:
        if not isinstance(model, Generator):
            kind = f"a {model.kind}" if isinstance(model, SavedModel) else describe(model)
            raise UserError(f"only models that generate can form an ensemble, not {kind}")
    for weight in weights or ():
        if not isinstance(weight, int | float):
            raise UserError(f"weights must be numbers, one for each model, not {describe(weight)}")
    first = models[0]
    for number, other in enumerate(models[1:], 2):
        if reason := _difference(first, other):
            raise UserError(f"model {number} of the ensemble {reason} than the first")
    backend = Ensemble([model.eager for model in models], weights)
    joint = copy.copy(first)
    joint.net, joint._open_net = None, _no_net
    joint.has_net = False
    joint.backend = backend
    joint.num_truncated = joint.num_left_out = joint.num_unknown = 0
    joint.failures = {}
    longest = min(model.config.max_length for model in models)
    joint.config = replace(first.config, max_length=longest)
    return joint


def _no_net() -> tuple[Any, Any]:
    raise UserError(
        "an ensemble has no net: it generates and scores only; for embed, save, export, a draft or "
        "another ensemble give one of its models"
    )


def _difference(first: Generator, other: Generator) -> str | None:
    """The reason why two models cannot form an ensemble; None: they can."""
    if other.kind != first.kind:
        return f"is of another kind ({other.kind})"
    if other.eager.vocab_size != first.eager.vocab_size:
        return f"has another vocabulary ({other.eager.vocab_size} tokens)"
    if _source_size(other.config) < _source_size(first.config):
        return f"has another source vocabulary ({_source_size(other.config)} tokens)"
    if other.has_tokenizer and first.has_tokenizer:
        for side in ("src", "tgt"):
            one, two = (getattr(model, f"{side}_tokenizer") for model in (first, other))
            if one is not two and one.content() != two.content():
                return "has another tokenizer"
    if (other.ids.decoder_start_ids, other.end_ids()) != (
        first.ids.decoder_start_ids,
        first.end_ids(),
    ):
        return "has other start or EOS ids"
    return None


def _source_size(config: Any) -> int:
    """The size of the source vocabulary, or of the only one."""
    size: int = getattr(config, "src_vocab_size", None) or config.vocab_size
    return size
