"""One of two processes that train under DDP; run by tests/training/test_train_step.py."""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from encoder_runs import Ready, train_step
from heedful.recipe_files import load_recipe


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[4]}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=world)
    for path in sorted(folder.glob("*.yaml")):
        run = Ready(load_recipe(path), folder / "data")
        plan = run.task.plan(run.data, 0)[:world]
        targets = sum(run.load(item).num_targets for item in plan)
        step = DistributedDataParallel(train_step(run).eval())
        found = step(run.load(run.task.plan(run.data, 0, rank, world)[0]))
        # DDP takes the mean over the processes; the loss is of all their targets.
        (found.loss * world / targets).backward()
        if rank == 0:
            grads = {n: p.grad for n, p in step.module.net.named_parameters() if p.grad is not None}
            save_file(grads, folder / f"{path.stem}.safetensors")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
