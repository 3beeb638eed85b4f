"""A compiled training step has the eager one's loss and gradients; what cannot be is refused."""

import pytest
import torch

import compiled_steps
from encoder_runs import PreparedTask, recipe_of
from heedful.errors import UserError
from heedful.progress import use_display
from heedful.run import train
from heedful.tasks.language_modeling import LanguageModeling
from heedful.tasks.task import Task
from heedful.training.block_compiler import BlockCompiler
from trainers import batch_for, small_net


@pytest.mark.slow
def test_compiled_steps_equal_eager_steps(commands, tmp_path):
    """Every family, R-Drop, experts, dropout, accumulated gradients, runs that are resumed."""
    commands.call(compiled_steps.main, tmp_path)


@pytest.mark.benchmarks
def test_runs_compiled_by_inductor_equal_eager_runs(commands, tmp_path):
    """It compiles some twenty kernels, which takes most of a minute."""
    commands.call(compiled_steps.runs_train_and_resume, tmp_path)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("translation", {"training__subword_sampling": 0.1}, "but training.subword_sampling gives"),
        ("denoising", {}, "training.compile: objective.infilling makes some sources longer"),
    ],
)
def test_settings_without_fixed_shapes_are_refused(tmp_path, task, changes, message):
    with pytest.raises(UserError, match=message):
        train(recipe_of(task, tmp_path, training__compile=True, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_task_without_row_lengths_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageModeling, "batch_shapes", Task.batch_shapes)
    recipe = recipe_of("language_modeling", tmp_path, training__compile=True)
    with pytest.raises(UserError, match="the task language_modeling has no batches of fixed"):
        train(recipe, tmp_path / "out")


def test_a_net_that_cannot_be_compiled_is_one_line():
    def fails(graph, inputs):
        raise ValueError("no such kernel")

    net = small_net()
    compiler = BlockCompiler(net, backend=fails)
    shown = []

    class Bar:
        def __init__(self, name, total):
            shown.append((name, total))

        def __enter__(self):
            return lambda count: None

        def __exit__(self, *error):
            pass

    net.train()
    batch = batch_for(net)
    message = "^torch cannot compile the net: .*; set training.compile to false$"
    with pytest.raises(UserError, match=message), use_display(Bar), compiler.step(batch):
        net.decode(batch.tokens, memory=net.encode(batch.source))
    assert shown == [("compiling the training step for 3 rows of 7 tokens", 1)]
    with torch.no_grad():  # evaluation calls the blocks themselves
        net.eval().encode(batch.source)


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def missing():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(UserError, match=r"training.compile needs a C\+\+ compiler: install one"):
        BlockCompiler(small_net())


def test_windows_of_a_language_model_have_one_shape(tmp_path):
    run = PreparedTask(
        recipe_of("language_modeling", tmp_path, training__compile=True), tmp_path / "d"
    )
    widths = {run.load_batch(item).tokens.ids.size(1) for item in run.plan_epoch(0)}
    ((rows, width, source),) = run.task.batch_shapes(run.data)
    assert (rows, widths, source) == (8, {width}, None)
