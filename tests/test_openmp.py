"""How threads of OpenMP wait, and that there is one OpenMP in a process."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from heedful import openmp
from heedful.kernels.build import build_library, has_cpp_compiler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="this is not Linux")
# A loop of two threads, compiled to a call of GOMP_parallel; that of RUNTIME runs nothing.
LOOP = """
int calls = 0;
extern "C" int run_loop() {
#pragma omp parallel num_threads(2)
  calls += 100;
  return calls;
}
"""
RUNTIME = """
extern "C" void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) {}
"""
KERNELS = """
import torch
from heedful import openmp
from heedful.kernels import library
reason = library.load()
torch.ones(2 ** 20).exp()
print(reason, *openmp.loaded_libgomps())
"""


class FakeTeam:
    made: list["FakeTeam"]

    def __init__(self) -> None:
        self.is_released = False
        self.made.append(self)

    def release(self) -> None:
        self.is_released = True


def test_threads_sleep_while_the_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training beside two busy loops took 15 s per step, of which 0.6 s was its fair share."""
    FakeTeam.made = []
    monkeypatch.setattr(openmp, "SleepingTeam", FakeTeam)
    monkeypatch.setattr(openmp, "loaded_libgomps", lambda: [Path("libgomp.so.1")])
    watcher, seconds, now = openmp.Watcher({"1": 5.0, "2": 1.0}, 0.0, 0.0), 5.0, 0.0

    def look(waited: float, count: int = 8) -> None:
        nonlocal seconds, now
        for _ in range(count):
            seconds, now = seconds + waited, now + 1
            waits = {"1": seconds, "2": 1.0} | {f"{n}": now / 50 for n in range(3, 99)}
            watcher.look(waits, 0.0, now)

    look(0.02)  # idle cores: nothing changes
    assert FakeTeam.made == []
    look(1.0)
    [team] = FakeTeam.made
    assert not team.is_released
    look(0.2)  # a little less: it stays
    assert not team.is_released
    look(0.0)
    assert team.is_released
    assert watcher.team is None
    seconds -= 4  # the thread has ended, and another one has its number
    look(0.0, 1)
    look(0.9)
    assert len(FakeTeam.made) == 2


def test_no_team_is_made_before_libgomp_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was kept without threads as long as the cores were shared."""
    FakeTeam.made = []
    loaded: list[Path] = []
    monkeypatch.setattr(openmp, "SleepingTeam", FakeTeam)
    monkeypatch.setattr(openmp, "loaded_libgomps", lambda: loaded)
    watcher = openmp.Watcher({}, 0.0, 0.0)
    watcher.look({"1": 5.0}, 0.0, 5.0)
    assert FakeTeam.made == []
    loaded.append(Path("libgomp.so.1"))
    watcher.look({"1": 6.0}, 0.0, 6.0)
    assert len(FakeTeam.made) == 1


def watching(monkeypatch: pytest.MonkeyPatch, folder: Path, running: int) -> openmp.Watcher:
    """The watcher of this process, which may use four cores, with this number of ready threads."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(openmp, "_LOAD", folder / "loadavg")
    openmp._LOAD.write_text(f"0.67 1.09 1.18 {running}/78 5101\n")
    monkeypatch.setattr(openmp, "_watcher", openmp.Watcher({}, 5.0, 0.0))
    monkeypatch.setattr(openmp, "_watching", os.getpid())
    assert openmp._watcher is not None
    return openmp._watcher


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (0.0, [1, 2, 4, 4]),
        (0.4, [1, 2, 4, 4]),
        (1.0, [1, 2, 3, 3]),
        (3.0, [1, 2, 2, 2]),  # half of the cores at least: they are shared with the others
        (9.0, [1, 2, 2, 2]),
    ],
)
def test_no_more_threads_than_cores_that_others_leave_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used: float, expected: list[int]
) -> None:
    """Decoding with two threads beside one busy loop took 1.7 times its fair share."""
    watcher = watching(monkeypatch, tmp_path, running=3)
    for now in range(1, 9):
        watcher.look({}, 5.0 + used * now, now)
    assert [openmp.limited(count) for count in (1, 2, 4, 9)] == expected
    monkeypatch.setattr(openmp, "_watching", None)  # as in a process that was forked
    assert openmp.limited(9) == 9


def test_all_cores_count_as_free_as_soon_as_no_other_program_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests of a program that works between them were decoded by one of two threads."""
    watcher = watching(monkeypatch, tmp_path, running=2)
    monkeypatch.setattr(openmp, "seconds_of_others", lambda: 40.0)
    monkeypatch.setattr("time.monotonic", lambda: 8.1)
    for now in range(1, 9):
        watcher.look({}, 5.0 + 4 * now, now)
    assert openmp.limited(4) == 2
    openmp._LOAD.write_text("0.67 1.09 1.18 1/78 5101\n")
    assert openmp.limited(2) == 2
    assert watcher.free_cores == 2  # as many as asked for: nothing is read
    assert openmp.limited(3) == 3
    assert openmp.limited(4) == 4
    watcher.look({}, 37.1, 8.05)  # of a time before
    assert openmp.limited(4) == 4
    watcher.look({}, 41.9, 9.1)  # 1.9 cores since then, half of it in the mean
    assert watcher.free_cores == 3
    openmp._LOAD.unlink()
    assert openmp.limited(4) == 3


def test_time_of_other_programs_on_the_usable_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = tmp_path / "stat"
    table.write_text(
        "cpu 9 9 9 9\ncpu1 900 0 0 9 9 0 0 0 7 7\ncpu11 100 20 3 9 9 4 5 6 7 7\nintr 3\n"
    )
    monkeypatch.setattr(openmp, "_CORES", table)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {11})
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    monkeypatch.setattr("time.process_time", lambda: 0.38)
    assert openmp.seconds_of_others() == pytest.approx(1.0)
    table.unlink()
    assert openmp.seconds_of_others() == 0.0


def test_a_libgomp_whose_file_was_replaced_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ended with an error, and the one that watches waited for it for ever."""
    gone = Path("/nowhere/libgomp.so.1 (deleted)")
    monkeypatch.setattr(openmp, "loaded_libgomps", lambda: [gone])
    team = object.__new__(openmp.SleepingTeam)
    team._is_made, team._is_released = threading.Event(), threading.Event()
    team._is_released.set()
    team._hold()
    assert team._is_made.is_set()


@pytest.mark.parametrize("count", [1, None])
def test_a_sleeping_team_has_more_threads_than_cores_until_it_is_released(
    count: int | None,
) -> None:
    """In a process of its own, in which no other threads begin and end; on some or all cores."""
    usable = sorted(os.sched_getaffinity(0))[:count]
    code = (
        f"import os; os.sched_setaffinity(0, {usable})\n"
        "import os, torch; torch.set_num_threads(2); torch.ones(2 ** 20).exp()\n"
        "from heedful.openmp import SleepingTeam\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = count(); team = SleepingTeam(); print(count() - before); team.release()\n"
        "while count() > before: pass"  # the threads of the team end after the one that made it
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(usable) + 1


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_wait_policy_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(openmp, "_watching", None)
    monkeypatch.setenv(name, "active")
    openmp.watch()
    assert openmp._watching is None


def test_one_thread_watches_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class Thread:
        def __init__(self, target: object, name: str, daemon: bool) -> None:
            assert daemon
            started.append(name)

        def start(self) -> None:
            pass

    monkeypatch.setattr(openmp, "_watching", None)
    monkeypatch.setattr("threading.Thread", Thread)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    openmp.watch()
    openmp.watch()
    assert started == ["openmp-watch"]


def test_kernels_use_the_openmp_of_torch() -> None:
    if not has_cpp_compiler():
        pytest.skip("there is no C++ compiler")
    done = subprocess.run(
        [sys.executable, "-c", KERNELS], capture_output=True, text=True, check=True
    )
    assert [Path(path).parts[-3] for path in done.stdout.split()] == ["torch"], done.stdout


def test_a_library_uses_the_openmp_of_torch_under_another_name(tmp_path: Path) -> None:
    """Some builds of torch have a libgomp with a hash in its name."""
    if not has_cpp_compiler():
        pytest.skip("there is no C++ compiler")
    for name, source in (("runtime", RUNTIME), ("loop", LOOP)):
        (tmp_path / f"{name}.cpp").write_text(source)
        build_library([tmp_path / f"{name}.cpp"], tmp_path / f"lib{name}.so")
    code = (
        f"import ctypes; ctypes.CDLL('{tmp_path}/libruntime.so', mode=ctypes.RTLD_GLOBAL)\n"
        f"library = ctypes.CDLL('{tmp_path}/libloop.so'); print(library.run_loop())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"  # libgomp would run the loop twice
