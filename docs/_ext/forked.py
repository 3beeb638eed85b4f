"""Runs of Sphinx and kernels of pages, forked from one process that has made their imports.

Each would import torch, heedful and matplotlib anew: seconds for a page that computes for less.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

_IMPORTS = (
    *("torch", "matplotlib.pyplot", "matplotlib.backends.backend_agg", "PIL.JpegImagePlugin"),
    *("ipykernel.kernelapp", "ipykernel.debugger", "IPython.core.debugger", "psutil", "sqlite3"),
    *("heedful.run", "heedful.zoo.vaswani2017", "heedful.zoo.llama", "heedful.insight"),
    *("sphinx.cmd.build", "sphinx.ext.autodoc", "myst_nb"),
)
# Of the first process: matplotlib reads its backend when it is imported, debuggers warn of nothing.
_VARIABLES = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "OMP_NUM_THREADS": "1"}
_VARIABLES |= {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}


def start(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Call a function of a module in a new process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTS])
    with patch.dict(os.environ, _VARIABLES):
        forkserver.ensure_running()
    child: BaseProcess = context.Process(target=function, args=arguments)
    child.start()
    return child


class _Kernel:
    """A kernel, with what `jupyter_client` uses of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, arguments: list[str], cwd: str, env: dict[str, str]) -> None:
        reader, writer = multiprocessing.Pipe(duplex=False)
        self._process = start(_run_kernel, writer, arguments, cwd, env)
        writer.close()
        reader.recv()  # it leads a group of processes, which `jupyter_client` will ask for
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def _run_kernel(ready: Any, arguments: list[str], cwd: str, env: dict[str, str]) -> None:
    os.setsid()
    ready.send(None)
    ready.close()
    os.environ.clear()
    os.environ.update(env, JPY_PARENT_PID=str(os.getppid()))
    os.chdir(cwd)
    sys.argv = arguments
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()


def _launch(command: list[str], *, cwd: str, env: dict[str, str], **_: Any) -> _Kernel:
    """As `jupyter_client.launcher.launch_kernel` does `python -m ipykernel_launcher ...`."""
    return _Kernel(command[command.index("ipykernel_launcher") :], cwd, env)


def setup(app: Any) -> dict[str, bool]:
    """Fork the kernels of pages instead of starting them."""
    from jupyter_client.provisioning import local_provisioner

    local_provisioner.launch_kernel = _launch
    return {"parallel_read_safe": True, "parallel_write_safe": True}
