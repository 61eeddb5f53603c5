"""`AveragingOptimizer` with FSDP2: replicas of two ranks each, which shard their parameters."""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import meantime as mt
from meantime.adapters import AveragingOptimizer
from tests import checkpoints


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    # Three outputs over two shards: the shards are not equal.
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def sharded(mesh, averager, **options):
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    optimizer = AveragingOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.05),
        averager,
        replicas=mt.Distributed(mesh["replica"]),
        **options,
    )
    return model, optimizer


def train(model, optimizer, steps):
    for step in steps:
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def by_hand(steps, every):
    """Two replicas in this process, each with the batches of its two ranks."""
    models = [network(), network()]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in models]
    for step in range(steps):
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x = torch.cat([batch(step, 2 * k), batch(step, 2 * k + 1)])
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    mean = (a + b) / 2
                    a.copy_(mean), b.copy_(mean)
    return models


def moments_body():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model, optimizer = sharded(
        mesh, mt.periodic(mt.average_params(), every=2), optimizer_state="average"
    )
    world = mt.Distributed(mesh["replica"])

    def moments():
        return [entries["exp_avg"].full_tensor() for entries in optimizer.state.values()]

    train(model, optimizer, range(1))
    optimizer.optimizer.register_step_post_hook(lambda *_: local.append(moments()))
    local = []
    train(model, optimizer, range(1, 2))
    for mean, found in zip(world.mean(local[0]), moments(), strict=True):
        assert torch.allclose(mean, found, atol=1e-8)

    # Those of a replica with a NaN in one shard do not count, on either of its ranks.
    first = next(iter(optimizer.state.values()))["exp_avg"]
    if dist.get_rank() == 3:
        first.to_local().fill_(torch.nan)
    healthy = world.broadcast(first.full_tensor())
    optimizer.average_now()
    assert torch.equal(first.full_tensor(), healthy)


def test_moments_of_sharded_replicas(gloo):
    gloo.run(moments_body)


def training_body(folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    replica = mesh.get_local_rank("replica")

    model, optimizer = sharded(mesh, mt.periodic(mt.average_params(), every=3))
    train(model, optimizer, range(7))
    expected = by_hand(7, every=3)[replica]
    for mine, reference in zip(values(model), expected.parameters(), strict=True):
        assert torch.allclose(mine, reference, atol=1e-6)

    # A NaN in one shard of one replica excludes all of that replica, on all its ranks.
    if dist.get_rank() == 3:
        with torch.no_grad():
            model[0].weight.to_local().fill_(torch.nan)
    healthy = values(model) if replica == 0 else None
    optimizer.average_now()
    means = values(model)
    assert all(bool(torch.isfinite(x).all()) for x in means)
    if healthy is not None:
        assert all(torch.equal(a, b) for a, b in zip(healthy, means, strict=True))

    # Saved in the middle of a round, replicas apart, and resumed.
    averager = mt.diloco(mt.identity(), every=4)
    model, optimizer = sharded(mesh, averager)
    train(model, optimizer, range(6))
    checkpoints.save(folder, model, optimizer, replica)
    train(model, optimizer, range(6, 11))

    other, resumed = sharded(mesh, averager)
    checkpoints.load(folder, other, resumed, replica)
    train(other, resumed, range(6, 11))
    assert all(torch.equal(a, b) for a, b in zip(values(model), values(other), strict=True))
    with resumed.averaged_parameters():
        shown = mt.Distributed(mesh["replica"]).gather([p.to_local() for p in other.parameters()])
        assert all(bool((x == x[:1]).all()) for x in shown)
    assert all(torch.equal(a, b) for a, b in zip(values(model), values(other), strict=True))


def test_fully_sharded_replicas(gloo):
    with tempfile.TemporaryDirectory() as folder:
        gloo.run(training_body, folder)
