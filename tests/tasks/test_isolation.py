"""Documents and chats in one row: with every published decoder each has the loss that it has alone.

Positions begin at 0 in each, attention stays inside, and no first token of a document is a target.
"""

import numpy as np
import pytest
import torch

from architectures import DECODERS, VOCAB, tiny
from heedful.data.collate import collate_chats, collate_windows
from heedful.data.columns import Sequences, pack_ids
from heedful.data.plans import plan_windows
from heedful.evaluation.likelihood import batch_loss
from heedful.models.decoder_only import DecoderOnly
from heedful.zoo import architecture

NAMES = [name for name in DECODERS if not architecture(name).has_key("num_decoder_layers")]
LENGTHS = [9, 2, 14, 5]


def texts(lengths: list[int], factor: int = 1) -> Sequences:
    """Random tokens; times 2, plus 1 for about half of them, as those of answers."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(1, VOCAB, size) for size in lengths]
    if factor == 2:
        rows = [2 * row + rng.integers(0, 2, len(row)) for row in rows]
    return pack_ids([row.tolist() for row in rows], factor * VOCAB)


@pytest.fixture(params=NAMES)
def net(request: pytest.FixtureRequest) -> DecoderOnly:
    made = tiny(request.param)
    assert isinstance(made, DecoderOnly)
    return made.eval()


def nll(net: DecoderOnly, documents: Sequences, **options: bool) -> float:
    """The loss of documents in one window."""
    size = int(documents.offsets[-1]) - 1
    [window] = plan_windows(documents.lengths, context=size, batch_size=1, seed=0, epoch=0)
    batch = collate_windows(documents, window, pad_id=0, **options)
    with torch.no_grad():
        return float(batch_loss(net, batch).nll)


def test_documents_of_a_window(net: DecoderOnly) -> None:
    documents = texts(LENGTHS)
    alone = sum(nll(net, pack_ids([row.tolist()], VOCAB), isolate=True) for row in documents)
    assert nll(net, documents, isolate=True) == pytest.approx(alone, rel=1e-6)
    assert nll(net, documents, isolate=False) != pytest.approx(alone, rel=1e-3)


def test_chats_of_a_packed_row(net: DecoderOnly) -> None:
    chats = texts(LENGTHS, 2)
    rows = [np.array([2, 0, 3]), np.array([1])]
    batch = collate_chats(chats, rows, pad_id=0)
    parts = [collate_chats(chats, [row], pad_id=0) for row in np.arange(4)[:, None]]
    with torch.no_grad():
        alone = sum(float(batch_loss(net, part).nll) for part in parts if part.num_targets)
        assert float(batch_loss(net, batch).nll) == pytest.approx(alone, rel=1e-6)
    answers = [(row[1:] >> 1)[(row[1:] & 1).astype(bool)].tolist() for row in chats]
    assert batch.targets.tolist() == [*answers[2], *answers[0], *answers[3], *answers[1]]
    assert batch.num_tokens == sum(LENGTHS) - 4
