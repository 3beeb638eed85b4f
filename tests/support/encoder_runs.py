"""Shared by the tests of encoders' tasks: tiny recipes, runs that are stopped, saved models."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import commands
from heedful import plugins
from heedful.config import Recipe, parse_recipe, task_keys
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.evaluation.likelihood import batch_loss
from heedful.pipelines import ModelMetadata, open_net
from heedful.run import train
from heedful.tasks.distillation import DistillationLoss
from heedful.tasks.prepared_data import prepare
from heedful.tasks.rdrop import RDropLoss
from heedful.tasks.run_data import Inherited
from heedful.tasks.word_dropout import WordDropoutLoss
from heedful.training.events import Event, StepDone
from heedful.training.step import LossFunction, LossNet
from heedful.zoo import architecture
from heedful.zoo.saved import make_config
from option_space import randomized

NET: dict[str, Any] = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32}
TINY: dict[str, Any] = {
    "data": {"max_length": 16},
    "tokenizer": {"kind": "word", "vocab_size": None},
    "model": {"architecture": "bert", **NET, "dropout": 0.1},
    "training": commands.TINY["training"]
    | {"batch_sentences": 8, "label_smoothing": 0.0}
    | {"evaluate_every": 4, "log_every": 1, "average_checkpoints": 1},
}


def tiny(task: str, **changes: Any) -> Recipe:
    """A recipe of a net that trains quickly; dotted names as `training__max_steps=5`."""
    keys = task_keys(task)
    data = {key: value for key, value in TINY["data"].items() if keys.includes(f"data.{key}")}
    return parse_recipe(commands.tiny({"task": task, **TINY, "data": data}, **changes))


# Wider and with more steps: a net of the size of `TINY` often fails to separate some texts.
LEARNS: dict[str, Any] = {
    "model": {"architecture": "bert", "num_layers": 1, "d_model": 64, "num_heads": 4, "d_ff": 128},
    "model__dropout": 0.0,
    "model__attention_dropout": 0.0,
    "training__batch_sentences": 16,
    "training__schedule": {"name": "constant", "learning_rate": 0.002, "warmup_steps": 5},
}


class Stop(Exception):
    """Ends a run as if it had been killed."""


class StopAt:
    """An event function that ends the run at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == self.step:
            raise Stop


def assert_resumes(recipe: Recipe, folder: Path, results: Sequence[str]) -> None:
    """A run that is killed twice and resumed is bit-equal to an uninterrupted one."""
    whole, killed = folder / "whole", folder / "killed"
    train(recipe, whole)
    for number, step in enumerate((6, 9)):
        try:
            train(recipe, killed, resume=number > 0, on_event=StopAt(step))
        except Stop:
            continue
        raise AssertionError(f"the run was not stopped at step {step}")
    train(recipe, killed, resume=True)
    last = f"checkpoints/step-{recipe.training.max_steps:08d}"
    for name in ("model.safetensors", f"{last}/training.safetensors", *results):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


class PreparedTask:
    """A task with prepared data and a model, as in a run.

    Attributes: printed_lines: the lines printed by the preparation.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        net: str | None = None,
        inherited: Inherited | None = None,
    ) -> None:
        self.recipe, self.printed_lines = recipe, list[str]()
        self.task = plugins.task.get(recipe.task)(recipe)
        self.task.check()
        self.data = prepare(self.task, folder, inherited or Inherited(), self.printed_lines.append)
        if recipe.training.compile:
            self.data = replace(self.data, shapes=self.task.batch_shapes(self.data))
        self.tokenizers, self.tokenizer = self.data.tokenizers, self.data.tokenizer
        self.num_train, self.num_valid = (
            self.task.split_size(self.data, split) for split in ("train", "valid")
        )
        self.model: Any = None
        if net is not None:
            config, module = random_net(net, **self.task.model_keys(self.data, net))
            self.model = open_net(module, config, self.describe_model(net), *self.tokenizers)

    def describe_model(self, name: str) -> ModelMetadata:
        return self.task.describe_model(self.data, name)

    def plan_epoch(self, epoch: int) -> Any:
        return self.task.plan_epoch(replace(self.data, epoch=epoch))

    def load_batch(self, item: Any, epoch: int = 0) -> Any:
        return self.task.collate(replace(self.data, epoch=epoch), item)

    def evaluate(self) -> Any:
        return self.task.evaluate(self.model, self.data)

    def compute_final_scores(self, out: Path) -> Any:
        return self.task.compute_final_scores(self.model, self.data, out)


def loss_net_of(run: PreparedTask, device: str = "cpu") -> LossNet:
    """A net for a task's data with its loss, equal at every call."""
    name = run.recipe.model["architecture"]
    keys = run.recipe.model | run.task.model_keys(run.data, name)
    known = architecture(name).config.__dataclass_fields__
    config = make_config(name, {key: value for key, value in keys.items() if key in known})
    torch.manual_seed(0)
    net = architecture(name).build(config).to(device)
    distillation, training = run.recipe.distillation, run.recipe.training
    smoothing = training.label_smoothing
    loss: LossFunction = partial(batch_loss, label_smoothing=smoothing)
    if distillation.teacher is not None:
        teacher = architecture(name).build(config).to(device).eval().requires_grad_(False)
        loss = DistillationLoss(distillation, teacher, smoothing)
    if training.r_drop:
        loss = RDropLoss(training.r_drop, smoothing)
    if training.word_dropout:
        loss = WordDropoutLoss(loss, run.tokenizers, training.word_dropout, torch.device(device))
    return LossNet(net, loss)


def words(vocabulary: Sequence[str]) -> Tokenizer:
    """A tokenizer of whole words with a mask, as of masked language models."""
    return train_tokenizer(
        [" ".join(vocabulary)], kind="word", extra_specials=("<mask>",), template="both"
    )


def random_net(name: str, **keys: Any) -> tuple[Any, nn.Module]:
    """A net whose weights are large enough that outputs differ clearly, and its Config."""
    config = make_config(name, {**NET, **keys})
    torch.manual_seed(0)
    return config, randomized(architecture(name).build(config), 0.1)


def saved(folder: Path, name: str, tokenizer: Tokenizer, *, labels: Any = (), **keys: Any) -> Any:
    """A random model in a directory, as written by an import."""
    keys = {"vocab_size": tokenizer.vocab_size, "max_length": 20, **keys}
    config, net = random_net(name, **keys)
    folder.mkdir()
    model = open_net(net, config, ModelMetadata(name, "imported", labels=tuple(labels)), tokenizer)
    model.save(folder)
    return model


_WORDS = ["red", "old", "big", "dog", "cat", "cow", "sees", "the"]
TWO_STACKS = {"d_model": 16, "num_heads": 2, "d_ff": 32, "dropout": 0.1, "norm_placement": "pre"}


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def sentences(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(_WORDS, int(rng.integers(2, 6)))) for _ in range(count)]


def recipe_of(task: str, folder: Path, **changes: Any) -> Any:
    """A recipe of a task whose data are in `folder`, with a net of two layers."""
    lines = sentences(80)
    keys: dict[str, Any] = {}
    if task in ("translation", "classification", "sft"):
        keys["data__valid_size"] = 16
    if task in ("translation", "denoising"):
        layers = {"num_encoder_layers": 2, "num_decoder_layers": 2}
        keys["model"] = {"architecture": "vaswani2017", **TWO_STACKS, **layers}
    else:
        keys["model__num_layers"] = 2
    if task == "translation":
        keys |= {"evaluation__decode_sentences": 2, "evaluation__final_beam_size": 1}
        keys["data__train"] = {
            "src": write(folder / "src", lines),
            "tgt": write(folder / "tgt", [" ".join(line.split()[::-1]) for line in lines]),
        }
    elif task == "classification":
        labeled = [f"{line}\t{'x' if 'dog' in line else 'y'}" for line in lines]
        keys["data__train__file"] = write(folder / "train.tsv", labeled)
    elif task == "sft":
        rows = [json.dumps({"prompt": line, "response": line.split()[0]}) for line in lines]
        keys["data__train__file"] = write(folder / "train.jsonl", rows)
        keys |= {"tokenizer": {"kind": "byte", "vocab_size": None}, "data__max_length": 128}
        keys["objective"] = {"sample_tokens": 3}
    else:
        keys["data__train__text"] = write(folder / "text", lines)
    if task in ("language_modeling", "sft"):
        keys["model__architecture"] = "gpt2"
        changes = {"model__d_ff": None} | changes
    if task == "language_modeling":
        keys["objective"] = {"context": 8, "sample_tokens": 3}
    return tiny(task, **(keys | changes))
