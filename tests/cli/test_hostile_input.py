"""Wrong and hostile input to every command: one line, exit code 2, no partial files.

HEEDFUL_FUZZ is the number of cases of each kind (`make fuzz`); without it there are few, the same
in every run.
"""

import os
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

from commands import Commands, Outcome
from hostile_input import OUTPUT_FLAGS, USES, Use, prepare
from hostile_world import make_world

COUNT = os.environ.get("HEEDFUL_FUZZ")
SECONDS = 90  # that a process may take; two cores are shared with other tests
FUZZ = settings(
    max_examples=int(COUNT or 8),
    derandomize=COUNT is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, *([Phase.shrink] if COUNT else [])],
)
NO_TRANSLATION = ("no other translation is finished", "ends none of its translations")
NAMED_OUTPUTS = ("average", "export", "import", "recipes", "train")  # whose output has no flag


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "world"
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("heedful.deploy.measure._MIN_SECONDS", 0.0)
        patches.setattr("heedful.deploy.measure._NUM_SINGLE", 2)
        make_world(folder)
    return folder


@pytest.mark.parametrize("kind", USES)
def test_hostile_input_ends_in_one_line_and_nothing_partial(
    commands: Commands, world: Path, tmp_path: Path, kind: str
) -> None:
    @FUZZ
    @drawn(data=st.data())
    def check(data: st.DataObject) -> None:
        box = Path(tempfile.mkdtemp(dir=tmp_path))
        prepare(box / "here")
        use = USES[kind](data.draw, world, box / "here")
        note(str(use))
        before, others = stamps(box), _untouched(use, world)
        done = commands.run(
            *use.words,
            stdin=use.stdin,
            cwd=box / "here",
            stdout=use.stdout,
            kill={"seconds": SECONDS},
            first=use.first(),
        )
        note(f"{done}")
        assert_reported(use, done)
        assert _untouched(use, world) == others, "something outside was changed"
        assert_nothing_partial(use, done, before, stamps(box))
        shutil.rmtree(box)

    check()


def _untouched(use: Use, world: Path) -> dict[str, Any]:
    """The files that the command may not write. A report is in its run where no place is named."""
    report = "report.html" if "report" in use.words else None
    return {path: stamp for path, stamp in stamps(world).items() if Path(path).name != report}


def assert_reported(use: Use, done: Outcome) -> None:
    """No traceback, an exit code that the use allows, and with code 2 an error in one line."""
    assert "Traceback (most recent" not in done.out + done.err
    codes = {0, 1, 2} if use.words[:1] == ["verify"] else {0, 2}
    if use.ending is not None:  # a run that gets SIGTERM saves, and ends as with Ctrl-C
        codes |= {128 + use.ending[0], 130}
    if use.ending is None or done.signal != use.ending[0]:  # which came before the command began
        assert not done.signal, "the process was killed, or hung"
        assert done.code in codes
    if done.code == 2:
        lines = [line for line in done.err.splitlines() if not line.startswith("note: ")]
        assert len(lines) <= 3
        if 2 not in use.closed:
            assert sum("error: " in line for line in lines) == 1


def assert_nothing_partial(
    use: Use, done: Outcome, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Only the named outputs are written, and none of them by a refused command."""
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    output_paths = outputs(use)
    written = {path for path in changed if any(is_below(path, output) for output in output_paths)}
    parents = {str(parent) for output in output_paths for parent in Path(output).parents}
    assert {path for path in changed - written if path not in parents} == set()
    assert not [path for path in changed if ".tmp" in path and path in after]
    # A resumed run may fail later; a complete file may be reported to a closed stream.
    may_write = "--resume" in use.words or use.closed or use.stdout or use.ending
    # Only a trained backward model shows that it ends no translation; it can be trained longer.
    may_write = may_write or any(reason in done.err for reason in NO_TRANSLATION)
    if done.code == 2 and not may_write:
        assert written == set()


def outputs(use: Use) -> set[str]:
    """The paths, relative to the folder above, that a command line names as its output."""
    words = use.words
    paths = [after for flag, after in pairwise(words) if flag in OUTPUT_FLAGS]
    paths += [word.partition("=")[2] for word in words if word.startswith(OUTPUT_FLAGS)]
    paths += words if words[:1] and words[0] in NAMED_OUTPUTS else []
    paths += ["runs", "dates.yaml", "folder/dates.yaml", "model/backends", "out", "out2"]
    return {os.path.normpath(os.path.join("here", word)) for word in paths}


def is_below(path: str, folder: str) -> bool:
    return folder == "." or path == folder or path.startswith(f"{folder}/")


def stamps(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every entry below a folder with its size and times."""
    actual = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        stamp = (
            (state.st_mode,) if path.is_dir() else (state.st_mtime_ns, state.st_size, state.st_ino)
        )
        actual[str(path.relative_to(folder))] = stamp
    return actual
