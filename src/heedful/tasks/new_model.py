"""The model of a new run: inherited tokenizers, Config and net."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heedful import plugins
from heedful.config import Adapter
from heedful.data.hf_tokenizers import open_tokenizer
from heedful.data.tokenizer import IMPORTED
from heedful.errors import UserError
from heedful.files import read_object
from heedful.models.adapters import LoRA, add_lora, lora_layers
from heedful.pipelines import (
    Classifier,
    ModelMetadata,
    SavedModel,
    Translator,
    open_net,
    parameter_count,
)
from heedful.pipelines.base import CONFIG
from heedful.pipelines.nets import read_lora
from heedful.tasks.init_from import VOCABULARIES
from heedful.tasks.run_data import Inherited, RunData
from heedful.tasks.task import Task
from heedful.zoo import architecture
from heedful.zoo.architectures import parameters_on_meta
from heedful.zoo.saved import Base, initialized_net, make_config, set_weights, trainable, weights_of


def inherited_parts(task: Task, source: SavedModel | None, teacher: SavedModel | None) -> Inherited:
    """Tokenizers, start token, labels and problem that the run inherits.

    Args:
        source: the model of `init_from`.
        teacher: the model of `distillation.teacher`, which takes precedence over `source`.

    Raises:
        UserError: as `architecture_and_config`; tokenizers of the recipe's `tokenizer.path` that
            differ from those of the model, or that the task cannot use.
    """
    architecture_and_config(task, None, source, teacher)
    path, parent = task.recipe.tokenizer.path, teacher or source
    tokenizers = None
    if path is not None:
        src = open_tokenizer(Path(path), "source")
        tgt = open_tokenizer(Path(path), "target")
        tokenizers = (src, src if src.content() == tgt.content() else tgt)
    if parent is None:
        return Inherited(tokenizers and task.adapt_tokenizers(tokenizers))
    contents = [parent.src_tokenizer.content(), parent.tgt_tokenizer.content()]
    if tokenizers is not None and [t.content() for t in tokenizers] != contents:
        raise UserError(
            f"tokenizer.path: {path} is another tokenizer than that of the model that the run "
            "starts from; leave tokenizer.path out"
        )
    start_id = None
    if isinstance(source, Translator) and _is_imported(source):
        start_id = source.ids.decoder_start_ids[-1]
    tokenizers = task.adapt_tokenizers((parent.src_tokenizer, parent.tgt_tokenizer))
    problem = source.metadata.problem if isinstance(source, Classifier) else None
    return Inherited(tokenizers, start_id, tuple(parent.metadata.labels), problem)


def _is_imported(source: SavedModel | None) -> bool:
    return source is not None and source.has_tokenizer and source.src_tokenizer.kind == IMPORTED


def build_model(
    task: Task,
    data: RunData,
    source: SavedModel | None,
    teacher: SavedModel | None,
    device: torch.device,
) -> SavedModel:
    """The run's model with initial weights, to be trained on `device`."""
    name, config = architecture_and_config(task, data, source, teacher)
    net = initialized_net(name, config, device)
    metadata = task.describe_model(data, name)
    if source is not None and _is_imported(source):
        # An imported model keeps its start and end tokens; the task may add the end of an answer.
        generation = source.metadata.generation
        eos_ids = dict.fromkeys((*generation.eos_ids, *metadata.generation.eos_ids))
        metadata = replace(metadata, generation=replace(generation, eos_ids=tuple(eos_ids)))
    plugin = plugins.architecture.plugin_of(name)
    if plugin is not None:
        metadata = replace(metadata, plugins=(plugin,))
    return open_net(net, config, metadata, *data.tokenizers)


def rebuild_model(
    directory: Path, data: RunData, device: torch.device, *, has_weights: bool = True
) -> SavedModel:
    """The model of a run's folder: trained weights are initial ones, which a checkpoint then
    replaces, and the others those of its base.

    Args:
        has_weights: False: all parameters are on the meta device, as another process has them.
    """
    content = read_object(directory / CONFIG)
    try:
        metadata, keys = ModelMetadata.from_dict(content), {**content["model"]}
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory / CONFIG} was not written by heedful: {error}") from None
    config = make_config(metadata.architecture, keys, str(directory / CONFIG))
    base = Base.read(content, directory / CONFIG)
    adapter = read_lora(content, directory / CONFIG)
    with nullcontext() if has_weights else parameters_on_meta():
        net = initialized_net(metadata.architecture, config, device)
        if base is not None and adapter is not None:
            add_lora(net, adapter)
    model = open_net(net, config, metadata, *data.tokenizers)
    model.adapter = adapter
    if base is not None and adapter is not None and has_weights:
        frozen = weights_of(net).keys() - trainable(net).keys()
        tensors = base.load(directory)
        set_weights(
            net, {name: tensors[name] for name in frozen if name in tensors}, base.path, frozen
        )
    return model


def adapt_model(model: SavedModel, settings: Adapter, new: Sequence[str]) -> str:
    """Add a LoRA adapter to the model of a new run, and return a line that describes it.

    Args:
        new: names of the weights that init_from does not have, which are trained too.

    Raises:
        UserError: a target that matches no matrix.
    """
    assert settings.rank is not None, "without a rank there is no adapter"
    targets = tuple(settings.targets)
    lora = LoRA(settings.rank, settings.alpha, settings.dropout, targets, tuple(new))
    model.add_adapter(lora)
    return f"adapter    rank {lora.rank} on {len(lora_layers(model.net))} linear layers"


def trained_share(net: nn.Module) -> str:
    """The number of trained parameters and their share, for a line about a run."""
    trained = sum(weight.numel() for weight in trainable(net).values())
    total = parameter_count(net)
    return f"{trained:,} of {total:,} parameters are trained ({trained / total:.1%})"


def architecture_and_config(
    task: Task, data: RunData | None, source: SavedModel | None, teacher: SavedModel | None
) -> tuple[str, Any]:
    """The architecture's name and its Config.

    In increasing precedence: the named size, the Config of the origin model if it has the same
    architecture, keys that the data determine, and the recipe's keys. The origin is the model that
    the run starts from, or whose layers it copies. `data` is None in a first check of the recipe.

    Raises:
        UserError: an error in the recipe's `model`, or an origin of another problem.
    """
    task.problem(source.metadata.problem if isinstance(source, Classifier) else None)
    keys = dict(task.recipe.model)
    origin = source or (teacher if task.recipe.distillation.copy_layers else None)
    if not keys and origin is None:
        keys = dict(task.default_model)
    default = origin.metadata.architecture if origin else task.default_model["architecture"]
    name = str(keys.pop("architecture", default))
    kind = architecture(name)
    size = keys.pop("size", None)
    if size is not None and str(size) not in kind.sizes:
        raise UserError(f"model.size: no size {size} of {name}; known: {', '.join(kind.sizes)}")
    is_same = origin is not None and origin.metadata.architecture == name
    base = asdict(origin.config) if origin is not None and is_same else {}
    models = [model for model in (source, teacher) if model is not None]
    derived = _sizes_for_weights(task, task.model_keys(data, name), models, origin)
    for key in derived:
        if "vocab_size" in key and key in keys:
            raise UserError(f"model.{key} is determined by the tokenizer: set tokenizer.vocab_size")
    derived = {key: value for key, value in derived.items() if kind.has_key(key)}
    sizes = dict(kind.sizes[size]) if size else {}
    return name, make_config(name, sizes | base | derived | keys)


def _sizes_for_weights(
    task: Task, sizes: dict[str, Any], models: list[SavedModel], origin: SavedModel | None
) -> dict[str, Any]:
    """Sizes with which the weights of `models` can be copied.

    Vocabularies are at least as large as theirs, and the maximum length is that of `origin`.

    Raises:
        UserError: texts longer than the maximum length of `origin`.
    """
    for name in VOCABULARIES:
        if name in sizes:
            sizes[name] = max(sizes[name], 0, *(getattr(m.config, name, 0) for m in models))
    needed = sizes["max_length"]
    max_length = getattr(origin.config, "max_length", needed) if origin else needed
    longest = task.recipe.model.get("max_length", max_length)
    if isinstance(longest, int) and longest < needed:
        raise UserError(
            f"{task.length_key} {needed} is more than the {longest} tokens that the model reads; "
            f"set it to {longest} or less, or give model.max_length"
        )
    return sizes | {"max_length": max_length}
