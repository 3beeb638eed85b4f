"""Train a decoder-only model in a plain torch loop, and exchange it with Hugging Face.

python examples/language_model.py OUT [MODEL]    MODEL, of heedful or transformers: to be tuned
"""

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import heedful
from heedful.zoo import gpt2

TEXT = "the cat sat on the mat. the dog ran to the park. a bird sang in the tree. " * 50


def new_language_model() -> heedful.LanguageModel:
    tokenizer = heedful.train_tokenizer([TEXT], kind="char")
    size = tokenizer.vocab_size
    config = gpt2.Config(size, d_model=64, num_heads=4, num_layers=2, max_length=256, dropout=0.0)
    return heedful.from_net(gpt2.build(config), config, tokenizer)


def train(model: heedful.LanguageModel, text: str, steps: int, context: int = 32) -> None:
    ids = torch.tensor(model.tokenizer.encode(text))
    optimizer = torch.optim.AdamW(model.net.parameters(), lr=2e-3)
    model.net.train()
    for _ in range(steps):
        starts = torch.randint(len(ids) - context, (16,))
        rows = ids[starts[:, None] + torch.arange(context + 1)]  # (B, T + 1)
        logits = model.net(rows[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.net.eval()


def main(out: Path, start: Path | None = None, *, steps: int = 150) -> None:
    torch.manual_seed(0)
    model = new_language_model() if start is None else heedful.load_language_model(start)
    print(heedful.verify(model.net, fresh=start is None, overfit=False).summary())
    train(model, TEXT, steps)
    print(model.generate("the cat", max_new_tokens=20))
    for piece in model.stream("a bird", temperature=0.8, seed=1, max_new_tokens=30):
        print(piece, end="", flush=True)
    print("", *model.score(["the dog ran", "dog the ran"]), sep="\n")
    model.save(out / "language_model")
    again = heedful.load_language_model(out / "language_model")
    heedful.export_hf(again, out / "hf")  # for transformers
    back = heedful.load_language_model(out / "hf")  # `heedful.import_hf` writes what this opens
    assert back.generate("the cat", max_new_tokens=20) == again.generate(
        "the cat", max_new_tokens=20
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
