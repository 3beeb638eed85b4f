"""Nets without weights in all processes of FSDP but the main one, and the shards that they get."""

import json
import shutil
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from architectures import SIZES, config_of
from commands import Commands
from encoder_runs import recipe_of
from heedful.training.shards import whole_tensor
from heedful.zoo import ARCHITECTURES, architecture
from heedful.zoo.architectures import parameters_on_meta
from process_group import Case, run_group, train_all, write_case


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_net_on_meta_has_the_structure_and_the_buffers(name: str) -> None:
    """The same parameters, shared by the same modules, without memory; and equal buffers."""
    config = config_of(name, SIZES, {})
    torch.manual_seed(0)
    whole = architecture(name).build(config)
    with parameters_on_meta():
        empty = architecture(name).build(config)
    for remove in (True, False):
        left, right = (
            {n: p.shape for n, p in net.named_parameters(remove_duplicate=remove)}
            for net in (whole, empty)
        )
        assert left == right
    assert all(parameter.is_meta for parameter in empty.parameters())
    buffers = dict(empty.named_buffers())
    assert buffers.keys() == dict(whole.named_buffers()).keys()
    for path, buffer in whole.named_buffers():
        assert torch.equal(buffers[path], buffer), path
    nn.Linear(1, 1).weight.sum().item()  # real again after the block


class _Bytes:
    """The most bytes of whole parameters that are alive at one time, of those since `restart`."""

    def __init__(self) -> None:
        self.restart()
        register_module_parameter_registration_hook(self._count)

    def restart(self) -> None:
        self.most, self._refs = 0, dict[int, ref[nn.Parameter]]()

    def _count(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self._refs[id(parameter)] = ref(parameter)
        alive = [parameter for get in self._refs.values() if (parameter := get()) is not None]
        self.most = max(
            self.most, sum(p.numel() * p.element_size() for p in alive if not p.is_meta)
        )


def train_recording(rank: int, cases: list[Case], folder: Path) -> None:
    """Train, and store by run and rank the weights at its start and the bytes of parameters."""
    from heedful.training.trainer import Trainer

    counted, real = _Bytes(), Trainer.run

    def run(self: Trainer) -> Any:
        shards = dict(self.trained.net.named_parameters())
        local = [p.to_local() if hasattr(p, "to_local") else p for p in shards.values()]
        content = {
            "most": counted.most,
            "local": sum(p.numel() * p.element_size() for p in local),
            "whole": sum(p.numel() * p.element_size() for p in shards.values()),
            "largest": max(p.numel() * p.element_size() for p in shards.values()),
            "is_meta": all(p.is_meta for p in self.trained.whole.parameters()),
        }
        name = self.checkpoints.directory.parent.name
        (folder / f"{name}.{rank}.json").write_text(json.dumps(content))
        weights = {n: whole_tensor(p.detach()).clone() for n, p in shards.items()}
        save_file(weights, folder / f"{name}.{rank}.safetensors")
        return real(self)

    Trainer.run = run  # type: ignore[method-assign]
    for case in cases:
        counted.restart()
        train_all(rank, [case])


def content_of(folder: Path, **changes: Any) -> dict[str, Any]:
    keys = {"training__max_steps": 2, "training__evaluate_every": 2, "training__batch_parts": 2}
    recipe = recipe_of("translation", folder, **(keys | changes))
    content: dict[str, Any] = json.loads(recipe.model_dump_json(exclude_unset=True))
    return content


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Path:
    """A run of two steps in one process, to start from and to resume."""
    folder = tmp_path_factory.mktemp("origin")
    case = write_case(folder, "first", content_of(folder))
    commands.call(train_all, 0, [case])
    return case.out


STARTS: dict[str, dict[str, Any]] = {
    "new": {},
    "init_from": {"training__seed": 5},
    "lora": {"adapter": {"rank": 2}},
    "frozen": {"training__freeze": ["encoder"]},
    "resumed": {"training__max_steps": 4},
}


def test_shards_have_the_weights_of_one_process(
    commands: Commands, tmp_path: Path, origin: Path
) -> None:
    """To the bit, however a run starts; and the second process never has the whole net."""
    by_sharing: dict[str, list[Case]] = {}
    for sharing in ("none", "fsdp"):
        cases = by_sharing[sharing] = []
        for start, changes in STARTS.items():
            keys = {**changes, "training__parallel": sharing}
            if start in ("init_from", "lora"):
                keys["init_from"] = str(origin)
            name = f"{start}-{sharing}"
            if start == "resumed":
                shutil.copytree(origin, tmp_path / name)
            content = content_of(origin.parent if start == "resumed" else tmp_path, **keys)
            cases.append(write_case(tmp_path, name, content, resume=start == "resumed"))
    commands.call(train_recording, 0, by_sharing["none"], tmp_path)
    run_group(commands, tmp_path, 2, train_recording, by_sharing["fsdp"], tmp_path)
    for start in STARTS:
        alone = load_file(tmp_path / f"{start}-none.0.safetensors")
        for rank in range(2):
            shared = load_file(tmp_path / f"{start}-fsdp.{rank}.safetensors")
            assert shared.keys() == alone.keys()
            for path, tensor in alone.items():
                assert torch.equal(shared[path], tensor), (start, path)
        sizes = [json.loads((tmp_path / f"{start}-fsdp.{r}.json").read_text()) for r in range(2)]
        assert sizes[0]["most"] >= sizes[0]["whole"]  # the count counts
        assert sizes[1]["most"] <= sizes[1]["largest"]
        assert sizes[1]["is_meta"]
        assert sizes[1]["local"] <= 0.6 * sizes[1]["whole"]
