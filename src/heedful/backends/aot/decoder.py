"""The compiled backend of nets that generate: searches of `Searcher`, decoding steps as graphs."""

from pathlib import Path

from heedful.backends.aot.compiled_net import CompiledFacts, CompiledNet
from heedful.backends.base import GenerationRequest, Settings
from heedful.backends.manifest import SHORTLIST
from heedful.backends.torch.graph_generator import GraphGenerator


class Compiled(GraphGenerator):
    """The compiled graphs of an encoder-decoder or decoder-only net as a backend; CPU only.

    Args:
        directory: of the graphs (`heedful.backends.aot.compile`).
        weights: the model's own file of weights.
        trusted: as in `CompiledNet`.

    Raises:
        UserError: as in `CompiledNet`.
    """

    name = "compiled"

    def __init__(
        self,
        directory: Path,
        weights: Path,
        facts: CompiledFacts,
        precision: str,
        settings: Settings,
        *,
        trusted: bool = False,
    ) -> None:
        super().__init__(
            CompiledNet(directory, weights, facts, trusted=trusted),
            facts.max_length,
            precision,
            settings,
            is_encoder_decoder=facts.family == "encoder_decoder",
            has_shortlist=(directory.parents[1] / SHORTLIST).is_file(),
        )

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """See `GenerationBackend.unsupported_reasons`."""
        reasons = super().unsupported_reasons(rows, request)
        longest = self.decoding.max_length
        if not self.decoding.is_encoder_decoder and any(
            len(row) + limit > longest
            for row, limit in zip(rows, request.max_new_tokens, strict=True)
        ):
            reasons.append(f"prompt and output may exceed the {longest} tokens of the net")
        return reasons
