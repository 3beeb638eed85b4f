"""One of two processes that train under DDP; run by tests/training/test_train_step.py."""

import faulthandler
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from encoder_runs import PreparedTask, loss_net_of
from heedful.recipe_files import load_recipe


def main(folder: Path, rank: int, world: int) -> None:
    faulthandler.dump_traceback_later(
        150, exit=True
    )  # print stack traces instead of hanging silently
    # Without a port that another may take, and without asking a resolver for this host's name.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=90),
    )
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
    distributed.destroy_process_group()
