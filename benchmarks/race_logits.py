"""The loss of a language model of the race on the test text, by the program that trained it.

python benchmarks/race_logits.py SYSTEM SNAPSHOT TEXT OUT

It runs in the system's own environment and writes the nats of each window in a line. Windows do not
overlap, and each one predicts `CONTEXT` characters.
"""

import json
import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from nanogpt import CONTEXT

BATCH = 256  # windows
# Logits (B, T, V) of ids (B, T), and the ids of a text.
Logits = Callable[[Tensor], Tensor]
Ids = Callable[[str], list[int]]


def heedful(snapshot: Path) -> tuple[Logits, Ids]:
    """A model directory."""
    from heedful.pipelines import load

    model = load(snapshot)
    return model.net, model.src_tokenizer.encode


def nanogpt(snapshot: Path) -> tuple[Logits, Ids]:
    """nanoGPT's ckpt.pt and meta.pkl; its model.py is in the race's folder, where this runs."""
    sys.path.insert(0, "")
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    (weights,) = snapshot.glob("*.pt")
    checkpoint = torch.load(weights, map_location="cpu")
    net = GPT(GPTConfig(**checkpoint["model_args"]))
    net.load_state_dict(checkpoint["model"])
    index = pickle.loads(Path("data/shakespeare_char/meta.pkl").read_bytes())["stoi"]
    # Without targets it computes the logits of the last position only.
    return lambda ids: net.eval()(ids, ids)[0], lambda text: [index[c] for c in text]


def litgpt(snapshot: Path) -> tuple[Logits, Ids]:
    """litgpt's lit_model.pth and model_config.yaml, with the tokenizer of the race's folder."""
    from litgpt import GPT, Config, Tokenizer  # type: ignore[import-not-found]

    net = GPT(Config.from_file(snapshot / "model_config.yaml"))
    state = torch.load(snapshot / "lit_model.pth", map_location="cpu", weights_only=False)
    net.load_state_dict(state["model"])
    tokenizer = Tokenizer("tokenizer")
    return net.eval(), lambda text: tokenizer.encode(text, bos=False, eos=False).tolist()


SYSTEMS = {"heedful": heedful, "nanogpt": nanogpt, "litgpt": litgpt}


@torch.inference_mode()
def window_losses(logits_of: Logits, ids: Tensor) -> list[float]:
    """The sums of the nats of the windows of a text's ids."""
    count = (len(ids) - 1) // CONTEXT
    inputs, targets = (ids[first : first + count * CONTEXT].view(count, -1) for first in (0, 1))
    sums: list[float] = []
    for batch, labels in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        logits = logits_of(batch).float().transpose(1, 2)
        sums += F.cross_entropy(logits, labels, reduction="none").sum(1).tolist()
    return sums


def main() -> None:
    """Write the losses of the windows."""
    system, snapshot, text, out = sys.argv[1], *map(Path, sys.argv[2:])
    torch.manual_seed(0)
    logits_of, ids_of = SYSTEMS[system](snapshot)
    ids = ids_of(text.read_text(encoding="utf-8"))
    if len(ids) != len(text.read_text(encoding="utf-8")):
        raise SystemExit(f"{len(ids)} ids are not one for each character")
    losses = window_losses(logits_of, torch.tensor(ids))
    if not all(map(math.isfinite, losses)):
        raise SystemExit(f"a loss is not finite: {json.dumps(losses[:3])}")
    out.write_text("".join(f"{loss:.4f}\n" for loss in losses), encoding="utf-8")


if __name__ == "__main__":
    main()
