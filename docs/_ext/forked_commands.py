"""`heedful` of shell cells, forked from a process that has made its imports.

On the path of the cells is a program that hands its words, folder, environment and streams to that
process, and ends with the code of the command.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from forked import start

_PROGRAM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    socket.send_fds(asked, [b" "], [0, 1, 2])
    asked.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    asked.shutdown(socket.SHUT_WR)
    sys.exit((asked.recv(1) or b"\\1")[0])
"""


def _answer_all(listener: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the children end alone
    while True:
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                _answer(connection)


def _answer(connection: socket.socket) -> NoReturn:
    """Run one command, and send its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as asked:
        words, folder, environment = json.load(asked)
    child = os.fork()
    if child == 0:
        _run(words, folder, environment, streams)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with suppress(OSError):  # the cell was given up
        connection.sendall(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def _run(words: list[str], folder: str, environment: dict[str, str], streams: Any) -> NoReturn:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww")
    )
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["heedful", *words]
    code = 1
    try:
        from heedful.cli import main

        main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError):  # a reader that has gone
            sys.stdout.flush()
        os._exit(code)


@cache
def _folder() -> str:
    """The folder of the program; the process behind it begins with the first kernel."""
    folder = TemporaryDirectory(prefix="heedful-site-")
    address, program = Path(folder.name) / "socket", Path(folder.name) / "heedful"
    program.write_text(_PROGRAM.format(python=sys.executable, address=str(address)))
    program.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        process = start(_answer_all, listener)

    def end() -> None:
        process.kill()
        folder.cleanup()

    Finalize(None, end, exitpriority=1)  # before `multiprocessing` waits for it
    return folder.name


def setup(app: Any) -> dict[str, bool]:
    """Put the program on the path of kernels, which `forked` launches."""
    from jupyter_client.provisioning import local_provisioner

    launch = local_provisioner.launch_kernel

    def launch_with_program(command: list[str], *, env: dict[str, str], **more: Any) -> Any:
        path = f"{_folder()}{os.pathsep}{env['PATH']}"
        return launch(command, env=env | {"PATH": path}, **more)

    local_provisioner.launch_kernel = launch_with_program
    return {"parallel_read_safe": True, "parallel_write_safe": True}
