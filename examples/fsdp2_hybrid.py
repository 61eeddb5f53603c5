"""DiLoCo between groups of ranks, FSDP2 inside each: parameters sharded, replicas far apart.

    torchrun --standalone --nproc-per-node 4 examples/fsdp2_hybrid.py

Four ranks are a 2 x 2 mesh. The ranks of a row shard one replica with `fully_shard`, which talks at
every step; the two replicas talk every ten steps. A mean over the replicas is one of the local
shards: no rank ever holds the whole model.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import meantime as mt
from meantime.adapters import AveragingOptimizer

STEPS, PERIOD, BATCH = 200, 10, 32


def main():
    if not dist.is_torchelastic_launched():
        raise SystemExit("start this with torchrun, see the top of the file")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    rank = dist.get_rank()

    bunch = load_digits()
    images = torch.tensor(bunch.data / 16, dtype=torch.float32)
    labels = torch.tensor(bunch.target)
    torch.manual_seed(rank)  # data of its own for every rank
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])

    optimizer = AveragingOptimizer(
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        mt.diloco(mt.identity(), every=PERIOD, momentum=0.5),
        replicas=mt.Distributed(mesh["replica"]),
        model=model,
    )
    for _ in range(STEPS):
        rows = torch.randint(len(images), (BATCH,))
        cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.no_grad(), optimizer.averaged_parameters():
        accuracy = (model(images).argmax(1) == labels).float().mean()
    if rank == 0:
        done = optimizer.last_synchronisation
        print(f"{done.participants} replicas, {done.nbytes} bytes from this rank at a time")
        print(f"accuracy on the data: {accuracy:.3f}", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # with gloo, torch 2.13 now and then aborts while the interpreter shuts down


if __name__ == "__main__":
    main()
