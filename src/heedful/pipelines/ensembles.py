"""Several models that write as one: the mean of their probabilities is searched."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from heedful.errors import UserError
from heedful.pipelines.text_generation import Generator

AnyGenerator = TypeVar("AnyGenerator", bound=Generator)


def ensemble(
    models: Sequence[AnyGenerator], weights: Sequence[float] | None = None
) -> AnyGenerator:
    """A model that generates and scores with several models of one vocabulary.

    Each token has the weighted mean of their probabilities (Sutskever et al. 2014, sec. 3.6), in
    searches and in `score`, `teacher_forced` and `window_sums` alike. Options that no call gives,
    and limits of length, are the first model's. It runs in torch. It has no net of its own: what
    needs one (`embed`, `save`, `export`, a draft and more) raises UserError.

    Args:
        models: translators or language models, each of its own architecture and size.
        weights: in any unit; default: all alike.

    Raises:
        UserError: no model, models of unlike kinds, vocabularies or marks, wrong weights.
    """
    from heedful.backends.torch.ensemble import Ensemble

    if not models:
        raise UserError("an ensemble needs at least one model")
    first = models[0]
    if not isinstance(first, Generator):
        raise UserError(f"an ensemble is of models that write, not of a {first.kind}")
    for number, other in enumerate(models[1:], 2):
        if reason := _unlike(first, other):
            raise UserError(f"model {number} of the ensemble {reason} than the first")
    backend = Ensemble([model.eager for model in models], weights)
    joint = copy.copy(first)
    joint.net, joint._open_net = None, _no_net
    joint.has_net = False
    joint.backend = backend
    longest = min(model.config.max_length for model in models)
    joint.config = replace(first.config, max_length=longest)
    return joint


def _no_net() -> tuple[Any, Any]:
    raise UserError(
        "an ensemble has no net of its own: it generates and scores; for anything else (such as "
        "embed, save, export, a draft, another ensemble) give one of its models"
    )


def _unlike(first: Generator, other: Generator) -> str | None:
    """What keeps two models from writing together, if anything does."""
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
    if (other.ids.start, other.end_ids()) != (first.ids.start, first.end_ids()):
        return "has other marks of start and end"
    return None


def _source_size(config: Any) -> int:
    """How many ids the net's table of sources, or of texts, has."""
    size: int = getattr(config, "src_vocab_size", None) or config.vocab_size
    return size
