"""Bulk inference by Ray Data: the worker of `heedful.bulk.worker` on the machines of a cluster."""

import logging
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heedful import extras
from heedful.bulk.shards import ShardReader
from heedful.bulk.worker import ShardResult, Worker
from heedful.data.workers import without_main_module
from heedful.errors import UserError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_SECONDS_TO_CONNECT = _SECONDS_TO_END = 10.0


def run_on_ray(
    worker: Worker,
    reader: ShardReader,
    done: Collection[int],
    *,
    num_workers: int,
    num_gpus: int = 0,
    address: str | None = None,
) -> Generator[ShardResult, None, None]:
    """The results of the shards that are not done, as they are finished.

    The files are read by one task, and the model is opened by each worker: on a cluster all
    machines must see them under the same paths. Results are written by this process. Another one
    is connected to Ray, as Ray ends the process that is when a cluster goes away.

    Args:
        num_gpus: of each worker, for Ray's scheduler; its cores are its threads.
        address: of the cluster (`ray.init`); None: the one of the environment variable
            RAY_ADDRESS, or a new one on this machine, which ends with the job.

    Raises:
        UserError: Ray is not installed; the cluster cannot be reached, or goes away; errors of the
            worker.
    """
    extras.require("ray", "a job on Ray")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = replace(worker, progress=None), reader, frozenset(done), num_workers, num_gpus
    process = context.Process(target=_drive, args=(sender, *arguments, address), daemon=True)
    with without_main_module():
        process.start()
    sender.close()
    try:
        while (result := _receive(receiver)) is not None:
            if worker.progress is not None:
                worker.progress(result.num_rows)
            yield result
        process.join(_SECONDS_TO_END)
    finally:
        process.terminate()
        process.join(_SECONDS_TO_END)
        process.kill()


def _receive(receiver: "Connection[None, Any]") -> ShardResult | None:
    """The next result, None at the end; raises an error of the process that sends them."""
    try:
        received: ShardResult | UserError | None = receiver.recv()
    except EOFError:  # it was ended
        raise _stopped("the connection to its cluster was lost") from None
    if isinstance(received, UserError):
        raise received
    return received


def _drive(sender: "Connection[Any, None]", *arguments: Any) -> None:
    """Send the results of `_results`, and then None, or the error that ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    with open(os.devnull, "wb") as silence:  # Ray's own lines, of C++ too
        for number in (1, 2):
            os.dup2(silence.fileno(), number)
    try:
        for result in _results(*arguments):
            sender.send(result)
    except UserError as error:
        sender.send(error)
    except Exception as error:
        sender.send(_stopped(f"{type(error).__name__}: {_first_line(error)}"))


def _results(
    worker: Worker,
    reader: ShardReader,
    done: frozenset[int],
    num_workers: int,
    num_gpus: int,
    address: str | None,
) -> Iterator[ShardResult | None]:
    """The results, and then None, by this process."""
    num_cpus = worker.load_settings.get("threads") or 1
    with _connected(num_workers * num_cpus + 1, address) as data:
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_no_progress_timeout_s = -1  # a shard may take longer than Ray's limit
        context.target_max_block_size = 1  # a shard is a block, which a free worker takes
        shards = data.read_datasource(
            _source(data, reader, done), override_num_blocks=1
        ).map_batches(
            _RayWorker,
            fn_constructor_args=(worker,),
            batch_size=1,
            compute=data.ActorPoolStrategy(size=num_workers),
            num_cpus=num_cpus,
            num_gpus=num_gpus or None,
        )
        for row in shards.iter_rows():
            result: ShardResult | UserError = pickle.loads(row["result"])
            if isinstance(result, UserError):
                raise result
            yield result
        yield None


class _RayWorker:
    """The worker as a class for `Dataset.map_batches`: one pickled shard in, its result out."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        [shard] = batch["shard"]
        try:
            result: ShardResult | UserError = self._worker(pickle.loads(shard))
        except UserError as error:  # otherwise Ray wraps it in another error
            result = error
        return {"result": [pickle.dumps(result)]}


def _source(data: Any, reader: ShardReader, done: frozenset[int]) -> Any:
    """A source of Ray Data whose one task reads the shards one after another."""
    import pyarrow as pa
    from ray.data.block import BlockMetadata

    class ShardSource(data.Datasource):  # type: ignore[misc]
        """The shards, pickled, as rows of Ray Data."""

        def estimate_inmemory_data_size(self) -> None:
            """The size is unknown before the files are read."""
            return

        def get_read_tasks(self, parallelism: int, *arguments: Any, **keywords: Any) -> list[Any]:
            """The only task."""

            def read() -> Iterator[Any]:
                """A table for each shard."""
                for shard in reader.shards(done):
                    yield pa.table({"shard": pa.array([pickle.dumps(shard)], pa.large_binary())})

            metadata = BlockMetadata(
                num_rows=None, size_bytes=None, input_files=None, exec_stats=None
            )
            return [data.ReadTask(read, metadata)]

    return ShardSource()


@contextmanager
def _connected(num_cpus: int, address: str | None) -> Iterator[Any]:
    """The module `ray.data`, connected; errors of Ray are raised as UserError."""
    import ray
    from ray import data
    from ray.exceptions import RayError

    address = address or os.environ.get("RAY_ADDRESS")
    settings: dict[str, Any] = {"address": address}
    if address is None:
        # A new one, whether or not there is a cluster on this machine.
        settings = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    else:
        _check_address(address)
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        try:
            ray.init(**settings, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(address, _first_line(error)) from None
        yield data
    except RayError as error:
        raise _stopped(_first_line(error)) from None
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise UserError if the host does not answer, for which Ray would wait for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_CONNECT).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str | None, reason: str) -> UserError:
    return UserError(
        f"no Ray cluster at {address or 'this machine'}: {reason}; start one by `ray start --head`,"
        " or leave out address=ADDRESS"
    )


def _stopped(reason: str) -> UserError:
    return UserError(f"Ray stopped: {reason}; the same command continues")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
