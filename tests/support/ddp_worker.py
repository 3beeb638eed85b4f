"""Gradients of one step under DDP; called by tests/training/test_train_step.py."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from encoder_runs import PreparedTask, loss_net_of
from heedful.recipe_files import load_recipe


def save_gradients(rank: int, folder: Path, world: int) -> None:
    """One step of each recipe in the folder; the first process writes the gradients."""
    for path in sorted(folder.glob("*.yaml")):
        run = PreparedTask(load_recipe(path), folder / "data")
        plan = run.plan_epoch(0)[:world]
        targets = sum(run.load_batch(item).num_targets for item in plan)
        # The two passes of R-Drop differ by dropout; others have none.
        loss_net = DistributedDataParallel(loss_net_of(run).train(path.stem.startswith("rdrop")))
        torch.manual_seed(rank)
        actual = loss_net(run.load_batch(run.plan_epoch(0)[rank::world][0]))
        # DDP takes the mean over the processes; the loss is of all their targets.
        (actual.loss * world / targets).backward()
        if rank == 0:
            grads = {
                n: p.grad for n, p in loss_net.module.net.named_parameters() if p.grad is not None
            }
            save_file(grads, folder / f"{path.stem}.safetensors")
    distributed.barrier()  # neither leaves while the other still reads
