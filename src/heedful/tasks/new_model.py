"""A run's model before its first step: what it takes over, its configuration and its net."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from heedful import plugins
from heedful.data.hf_tokenizers import open_tokenizer
from heedful.data.tokenizer import IMPORTED
from heedful.errors import UserError
from heedful.files import read_object
from heedful.pipelines import ModelMetadata, SavedModel, Translator, open_net
from heedful.pipelines.base import CONFIG
from heedful.tasks.init_from import VOCABULARIES
from heedful.tasks.run_data import Data, InheritedParts
from heedful.tasks.task import Task
from heedful.zoo import architecture
from heedful.zoo.saved import initialized_net, make_config


def inherited_parts(
    path: str | None, source: SavedModel | None, teacher: SavedModel | None
) -> InheritedParts:
    """The tokenizers that the data take over: the recipe's own, or those of a model."""
    master = teacher or source
    own = None
    if path is not None:
        src = open_tokenizer(Path(path), "source")
        tgt = open_tokenizer(Path(path), "target")
        own = (src, src if src.content() == tgt.content() else tgt)
    if master is None:
        return InheritedParts(own)
    theirs = [master.src_tokenizer.content(), master.tgt_tokenizer.content()]
    if own is not None and [each.content() for each in own] != theirs:
        raise UserError(
            f"tokenizer.path: {path} is another tokenizer than that of the model which the run "
            "comes from; leave tokenizer.path out"
        )
    start_id = None
    if isinstance(source, Translator) and _is_imported(source):
        start_id = source.ids.decoder_start_ids[-1]
    tokenizers = master.src_tokenizer, master.tgt_tokenizer
    return InheritedParts(tokenizers, start_id, tuple(master.metadata.labels))


def _is_imported(source: SavedModel | None) -> bool:
    return source is not None and source.has_tokenizer and source.src_tokenizer.kind == IMPORTED


def build_model(
    task: Task,
    data: Data,
    source: SavedModel | None,
    teacher: SavedModel | None,
    device: torch.device,
) -> SavedModel:
    """The run's model, with weights as drawn; `device`: where it will be trained."""
    name, config = model_config(task, data, source, teacher)
    net = initialized_net(name, config, device)
    metadata = task.describe_model(data, name)
    if source is not None and _is_imported(source):
        # An imported model's outputs go on to begin and end as it was trained.
        metadata = replace(metadata, generation=source.metadata.generation)
    plugin = plugins.architecture.plugin_of(name)
    if plugin is not None:
        metadata = replace(metadata, plugins=(plugin,))
    return open_net(net, config, metadata, *data.tokenizers)


def rebuild_model(directory: Path, data: Data, device: torch.device) -> SavedModel:
    """The model of a run's folder, with weights yet to be set from a checkpoint."""
    content = read_object(directory / CONFIG)
    metadata = ModelMetadata.from_dict(content)
    config = make_config(metadata.architecture, content["model"], str(directory / CONFIG))
    net = initialized_net(metadata.architecture, config, device)
    return open_net(net, config, metadata, *data.tokenizers)


def model_config(
    task: Task, data: Data | None, source: SavedModel | None, teacher: SavedModel | None
) -> tuple[str, Any]:
    """The architecture and its Config: its size, the origin's, what follows from data, the keys.

    The origin is the model that the run starts from, or whose layers it takes. Without data only a
    first look at the recipe; raises UserError for what is wrong with `model`.
    """
    keys = dict(task.recipe.model)
    origin = source or (teacher if task.recipe.distillation.copy_layers else None)
    if not keys and origin is None:
        keys = dict(task.default_model)
    first = origin.metadata.architecture if origin else task.default_model["architecture"]
    name = str(keys.pop("architecture", first))
    kind = architecture(name)
    size = keys.pop("size", None)
    if size is not None and str(size) not in kind.sizes:
        raise UserError(f"model.size: no size {size} of {name}; known: {', '.join(kind.sizes)}")
    same = origin is not None and origin.metadata.architecture == name
    base = asdict(origin.config) if origin is not None and same else {}
    models = [each for each in (source, teacher) if each is not None]
    follows = _kept_sizes(task, task.model_keys(data, name), models, origin)
    for key in follows:
        if "vocab_size" in key and key in keys:
            raise UserError(f"model.{key} follows from the tokenizer: set tokenizer.vocab_size")
    follows = {key: value for key, value in follows.items() if kind.has_key(key)}
    sizes = dict(kind.sizes[size]) if size else {}
    return name, make_config(name, sizes | base | follows | keys)


def _kept_sizes(
    task: Task, sizes: dict[str, Any], models: list[SavedModel], origin: SavedModel | None
) -> dict[str, Any]:
    """Sizes of a run's own net, as far as the models that it comes from let it choose.

    A vocabulary is never smaller than theirs, because their tables could not be taken over
    otherwise; and the length is the origin's.

    Raises:
        UserError: texts that are longer than that model's.
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
