"""The second pass over training rows: their chunks encoded, in worker processes."""

from dataclasses import dataclass

from heedful.data.columns import Columns
from heedful.data.encoding import Encoder
from heedful.data.scan import ScannedChunk, training_rows
from heedful.data.splits import KnownRows, Split


@dataclass(frozen=True)
class ChunkEncoder:
    """Encodes the training rows of a chunk; it can be sent to another process.

    Attributes:
        known: the held-out rows, whose sources are left out.
    """

    encoder: Encoder
    split: Split
    known: KnownRows

    def __call__(self, chunk: ScannedChunk) -> Columns:
        """The columns of a chunk; errors as in `Encoder`."""
        return self.encoder(training_rows(chunk, self.split, self.known))
