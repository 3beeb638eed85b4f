"""`heedful distill`: a run whose model learns from a larger one."""

from pathlib import Path

import typer

from heedful.cli.flags import Json, Quiet, TrainingFlags, complete_recipe
from heedful.cli.help import IN_OUT
from heedful.cli.shared import make_console, print_result, report_result, run_recipe
from heedful.errors import UserError

STUDENT = "translation-student"
DISTILLED, SMALLER = "-distilled", "-student"  # ends of the names of runs


def distill(
    *,
    teacher: Path = typer.Argument(..., metavar="TEACHER", help="Model directory of the teacher."),
    recipe: str | None = typer.Argument(
        None,
        metavar="RECIPE",
        help="Recipe file, folder of a run, or name of a shipped recipe.",
        autocompletion=complete_recipe,
    ),
    student: bool = typer.Option(
        False,
        "--student",
        help=f"In place of a recipe: {STUDENT} with the data of the teacher's run; starts from the "
        "teacher's encoder and two layers of its decoder, for speed.",
    ),
    flags: TrainingFlags,
    out: Path | None = typer.Option(
        None,
        metavar="DIR",
        help="Folder of the run.",
        show_default=f"runs/RECIPE{DISTILLED}, or runs/TEACHER{SMALLER}",
        rich_help_panel=IN_OUT,
    ),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a smaller model on the outputs of a larger one (distillation).

    The recipe has the size of the new model, its data, and under `distillation` the loss: from the
    teacher's probabilities of each token (level word), or from the teacher's outputs (level
    sequence). The tokenizer is the teacher's. To continue a stopped run: heedful train FOLDER
    --resume.

    Example: heedful distill runs/translation small.yaml --set model.d_model=128

    Example: heedful distill runs/translation --student
    """
    from heedful.recipe_files import load_recipe, recipe_path, recorded_recipe

    if not teacher.is_dir():
        raise UserError(f"{teacher} does not exist; give the directory that a training wrote")
    settings = flags.overrides | {"distillation.teacher": str(teacher)}
    if (recipe is None) != student:
        raise UserError("give a recipe for the new model, or --student, and not both")
    if recipe is None:
        recipe, name = STUDENT, f"{teacher.resolve().name}{SMALLER}"
        if (teacher / "recipe.yaml").is_file():
            teacher_recipe = recorded_recipe(teacher)
            if teacher_recipe.task != "translation":
                raise UserError(
                    f"--student is for translators, but {teacher} was trained for the task "
                    f"{teacher_recipe.task}; give a recipe for the new model"
                )
            settings = {"data": teacher_recipe.data.model_dump(exclude_unset=True), **settings}
    else:
        file = recipe_path(recipe)
        of_run = file.name == "recipe.yaml"
        name = f"{file.resolve().parent.name if of_run else file.stem}{DISTILLED}"
    loaded = load_recipe(recipe, settings)
    distillation = loaded.distillation
    targets = {
        "word": f"its probabilities of each token (temperature {distillation.temperature:g})",
        "sequence": f"its own outputs (beam of {distillation.beam_size})",
    }[distillation.level]
    out = out or Path("runs") / name
    console = make_console(quiet=quiet or json)
    console.print(f"{out} learns from {teacher}: {targets}")
    result = run_recipe(loaded, out, console)
    print_result(result) if json else report_result(result, console)
