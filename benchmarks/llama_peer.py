"""llama.cpp as a peer: greedy decoding of a GGUF file through its C API.

It runs in a separate process, `python llama_peer.py FILE`, since threads of other backends in the
same process would slow it down.
"""

import ctypes
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PRECISIONS = ("f32", "q8_0")


class LlamaCpp:
    """A GGUF model in another process, for any number of contexts."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, __file__, str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(self, *request: Any) -> Any:
        """Send a request to the process (`_serve`); returns its reply. EOFError if it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def __del__(self) -> None:
        self._process.communicate()  # closes its input, which ends it


class Context:
    """Greedy decoding of several sequences in parallel; the arguments are those of `_Context`."""

    def __init__(self, model: LlamaCpp, **options: Any) -> None:
        self.model = model
        self.number = model.call("open", options)

    def __del__(self) -> None:
        self.model.call("close", self.number)

    def generate(self, rows: Sequence[Sequence[int]], new: int, end: int) -> list[list[int]]:
        """See `_Context.generate`."""
        outputs: list[list[int]] = self.model.call("generate", self.number, rows, new, end)
        return outputs


def _serve(path: Path) -> None:
    """Reply to requests on standard input: open, close, and generate with a context."""
    model, contexts = _Model(path), dict[int, _Context]()
    number = 0
    while True:
        try:
            command, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        reply: Any = None
        if command == "open":
            number += 1
            contexts[number] = _Context(model, **arguments[0])
            reply = number
        elif command == "close":
            del contexts[arguments[0]]
        else:
            reply = contexts[arguments[0]].generate(*arguments[1:])
        pickle.dump(reply, sys.stdout.buffer)
        sys.stdout.buffer.flush()


class _Model:
    """A GGUF model, for any number of contexts."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self.api = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        assert self.model, f"llama.cpp refuses {path}"

    def __del__(self) -> None:
        self.api.llama_model_free(self.model)


class _Context:
    """Greedy decoding of several sequences in one batch.

    Args:
        sequences: number of sequences.
        capacity: maximum number of tokens of a sequence.
        flash: use llama.cpp's flash attention.
        unified: one buffer of keys and values for all sequences.
        exact: keys and values in float32; default: float16, the default of llama.cpp.
    """

    def __init__(
        self,
        model: _Model,
        *,
        sequences: int,
        capacity: int,
        vocab_size: int,
        threads: int,
        flash: bool,
        unified: bool,
        exact: bool = False,
    ) -> None:
        api = self.api = model.api
        self.model = model  # a reference, since the model must outlive the context
        self.vocab_size = vocab_size
        options = api.llama_context_default_params()
        capacity = -(-capacity // 32) * 32
        options.n_ctx = sequences * capacity
        options.n_batch = options.n_ubatch = sequences * capacity
        options.n_seq_max = options.n_outputs_max = sequences
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = int(flash)
        options.kv_unified = unified
        options.no_perf = True
        if exact:
            options.type_k = options.type_v = api.GGML_TYPE_F32
        self.context = api.llama_init_from_model(model.model, options)
        assert self.context, "llama.cpp refuses the context"
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(sequences * capacity, 0, 1)

    def __del__(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)

    def generate(self, rows: Sequence[Sequence[int]], new: int, end: int) -> list[list[int]]:
        """Exactly `new` greedy tokens after each row, without `end`."""
        self.api.llama_memory_clear(self.memory, False)
        entries = [
            (token, position, number, position == len(row) - 1)
            for number, row in enumerate(rows)
            for position, token in enumerate(row)
        ]
        outputs: list[list[int]] = [[] for _ in rows]
        for step in range(new):
            tokens = self._decode(entries, len(rows), end)
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
            entries = [
                (token, len(row) + step, number, True)
                for number, (row, token) in enumerate(zip(rows, tokens, strict=True))
            ]
        return outputs

    def _decode(self, entries: list[tuple[int, int, int, bool]], count: int, end: int) -> list[int]:
        """The most probable next token of each sequence.

        `entries` are (token, position, sequence, is last).
        """
        batch = self.batch
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, is_last) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.logits[index] = 1, is_last
            batch.seq_id[index][0] = sequence
        status = self.api.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode: {status}"
        pointer = self.api.llama_get_logits(self.context)
        logits = np.ctypeslib.as_array(pointer, shape=(count, self.vocab_size))
        logits[:, end] = -np.inf
        tokens: list[int] = logits.argmax(1).tolist()
        return tokens


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
