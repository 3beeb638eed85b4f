"""What the tasks of encoder-only models share: checks of the recipe, sizes, plans."""

from collections.abc import Collection

import numpy as np
from jaxtyping import Int64

from heedful.config import Files, Recipe
from heedful.errors import UserError
from heedful.jobs.sources import kept_sizes
from heedful.text.sequences import plan_sequences
from heedful.zoo import architecture

METRICS = ("loss", "accuracy", "token_accuracy")
_SOURCES = ("src", "tgt", "file", "text")


def check_encoder_recipe(recipe: Recipe, sources: Collection[str]) -> None:
    """Refuse what no task of an encoder can use; raises UserError naming the key.

    `sources` are the keys of `data.train`, `data.valid` and `data.test` that the task reads from:
    the training text has to be in one of them.
    """
    for key in ("head", "num_labels"):
        if key in recipe.model:
            raise UserError(f"model.{key} follows from the task {recipe.task}; leave it out")
    if recipe.evaluation.metric not in METRICS:
        raise UserError(
            f"evaluation.metric {recipe.evaluation.metric} is none of the task {recipe.task}; "
            "use loss or accuracy"
        )
    wanted = " or ".join(sources)
    for name, files in splits_of(recipe).items():
        given = [key for key in _SOURCES if getattr(files, key) is not None]
        for key in given:
            if key not in sources:
                raise UserError(
                    f"data.{name}.{key} is of no use to the task {recipe.task}; give {wanted}"
                )
        if len(given) > 1:
            raise UserError(f"data.{name}: give {wanted}, not both")
        if name == "train" and not given:
            example = " or ".join(f"--set data.train.{key}=FILE" for key in sources)
            raise UserError(f"data.train is not given: add {example}")


def splits_of(recipe: Recipe) -> dict[str, Files]:
    """The files of train, valid and test."""
    return {"train": recipe.data.train, "valid": recipe.data.valid, "test": recipe.data.test}


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
