"""Train a text classifier in a plain torch loop, and exchange it with Hugging Face.

python examples/classifier.py OUT [MODEL]    MODEL, of heedful or transformers: to be tuned
"""

import random
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import heedful
from heedful.zoo import bert

ADJECTIVES = {"negative": ["dull", "weak", "silly"], "positive": ["great", "clever", "moving"]}
LABELS = list(ADJECTIVES)
ROWS = [
    (f"the {noun} was {word}", label)
    for noun in ("film", "book", "song", "play", "plot", "cast")
    for label, words in ADJECTIVES.items()
    for word in words
]


def new_classifier() -> heedful.Classifier:
    tokenizer = heedful.train_tokenizer([text for text, _ in ROWS], kind="word", template="both")
    size = tokenizer.vocab_size
    config = bert.Config(
        size, d_model=64, num_heads=4, num_layers=2, d_ff=128, max_length=64, head="classify"
    )
    model = heedful.from_net(bert.build(config), config, tokenizer, labels=LABELS)
    assert isinstance(model, heedful.Classifier)
    return model


def pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids (B, T), padded on the right, and lengths (B,)."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return ids, torch.tensor([len(row) for row in rows])


def train(model: heedful.Classifier, rows: list[tuple[str, str]], steps: int) -> None:
    ids = model.encode([text for text, _ in rows])
    classes = torch.tensor([model.labels.index(label) for _, label in rows])
    optimizer = torch.optim.AdamW(model.net.parameters(), lr=1e-3)
    model.net.train()
    for _ in range(steps):
        batch = random.sample(range(len(rows)), 16)
        logits = model.net(*pad([ids[row] for row in batch]))
        loss = cross_entropy(logits, classes[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.net.eval()


def main(out: Path, start: Path | None = None, *, steps: int = 100) -> None:
    random.seed(0)
    torch.manual_seed(0)
    model = new_classifier() if start is None else heedful.load_classifier(start)
    print(heedful.verify(model.net, fresh=start is None, overfit=False).summary())
    train(model, ROWS, steps)
    print(model.classify("the film was great"))
    print(model.embed(["the film was great", "the book was dull"]).shape)
    model.save(out / "classifier")
    again = heedful.load_classifier(out / "classifier")
    heedful.export_hf(again, out / "hf")  # for transformers
    back = heedful.load_classifier(out / "hf")  # `heedful.import_hf` writes what this opens
    assert back.classify("the book was dull").label == again.classify("the book was dull").label


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
