"""The ONNX graphs of a net that generates: opened from a directory, and called as the net is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.backends.onnxruntime.cached_step import StepInputs, step_names
from heedful.backends.onnxruntime.facts import OnnxFacts
from heedful.backends.onnxruntime.session import BoundSession, open_session
from heedful.parts.cache import Cache, LayerShape
from heedful.parts.tokens import Tokens


class OnnxNet:
    """The graphs in a directory that `write_graphs` wrote for searches.

    Args:
        threads: of each graph.

    Raises:
        UserError: ONNX Runtime cannot open a graph.
    """

    def __init__(self, directory: Path, facts: OnnxFacts, threads: int) -> None:
        self.facts = facts
        self.is_encoder_decoder = facts.family == "encoder_decoder"
        self._layers = [LayerShape(*layer) for layer in facts.cache_layers]
        self._encoder = None
        if self.is_encoder_decoder:
            self._encoder = open_session(directory / "encoder.onnx", threads)
        self._decoder = BoundSession(directory / "decoder.onnx", threads)
        self._vocab_size = self._decoder.output_width(0)
        windows, layers = len({layer.window for layer in self._layers}), len(self._layers)
        names = step_names(windows, layers, has_sources=self.is_encoder_decoder)
        read = set(self._decoder.inputs)
        self._inputs = [name if name in read else None for name in names]

    def start(self, given: Tokens | int, *, capacity: int, branches: int = 1) -> Cache:
        """See `EncoderDecoder.start` and `DecoderOnly.start`."""
        rows = given if isinstance(given, int) else given.ids.size(0)
        cache = Cache.empty(self._layers, rows, capacity, branches, torch.empty(0))
        if isinstance(given, int):
            return cache
        assert self._encoder is not None
        feed = {"ids": given.ids.numpy(), "lengths": given.lengths.numpy()}
        cross = [torch.from_numpy(values) for values in self._encoder.run(None, feed)]
        real = torch.ones_like(given.ids, dtype=torch.bool) if given.real is None else given.real
        return replace(cache, cross=cross, source_real=real)

    def decode(self, tokens: Tokens, cache: Cache) -> Float[Tensor, "N 1 V"]:
        """Logits after the last of the new tokens, whose keys and values the cache stores."""
        rows, length = tokens.ids.shape
        last = torch.arange(length - 1, length * (rows // cache.num_sources), length)
        return self._step(tokens, cache, last).view(rows, 1, -1)

    def head(self, logits: Tensor) -> Tensor:
        """The identity: `decode` returns logits."""
        return logits

    def logits(self, *inputs: Tensor) -> Float[Tensor, "B T V"]:
        """Logits of whole rows, given ids and lengths, or source and target ids and lengths."""
        ids, lengths = inputs[len(inputs) // 2 - 1], inputs[-1]
        start: Any = ids.size(0)
        if self.is_encoder_decoder:
            start = Tokens.from_ids(inputs[0], inputs[2])
        cache = self.start(start, capacity=ids.size(1))
        return self._step(Tokens.from_ids(ids, lengths), cache, torch.arange(ids.size(1)))

    def _step(
        self, tokens: Tokens, cache: Cache, indices: Int[Tensor, "R"]
    ) -> Float[Tensor, "B R V"]:
        """Logits after some of the new tokens of each text, those of all beams; -1 is the last."""
        given = StepInputs.of_tokens(tokens, cache, indices)
        tensors = [*given.tensors, *given.stores, *given.sources]
        inputs = {
            name: tensor
            for name, tensor in zip(self._inputs, tensors, strict=True)
            if name is not None
        }
        logits = torch.empty(cache.num_sources, indices.size(0), self._vocab_size)
        outputs = zip(self._decoder.outputs, [logits, *given.stores], strict=True)
        self._decoder.run(inputs, dict(outputs))
        return logits
