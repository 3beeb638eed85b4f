"""`heedful bulk`: files of any size through a model, in shards, by several processes or Ray."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from heedful.cli.flags import Json, ModelFolder, Quiet, RunTime, leave_out
from heedful.cli.help import IN_OUT
from heedful.cli.shared import make_console, note, print_json
from heedful.errors import UserError
from heedful.options import RUN_TIME

if TYPE_CHECKING:
    from heedful.bulk.job import MapShards

Task = Literal["translate", "generate", "score", "embed", "classify", "fill"]
_TASK = "Task"


def _flag(default: Any, name: str, metavar: str | None, help: str, **options: Any) -> Any:
    return typer.Option(default, name, metavar=metavar, help=help, **options)


@dataclass(frozen=True)
class BulkInput:
    """The files of a job, and how their rows are read and written."""

    inputs: list[Path] = _flag(
        ...,
        "--input",
        "FILE",
        "Text (a row a line), .tsv, .csv, .jsonl or .parquet, of pairs also .tmx, .xliff or .po, "
        "also ending in .gz or .zst; a folder or a pattern: all its files; repeatable.",
        rich_help_panel=IN_OUT,
    )
    folder: Path = _flag(
        ..., "--output", "DIR", "Folder of the job, new or to continue.", rich_help_panel=IN_OUT
    )
    field: list[str] | None = _flag(
        None,
        "--field",
        "NAME",
        "Key or column of the text, or number of a column of .tsv; twice for pairs.",
        show_default="text; src and tgt, or text and pair",
        rich_help_panel=IN_OUT,
    )
    pairs: bool = _flag(
        False,
        "--pairs",
        None,
        "Rows are pairs: source and target to score, or two texts to classify.",
        rich_help_panel=IN_OUT,
    )
    format: str = _flag(
        "jsonl",
        "--format",
        "jsonl|text|parquet",
        "Format of the output; text has the result alone, blank for a row with an error.",
        rich_help_panel=IN_OUT,
    )
    shard_rows: int = _flag(
        4_096,
        "--shard-rows",
        "N",
        "Most rows of a shard, the unit that is redone after an interruption.",
        min=1,
        max=4_096,
        rich_help_panel=IN_OUT,
    )


@dataclass(frozen=True)
class Workers:
    """The number of workers and the place that they run at."""

    runner: str = _flag(
        "local",
        "--with",
        "local|ray",
        "Run on this machine, or by Ray Data (extra ray).",
        rich_help_panel=RUN_TIME,
    )
    address: str | None = _flag(
        None,
        "--address",
        "ADDRESS",
        "Ray cluster, such as auto or ray://host:10001.",
        show_default="RAY_ADDRESS, or a new one on this machine",
        rich_help_panel=RUN_TIME,
    )
    workers: int | None = _flag(
        None,
        "--workers",
        "N",
        "Processes with a model each.",
        min=1,
        max=4_096,
        show_default="the cores, or as many models as half of the memory holds; on a GPU 1",
        rich_help_panel=RUN_TIME,
    )


@dataclass(frozen=True)
class TaskFlags:
    """Options of single tasks."""

    scores: bool = _flag(
        False, "--scores", None, "translate, generate: add scores.", rich_help_panel=_TASK
    )
    truncate: bool = _flag(
        False,
        "--truncate",
        None,
        "Truncate texts that are too long for the model; without, they are rows with an error "
        "(classify always truncates).",
        rich_help_panel=_TASK,
    )
    pooling: str | None = _flag(
        None,
        "--pooling",
        "mean|first|last|max",
        "embed: the state of a text, of all its tokens or of one.",
        show_default="the model's, or mean",
        rich_help_panel=_TASK,
    )
    prompt: str | None = _flag(
        None, "--prompt", "TEXT", "embed: put this before each text.",
        show_default="the model's", rich_help_panel=_TASK,
    )  # fmt: skip
    prompt_name: str | None = _flag(
        None, "--prompt-name", "NAME", "embed: put the model's prompt of this name there.",
        show_default="the model's", rich_help_panel=_TASK,
    )  # fmt: skip
    candidates: int | None = _flag(
        None, "--candidates", "N", "fill: candidates per mask.", min=1, show_default="5",
        rich_help_panel=_TASK,
    )  # fmt: skip

    @property
    def explicit_options(self) -> dict[str, Any]:
        """The options that are on the command line."""
        return {name: value for name, value in vars(self).items() if value not in (None, False)}


@leave_out("draft", "num_draft_tokens")
def bulk(
    *,
    model: ModelFolder,
    task: Task = typer.Option(
        ...,
        metavar="translate|generate|score|embed|classify|fill",
        help="The task of each row; its results are those of the command of this name.",
        rich_help_panel=_TASK,
    ),
    files: BulkInput,
    flags: TaskFlags,
    options: dict[str, Any],
    workers: Workers,
    run_time: RunTime,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Run a model over files of any size: the results are shards in a folder.

    The same command continues an interrupted job at the first unfinished shard, and the result is
    byte for byte that of a job without interruption. Other settings, another model or other input
    are refused. A row that cannot be used (empty, too long, not JSON, not UTF-8) gets a row with
    its file, line and error. DIR/manifest.json has the SHA-256 of each shard, of the model and of
    the input, and the settings. Samples can be repeated: --seed is 0 unless it is given.

    Example: heedful bulk runs/mine --task translate --input 'in/*' --output out

    Example: heedful bulk runs/novel --task score --input web.parquet --output out

    Example: heedful bulk m --task classify --input reviews.jsonl --output out
    """
    from heedful.bulk.job import BulkJob, choose_workers, run_job
    from heedful.progress import ProgressBars, use_display

    if workers.address is not None and workers.runner != "ray":
        raise UserError("--address is the address of a Ray cluster: give --with ray too")
    if task == "score":
        run_time = run_time.only_eager("score")
    sizes = {} if run_time.batch_tokens is None else {"batch_tokens": run_time.batch_tokens}
    num_workers = workers.workers or choose_workers(model, run_time.device, run_time.backend)
    job = BulkJob(
        model=model,
        task=task,
        inputs=files.inputs,
        output=files.folder,
        pairs=files.pairs,
        fields=files.field or (),
        options={**options, **flags.explicit_options, **sizes},
        format=files.format,
        shard_rows=files.shard_rows,
        load_settings={
            "device": run_time.device,
            "backend": run_time.backend,
            "precision": run_time.precision,
            "threads": run_time.threads,
            "use": "throughput",
            "trust_compiled": run_time.trust_compiled,
        },
        workers=num_workers,
    )
    console = make_console(quiet=quiet or json)
    with use_display(None if console.quiet else ProgressBars(console).track):
        report = run_job(job, _map_shards(workers, num_workers, run_time), console.print)
    if json:
        print_json(asdict(report))
        return
    console.print(f"{files.folder}: rows {report.num_rows:,}, shards {report.num_shards:,}")
    if report.num_errors:
        note(f"rows with an error: {report.num_errors:,}, in the column error")


def _map_shards(workers: Workers, num_workers: int, run_time: RunTime) -> "MapShards":
    """The function that runs the workers."""
    from heedful.bulk.job import run_locally
    from heedful.bulk.on_ray import run_on_ray

    if workers.runner == "local":
        return partial(run_locally, num_workers=num_workers)
    if workers.runner != "ray":
        raise UserError(f"--with must be local or ray, not {workers.runner}")
    return partial(
        run_on_ray,
        num_workers=num_workers,
        num_gpus=int(run_time.device.startswith("cuda")),
        address=workers.address,
    )
