"""Tensor parallelism: the steps and weights of one process, with divided heads and units."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from commands import Commands, assert_refused, write_recipe
from encoder_runs import recipe_of
from heedful.errors import UserError
from heedful.parts.attention import Attention
from heedful.parts.dropout import Dropout, DropoutShare
from heedful.parts.experts import Experts
from heedful.parts.feedforward import FeedForward
from heedful.parts.lora import LoRALinear
from heedful.parts.positions import AlibiBias
from heedful.processes import Processes
from heedful.training.tensor_parallel import DataProcesses, Division, divide_net
from process_group import (
    Case,
    assert_equal_steps,
    assert_equal_weights,
    run_command,
    run_group,
    train_all,
    write_case,
)

GROUP: Any = None  # of processes, where none is used
STEPS = 4
SMALL = {"d_model": 16, "num_heads": 4, "num_layers": 2, "d_ff": 32, "dropout": 0.2}
T5 = {
    "architecture": "t5",
    "d_model": 16,
    "num_heads": 4,
    "head_dim": 8,
    "d_ff": 32,
    "dropout": 0.2,
}
T5 |= {"num_encoder_layers": 1, "num_decoder_layers": 1}
# With dropout, of all kinds of divided parameters.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder-decoder": ("translation", {"training__ema_decay": 0.5, "model__dropout": 0.2}),
    "llama": (
        "language_modeling",
        {"model": {"architecture": "llama", **SMALL, "num_kv_heads": 2}},
    ),
    "masked": (
        "masked_lm",
        {"training__activation_checkpointing": True, "model__dropout": 0.2},
    ),
    "norms of heads": (
        "language_modeling",
        {"model": {"architecture": "qwen3", **SMALL, "num_kv_heads": 2, "head_dim": 8}},
    ),
    "relative": ("translation", {"model": T5}),
}


def case_of(name: str, folder: Path, **changes: Any) -> Case:
    """A run whose steps have six parts."""
    task, keys = RECIPES[name]
    defaults = {"training__max_steps": STEPS, "training__evaluate_every": STEPS}
    defaults |= {"training__gradient_accumulation": 3, "training__batch_parts": 2}
    # Adam divides gradients by their size: with a small eps also the rounding of those that are 0.
    defaults |= {"training__optimizer": {"eps": 1e-4}}
    folder.mkdir(exist_ok=True)
    recipe = recipe_of(task, folder, **(defaults | keys | changes))
    content: dict[str, Any] = json.loads(recipe.model_dump_json(exclude_unset=True))
    return write_case(folder, name, content)


def assert_equal_runs(actual: Path, expected: Path) -> None:
    """Steps and final weights equal but for the order of sums."""
    assert_equal_steps(actual, expected)
    assert_equal_weights(actual, expected)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Path:
    """The folder of all runs in one process; "longer" has one that continues to twice the steps."""
    folder = tmp_path_factory.mktemp("whole")
    cases = [case_of(name, folder) for name in RECIPES]
    cases.append(case_of("encoder-decoder", folder / "longer", training__max_steps=2 * STEPS))
    commands.call(train_all, 0, cases)
    return folder


def assert_equal_to_one(commands: Commands, whole: Path, folder: Path, processes: int) -> None:
    """Train each recipe with half of the net in each process, and compare with `whole`."""
    cases = [case_of(name, folder, training__tensor_parallel=2) for name in RECIPES]
    run_group(commands, folder, processes, train_all, cases)
    for name in RECIPES:
        assert_equal_runs(folder / name, whole / name)


def test_two_processes_that_divide_the_net_take_the_steps_of_one(
    commands: Commands, whole: Path, tmp_path: Path
) -> None:
    assert_equal_to_one(commands, whole, tmp_path, 2)


def test_a_checkpoint_goes_on_divided_otherwise(
    commands: Commands, whole: Path, tmp_path: Path
) -> None:
    """From a divided net to one process, and from shards of FSDP to a divided net."""
    longer = {"training__max_steps": 2 * STEPS}
    for first, then, count in (
        ({"training__tensor_parallel": 2}, {}, 1),
        ({"training__parallel": "fsdp"}, {"training__tensor_parallel": 2}, 2),
    ):
        folder = tmp_path / str(count)
        case = case_of("encoder-decoder", folder, **first)
        run_group(commands, tmp_path, 2, train_all, [case])
        resumed = case_of("encoder-decoder", folder, **longer, **then)
        resumed = Case(resumed.recipe, resumed.out, resume=True)
        if count == 1:
            commands.call(train_all, 0, [resumed])
        else:
            run_group(commands, tmp_path, count, train_all, [resumed])
        assert_equal_runs(resumed.out, whole / "longer" / "encoder-decoder")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "processes": ({"training__tensor_parallel": 3}, "needs a multiple of 3 processes, not 2"),
    "fsdp": ({"training__parallel": "fsdp"}, "set training.parallel to ddp"),
    "none": ({"training__parallel": "none"}, "training.parallel none refuses"),
    "muon": ({"training__optimizer": {"name": "muon"}}, "muon needs whole ones"),
    "compile": ({"training__compile": True}, "training.compile"),
    "fp16": ({"training__precision": "fp16"}, "training.precision fp16"),
    "heads": ({"model__num_heads": 1}, "it must divide the 1 heads"),
    "units": ({"model__d_ff": 31}, "it must divide the 31 feed-forward units"),
}


@pytest.mark.parametrize(("changes", "part"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refusal_is_one_line(
    commands: Commands, tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    recipe = write_recipe(tmp_path / "recipe.json", **{"training__tensor_parallel": 2, **changes})
    words = ["train", recipe, "--out", tmp_path / "run", "--quiet"]
    run_group(commands, tmp_path, 2, run_command, tmp_path, words, codes=[2, 2])
    (line,) = [
        line
        for rank in range(2)
        for line in (tmp_path / f"out.{rank}").read_text().splitlines()
        if not line.startswith("[Gloo]")
    ]
    assert line.startswith("error: training.tensor_parallel ")
    assert part in line
    assert not (tmp_path / "run").exists() or not (tmp_path / "run" / "run.json").exists()


def test_one_process_does_not_divide_a_net(commands: Commands, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.json", training__tensor_parallel=2)
    outcome = commands.train(recipe, tmp_path / "run")
    assert_refused(outcome, "needs a multiple of 2 processes, not 1", "torchrun")


@pytest.mark.parametrize(
    ("module", "part"),
    [
        (Experts(8, 2, 1, lambda: FeedForward(8)), "experts"),
        (LoRALinear(nn.Linear(8, 8), [8], [0], rank=2, alpha=4.0), "adapter.rank"),
        (Attention(8, 4, num_kv_heads=1), "the 1 key/value heads"),
        (Attention(8, 4, dropout=0.1).to("meta"), "set model.dropout to 0"),
    ],
)
def test_a_net_that_cannot_be_divided_is_left_whole(module: nn.Module, part: str) -> None:
    before = {name: p.shape for name, p in module.named_parameters()}
    net = nn.Sequential(FeedForward(8).to(next(module.parameters()).device), module)
    with pytest.raises(UserError, match=r"training\.tensor_parallel 2") as caught:
        divide_net(net, 0, 2, GROUP)
    assert part in str(caught.value)
    assert {name: p.shape for name, p in module.named_parameters()} == before


@given(
    parts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    count=st.integers(1, 4),
    dim=st.integers(0, 1),
)
def test_shares_of_a_tensor_are_disjoint_and_join_to_it(
    parts: list[int], count: int, dim: int
) -> None:
    sizes = tuple(part * count for part in parts)
    shape = [3, 3]
    shape[dim] = sum(sizes)
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    division = Division(dim, sizes, count)
    shares = [division.share(whole, index) for index in range(count)]
    assert {division.whole_shape(share) for share in shares} == {whole.shape}
    assert torch.equal(division.join(shares), whole)
    elements = torch.cat([share.flatten() for share in shares])
    assert elements.sort().values.tolist() == whole.flatten().tolist()


def test_a_share_of_queries_keys_and_values_is_of_whole_heads() -> None:
    """The divided net of each process: its heads are those of the whole one."""
    whole = Attention(8, 4, num_kv_heads=2, position=AlibiBias(4))
    heads: list[Tensor] = []
    x = torch.randn(2, 5, 8)
    for index in range(2):
        net = deepcopy(whole)
        divide_net(net, index, 2, GROUP)
        assert (net.num_heads, net.num_kv_heads) == (2, 1)
        # Without the exchange: the linear layers of this process alone.
        for linear in (net.qkv, net.out):
            linear.__class__ = nn.Linear
        net.out = nn.Identity()  # type: ignore[assignment]
        heads.append(net(x))
    whole.out = nn.Identity()  # type: ignore[assignment]
    torch.testing.assert_close(torch.cat(heads, dim=-1), whole(x))


@pytest.mark.parametrize("dim", [1, -1])
def test_a_mask_of_a_share_is_that_of_the_whole(dim: int) -> None:
    whole = torch.ones(2, 4, 6, 8)
    dropout, outputs = Dropout(0.5), []
    for share in (None, DropoutShare(dim, 0, 2), DropoutShare(dim, 1, 2)):
        torch.manual_seed(3)
        dropout.share = share
        part = whole if share is None else whole.chunk(2, dim)[share.index]
        x = part.clone().requires_grad_()
        outputs.append(dropout(x))
        outputs[-1].sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, outputs[-1].detach())
    torch.testing.assert_close(torch.cat(outputs[1:], dim), outputs[0])


def test_groups_take_different_batches() -> None:
    """Sums count each group once."""

    class Four(Processes):
        """Process 3 of four, whose groups of two have counted 5 and 7."""

        rank, count = 3, 4

        def sum(self, values: Sequence[int]) -> list[int]:
            return [5 + 5 + 7 + 7 for _ in values]

    groups = DataProcesses(Four(), 2)
    assert (groups.rank, groups.count, groups.sum([7])) == (1, 2, [12])


@pytest.mark.slow
def test_two_groups_of_two_take_the_steps_of_one(
    commands: Commands, whole: Path, tmp_path: Path
) -> None:
    """Each group has half of the parts of a step, and each process of it half of the net."""
    assert_equal_to_one(commands, whole, tmp_path, 4)
