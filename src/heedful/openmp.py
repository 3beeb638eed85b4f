"""How threads of OpenMP wait: they spin while cores are free, and sleep while they are shared.

A parallel loop ends when its last thread has. In libgomp, which torch uses on Linux, the others
spin for some milliseconds. On idle cores that is fastest: a sleeping thread takes longer to wake
than most loops of a small net run. Beside another program, spinning threads take the core that the
late thread waits for, and a training is several times slower than its share of the cores.

`watch` therefore measures how long the threads of this process wait for a core, and switches.
libgomp has one switch at run time: with more threads than cores it spins briefly
(https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html), so a team of sleeping threads is
kept while the cores are shared. Results do not change, only times.

Decoding waits for its threads after each of its short products, so it also takes no more threads
than there are cores that other programs leave free (`limited`).
"""

import ctypes
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

_SECONDS = 0.2  # between two looks, at least
_COST = 0.01  # largest share of the time that looks take, in a process of very many threads
# Share of the time that a thread waits for a core, above which waiting threads sleep, and below
# which they spin again: measured in docs/log.md.
_SHARED, _FREE = 0.25, 0.1
_TASKS = Path("/proc/self/task")
_CORES = Path("/proc/stat")
_LOAD = Path("/proc/loadavg")
_watching: int | None = None  # the process that has a watching thread
_watcher: "Watcher | None" = None  # of that thread


def watch() -> None:
    """Start to adapt how threads wait, once in a process.

    Without effect where the user has set OMP_WAIT_POLICY or GOMP_SPINCOUNT, on systems other than
    Linux, and where the kernel does not count waiting times.
    """
    global _watching  # noqa: PLW0603
    is_set = "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
    if is_set or _watching == os.getpid() or not _seconds_without_core():
        return
    _watching = os.getpid()
    threading.Thread(target=_adapt, name="openmp-watch", daemon=True).start()


def limited(threads: int) -> int:
    """At most this number of threads: those for which other programs leave cores free.

    Half of the cores that this process may use count as free, however busy they are, and all of
    them as soon as no other program runs.
    """
    if _watcher is None or _watching != os.getpid():
        return threads
    if threads > _watcher.free_cores and not _others_run():
        _watcher.count_anew(seconds_of_others(), time.monotonic())
    return min(threads, _watcher.free_cores)


class SleepingTeam:
    """Idle threads in each loaded libgomp, because of which its waiting threads sleep."""

    def __init__(self) -> None:
        self._is_released = threading.Event()
        self._is_made = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="openmp-team", daemon=True)
        self._thread.start()
        self._is_made.wait()

    def release(self) -> None:
        """End the threads; waiting threads spin again."""
        self._is_released.set()
        self._thread.join()

    def _hold(self) -> None:
        """Start a team of this thread, which libgomp frees when the thread ends."""
        nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
        for path in loaded_libgomps():
            try:
                library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
            except OSError:  # its file was replaced: it cannot be found by its name
                continue
            # More than the cores that this process may use; not more than needed, since libgomp
            # ends the process at a limit of threads.
            library.GOMP_parallel(nothing, None, library.omp_get_num_procs() + 1, 0)
        self._is_made.set()
        self._is_released.wait()


def loaded_libgomps() -> list[Path]:
    """The files of this process's libgomps: torch's, and those of other packages.

    Kernels and compiled nets that name another libgomp than torch's run with torch's, since torch
    makes the functions of its libraries global.
    """
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sorted({Path(line.split(maxsplit=5)[-1]) for line in lines if "/libgomp" in line})


class Watcher:
    """Makes a sleeping team while the cores are shared, and counts free cores.

    Args:
        seconds: that each thread has waited for a core, at the time `now`.
        others: seconds of the cores that other programs have used, at this time.
    """

    def __init__(self, seconds: Mapping[str, float], others: float, now: float) -> None:
        self.team: SleepingTeam | None = None
        self.free_cores = len(os.sched_getaffinity(0))
        self._seconds, self._now = seconds, now
        # Means of the last looks: the share of the time that the latest thread waits, and the
        # cores that other programs use.
        self._share = self._used = 0.0
        self._lock = threading.Lock()
        self._others, self._counted = others, now

    def look(self, seconds: Mapping[str, float], others: float, now: float) -> None:
        """Make or release the team; count the free cores."""
        waits = (value - self._seconds.get(thread, 0.0) for thread, value in seconds.items())
        waited = max(waits, default=0.0)
        self._share += (waited / (now - self._now) - self._share) / 2
        self._seconds, self._now = seconds, now
        self._count_cores(others, now)
        if self.team is None and self._share > _SHARED and loaded_libgomps():
            self.team = SleepingTeam()
        elif self.team is not None and self._share < _FREE:
            self.team.release()
            self.team = None

    def count_anew(self, others: float, now: float) -> None:
        """Count all cores as free, whatever other programs used before."""
        with self._lock:
            self._used, self._others, self._counted = 0.0, others, now
            self.free_cores = len(os.sched_getaffinity(0))

    def _count_cores(self, others: float, now: float) -> None:
        with self._lock:
            if now <= self._counted:  # counted anew after the figures were read
                return
            self._used += ((others - self._others) / (now - self._counted) - self._used) / 2
            self._others, self._counted = others, now
            count = len(os.sched_getaffinity(0))
            # Beside many busy programs, half of the cores: threads share them with the others.
            self.free_cores = max(1, count // 2, round(count - max(0.0, self._used)))


def _adapt() -> None:
    global _watcher  # noqa: PLW0603
    _watcher = Watcher(_seconds_without_core(), seconds_of_others(), time.monotonic())
    pause = _SECONDS
    while True:
        time.sleep(pause)
        began = time.thread_time()
        _watcher.look(_seconds_without_core(), seconds_of_others(), time.monotonic())
        pause = max(_SECONDS, (time.thread_time() - began) / _COST)


def _seconds_without_core() -> dict[str, float]:
    """Time that each thread was ready to run and had no core; empty where it is not counted."""
    seconds = {}
    for task in os.listdir(_TASKS) if _TASKS.is_dir() else []:
        try:
            seconds[task] = int((_TASKS / task / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # the thread has ended, or nothing is counted
            continue
    return seconds


def _others_run() -> bool:
    """True unless this thread is the only one that runs or is ready to run, as far as is known."""
    try:
        running = _LOAD.read_text(encoding="utf-8").split()[3]
    except (OSError, IndexError):
        return True
    return not running.startswith("1/")


def seconds_of_others() -> float:
    """Time that other processes have used the cores that this one may use; 0 if unknown."""
    try:
        lines = _CORES.read_text(encoding="utf-8").splitlines()
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in lines if line.partition(" ")[0] in names]
        # user, nice, system, idle, iowait, irq, softirq, steal: all but the idle ones
        ticks = sum(int(row[column]) for row in rows for column in (1, 2, 3, 6, 7, 8))
    except (OSError, IndexError, ValueError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
