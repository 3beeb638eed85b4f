"""Small trainers: a net, random pairs, settings, and a listener that keeps its events."""

import numpy as np
import torch

from heedful.config import Training
from heedful.data.collate import collate_pairs, collate_texts
from heedful.data.columns import pack_ids
from heedful.evaluation.likelihood import batch_loss
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.training.checkpoint import Checkpoints
from heedful.training.events import EvaluationResult
from heedful.training.step import LossNet
from heedful.training.trainer import Trainer
from heedful.zoo import vaswani2017
from heedful.zoo.saved import weights_of

VOCAB = 11


class EventRecorder:
    """A listener that records all events."""

    def __init__(self):
        self.events = []

    def __call__(self, event):
        self.events.append(event)

    def of_type(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def settings(**keys):
    defaults = {"max_steps": 1, "evaluate_every": 1000, "log_every": 1, "clip_norm": None}
    defaults["schedule"] = {"name": "constant", "learning_rate": 0.01, "warmup_steps": 0}
    return Training(**(defaults | keys))


def small_net(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "d_ff": 32, "max_length": 16}
    config = vaswani2017.Config(VOCAB, VOCAB, d_model=16, num_heads=2, dropout=dropout, **sizes)
    return vaswani2017.build(config)


def pairs(lengths, seed=0):
    """Random pairs with the given (source, target) lengths."""
    rng = np.random.default_rng(seed)
    sides = zip(*lengths, strict=True)
    return [pack_ids([rng.integers(4, VOCAB, n).tolist() for n in side], VOCAB) for side in sides]


def batch_for(net):
    """Rows of several lengths, so that some are padded, with targets at some positions."""
    source, target = pairs([(3, 5), (6, 2), (4, 7)])
    rows = torch.arange(3).numpy()
    if isinstance(net, EncoderDecoder):
        return collate_pairs(source, target, rows, start_ids=[1], pad_id=0)
    return collate_texts(source, rows, pad_id=0, labels=torch.tensor([1, 5, 2]).numpy())


def copied(net):
    return {name: weight.detach().clone() for name, weight in weights_of(net).items()}


def evaluation(value=0.0, loss=1.0, perplexity=2.0):
    return EvaluationResult(loss, perplexity, 0.5, {}, [], value)


def trainer_of(
    net, store, plan, keys, tmp_path, *, smoothing=0.0, rate=None, precision="fp32", **hooks
):
    """A trainer over batches of a store; each item of `plan` is the rows of a batch."""
    parts = {
        "plan_epoch": plan if callable(plan) else lambda epoch: plan,
        "load_batch": lambda epoch, rows: collate_pairs(
            *store, np.array(rows), start_ids=[1], pad_id=0
        ),
        "evaluate": evaluation,
        "save_best": lambda: None,
    }
    loss = hooks.pop("loss", lambda net, batch: batch_loss(net, batch, label_smoothing=smoothing))
    trainer = Trainer(
        LossNet(net, loss),
        keys,
        rate or (lambda step: 0.01),
        Checkpoints(
            tmp_path / "checkpoints", keys.average_checkpoints, best=keys.average_of == "best"
        ),
        [EventRecorder()],
        precision=precision,
        **(parts | hooks),
    )
    return trainer, trainer.listeners[0]
