"""Eight replicas in one process: the per-replica code runs inside `torch.func.vmap`.

Compares averaging at every step, local SGD and DiLoCo on scikit-learn's handwritten digits.
The replicas hold different data: half of each share is sorted by digit, half is mixed.
"""

import torch
from sklearn.datasets import load_digits
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import meantime as mt

REPLICAS, STEPS, BATCH = 8, 240, 16

bunch = load_digits()
order = torch.randperm(len(bunch.data), generator=torch.Generator().manual_seed(0))
images = torch.tensor(bunch.data / 16, dtype=torch.float32)[order]
labels = torch.tensor(bunch.target)[order]
(images, test_images), (labels, test_labels) = images.split(1437), labels.split(1437)
half = 704  # a multiple of eight
by_digit = labels[:half].argsort(stable=True).view(REPLICAS, -1)
mixed = torch.arange(half, 2 * half).view(REPLICAS, -1)
shares = torch.cat([by_digit, mixed], dim=1)  # rows of the training data, for each replica

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
start = {name: p.detach() for name, p in model.named_parameters()}


def loss(params, x, y):
    return cross_entropy(functional_call(model, params, (x,)), y)


def train(tx):
    """The parameters of all replicas at the end, and after how many steps they were equal."""
    world = mt.Vmapped(REPLICAS)

    def local_step(params, state, x, y):  # what one replica does
        return mt.step(tx, grad(loss)(params, x, y), params, state, replicas=world)

    batches = torch.Generator().manual_seed(1)
    params = {name: p.expand(REPLICAS, *p.shape) for name, p in start.items()}
    state = vmap(tx.init)(params)
    synchronised = 0
    for _ in range(STEPS):
        picks = torch.randint(shares.shape[1], (REPLICAS, BATCH), generator=batches)
        rows = shares.gather(1, picks)
        params, state = vmap(local_step)(params, state, images[rows], labels[rows])
        # After a synchronisation all replicas hold the same bits.
        synchronised += all(bool((p == p[0]).all()) for p in params.values())
    return params, synchronised


def accuracy(params):
    """Of the first replica."""
    first = {name: p[0] for name, p in params.items()}
    predicted = functional_call(model, first, (test_images,)).argmax(1)
    return (predicted == test_labels).float().mean().item()


algorithms = {
    "never": mt.adamw(2e-3),
    "gradients, every step": mt.chain(mt.mean(), mt.adamw(2e-3)),
    "local SGD, period 10": mt.local_sgd(mt.adamw(2e-3), every=10),
    "local SGD, period 40": mt.local_sgd(mt.adamw(2e-3), every=40),
    "DiLoCo, period 40": mt.diloco(mt.adamw(2e-3), every=40),
}
print(f"{'averaging':22} {'synchronisations':>16} {'test accuracy':>14}")
for name, tx in algorithms.items():
    params, synchronised = train(tx)
    print(f"{name:22} {synchronised:16} {accuracy(params):14.3f}")
