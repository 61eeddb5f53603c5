"""Post-local SGD in a classic script: DDP, a scheduler, a gradient scaler, checkpoints.

    torchrun --standalone --nproc-per-node 2 examples/classic_script.py [--checkpoint FOLDER]

Two lines make it post-local: the one that wraps the optimizer and the one that registers the hook.
During the warm-up DDP averages gradients; after it the hook leaves them alone, and the replicas
average their parameters every eight steps. Stopped in the middle of a round and started again
with the same folder, it ends with the same bits as if it had never stopped.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import meantime as mt
from meantime.adapters import AveragingOptimizer, post_local_hook

STEPS, WARMUP, PERIOD, BATCH = 400, 100, 8, 32


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, help="a folder to resume from and save to")
    parser.add_argument("--stop", type=int, default=STEPS, help="save and stop after this step")
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        raise SystemExit("start this with torchrun, see the top of the file")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    bunch = load_digits()
    order = torch.randperm(len(bunch.data), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.data / 16, dtype=torch.float32)[order]
    labels = torch.tensor(bunch.target)[order]
    (images, test_images), (labels, test_labels) = images.split(1437), labels.split(1437)
    images, labels = images[rank::size], labels[rank::size]  # this replica's share

    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = AveragingOptimizer(
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        mt.periodic(mt.average_params(), every=PERIOD, after=WARMUP, last=STEPS),
        replicas=mt.Distributed(),
    )
    model.register_comm_hook(None, post_local_hook(optimizer))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    scaler = torch.amp.GradScaler("cpu")
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}

    start = 0
    file = options.checkpoint and options.checkpoint / f"rank{rank}.pt"
    if file and file.exists():
        saved = torch.load(file, weights_only=True)
        start = saved.pop("step")
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    for step in range(start + 1, options.stop + 1):
        batches = torch.Generator().manual_seed(step * size + rank)
        rows = torch.randint(len(images), (BATCH,), generator=batches)
        scaler.scale(cross_entropy(model(images[rows]), labels[rows])).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()

    if file:  # every rank its own: in the middle of a round they differ
        file.parent.mkdir(parents=True, exist_ok=True)
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"step": options.stop, **states}, file)
    with torch.no_grad(), optimizer.averaged_parameters():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
    if rank == 0:
        print(f"step {options.stop}: test accuracy of the mean {accuracy:.4f}", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # with gloo, torch 2.13 now and then aborts while the interpreter shuts down


if __name__ == "__main__":
    main()
