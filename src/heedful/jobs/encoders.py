"""What the tasks of encoder-only models share: checks of the recipe, sizes, plans."""

from collections.abc import Collection

import numpy as np
from jaxtyping import Int64

from heedful.config import Recipe
from heedful.data.sequences import plan_sequences
from heedful.errors import UserError
from heedful.jobs.sources import kept_sizes
from heedful.jobs.texts import check_sources
from heedful.zoo import architecture

METRICS = ("loss", "accuracy", "token_accuracy")


def check_encoder_recipe(recipe: Recipe, sources: Collection[str]) -> None:
    """Refuse what no task of an encoder can use; raises UserError naming the key.

    `sources` as of `check_sources`.
    """
    for key in ("head", "num_labels"):
        if key in recipe.model:
            raise UserError(f"model.{key} follows from the task {recipe.task}; leave it out")
    if recipe.evaluation.metric not in METRICS:
        raise UserError(
            f"evaluation.metric {recipe.evaluation.metric} is none of the task {recipe.task}; "
            "use loss or accuracy"
        )
    check_sources(recipe, sources)


def encoder_sizes(recipe: Recipe, name: str, vocab_size: int, **keys: object) -> dict[str, object]:
    """`Job.sizes` of an encoder with the head that `keys` say; see `kept_sizes`.

    Raises:
        UserError: an architecture without such heads; texts that are longer than the model's.
    """
    if "head" not in architecture(name).Config.__dataclass_fields__:
        raise UserError(
            f"{name} is no encoder, which the task {recipe.task} needs; set model.architecture to "
            "bert, roberta or distilbert, or start from such a model"
        )
    sizes: dict[str, object] = {"vocab_size": vocab_size, **keys}
    return kept_sizes(recipe, sizes, recipe.data.max_length, "data.max_length")


def training_plan(
    recipe: Recipe, lengths: Int64[np.ndarray, " N"], epoch: int
) -> list[Int64[np.ndarray, " n"]]:
    """The batches of an epoch, as the recipe limits them."""
    settings = recipe.training
    return plan_sequences(
        lengths,
        max_tokens=settings.batch_tokens,
        max_sentences=settings.batch_sentences,
        seed=settings.seed,
        epoch=epoch,
    )


def evaluation_plan(
    lengths: Int64[np.ndarray, " N"], max_tokens: int = 8_192
) -> list[Int64[np.ndarray, " n"]]:
    """Batches of held-out texts, the longest first; one above the budget goes alone."""
    budget = max(max_tokens, int(lengths.max(initial=1)))
    return plan_sequences(
        lengths, max_tokens=budget, max_sentences=None, seed=0, epoch=0, shuffle=False
    )
