"""Sessions of ONNX Runtime on the CPU, opened from files and run on torch tensors."""

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful.errors import UserError

_TYPES = {torch.float32: np.float32, torch.int64: np.int64, torch.bool: np.bool_}


def open_session(path: Path, threads: int = 1) -> Any:
    """An ONNX Runtime session on the CPU; raises UserError for a file that it cannot open."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has no base class for its errors
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"ONNX Runtime cannot open {path}: {reason}") from None


class BoundSession:
    """A session that reads and writes the memory of torch tensors.

    Names stay bound between calls: only tensors with another address or shape are bound again. One
    call runs at a time.

    Args:
        path, threads: see `open_session`.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self._session = open_session(path, threads)
        self._binding = self._session.io_binding()
        self._lock = Lock()
        self._bound: dict[str, tuple[int, torch.Size]] = {}
        # A graph has no input for a value that no output depends on.
        self.inputs: list[str] = [each.name for each in self._session.get_inputs()]
        self.outputs: list[str] = [each.name for each in self._session.get_outputs()]

    def output_width(self, index: int) -> int:
        """The last dimension of an output, which is fixed."""
        width: int = self._session.get_outputs()[index].shape[-1]
        return width

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Run on contiguous tensors by name, and write the outputs into others.

        An output can share the memory of an input; then only the changed elements are written.
        """
        binding = self._binding
        with self._lock:
            for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
                for name, tensor in tensors.items():
                    place = tensor.data_ptr(), tensor.shape
                    if self._bound.get(name) != place:
                        bind(name, "cpu", 0, _TYPES[tensor.dtype], tensor.shape, tensor.data_ptr())
                        self._bound[name] = place
            self._session.run_with_iobinding(binding)
