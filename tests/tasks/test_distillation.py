"""Distillation: the three losses, copied layers, teacher outputs, and runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import heedful
import heedful.parts.losses as losses
from commands import tiny, tree
from encoder_runs import (
    TWO_STACKS,
    PreparedTask,
    assert_resumes,
    loss_net_of,
    recipe_of,
    sentences,
    write,
)
from heedful.config import Distillation, parse_recipe
from heedful.data.prepared import cache_folder
from heedful.errors import UserError
from heedful.evaluation.likelihood import batch_loss
from heedful.pipelines import ModelMetadata
from heedful.progress import Advance, use_display
from heedful.run import train
from heedful.tasks.distillation import (
    DistillationLoss,
    copy_layers,
    cosine_loss,
    sequence_distillation,
    soft_target_loss,
)
from heedful.tasks.run_data import Inherited
from heedful.zoo import bert, vaswani2017
from heedful.zoo.saved import load_tensors, weights_of

LEVELS = {"distillation_weight": 5.0, "cross_entropy_weight": 2.0, "cosine_weight": 1.0}


def logits(seed: int, n: int = 7, classes: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, classes, generator=generator, dtype=torch.float64) * 3


def distillation_settings(**keys: Any) -> Distillation:
    return Distillation(
        **({"distillation_weight": 0.0, "cross_entropy_weight": 0.0, "cosine_weight": 0.0} | keys)
    )


# --- the losses -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 8.0])
def test_soft_targets_are_the_divergence_of_the_softened_distributions(temperature):
    student, teacher = logits(0), logits(1)
    p, q = ((item / temperature).softmax(-1) for item in (teacher, student))
    by_hand = temperature**2 * (p * (p.log() - q.log())).sum()
    actual = soft_target_loss(student, teacher, temperature)
    torch.testing.assert_close(actual.double(), by_hand, rtol=1e-5, atol=1e-6)
    module = torch.nn.KLDivLoss(reduction="batchmean")  # as the authors have it
    reference = module(F.log_softmax(student / temperature, -1), p) * temperature**2 * len(student)
    torch.testing.assert_close(actual.double(), reference, rtol=1e-5, atol=1e-6)


def test_the_cosine_loss_is_torchs_and_independent_of_norms():
    student, teacher = logits(0), logits(1)
    module = torch.nn.CosineEmbeddingLoss(reduction="sum")
    reference = module(student, teacher, torch.ones(len(student)))
    actual = cosine_loss(student, teacher).double()
    torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-5)
    assert float(cosine_loss(student, student * 3)) == pytest.approx(0, abs=1e-5)
    assert float(cosine_loss(student, -student)) == pytest.approx(2 * len(student), rel=1e-6)


# --- a student, a teacher and a batch of each task ------------------------------------------


TASKS = ["translation", "language_modeling", "masked_lm", "classification"]


def layers_of(task: str, count: int) -> dict[str, int]:
    two = task == "translation"
    return dict.fromkeys(
        ("num_encoder_layers", "num_decoder_layers") if two else ("num_layers",), count
    )


def two_nets(task: str, folder: Path) -> tuple[Any, ...]:
    """A batch of a task, a student of one layer and a teacher of two."""
    nets = []
    for count in (1, 2):
        keys = {f"model__{key}": value for key, value in layers_of(task, count).items()}
        run = PreparedTask(recipe_of(task, folder, **keys), folder / "data")
        nets.append(loss_net_of(run).net.eval())
        with torch.no_grad():
            for parameter in nets[-1].parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return run.load_batch(run.plan_epoch(0)[0]), *nets


def gradients(net: Any) -> dict[str, torch.Tensor]:
    actual = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in net.named_parameters()
    }
    net.zero_grad()
    return actual


@pytest.mark.parametrize("task", TASKS)
def test_with_cross_entropy_only_the_loss_is_the_tasks(task, tmp_path):
    batch, student, teacher = two_nets(task, tmp_path)
    own = batch_loss(student, batch, label_smoothing=0.1)
    own.loss.backward()
    expected = gradients(student)
    actual = DistillationLoss(distillation_settings(cross_entropy_weight=1.0), teacher, 0.1)(
        student, batch
    )
    actual.loss.backward()
    torch.testing.assert_close((actual.loss, actual.nll), (own.loss, own.nll))
    assert actual.tokens == own.tokens == batch.num_targets
    for name, gradient in gradients(student).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("key", ["distillation_weight", "cosine_weight"])
def test_a_student_equal_to_its_teacher_has_zero_gradients(task, key, tmp_path):
    batch, student, teacher = two_nets(task, tmp_path)
    actual = DistillationLoss(distillation_settings(**{key: 1.0}), student)(student, batch)
    actual.loss.backward()
    assert actual.loss.item() == pytest.approx(0, abs=1e-4)
    same = gradients(student)
    DistillationLoss(distillation_settings(**{key: 1.0}), teacher)(student, batch).loss.backward()
    other = gradients(student)
    assert max(float(gradient.abs().max()) for gradient in same.values()) < 1e-4
    assert max(float(gradient.abs().max()) for gradient in other.values()) > 1e-2


@pytest.mark.parametrize("task", TASKS)
def test_the_three_losses_are_added_with_their_weights(task, tmp_path):
    batch, student, teacher = two_nets(task, tmp_path)
    single = [
        DistillationLoss(distillation_settings(**{k: 1.0}), teacher)(student, batch).loss.item()
        for k in LEVELS
    ]
    assert min(single) > 0.001
    together = DistillationLoss(distillation_settings(**LEVELS), teacher)(student, batch)
    expected = sum(w * loss for w, loss in zip(LEVELS.values(), single, strict=True))
    assert together.loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_losses_are_independent_of_chunks_and_the_teacher_has_no_gradient(
    task, monkeypatch, tmp_path
):
    batch, student, teacher = two_nets(task, tmp_path)
    results = []
    for elements in (10**9, 24):
        monkeypatch.setattr(losses, "_LEAST_ROWS", 1)
        monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(losses, "_BLOCK_ELEMENTS", elements)
        torch.manual_seed(5)
        actual = DistillationLoss(distillation_settings(**LEVELS), teacher)(student, batch)
        actual.loss.backward()
        results.append((actual, gradients(student)))
    (one, first), (many, second) = results
    assert all(weight.grad is None for weight in teacher.parameters())
    torch.testing.assert_close(many, one)
    for name, gradient in first.items():
        torch.testing.assert_close(second[name], gradient, rtol=1e-4, atol=1e-5)


# --- a student of its teacher's layers ------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "reference", "layers"),
    [(1, 2, (0,)), (2, 4, (0, 2)), (3, 6, (0, 2, 4)), (2, 5, (0, 2)), (3, 3, (0, 1, 2))],
)
def test_a_student_is_initialized_from_every_second_layer(own, reference, layers):
    torch.manual_seed(0)
    keys = {"d_model": 16, "num_heads": 2, "d_ff": 32, "max_length": 8, "head": "mlm"}
    student, teacher = (
        bert.build(bert.Config(12, num_layers=count, **keys)) for count in (own, reference)
    )
    layers_of, copied, initialized = copy_layers(student, teacher)
    assert layers_of == {"encoder.blocks": layers}
    own_result, teacher_weights = weights_of(student), weights_of(teacher)
    for index, layer in enumerate(layers):
        names = [name for name in own_result if name.startswith(f"encoder.blocks.{index}.")]
        assert len(names) == 12
        for name in names:
            origin = name.replace(f"blocks.{index}.", f"blocks.{layer}.")
            assert torch.equal(own_result[name], teacher_weights[origin])
            assert own_result[name].data_ptr() != teacher_weights[origin].data_ptr()
    assert torch.equal(
        own_result["embedding.tokens.weight"], teacher_weights["embedding.tokens.weight"]
    )
    assert copied == sorted(own_result)
    assert initialized == []


def test_layers_of_both_stacks_are_copied_and_others_are_named():
    torch.manual_seed(0)
    keys = TWO_STACKS | {"max_length": 8}
    teacher = vaswani2017.build(
        vaswani2017.Config(12, 12, num_encoder_layers=4, num_decoder_layers=2, **keys)
    )
    keys |= {"d_ff": 48}
    student = vaswani2017.build(
        vaswani2017.Config(12, 12, num_encoder_layers=2, num_decoder_layers=2, **keys)
    )
    layers_of, _, initialized = copy_layers(student, teacher)
    assert layers_of == {"encoder.blocks": (0, 2), "decoder.blocks": (0, 1)}
    assert initialized
    assert all(".feedforward.sublayer." in name for name in initialized)
    with pytest.raises(UserError, match=r"4 layers in encoder\.blocks, the teacher 2"):
        copy_layers(teacher, student)


# --- runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """(folder of the data, folder of the run) of a teacher of each task."""
    runs = {}

    def make(task: str) -> tuple[Path, Path]:
        if task not in runs:
            folder = tmp_path_factory.mktemp(task)
            train(recipe_of(task, folder), folder / "teacher")
            runs[task] = folder, folder / "teacher"
        return runs[task]

    return make


def student_of(task: str, folder: Path, teacher: Path, **changes: Any) -> Any:
    keys: dict[str, Any] = {f"model__{key}": value for key, value in layers_of(task, 1).items()}
    keys |= {"distillation": {"teacher": str(teacher), "copy_layers": True, "cosine_weight": 1.0}}
    return recipe_of(task, folder, **(keys | changes))


@pytest.mark.parametrize("task", TASKS)
def test_a_student_learns_and_a_resumed_run_is_equal(task, teachers, tmp_path):
    folder, teacher = teachers(task)
    before = {name: tensor.clone() for name, tensor in load_tensors(teacher / WEIGHTS).items()}
    recipe = student_of(task, folder, teacher)
    assert_resumes(recipe, tmp_path, ("scores.json",))
    for name, tensor in load_tensors(teacher / WEIGHTS).items():
        assert torch.equal(tensor, before[name])
    student, master = (heedful.load(path, device="cpu") for path in (tmp_path / "whole", teacher))
    assert student.src_tokenizer.content() == master.src_tokenizer.content()
    names = set(load_tensors(tmp_path / "whole" / WEIGHTS))
    assert names < set(before)  # fewer layers, and nothing of the teacher besides
    assert not any(".blocks.1." in name for name in names)
    state = load_tensors(tmp_path / "whole/checkpoints/step-00000012" / WEIGHTS)
    assert set(state) == names


WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("task", TASKS)
def test_a_student_with_copied_layers_has_the_sizes_and_weights_of_its_teacher(
    task, teachers, tmp_path
):
    """With a tiny learning rate the copied weights stay."""
    folder, teacher = teachers(task)
    teacher_config = heedful.load(teacher, device="cpu").config
    keys = {"name": "constant", "learning_rate": 1e-12, "warmup_steps": 0}
    recipe = student_of(task, folder, teacher, training__max_steps=1, training__schedule=keys)
    own_keys = layers_of(task, 1) | {"dropout": 0.25}
    printed_lines: list[str] = []
    train(
        recipe.model_copy(update={"model": own_keys}),
        tmp_path / "run",
        print_line=printed_lines.append,
    )
    student = heedful.load(tmp_path / "run", device="cpu").config
    assert student == replace(teacher_config, **own_keys)
    assert any("blocks: layers 0 of the teacher" in line for line in printed_lines)
    own, teacher_weights = (load_tensors(path / WEIGHTS) for path in (tmp_path / "run", teacher))
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, teacher_weights[name], rtol=0, atol=1e-9)


STEPS = {
    "training__max_steps": 25,
    "training__evaluate_every": 25,
    "training__batch_sentences": 16,
}


def divergence(student: Any, teacher: Any, recipe: Any, folder: Path) -> float:
    """The divergence of a student's predictions from its teacher's, on training pairs."""
    run = PreparedTask(
        recipe, folder, inherited=Inherited((teacher.src_tokenizer, teacher.tgt_tokenizer))
    )
    batch = run.load_batch(np.arange(40))
    keys = distillation_settings(distillation_weight=1.0, temperature=1.0)
    with torch.no_grad():
        return float(DistillationLoss(keys, teacher.net)(student.net, batch).loss)


def test_a_student_with_soft_targets_comes_nearer_to_its_teacher(teachers, tmp_path):
    folder, teacher = teachers("translation")
    master = heedful.load(teacher, device="cpu")
    actual = {}
    for name, weights in (("soft", (1.0, 0.0)), ("hard", (0.0, 1.0))):
        keys = {
            "teacher": str(teacher),
            "distillation_weight": weights[0],
            "cross_entropy_weight": weights[1],
        }
        recipe = student_of("translation", folder, teacher, distillation=keys, **STEPS)
        train(recipe, tmp_path / name)
        student = heedful.load(tmp_path / name, device="cpu")
        actual[name] = divergence(student, master, recipe, tmp_path / "data")
    assert actual["soft"] < 0.6 * actual["hard"], actual


@pytest.fixture
def data_with_teacher_outputs(teachers):
    """A prepared task, and a function that returns data with teacher outputs."""
    folder, teacher = teachers("translation")
    master = heedful.load(teacher, device="cpu")

    def make(backward: Any = (), **keys: Any) -> tuple[PreparedTask, Any]:
        keys = {"teacher": str(teacher), "level": "sequence", **keys}
        recipe = student_of("translation", folder, teacher, distillation=keys)
        tokenizers = master.src_tokenizer, master.tgt_tokenizer
        run = PreparedTask(recipe, cache_folder(), inherited=Inherited(tokenizers))
        cache, print_line = cache_folder(), run.printed_lines.append
        return run, sequence_distillation(run.data, run.task, master, backward, cache, print_line)

    return master, make


def test_stored_outputs_of_a_model_for_many_languages_depend_on_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / WEIGHTS).write_bytes(b"")
    keys: list[Any] = []
    monkeypatch.setattr(
        "heedful.tasks.distillation.prepare_once", lambda cache, key, *_: keys.append(key)
    )
    data: Any = SimpleNamespace(directory=tmp_path, splits={"train": []})
    data.with_teacher_outputs = lambda directory: data
    distillation = {"teacher": str(tmp_path), "level": "sequence"}
    distillation["back_translation_models"] = [str(tmp_path)]
    for codes in ({}, {"de": "__de__", "nl": "__nl__"}):
        for language in ("de", "nl"):
            content = {"data": {"src_language": language}, "distillation": distillation}
            content |= {"task": "translation", "training": {"max_steps": 1}}
            task: Any = SimpleNamespace(recipe=parse_recipe(content))
            models: list[Any] = [
                SimpleNamespace(metadata=ModelMetadata("m2m100", "translation", language_codes=of))
                for of in ({}, codes)
            ]
            sequence_distillation(data, task, models[0], models[1:], tmp_path, str)
    one, other, of_german, of_dutch = keys
    assert one == other
    assert of_german != of_dutch


def test_sequences_are_the_teachers_translations(teachers, data_with_teacher_outputs, tmp_path):
    folder, teacher = teachers("translation")
    keys = {"teacher": str(teacher), "level": "sequence", "beam_size": 2}
    recipe = student_of("translation", folder, teacher, distillation=keys, training__max_steps=1)
    printed_lines: list[str] = []
    train(recipe, tmp_path / "run", print_line=printed_lines.append)
    assert any("translates" in line for line in printed_lines)
    master, make = data_with_teacher_outputs
    run, outputs = make(beam_size=2)
    own, actual = pairs_of(run.data), pairs_of(outputs)
    sources = [source for source, _ in own]
    beams = master.generate(
        sources, beam_size=2, stop_rule="optimal", batch_tokens=300, return_details=True
    )
    expected = [
        (source, best.ids)
        for source, (best, *_) in zip(sources, beams, strict=True)
        if best.finished and len(best.ids) <= recipe.data.max_length
    ]
    assert expected
    assert actual == expected != own
    assert all(ids[-1] == master.tgt_tokenizer.eos_id for _, ids in actual)
    assert outputs.splits["train"].report.num_lines == 64
    assert not [
        line for line in run.printed_lines if "translates" in line
    ]  # they were there already


def pairs_of(data: Any) -> list[tuple[list[int], list[int]]]:
    src, tgt = data.ids("train", "src"), data.ids("train", "tgt")
    return [(one.tolist(), other.tolist()) for one, other in zip(src, tgt, strict=True)]


def test_references_and_back_translations_are_included(teachers, data_with_teacher_outputs):
    _, teacher = teachers("translation")
    more = {
        "include_references": True,
        "back_translation_models": [str(teacher)],
    }
    master, make = data_with_teacher_outputs
    tokenizers = master.src_tokenizer, master.tgt_tokenizer
    run, first = make(beam_size=1)
    _, both = make([master], beam_size=1, **more)
    own, actual = pairs_of(run.data), [pairs_of(first), pairs_of(both)]

    def written(rows: Any, read: Any, write: Any) -> list[list[int]]:
        outputs = master.generate(
            read.decode_batch(rows), beam_size=1, too_long="truncate", return_details=True
        )
        texts = [best.text if best.finished else "" for best, *_ in outputs]
        return [write.encode_target(write.encode(text)) if text else [] for text in texts]

    _, targets = zip(*own, strict=True)
    back = [*zip(written(targets, *reversed(tokenizers)), targets, strict=True)]
    assert actual[1] == actual[0] + [pair for pair in [*own, *back] if all(pair)]
    assert len(actual[1]) > len(actual[0]) + len(own)


def test_a_target_too_long_for_the_backward_model_is_left_out(teachers, data_with_teacher_outputs):
    _, teacher = teachers("translation")
    master, make = data_with_teacher_outputs
    short = heedful.load(teacher, device="cpu")
    run, _ = make(beam_size=2)  # cached by an earlier test
    targets = [tgt for _, tgt in pairs_of(run.data)]
    lengths = [len(ids) for ids in short.prompt_ids(master.tgt_tokenizer.decode_batch(targets))]
    short.config = replace(short.config, max_length=max(lengths) - 1)
    _, outputs = make([short], beam_size=3, back_translation_models=str(teacher))
    left_out = [ids for ids, n in zip(targets, lengths, strict=True) if n == max(lengths)]
    remaining = [tgt for _, tgt in pairs_of(outputs)]
    assert left_out
    assert not [ids for ids in left_out if ids in remaining]


def test_an_interruption_loses_at_most_one_shard(data_with_teacher_outputs, monkeypatch, tmp_path):
    """Progress counts the rows of all passes, those of reused shards included."""
    master, make = data_with_teacher_outputs
    settings = {"beam_size": 2, "include_references": True, "back_translation_models": "nowhere"}
    plain, requested, stops = type(master).generate, list[int](), list[int]()
    reports: list[tuple[str, int, int]] = []

    @contextmanager
    def show(what: str, total: int) -> Iterator[Advance]:
        parts: list[int] = []
        yield parts.append
        reports.append((what, total, sum(parts)))

    def generate(self: Any, texts: Any, **options: Any) -> Any:
        requested.append(len(texts))
        if len(requested) in stops:
            raise KeyboardInterrupt
        return plain(self, texts, **options)

    monkeypatch.setattr(type(master), "generate", generate)
    monkeypatch.setattr("heedful.tasks.distillation.content_key", lambda paths: list("k"))
    outputs = {}
    for name, size, stops in (("at once", 1000, []), ("shards", 10, []), ("stopped", 10, [4, 12])):
        monkeypatch.setattr("heedful.tasks.teacher_outputs.SHARD_ROWS", size)
        monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / name))
        requested.clear()
        for _ in stops:
            with pytest.raises(KeyboardInterrupt):
                make([master], **settings)
        with use_display(show):
            _, data = make([master], **settings)
        assert reports.pop() == ("translating", 3 * 64, 3 * 64)
        outputs[name] = tree(data.outputs)
        # Twice all rows, and again the shards that were interrupted.
        assert sum(requested) == 2 * 64 + sum(requested[stop - 1] for stop in stops)
        assert max(requested) <= size
        folders = [path for path in cache_folder().iterdir() if path.is_dir()]
        assert len(folders) == 2  # the data and the pairs: the shards are removed
    assert outputs["stopped"] == outputs["shards"] == outputs["at once"]


def test_a_resumed_run_on_sequences_is_equal(teachers, tmp_path):
    folder, teacher = teachers("translation")
    keys = {"teacher": str(teacher), "level": "sequence", "beam_size": 1}
    assert_resumes(student_of("translation", folder, teacher, distillation=keys), tmp_path, ())


# --- what a user may do wrong ---------------------------------------------------------------


def refused(recipe: Any, folder: Path, *parts: str) -> None:
    with pytest.raises(UserError) as error:
        train(recipe, folder / "run")
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert not (folder / "run").exists()


def test_a_cosine_of_states_needs_one_width(teachers, tmp_path):
    folder, teacher = teachers("masked_lm")
    keys = {"teacher": str(teacher), "cosine_weight": 1.0}
    recipe = student_of("masked_lm", folder, teacher, distillation=keys, model__d_model=8)
    refused(recipe, tmp_path, "cosine_weight", "is 8 and the teacher's 16", "model.d_model to 16")
    keys["cosine_weight"] = 0.0
    recipe = student_of(
        "masked_lm", folder, teacher, distillation=keys, model__d_model=8, training__max_steps=1
    )
    train(recipe, tmp_path / "narrow")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"distillation": {"copy_layers": True}}, ["copy_layers", "distillation.teacher"]),
        ({"distillation": {"cosine_weight": 1.0}}, ["cosine_weight", "distillation.teacher"]),
        ({"distillation__level": "sequence"}, ["level sequence", "masked_lm"]),
        (
            {"distillation__distillation_weight": 0.0, "distillation__cross_entropy_weight": 0.0},
            None,
        ),
        ({"init_from": "TEACHER"}, ["init_from and distillation.copy_layers"]),
        ({"model__num_layers": 3}, ["3 layers", "the teacher 2"]),
        ({"model__d_ff": 64, "model__d_model": 8, "distillation__cosine_weight": 0.0}, ["fits"]),
        ({"data__max_length": 64}, ["data.max_length 64", "16"]),
        ({"distillation__teacher": "nowhere"}, ["nowhere", "does not exist"]),
    ],
)
def test_contradictory_settings_are_refused(changes, parts, teachers, tmp_path):
    folder, teacher = teachers("masked_lm")
    changes = {key: str(teacher) if v == "TEACHER" else v for key, v in changes.items()}
    if parts is None:
        changes["distillation__cosine_weight"], parts = 0.0, ["are all 0"]
    refused(student_of("masked_lm", folder, teacher, **changes), tmp_path, *parts)


@pytest.mark.parametrize("key", ["include_references", "back_translation_models"])
def test_settings_of_level_sequence_need_that_level(key, tmp_path):
    value = "runs/x" if key == "back_translation_models" else True
    alone = parse_recipe(tiny(distillation={key: value}))
    refused(alone, tmp_path, key, "distillation.teacher")
    data_with_teacher_outputs = parse_recipe(tiny(distillation={"teacher": "x", key: value}))
    refused(data_with_teacher_outputs, tmp_path, key, "level sequence")


def test_a_teacher_of_another_kind_is_refused(teachers, tmp_path):
    _, teacher = teachers("masked_lm")
    folder, _ = teachers("classification")
    refused(student_of("classification", folder, teacher), tmp_path, "classifier", "masked")


def test_a_teacher_with_other_labels_is_refused(teachers, tmp_path):
    _, teacher = teachers("classification")
    lines = [f"{line}\t{'p' if 'dog' in line else 'q'}" for line in sentences(80)]
    recipe = student_of("classification", tmp_path, teacher)
    write(tmp_path / "train.tsv", lines)
    refused(recipe, tmp_path, "labels 'x', 'y'", "has 'p', 'q'")
