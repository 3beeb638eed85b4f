"""GGUF files in llama.cpp: logits and tokens, by the C interface of llama-cpp-python."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

try:
    import llama_cpp as api
except ImportError:  # it is built from source
    api = None

_BATCH = 512  # most tokens of a text


class GgufModel:
    """A file that llama.cpp has opened, with keys and values in float32."""

    def __init__(self, path: Path) -> None:
        self._log = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._log, ctypes.c_void_p(0))
        api.llama_backend_init()
        options = api.llama_model_default_params()
        options.use_mmap = False
        self.model = api.llama_model_load_from_file(str(path).encode(), options)
        assert self.model, f"llama.cpp refuses {path}"
        self.vocab = api.llama_model_get_vocab(self.model)

    def __del__(self) -> None:
        if getattr(self, "model", None) and api.llama_model_free is not None:
            api.llama_model_free(self.model)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """(T, V), after each token of a text."""
        options = api.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = _BATCH
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = api.GGML_TYPE_F32
        options.flash_attn_type = 0
        context = api.llama_init_from_model(self.model, options)
        batch = api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for index, token in enumerate(ids):
            batch.token[index], batch.pos[index] = token, index
            batch.n_seq_id[index], batch.logits[index] = 1, True
            batch.seq_id[index][0] = 0
        assert api.llama_decode(context, batch) == 0
        shape = (len(ids), api.llama_vocab_n_tokens(self.vocab))
        logits = np.ctypeslib.as_array(api.llama_get_logits(context), shape=shape).copy()
        api.llama_batch_free(batch)
        api.llama_free(context)
        return logits

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text; `special`: with BOS, if the file has one before texts."""
        data = text.encode()
        ids = (api.llama_token * (len(data) + 8))()
        count = api.llama_tokenize(self.vocab, data, len(data), ids, len(ids), special, False)
        assert count >= 0
        return list(ids[:count])

    @property
    def eos_id(self) -> int:
        """The token that ends a text."""
        return int(api.llama_vocab_eos(self.vocab))
