"""Train an encoder-decoder in a plain torch loop, and exchange it with Hugging Face.

python examples/translator.py OUT [MODEL]    MODEL, of heedful or transformers: to be tuned
"""

import random
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import heedful
from heedful.zoo import vaswani2017

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
NUMBERS = ["".join(random.Random(seed).choices("0123456789", k=4)) for seed in range(2_000)]
PAIRS = [(" ".join(number), " ".join(WORDS[int(digit)] for digit in number)) for number in NUMBERS]


def new_translator() -> heedful.Translator:
    tokenizer = heedful.train_tokenizer([text for pair in PAIRS for text in pair], kind="word")
    size = tokenizer.vocab_size
    config = vaswani2017.Config(
        size, size, d_model=64, num_heads=4, d_ff=128, num_encoder_layers=1, num_decoder_layers=1
    )
    return heedful.from_net(vaswani2017.build(config), config, tokenizer)


def pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids (B, T), padded on the right, and lengths (B,)."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return ids, torch.tensor([len(row) for row in rows])


def train(model: heedful.Translator, pairs: list[tuple[str, str]], steps: int) -> None:
    sources, targets = model.pair_ids(*zip(*pairs, strict=True))
    start = list(model.ids.decoder_start_ids)
    optimizer = torch.optim.AdamW(model.net.parameters(), lr=2e-3)
    model.net.train()
    for _ in range(steps):
        rows = random.sample(range(len(pairs)), 32)
        src, src_lengths = pad([sources[row] for row in rows])
        tgt, tgt_lengths = pad([start + targets[row] for row in rows])
        logits = model.net(src, tgt[:, :-1], src_lengths, tgt_lengths - 1)
        real = torch.arange(tgt.size(1) - 1) < (tgt_lengths - 1)[:, None]
        loss = cross_entropy(logits[real], tgt[:, 1:][real])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.net.eval()


def main(out: Path, start: Path | None = None, *, steps: int = 200) -> None:
    random.seed(0)
    torch.manual_seed(0)
    model = new_translator() if start is None else heedful.load_translator(start)
    print(heedful.verify(model.net, fresh=start is None, overfit=False).summary())
    train(model, PAIRS, steps)
    print(model.translate("1 9 8 4"), model.generate("2 0 2 6", beam_size=3, return_details=True))
    model.save(out / "translator")
    heedful.export_hf(heedful.load_translator(out / "translator"), out / "hf")  # for transformers
    back = heedful.load_translator(out / "hf")  # `heedful.import_hf` writes what this opens
    assert back.translate("1 9 8 4") == model.translate("1 9 8 4")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
