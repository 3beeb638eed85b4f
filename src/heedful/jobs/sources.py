"""What a run keeps of the model that it starts from, and what it asks of its teacher."""

from pathlib import Path
from typing import Any

from heedful.config import Recipe
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import read_json
from heedful.inference import SavedModel
from heedful.inference.model import CONFIG
from heedful.inference.opening import expect
from heedful.jobs.job import Say
from heedful.tasks.distillation import copy_layers
from heedful.zoo import architecture

_VOCABULARIES = ("vocab_size", "src_vocab_size", "tgt_vocab_size")


def check_distillation(recipe: Recipe, *, levels: tuple[str, ...] = ("word",)) -> None:
    """Refuse settings of `distillation` that say nothing or exclude each other.

    `levels` are those that the task has, none where it cannot be distilled.
    """
    settings = recipe.distillation
    if settings.teacher is None:
        for key in ("copy_layers", "cosine_weight"):
            if getattr(settings, key):
                raise UserError(
                    f"distillation.{key} is set but distillation.teacher is not: add "
                    "--set distillation.teacher=DIRECTORY"
                )
        return
    if not levels:
        raise UserError(f"the task {recipe.task} cannot be distilled; leave out distillation")
    if settings.level not in levels:
        raise UserError(
            f"distillation.level {settings.level} is for pairs of texts; the task {recipe.task} "
            "has level word"
        )
    if settings.level == "sequence" and settings.cosine_weight:
        raise UserError(
            "distillation.cosine_weight is of level word: at level sequence the student sees the "
            "teacher's outputs alone; set it to 0"
        )
    if settings.level == "word" and not (
        settings.soft_weight or settings.hard_weight or settings.cosine_weight
    ):
        raise UserError(
            "distillation: soft_weight, hard_weight and cosine_weight are all 0, so nothing would "
            "be learnt; raise one"
        )
    if settings.copy_layers and recipe.init_from is not None:
        raise UserError(
            "init_from and distillation.copy_layers both say what the student begins as; "
            "leave one out"
        )


def kept_sizes(
    recipe: Recipe, sizes: dict[str, object], needed: int, key: str
) -> dict[str, object]:
    """Sizes of a run's own net, as far as the models that it comes from let it choose.

    A vocabulary is never smaller than theirs, because their tables could not be taken over
    otherwise; and the length is that of the model which the run starts from.

    Args:
        needed: tokens that the data have at most, as the recipe's `key` says.

    Raises:
        UserError: texts that are longer than that model's.
    """
    source, teacher = origin_models(recipe)
    sizes = dict(sizes)
    for name in _VOCABULARIES:
        if name in sizes:
            sizes[name] = max(int(str(sizes[name])), *(m.get(name, 0) for m in (source, teacher)))
    kept = source or (teacher if recipe.distillation.copy_layers else {})
    max_length = kept.get("max_length", needed)
    longest = recipe.model.get("max_length", max_length)
    if isinstance(longest, int) and longest < needed:
        raise UserError(
            f"{key} {needed} is more than the {longest} tokens that the model reads; set it to "
            f"{longest} or less, or give model.max_length"
        )
    return sizes | {"max_length": max_length}


def pair_sizes(
    recipe: Recipe, name: str, tokenizers: tuple[Tokenizer, Tokenizer], needed: int
) -> dict[str, object]:
    """`Job.sizes` of a net of two stacks; `needed`: tokens that a side has at most.

    Raises:
        UserError: an architecture of one stack; texts that are longer than the model's.
    """
    if "num_decoder_layers" not in architecture(name).Config.__dataclass_fields__:
        raise UserError(
            f"{name} has one stack, but the task {recipe.task} needs two; set model.architecture "
            "to vaswani2017, bart, marian or t5"
        )
    src, tgt = tokenizers
    sizes: dict[str, object] = {"src_vocab_size": src.vocab_size, "tgt_vocab_size": tgt.vocab_size}
    if src is not tgt and name == "vaswani2017":
        sizes["tie_embeddings"] = "decoder"
    return kept_sizes(recipe, sizes, needed, "data.max_length")


def origin_models(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sizes of the model that a run starts from and of its teacher; empty where none is."""
    first, second = (
        {} if path is None else saved_model(path)["model"]
        for path in (recipe.init_from, recipe.distillation.teacher)
    )
    return first, second


def saved_model(path: str) -> dict[str, Any]:
    """What a model directory says of itself; `run.py` has opened it before."""
    content: dict[str, Any] = read_json(Path(path) / CONFIG)
    return content


def ready_teacher(
    teacher: SavedModel, student: SavedModel, recipe: Recipe, *, longest: int, say: Say
) -> SavedModel:
    """The teacher in eval mode and without gradients, and the student begun as its layers.

    Args:
        longest: tokens that both read at most.
        say: told what was copied, where `distillation.copy_layers` asks for it.

    Raises:
        UserError: a teacher of another kind, or one whose outputs or states the student's cannot
            be compared with.
    """
    settings = recipe.distillation
    expect(teacher, type(student), f"distillation.teacher of the task {recipe.task}")
    if teacher.config.max_length < longest:
        raise UserError(
            f"distillation.teacher reads {teacher.config.max_length} tokens at most, but the data "
            f"have up to {longest}; lower data.max_length (or objective.context)"
        )
    for name in _VOCABULARIES:
        own, taught = (getattr(model.config, name, None) for model in (student, teacher))
        if own != taught:
            raise UserError(
                f"the student's {name} is {own} and the teacher's {taught}; both must have the "
                "same vocabulary, so start from a model that has the teacher's"
            )
    widths = student.config.d_model, teacher.config.d_model
    if settings.cosine_weight and settings.level == "word" and widths[0] != widths[1]:
        raise UserError(
            f"distillation.cosine_weight compares states, but the student's d_model is {widths[0]} "
            f"and the teacher's {widths[1]}; set it to 0, or model.d_model to {widths[1]}"
        )
    if settings.copy_layers:
        _begin_as_layers(student, teacher, say)
    teacher.net.eval().requires_grad_(False)
    return teacher


def _begin_as_layers(student: SavedModel, teacher: SavedModel, say: Say) -> None:
    try:
        found = copy_layers(student.net, teacher.net)
    except ValueError as error:
        raise UserError(
            f"distillation.copy_layers: the student has {error}; a student cannot have more"
        ) from None
    if not found.num_in_layers:
        raise UserError(
            "distillation.copy_layers: no tensor of the teacher's layers fits the student's; "
            "give it the teacher's d_model, num_heads and d_ff, or set copy_layers to false"
        )
    for stack, layers in found.layers.items():
        say(f"student    {stack}: layers {', '.join(map(str, layers))} of the teacher")
    others = len(found.copied) - found.num_in_layers
    say(f"           {len(found.copied)} tensors copied, {others} of them of no layer")
    if found.drawn:
        say(f"           {len(found.drawn)} drawn anew: {', '.join(found.drawn)}")
