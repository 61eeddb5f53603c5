"""DiLoCo in a pure training loop on `torch.func`, for one replica or for many processes.

    python examples/functional_loop.py
    torchrun --standalone --nproc-per-node 2 examples/functional_loop.py

Every process trains on its own share of scikit-learn's handwritten digits. Nothing in the loop
depends on how many there are: only `world` does.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

import meantime as mt

STEPS, PERIOD, BATCH = 300, 20, 32


def digits():
    """Images and labels: 1,437 to train on and 360 to test on."""
    bunch = load_digits()
    images = torch.tensor(bunch.data / 16, dtype=torch.float32)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return (images[order], torch.tensor(bunch.target)[order]), 1437


def main():
    launched = dist.is_torchelastic_launched()  # by torchrun
    if launched:
        dist.init_process_group("gloo")
    world = mt.Recorded(mt.Distributed() if launched else mt.Solo())

    (images, labels), split = digits()
    share = torch.arange(world.rank, split, world.size)
    batches = torch.Generator().manual_seed(1 + world.rank)

    torch.manual_seed(0)  # averaging presumes equal starts
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params, x, y):
        return cross_entropy(functional_call(model, params, (x,)), y)

    # `last`: the final round ends with the last step, so that the replicas end up equal.
    tx = mt.diloco(mt.adamw(2e-3), every=PERIOD, last=STEPS)
    state = tx.init(params)
    for _ in range(STEPS):
        rows = share[torch.randint(len(share), (BATCH,), generator=batches)]
        grads = grad(loss)(params, images[rows], labels[rows])
        updates, state = tx.update(grads, state, params, replicas=world)
        params = mt.apply_updates(params, updates)
        params, state = tx.average(params, state, replicas=world)

    predicted = functional_call(model, params, (images[split:],)).argmax(1)
    accuracy = (predicted == labels[split:]).float().mean()
    if world.rank == 0:
        print(f"{world.size} replica(s), {STEPS} local steps each: test accuracy {accuracy:.3f}")
        print(f"{len(world.calls)} synchronisations, {world.bytes / 1e6:.2f} MB from each replica")
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
