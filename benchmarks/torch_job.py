"""A job of torchrun's that goes on from its checkpoint: an MLP, data-parallel over gloo. Needs PyTorch.

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 benchmarks/torch_job.py FOLDER STEPS

Rank 0 appends "step unix_time" to FOLDER/times.txt for each step, and writes a checkpoint every 50.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_UNITS, _EXAMPLES, _CHECKPOINT_EVERY = 1024, 64, 50


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, _UNITS), torch.nn.GELU(), torch.nn.Linear(_UNITS, _UNITS), torch.nn.GELU(),
        torch.nn.Linear(_UNITS, 10),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    checkpoint, step = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    (folder / f"pid_{dist.get_rank()}").write_text(str(os.getpid()))
    while step < steps:
        images, labels = torch.rand(_EXAMPLES, 64), torch.randint(10, (_EXAMPLES,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            with open(folder / "times.txt", "a") as file:
                file.write(f"{step} {time.time()}\n")
            if step % _CHECKPOINT_EVERY == 0:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").rename(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
