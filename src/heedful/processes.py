"""The processes of one job: started by torchrun, or this process alone.

Torchrun starts equal processes and numbers them by ranks (`join`). They exchange small values
through the host (gloo); tensors are exchanged by `heedful.training.parallel`. Process 0, the main
one, prepares data, writes and prints.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from heedful.errors import UserError

if TYPE_CHECKING:
    import torch

_Result = TypeVar("_Result")
# For waits of others while one process prepares or evaluates. A process that ends closes its
# connections, which ends the waits of all others at once.
_TIMEOUT = timedelta(days=7)
_SECONDS_TO_FIND = 3.0  # for the operating system to report that another process has ended


class Processes:
    """A job of one process.

    Attributes:
        rank: number of this process, from 0.
        is_main: this process prepares data, writes and prints: that of rank 0.
        count: number of processes.
        local_rank, local_count: the same among the processes on this machine.
        host_group: torch's group for exchanges through the host; None for one process.
    """

    rank, count, local_rank, local_count = 0, 1, 0, 1
    is_main = True
    host_group: Any = None

    def sum(self, values: Sequence[int]) -> list[int]:
        """The sum over the processes of each value."""
        return [*values]

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag True if it is True in any process."""
        return [bool(value) for value in self.sum([int(flag) for flag in flags])]

    def gather(self, value: _Result) -> list[_Result]:
        """The value of each process, by rank, in all of them."""
        return [value]

    def from_main(self, function: Callable[[], _Result]) -> _Result:
        """Call the function in the main process, and return its result in all, which wait for it.

        If it raises, the main process ends, and the others with it.
        """
        return function()

    def for_thread(self) -> "Processes":
        """The same processes, whose exchanges do not mix with those of another thread.

        Called by all of them.
        """
        return self

    def wait(self) -> None:
        """Wait until all processes have called this."""

    def describe(self, rank: int) -> str:
        """The name of a process for a message."""
        return f"process {os.getpid()}"

    def device(self, device: "torch.device") -> "torch.device":
        """The device of this process, if the job runs on `device`."""
        return device


class Group(Processes):
    """The processes that torchrun started, connected by `torch.distributed`."""

    def __init__(self) -> None:
        from torch import distributed

        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()
        self.is_main = self.rank == 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", self.count))
        # A group for objects and sums on the host, in addition to that of the device.
        self.host_group = distributed.new_group(backend="gloo", timeout=_TIMEOUT)
        self._members = self.gather((socket.gethostname(), os.getpid()))

    def sum(self, values: Sequence[int]) -> list[int]:
        import torch
        from torch import distributed

        total = torch.tensor([*values], dtype=torch.int64)
        distributed.all_reduce(total, group=self.host_group)
        return [int(value) for value in total.tolist()]

    def gather(self, value: _Result) -> list[_Result]:
        from torch import distributed

        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value, group=self.host_group)
        return values

    def from_main(self, function: Callable[[], _Result]) -> _Result:
        import torch
        from torch import distributed

        content: list[Any] = [function() if self.is_main else None]
        host = torch.device("cpu")
        distributed.broadcast_object_list(content, src=0, group=self.host_group, device=host)
        result: _Result = content[0]
        return result

    def for_thread(self) -> "Group":
        return Group()

    def wait(self) -> None:
        self.sum([0])

    def device(self, device: "torch.device") -> "torch.device":
        """The device of this process: on CUDA another one for each process of a machine.

        Raises:
            UserError: fewer devices than processes; a device that cannot be shared.
        """
        import torch

        if device.type == "cuda":
            is_named = ":" in str(device)  # with its number
            num_devices = 1 if is_named else torch.cuda.device_count()
            if self.local_count > num_devices:
                raise UserError(
                    f"{self.local_count} processes on a machine need as many GPUs, not "
                    f"{num_devices}; use training.device=cuda with torchrun --nproc-per-node GPUS, "
                    "or training.device=cpu"
                )
            if not is_named:
                device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        elif device.type != "cpu":
            raise UserError(
                f"several processes train on CUDA or on the CPU, not on {device.type}; set "
                "training.device to one of them"
            )
        return device

    def describe(self, rank: int) -> str:
        return f"rank {rank} of {self.count} (process {self._members[rank][1]})"

    def killed_rank(self) -> int | None:
        """The rank of a killed process of this machine: it has ended and reported no error.

        Waits for some seconds.
        """
        deadline = time.monotonic() + _SECONDS_TO_FIND
        while time.monotonic() < deadline:
            for rank, (host, process) in enumerate(self._members):
                is_here = host == socket.gethostname()
                if is_here and _has_ended(process) and not _has_failed(rank):
                    return rank
            time.sleep(0.05)
        return None


_current: ContextVar[Processes | None] = ContextVar("processes", default=None)


def current() -> Processes:
    """The processes of this job; inside of `join` those of its group."""
    return _current.get() or Processes()


def is_launched() -> bool:
    """True if torchrun, or a launcher that sets the same variables, started several processes."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_restarted() -> bool:
    """True if torchrun started this process again after a failure (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def join() -> Iterator[Processes]:
    """In the block the processes of a job are connected.

    An error that ends the job is raised by the process that meets it first; the others exit with
    the same code and print nothing. A process that ended without a message (killed, out of
    memory) is named by one of the others.

    Raises:
        UserError: another process has ended; errors of the block.
    """
    if _current.get() is not None or not is_launched():
        yield current()
        return
    from torch import distributed

    is_own = not distributed.is_initialized()
    group: Processes | None = None
    try:
        if is_own:
            _connect()
        group = Group()
        token = _current.set(group)
        try:
            yield group
            group.wait()  # no process ends while another one still reads from it
        finally:
            _current.reset(token)
    except Exception as error:
        raise _reported(group, error) from None
    if is_own:
        distributed.destroy_process_group()


def _connect() -> None:
    """Join the group that the environment describes; processes on a CPU share its cores."""
    import torch
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local_count == int(os.environ["WORLD_SIZE"]):  # without a look at the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # Torchrun sets OMP_NUM_THREADS to 1 unless it is set.
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, _num_cores() // local_count))
    has_nccl = torch.cuda.is_available() and distributed.is_nccl_available()
    store, rank, count = next(rendezvous("env://", timeout=_TIMEOUT))
    # The agent of torchrun has one store for all attempts: entries of the last one are stale.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        store=distributed.distributed_c10d.PrefixStore(f"heedful-{attempt}", store),
        rank=rank,
        world_size=count,
        timeout=_TIMEOUT,
    )


def _num_cores() -> int:
    """The cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _reported(group: Processes | None, error: Exception) -> BaseException:
    """The exception to end this process with: the error, or a silent exit if another reported."""
    if not isinstance(group, Group):
        return error
    is_user_error = isinstance(error, UserError)
    if not _is_first_to_fail(group.rank):
        return SystemExit(2)
    rank = None if is_user_error else group.killed_rank()
    if rank is None:
        return error
    return UserError(
        f"{group.describe(rank)} ended without a message: it was killed, or its memory was not "
        "enough; continue the run with resume=True (torchrun --max-restarts does so itself)"
    )


def _is_first_to_fail(rank: int) -> bool:
    """Record that this process ends with an error; True if it is the first one."""
    with suppress(Exception):  # the process that holds the store has ended
        _store().set(f"heedful/failed/{rank}", "")
        return int(_store().add("heedful/failures", 1)) == 1
    return True


def _has_failed(rank: int) -> bool:
    """True for a process that ends with an error."""
    with suppress(Exception):
        return bool(_store().check([f"heedful/failed/{rank}"]))
    return False


def _store() -> Any:
    """The values that the processes of the group share."""
    from torch import distributed

    return distributed.distributed_c10d._get_default_store()  # there is no public name


def _has_ended(process: int) -> bool:
    """True for the number of a process that does not run, or whose parent has not noticed it."""
    state = Path(f"/proc/{process}/stat")
    with suppress(OSError):
        return state.read_text().rpartition(")")[2].split()[0] in "ZX"
    try:
        os.kill(process, 0)
    except OSError:
        return True
    return False
