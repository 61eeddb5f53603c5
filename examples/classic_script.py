"""Post-local SGD in a classic script: any `torch.optim` optimizer and a scheduler.

    torchrun --standalone --nproc-per-node 2 examples/classic_script.py

During the warm-up the gradients are averaged, as `DistributedDataParallel` would do. After it the
replicas train on their own and average their parameters every eight steps.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import meantime as mt
from meantime.adapters import AveragingOptimizer

STEPS, WARMUP, PERIOD, BATCH = 400, 100, 8, 32


def main():
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

    world = mt.Distributed()
    torch.manual_seed(rank)  # other batches on every rank; the weights become those of rank 0
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = AveragingOptimizer(
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        mt.periodic(mt.average_params(), every=PERIOD, after=WARMUP, last=STEPS),
        replicas=world,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

    for step in range(1, STEPS + 1):
        rows = torch.randint(len(images), (BATCH,))
        cross_entropy(model(images[rows]), labels[rows]).backward()
        if step <= WARMUP:
            world.mean([p.grad for p in model.parameters()], donate=True)  # in place
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
        accuracies, weights = world.gather((accuracy, list(model.parameters())))
    if rank == 0:
        same = all(bool((w == w[0]).all()) for w in weights)
        print("test accuracy of each rank:", accuracies.numpy().round(3))
        print("same weights on all ranks:", same, flush=True)
    dist.destroy_process_group()
    os._exit(0)  # with gloo, torch 2.13 now and then aborts while the interpreter shuts down


if __name__ == "__main__":
    main()
