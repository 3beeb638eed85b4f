"""Knowledge distillation: losses with a teacher, teacher outputs as data, copied layers.

Sanh et al. 2019, "DistilBERT, a distilled version of BERT", sec. 2 and 3. For translation Kim and
Rush 2016, "Sequence-Level Knowledge Distillation": the word-level loss of sec. 3.1 is the first two
terms of the loss here; in sec. 3.2 and 3.3 the teacher's outputs are the training data. Nguyen et
al. 2020, "Data Diversification", sec. 3, use these in addition to the data, with those of more
models and of back-translation (Sennrich et al. 2016).
"""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.config import Distillation, Recipe
from heedful.data.collate import Batch
from heedful.data.columns import ColumnsWriter, open_columns
from heedful.data.prepared import content_key, prepare_once, remove_folder
from heedful.data.reports import DataReport
from heedful.errors import UserError, format_names
from heedful.evaluation.likelihood import target_states
from heedful.parts.losses import ChunkLoss, LossSum, chunked_loss, cross_entropy
from heedful.pipelines import SavedModel, Translator
from heedful.pipelines.loading import expect, load
from heedful.progress import PrintLine
from heedful.tasks.corpora import resolve_paths, shared_languages
from heedful.tasks.run_data import RunData
from heedful.tasks.task import Task
from heedful.tasks.teacher_outputs import PAIRS, Pass, ShardWriter
from heedful.zoo.saved import WEIGHTS, copy_matching, weights_of

_SEQUENCE_KEYS = "include_references", "back_translation_models"
_IN_BLOCK = re.compile(r"(.*\bblocks)\.(\d+)\.(.+)")


def soft_target_loss(
    student: Float[Tensor, "N C"], teacher: Float[Tensor, "N C"], temperature: float
) -> Float[Tensor, ""]:
    """T² · Σ KL(softmax(teacher / T) ‖ softmax(student / T)), from logits, summed over N targets.

    The factor T² compensates for gradients of soft targets, which scale with 1/T² (Hinton et al.
    2015, sec. 2). The divergence is the cross-entropy without the teacher's entropy, a constant.
    """
    teacher_log_probs = (teacher.float() / temperature).log_softmax(-1)
    log_probs = (student.float() / temperature).log_softmax(-1)
    return temperature**2 * F.kl_div(log_probs, teacher_log_probs, reduction="sum", log_target=True)


def cosine_loss(student: Float[Tensor, "N D"], teacher: Float[Tensor, "N D"]) -> Float[Tensor, ""]:
    """Σ 1 - cos(student, teacher), summed over N states."""
    return (1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)).sum()


@dataclass(frozen=True)
class DistillationLoss:
    """The loss with a teacher: distillation_weight · soft targets + cross_entropy_weight · cross
    entropy + cosine_weight · cosine, all sums over the targets of the task's loss.

    Logits and their gradient are computed in chunks. Label smoothing applies to the cross entropy
    only.

    Args:
        teacher: a net in eval mode; it receives no gradient.
    """

    settings: Distillation
    teacher: Any
    label_smoothing: float = 0.0

    def __call__(self, net: Any, batch: Batch) -> LossSum:
        states, targets = target_states(net, batch), batch.targets
        with torch.no_grad():
            teacher_states = target_states(self.teacher, batch)
        settings = self.settings

        def make_loss(logits: Tensor, rows: Tensor, needs_grad: bool) -> ChunkLoss:
            with torch.set_grad_enabled(needs_grad):
                logits.requires_grad_(needs_grad)
                hard = cross_entropy(logits, targets[rows], label_smoothing=self.label_smoothing)
                loss = settings.cross_entropy_weight * hard.loss
                if settings.distillation_weight:
                    with torch.no_grad():
                        soft_logits = self.teacher.head(teacher_states[rows])
                    soft = soft_target_loss(logits, soft_logits, settings.temperature)
                    loss = loss + settings.distillation_weight * soft
            grad = torch.autograd.grad(loss, logits)[0] if needs_grad else None
            return ChunkLoss(loss.detach(), hard.nll, hard.correct, grad)

        rows = torch.arange(len(targets), device=targets.device)
        sums = chunked_loss(net.head, states, rows, make_loss)
        if settings.cosine_weight:
            cosine = settings.cosine_weight * cosine_loss(states, teacher_states)
            sums = sums._replace(loss=sums.loss + cosine)
        return sums


def check_distillation(recipe: Recipe, levels: tuple[str, ...]) -> None:
    """Raise UserError for settings of `distillation` without effect or in contradiction.

    Args:
        levels: the distillation levels that the task supports.
    """
    settings = recipe.distillation
    weights = settings.distillation_weight, settings.cross_entropy_weight, settings.cosine_weight
    problems = {
        f"distillation.level {settings.level} is for pairs of texts; the task {recipe.task} has "
        "level word": settings.level not in levels,
        "distillation.cosine_weight is for level word: at level sequence only the outputs of the "
        "teacher are used; set it to 0": settings.level == "sequence" and settings.cosine_weight,
        "distillation: distillation_weight, cross_entropy_weight and cosine_weight are all 0, so "
        "nothing would be learned; raise one": settings.level == "word" and not any(weights),
        f"distillation: {', '.join(_SEQUENCE_KEYS)} are for level sequence; set it, or leave them "
        "out": settings.level == "word" and any(getattr(settings, key) for key in _SEQUENCE_KEYS),
        "init_from and distillation.copy_layers both initialize the student; leave one "
        "out": settings.copy_layers and recipe.init_from is not None,
    }
    if settings.teacher is None:
        problems = {
            f"distillation.{key} is set but distillation.teacher is not: add "
            "distillation.teacher=DIRECTORY": getattr(settings, key) != field.default
            for key, field in Distillation.model_fields.items()
        }
    for message, is_wrong in problems.items():
        if is_wrong:
            raise UserError(message)


def prepare_teacher(teacher: SavedModel, student: SavedModel, task: Task, data: RunData) -> None:
    """Put the teacher into eval mode, without gradients.

    Raises:
        UserError: a teacher of another family, vocabulary, length, labels or width than the
            student needs.
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
        size, teacher_size = (getattr(m.config, name, None) for m in (student, teacher))
        if size != teacher_size:
            raise UserError(
                f"the student's {name} is {size} and the teacher's {teacher_size}; both must have "
                "the same vocabulary, so start from a model that has the teacher's"
            )
    widths = student.config.d_model, teacher.config.d_model
    if settings.cosine_weight and settings.level == "word" and widths[0] != widths[1]:
        raise UserError(
            f"distillation.cosine_weight compares states, but the student's d_model is {widths[0]} "
            f"and the teacher's {widths[1]}; set it to 0, or model.d_model to {widths[1]}"
        )
    if data.labels and teacher.metadata.problem != "single_label":
        raise UserError(
            f"distillation.teacher is a classifier of the problem {teacher.metadata.problem}, but "
            "distillation is for one label per text; give another teacher"
        )
    if data.labels and data.labels != tuple(teacher.metadata.labels):
        raise UserError(
            f"distillation.teacher has the labels {format_names(teacher.metadata.labels)}, but "
            f"data.train.file has {format_names(data.labels)}; they must be the same"
        )
    teacher.net.eval().requires_grad_(False)


def open_backward(settings: Distillation, device: str) -> list[Translator]:
    """Load `back_translation_models`, which must be translators, with any tokenizers."""
    key = "distillation.back_translation_models"
    return [
        expect(load(path, device=device, backend="eager"), Translator, key)
        for path in resolve_paths(settings.back_translation_models)
    ]


def _set_target(model: Translator, language: str | None) -> None:
    """Set the language that a model for many directions translates rows of ids into."""
    if model.metadata.language_codes and language is not None:
        model.metadata = replace(model.metadata, tgt_language=language)


def sequence_distillation(
    data: RunData,
    task: Task,
    teacher: Translator,
    backward: Sequence[Translator],
    cache: Path,
    print_line: PrintLine,
) -> RunData:
    """The data with the teacher's translations as targets (Kim and Rush 2016, sec. 3.2).

    The pairs of the data follow with `include_references`, and pairs of a back-translation and its
    target with `back_translation_models`. All are computed once for these models and stored in
    `cache`; until all are complete in shards, so that an interruption loses at most one. Pairs
    with a translation that is too long or has no EOS are dropped and counted.

    Args:
        teacher: a model with the tokenizers of the data.
        backward: models that translate from target to source.

    Raises:
        UserError: no translation is left.
    """
    settings, longest = task.recipe.distillation, task.recipe.data.max_length
    languages = shared_languages(task.recipe)
    _set_target(teacher, languages[1])
    for model in backward:
        _set_target(model, languages[0])
    sides = [resolve_paths(path) for path in (settings.teacher, settings.back_translation_models)]
    key = {
        "prepared": data.directory.name,
        "models": [[content_key([path / WEIGHTS]) for path in side] for side in sides],
        "include_references": settings.include_references,
        "beam_size": settings.beam_size,
        "max_length": longest,
    }
    if any(model.metadata.language_codes for model in (teacher, *backward)):
        key["languages"] = languages
    passes = [Pass("teacher", teacher)]
    passes += [Pass("targets")] if settings.include_references else []
    passes += [Pass("backward", model) for model in backward]
    total = len(data.splits["train"]) * len(passes)
    models = [str(path) for side in sides for path in side]
    about = {"task": f"{task.recipe.task}, outputs of a teacher", "files": models}
    writer = ShardWriter(data, settings, longest, key, about, cache, print_line)
    shards: list[Path] = []

    def fill(directory: Path) -> None:
        """Write all shards, and join them in the directory."""
        shards.extend(writer.write(passes))
        parts = [shard / PAIRS for shard in shards]
        num_kept = sum(len(open_columns(part)) for part in parts)
        if not num_kept:
            raise UserError(
                "distillation.teacher ends none of its translations within its length limit, so "
                "there is nothing to learn from; train it longer, or use level word"
            )
        columns = ColumnsWriter(directory / "train")
        for part in parts:
            columns.append(open_columns(part))
        columns.complete(DataReport(total, num_kept, noun="pairs"), {})

    data = data.with_teacher_outputs(prepare_once(cache, key, fill, about))
    for shard in shards:
        with suppress(OSError):  # already removed by another process
            remove_folder(shard)
    num_pairs = len(data.splits["train"])
    if num_pairs < total:
        print_line(f"           {total - num_pairs:,} left out: too long, or without an end")
    return data


def initialize_from_layers(student: SavedModel, teacher: SavedModel, print_line: PrintLine) -> None:
    """`copy_layers`, with a printed summary; raises UserError if no layer fits."""
    layers, copied, initialized = copy_layers(student.net, teacher.net)
    num_in_layers = sum(_IN_BLOCK.fullmatch(name) is not None for name in copied)
    if not num_in_layers:
        raise UserError(
            "distillation.copy_layers: no tensor of the teacher's layers fits the student's; "
            "give it the teacher's d_model, num_heads and d_ff, or set copy_layers to false"
        )
    for stack, numbers in layers.items():
        print_line(f"student    {stack}: layers {', '.join(map(str, numbers))} of the teacher")
    others = len(copied) - num_in_layers
    print_line(f"           {len(copied)} tensors copied, {others} of them outside layers")
    if initialized:
        print_line(f"           {len(initialized)} initialized: {', '.join(initialized)}")


def copy_layers(
    student: nn.Module, teacher: nn.Module
) -> tuple[dict[str, tuple[int, ...]], list[str], list[str]]:
    """Copy every k-th layer of the teacher to the student, and all tensors outside layers.

    Layer i of the student's N layers is layer ⌊i · L / N⌋ of the teacher's L: every second one for
    N = L / 2 (Sanh et al. 2019, sec. 3). Tensors are matched by name, with the layer's number
    mapped, and by shape.

    Returns:
        For each stack, the teacher's layers that were copied; the names of copied tensors of the
        student; the names of the others.

    Raises:
        UserError: a stack of the student has more layers than the teacher's.
    """
    depths, teacher_depths = _depths(weights_of(student)), _depths(weights_of(teacher))
    layers = {}
    for stack, depth in depths.items():
        if depth > teacher_depths.get(stack, 0):
            raise UserError(
                f"distillation.copy_layers: the student has {depth} layers in {stack}, the teacher "
                f"{teacher_depths.get(stack, 0)}; a student cannot have more"
            )
        layers[stack] = tuple(index * teacher_depths[stack] // depth for index in range(depth))

    def origin(name: str) -> str:
        match = _IN_BLOCK.fullmatch(name)
        return f"{match[1]}.{layers[match[1]][int(match[2])]}.{match[3]}" if match else name

    copied, initialized, _ = copy_matching(student, teacher, origin)
    return layers, copied, initialized


def _depths(names: dict[str, Tensor]) -> dict[str, int]:
    """The number of layers of each stack."""
    matches = map(_IN_BLOCK.fullmatch, names)
    blocks = dict.fromkeys(match.group(1, 2) for match in matches if match)
    return Counter(stack for stack, _ in blocks)
