"""The work of a planned run: its net without weights, and batches of its data or its limits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from torch import nn

from heedful import plugins
from heedful.config import Recipe
from heedful.cost.batches import full_batch, padded_tokens
from heedful.data.collate import Batch
from heedful.data.plans import Windows
from heedful.data.rows import Rows
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.models.adapters import LoRA, add_lora, freeze
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.heads import ClassificationHead
from heedful.pipelines import load
from heedful.progress import PrintLine
from heedful.tasks.corpora import SOURCES, split_files
from heedful.tasks.epochs import EpochBatches
from heedful.tasks.init_from import VOCABULARIES
from heedful.tasks.inputs import rows_per_batch
from heedful.tasks.new_model import architecture_and_config, inherited_parts
from heedful.tasks.run_data import RunData
from heedful.tasks.start import checked_task, prepare_data
from heedful.tasks.task import Task
from heedful.zoo import architecture
from heedful.zoo.architectures import meta_net

_AUTO_VOCABULARY = 8_000  # of `tokenizer.vocab_size: auto`
_SAMPLED_BATCHES = 32  # of an epoch, whose tokens are counted
_NO_FILE = "no file"  # in place of data.train, for the checks of a recipe without data


@dataclass(frozen=True)
class Work:
    """Net and batches of a run.

    Attributes:
        batches: some of an epoch, or one for all.
        largest: the batch with most tokens with padding.
        tokens: of each batch of the first epoch, with padding; None without data.
        total_steps: of the run, by its data; None without data, or without an end.
    """

    task: Task
    architecture: str
    net: nn.Module
    batches: Sequence[Batch]
    largest: Batch
    tokens: Int64[np.ndarray, " N"] | None
    total_steps: int | None = None

    @classmethod
    def open(cls, recipe: Recipe, *, uses_data: bool, print_line: PrintLine) -> "Work":
        """Prepare the data, if there are any, and build the net; raises UserError as a run does.

        Args:
            recipe: with absolute paths.
            uses_data: read the data, if their files exist; otherwise inputs have maximum lengths.
        """
        problem = _missing_data(recipe)
        if uses_data and problem is not None:
            print_line(f"data       {problem}: every input has the maximum length")
        task = checked_task(recipe if problem is None else _with_placeholder(recipe))
        source = None if recipe.init_from is None else load(recipe.init_from, backend="eager")
        teacher = None
        if recipe.distillation.teacher is not None:
            teacher = load(recipe.distillation.teacher, backend="eager")
            print_line("the teacher's memory and FLOPs are not counted")
        data = None
        if uses_data and problem is None:
            data = prepare_data(task, print_line)
        name, config = architecture_and_config(task, data, source, teacher)
        if data is None and source is teacher is None:
            config = _with_vocabulary(task, name, config)
        net = meta_net(name, config, "model")
        if recipe.adapter.rank is not None:
            keys = recipe.adapter
            assert keys.rank is not None
            add_lora(net, LoRA(keys.rank, keys.alpha, keys.dropout, tuple(keys.targets)))
        if recipe.training.freeze:
            freeze(net, recipe.training.freeze, "training.freeze")
        if data is None:
            batch = _longest_batch(task, net)
            return cls(task, name, net, [batch], batch, None)
        epochs = EpochBatches(task, data)
        plan = epochs.plan_epoch(0)
        tokens = _tokens_of(task, data, epochs, plan)
        step = -(-len(plan) // _SAMPLED_BATCHES)
        batches = [epochs.load_batch(0, item) for item in plan[::step]]
        largest = epochs.load_batch(0, plan[int(tokens.argmax())])
        return cls(task, name, net, batches, largest, tokens, epochs.total_steps())


def _missing_data(recipe: Recipe) -> str | None:
    """The reason why there are no data; None if there are, or if the task generates them."""
    task = plugins.task.get(recipe.task)
    if not any(task.recipe_keys.includes(f"data.train.{key}") for key in SOURCES):
        return None
    try:
        entries = split_files(recipe)
    except UserError as error:
        return str(error)
    paths = [path for entry in entries for path in entry.files.paths()]
    if not any(entry.files.paths() for entry in entries if entry.split == "train"):
        return "no data.train"
    missing = [path for path in paths if not Path(path).exists()]
    return f"no file {missing[0]}" if missing else None


def _with_placeholder(recipe: Recipe) -> Recipe:
    """The recipe with a name of a file for training, which is not read."""
    task, train = plugins.task.get(recipe.task), recipe.data.train
    if recipe.data.corpora or train.paths():
        return recipe
    key = next(key for key in ("text", "file") if task.recipe_keys.includes(f"data.train.{key}"))
    data = recipe.data.model_copy(update={"train": train.model_copy(update={key: _NO_FILE})})
    return recipe.model_copy(update={"data": data})


def _tokens_of(
    task: Task, data: RunData, epochs: EpochBatches, plan: Sequence[Any]
) -> Int64[np.ndarray, " N"]:
    """Tokens of each planned batch, with padding."""
    if isinstance(plan[0], Windows):
        sizes = [len(item.starts) * int(item.sizes.max()) for item in plan]
        return np.array(sizes, dtype=np.int64)
    return np.array([padded_tokens(epochs.load_batch(0, item)) for item in plan], dtype=np.int64)


def _with_vocabulary(task: Task, name: str, config: Any) -> Any:
    """The Config with the vocabularies of the recipe, before any tokenizer is trained."""
    recipe, tokenizers = task.recipe, _known_tokenizers(task)
    values: dict[str, Any]
    keys = [key for key in vars(config) if key in VOCABULARIES]
    size, is_joint = recipe.tokenizer.vocab_size, recipe.tokenizer.joint
    published = architecture(name).sizes.get(str(recipe.model.get("size")), {})
    if tokenizers is not None:
        src, tgt = tokenizers
        is_joint = src is tgt
        values = {key: (tgt if key == "tgt_vocab_size" else src).vocab_size for key in keys}
    elif size == "auto":
        values = {key: int(published.get(key, _AUTO_VOCABULARY)) for key in keys}
    elif size is None:
        raise UserError(
            "the vocabulary size is known only from the data; set tokenizer.vocab_size, or give "
            "the data"
        )
    else:
        values = dict.fromkeys(keys, size)
    if not is_joint and name == "vaswani2017":  # as `two_stack_keys` with data
        values["tie_embeddings"] = recipe.model.get("tie_embeddings", "decoder")
    return replace(config, **values)


def _known_tokenizers(task: Task) -> tuple[Tokenizer, Tokenizer] | None:
    """The recipe's tokenizers if they are read from a file or are of bytes; None if its data train
    them."""
    tokenizers = inherited_parts(task, None, None).tokenizers
    if tokenizers is None and task.recipe.tokenizer.kind == "byte" and task.row_columns:
        return task.train_tokenizers(Rows({column: [] for column in task.row_columns}))
    return tokenizers


def _longest_batch(task: Task, net: nn.Module) -> Batch:
    """A batch of inputs of the maximum length, as many as a batch of the run may have."""
    recipe = task.recipe
    width = int(getattr(task.objective, "context", recipe.data.max_length))
    source_width = width if isinstance(net, EncoderDecoder) else None
    per_row = width + (source_width or 0)
    rows = rows_per_batch(recipe, per_row)
    targets = float(width)
    if isinstance(net, EncoderOnly):
        is_classifier = isinstance(net.head, ClassificationHead)
        targets = 1.0 if is_classifier else width * getattr(task.objective, "mlm_probability", 1)
    return full_batch(rows, width, source_width=source_width, targets_per_row=targets)
