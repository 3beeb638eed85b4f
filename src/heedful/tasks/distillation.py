"""Learning from a larger model: a wrapper of any task, and a student that begins as its layers.

Sanh et al. 2019, "DistilBERT, a distilled version of BERT", sec. 2 and 3; for texts that a model
writes Kim and Rush 2016, "Sequence-Level Knowledge Distillation": sec. 3.1, whose word-level loss
is the first two terms, and sec. 3.2 and 3.3, in which its outputs are the data. Nguyen et al. 2020,
"Data Diversification", sec. 3, add these to the data, those of more models, and of models that
translate back (Sennrich et al. 2016).
"""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.config import Distillation, Recipe
from heedful.data.cache import remove_folder
from heedful.data.collate import Batch
from heedful.data.columns import DataReport, join_columns, open_columns
from heedful.data.prepared import content_key, prepare_once
from heedful.errors import UserError, format_names
from heedful.evaluation.target_scores import target_states
from heedful.parts.losses import ChunkLoss, LossSum, chunked_loss, cross_entropy
from heedful.pipelines import SavedModel, Translator
from heedful.pipelines.loading import expect, load
from heedful.progress import PrintLine
from heedful.tasks.inputs import resolve_paths
from heedful.tasks.run_data import Data
from heedful.tasks.task import Task
from heedful.tasks.teacher_outputs import PAIRS, Pass, ShardWriter
from heedful.zoo.names import weights_of
from heedful.zoo.saved import WEIGHTS, copy_matching

_MORE = "more_teachers", "back_translation_models"
_OF_SEQUENCES = "include_references", "select_by_chrf", *_MORE
_IN_BLOCK = re.compile(r"(.*\bblocks)\.(\d+)\.(.+)")


def soft_target_loss(
    student: Float[Tensor, "N C"], teacher: Float[Tensor, "N C"], temperature: float
) -> Float[Tensor, ""]:
    """T² · Σ KL(softmax(teacher / T) ‖ softmax(student / T)), from logits, summed over N places.

    Gradients of soft targets shrink with 1/T²; the factor makes up for that, so that weights need
    no change with T (Hinton et al. 2015, sec. 2). It differs from their cross-entropy by the
    teacher's entropy, which has no gradient, and is 0 where both say the same.
    """
    wanted = (teacher.float() / temperature).log_softmax(-1)
    said = (student.float() / temperature).log_softmax(-1)
    return temperature**2 * F.kl_div(said, wanted, reduction="sum", log_target=True)


def cosine_loss(student: Float[Tensor, "N D"], teacher: Float[Tensor, "N D"]) -> Float[Tensor, ""]:
    """Σ 1 - cos(student, teacher), summed over N states: their directions are to be the same."""
    return (1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)).sum()


@dataclass(frozen=True)
class DistillationLoss:
    """The loss with a teacher: distillation_weight · soft targets + cross_entropy_weight · cross
    entropy + cosine_weight · cosine, all sums over the places of the task's own loss.

    Logits are formed some at a time, with their gradient at once. Label smoothing is of the targets
    alone.

    Args:
        teacher: a net in eval mode; gets no gradient.
    """

    settings: Distillation
    teacher: Any
    label_smoothing: float = 0.0

    def __call__(self, net: Any, batch: Batch) -> LossSum:
        states, targets = target_states(net, batch), batch.targets
        with torch.no_grad():
            wanted = target_states(self.teacher, batch)
        settings = self.settings

        def make_loss(logits: Tensor, rows: Tensor, is_learnt: bool) -> ChunkLoss:
            with torch.set_grad_enabled(is_learnt):
                logits.requires_grad_(is_learnt)
                hard = cross_entropy(logits, targets[rows], label_smoothing=self.label_smoothing)
                loss = settings.cross_entropy_weight * hard.loss
                if settings.distillation_weight:
                    with torch.no_grad():
                        soft_logits = self.teacher.head(wanted[rows])
                    soft = soft_target_loss(logits, soft_logits, settings.temperature)
                    loss = loss + settings.distillation_weight * soft
            grad = torch.autograd.grad(loss, logits)[0] if is_learnt else None
            return ChunkLoss(loss.detach(), hard.nll, hard.correct, grad)

        rows = torch.arange(len(targets), device=targets.device)
        found = chunked_loss(net.head, states, rows, make_loss)
        if settings.cosine_weight:
            cosine = settings.cosine_weight * cosine_loss(states, wanted)
            found = found._replace(loss=found.loss + cosine)
        return found


def check_distillation(recipe: Recipe, levels: tuple[str, ...]) -> None:
    """Refuse settings of `distillation` that say nothing or exclude each other.

    `levels` are those that the task has.
    """
    settings = recipe.distillation
    weights = settings.distillation_weight, settings.cross_entropy_weight, settings.cosine_weight
    problems = {
        f"distillation.level {settings.level} is for pairs of texts; the task {recipe.task} has "
        "level word": settings.level not in levels,
        "distillation.cosine_weight is of level word: at level sequence the student sees the "
        "teacher's outputs alone; set it to 0": settings.level == "sequence"
        and settings.cosine_weight,
        "distillation: distillation_weight, cross_entropy_weight and cosine_weight are all 0, so "
        "nothing would be learnt; raise one": settings.level == "word" and not any(weights),
        f"distillation: {', '.join(_OF_SEQUENCES)} are of level sequence; set that, or leave them "
        "out": settings.level == "word" and any(getattr(settings, key) for key in _OF_SEQUENCES),
        "init_from and distillation.copy_layers both say what the student begins as; leave one "
        "out": settings.copy_layers and recipe.init_from is not None,
    }
    if settings.teacher is None:
        problems = {
            f"distillation.{key} is set but distillation.teacher is not: add "
            "--set distillation.teacher=DIRECTORY": getattr(settings, key) != field.default
            for key, field in Distillation.model_fields.items()
        }
    for message, is_wrong in problems.items():
        if is_wrong:
            raise UserError(message)


def prepare_teacher(teacher: SavedModel, student: SavedModel, task: Task, data: Data) -> None:
    """Put the teacher into eval mode and without gradients.

    Raises:
        UserError: a teacher of another kind, or one whose outputs or states the student's cannot
            be compared with.
    """
    recipe = task.recipe
    settings = recipe.distillation
    expect(teacher, type(student), f"distillation.teacher of the task {recipe.task}")
    longest = task.model_keys(data, student.metadata.architecture)["max_length"]
    if teacher.config.max_length < longest:
        raise UserError(
            f"distillation.teacher reads {teacher.config.max_length} tokens at most, but the data "
            f"have up to {longest}; lower {task.length_key}"
        )
    for name in ("vocab_size", "src_vocab_size", "tgt_vocab_size"):
        own, theirs = (getattr(model.config, name, None) for model in (student, teacher))
        if own != theirs:
            raise UserError(
                f"the student's {name} is {own} and the teacher's {theirs}; both must have the "
                "same vocabulary, so start from a model that has the teacher's"
            )
    widths = student.config.d_model, teacher.config.d_model
    if settings.cosine_weight and settings.level == "word" and widths[0] != widths[1]:
        raise UserError(
            f"distillation.cosine_weight compares states, but the student's d_model is {widths[0]} "
            f"and the teacher's {widths[1]}; set it to 0, or model.d_model to {widths[1]}"
        )
    if data.labels and data.labels != tuple(teacher.metadata.labels):
        raise UserError(
            f"distillation.teacher knows the labels {format_names(teacher.metadata.labels)}, but "
            f"data.train.file has {format_names(data.labels)}; they must be the same"
        )
    teacher.net.eval().requires_grad_(False)


@dataclass(frozen=True)
class OtherTeachers:
    """Those beside the first: of the same direction, and of the other. Any tokenizers will do."""

    forward: Sequence[Translator] = ()
    backward: Sequence[Translator] = ()

    @classmethod
    def open(cls, settings: Distillation, device: str) -> "OtherTeachers":
        """Load `more_teachers` and `back_translation_models`, which must be translators."""
        forward, backward = (
            [
                expect(
                    load(path, device=device, backend="eager"), Translator, f"distillation.{key}"
                )
                for path in resolve_paths(getattr(settings, key))
            ]
            for key in _MORE
        )
        return cls(forward, backward)


def sequence_distillation(
    data: Data,
    task: Task,
    teacher: Translator,
    others: OtherTeachers,
    cache: Path,
    print_line: PrintLine,
) -> Data:
    """The data with the teachers' translations as targets (Kim and Rush 2016, sec. 3.2).

    With `include_references` the pairs as they are follow; with `back_translation_models` their
    translations of the targets, each as the source of its target. All are made once for these
    models and kept in `cache`, in shards until all are made: an interruption costs one shard. A
    text is left out, and counted, whose translation does not end within the model's limit for it,
    or is too long: it would teach the wrong end.

    Args:
        teacher: has the data's tokenizers.

    Raises:
        UserError: no translation is left.
    """
    settings, longest = task.recipe.distillation, task.recipe.data.max_length
    forward = [*resolve_paths(settings.teacher), *resolve_paths(settings.more_teachers)]
    key = {
        "prepared": data.directory.name,
        "models": [
            [content_key([path / WEIGHTS]) for path in side]
            for side in (forward, resolve_paths(settings.back_translation_models))
        ],
        "include_references": settings.include_references,
        "beam_size": settings.beam_size,
        "select_by_chrf": settings.select_by_chrf,
        "max_length": longest,
    }
    passes = [Pass("teacher", teacher), *(Pass("forward", model) for model in others.forward)]
    passes += [Pass("targets")] if settings.include_references else []
    passes += [Pass("backward", model) for model in others.backward]
    total = len(data.splits["train"]) * len(passes)
    models = [str(path) for path in (*forward, *resolve_paths(settings.back_translation_models))]
    about = {"task": f"{task.recipe.task}, outputs of a teacher", "files": models}
    writer = ShardWriter(data, settings, longest, key, about, cache, print_line)
    shards: list[Path] = []

    def fill(directory: Path) -> None:
        shards.extend(writer.write(passes))
        parts = [shard / PAIRS for shard in shards]
        num_kept = sum(len(open_columns(part)) for part in parts)
        if not num_kept:
            raise UserError(
                "distillation.teacher ends none of its translations within its length limit, so "
                "there is nothing to learn from; train it longer, or use level word"
            )
        join_columns(directory / "train", parts, DataReport(total, num_kept, noun="pairs"))

    data = data.with_teacher_outputs(prepare_once(cache, key, fill, about))
    for shard in shards:
        with suppress(OSError):  # one that somebody removed already
            remove_folder(shard)
    kept = len(data.splits["train"])
    if kept < total:
        print_line(f"           {total - kept:,} left out: too long, or without an end")
    return data


def initialize_from_layers(student: SavedModel, teacher: SavedModel, print_line: PrintLine) -> None:
    """`copy_layers`, with what was copied said in lines; raises UserError where nothing fits."""
    layers, copied, drawn = copy_layers(student.net, teacher.net)
    num_in_layers = sum(_IN_BLOCK.fullmatch(name) is not None for name in copied)
    if not num_in_layers:
        raise UserError(
            "distillation.copy_layers: no tensor of the teacher's layers fits the student's; "
            "give it the teacher's d_model, num_heads and d_ff, or set copy_layers to false"
        )
    for stack, numbers in layers.items():
        print_line(f"student    {stack}: layers {', '.join(map(str, numbers))} of the teacher")
    others = len(copied) - num_in_layers
    print_line(f"           {len(copied)} tensors copied, {others} of them of no layer")
    if drawn:
        print_line(f"           {len(drawn)} drawn anew: {', '.join(drawn)}")


def copy_layers(
    student: nn.Module, teacher: nn.Module
) -> tuple[dict[str, tuple[int, ...]], list[str], list[str]]:
    """Begin a student as every k-th layer of its teacher, and all of what is no layer.

    Of L teacher's layers the student's layer i of N is ⌊i · L / N⌋: every second one, from the
    first, where N is half of L (Sanh et al. 2019, sec. 3). Tensors go by name and shape, a layer's
    by the name of its stack and its own number.

    Returns:
        By stack, the teacher's layer that each of the student's own began as; the names of the
        student's tensors that are the teacher's; those of the others.

    Raises:
        UserError: a stack of the student has more layers than the teacher's.
    """
    depths, known = _depths(weights_of(student)), _depths(weights_of(teacher))
    layers = {}
    for stack, depth in depths.items():
        if depth > known.get(stack, 0):
            raise UserError(
                f"distillation.copy_layers: the student has {depth} layers in {stack}, the teacher "
                f"{known.get(stack, 0)}; a student cannot have more"
            )
        layers[stack] = tuple(index * known[stack] // depth for index in range(depth))

    def origin(name: str) -> str:
        place = _IN_BLOCK.fullmatch(name)
        return f"{place[1]}.{layers[place[1]][int(place[2])]}.{place[3]}" if place else name

    copied, drawn, _ = copy_matching(student, teacher, origin)
    return layers, copied, drawn


def _depths(names: dict[str, Tensor]) -> dict[str, int]:
    """How many layers each stack has."""
    blocks = dict.fromkeys(each.group(1, 2) for each in map(_IN_BLOCK.fullmatch, names) if each)
    return Counter(stack for stack, _ in blocks)
