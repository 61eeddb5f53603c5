"""Replicas that are themselves sharded: a 2 x 2 mesh of processes, replicate x shard.

Bodies run in every process and assert there.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meantime as mt
from meantime.codecs.layout import local
from tests.test_distributed import all_bits, check_mean, raises


def job_of_four():
    """The mesh, the replica and the shard of this process, and the replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return mesh, *mesh.get_coordinate(), mt.Distributed(mesh["replicate"])


def values(seed: int) -> dict[str, torch.Tensor]:
    """Of one replica; known to all."""
    make = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(6, 3, generator=make),
        "uneven": torch.randn(5, 2, generator=make),
        "last": torch.randn(1, generator=make),  # nothing is left for the second shard
        "scale": torch.randn((), generator=make),
        "plain": torch.randn(2, generator=make),
    }


def sharded(tree: dict, mesh) -> dict:
    """The values as DTensors of several kinds; each process takes its own part."""
    rank = mesh["shard"].get_local_rank()

    def shard(x, mesh, placements):
        chunks = [*x.chunk(2), x[:0]]
        return DTensor.from_local(
            chunks[rank].clone(),
            mesh,
            placements,
            run_check=False,
            shape=x.shape,
            stride=x.stride(),
        )

    one = mesh["shard"]
    return {
        "weight": shard(tree["weight"], mesh, [Replicate(), Shard(0)]),  # as hybrid sharding has it
        "uneven": shard(tree["uneven"], one, [Shard(0)]),
        "last": shard(tree["last"], one, [Shard(0)]),
        "scale": DTensor.from_local(tree["scale"].clone(), one, [Replicate()], run_check=False),
        "plain": tree["plain"].clone(),
    }


def full(tree, mesh):
    """Plain tensors of what one replica holds."""

    def one(x):
        if not isinstance(x, DTensor) or x.placements[-1].is_replicate():
            return local(x)
        pieces: list = [None, None]
        dist.all_gather_object(pieces, x.to_local(), group=mesh.get_group("shard"))
        return torch.cat(pieces)

    return mt.tree.map(one, tree)


def collectives_body():
    mesh, replica, _, world = job_of_four()
    trees = [values(r) for r in range(2)]
    for weights in (None, [3.0, 0.5], [0.0, 2.0]):
        for donate in (False, True):
            mine = sharded(values(replica), mesh)
            weight = None if weights is None else weights[replica]
            mean = world.mean(mine, weight=weight, donate=donate)
            for key in mine:
                assert type(mean[key]) is type(mine[key])
                if isinstance(mine[key], DTensor):
                    assert mean[key].placements == mine[key].placements
                    assert mean[key].shape == mine[key].shape
            check_mean(full(mean, mesh), trees, weights)
    mine = sharded(values(replica), mesh)
    assert all_bits(full(world.broadcast(mine, 1), mesh)) == all_bits(trees[1])
    assert all_bits(full(world.shift(mine, 1), mesh)) == all_bits(trees[1 - replica])


def test_collectives(gloo):
    gloo.run(collectives_body)


def compressed_body():
    """Shards of the same place are compressed as the vector of all that a process holds."""
    mesh, replica, place, world = job_of_four()
    for codec in (mt.codecs.bf16(), mt.codecs.int8(4), mt.codecs.topk(0.3, block=4)):
        both = [sharded(values(r), mesh) for r in range(2)]
        vectors = [torch.cat([local(x).flatten() for x in mt.tree.leaves(t)]) for t in both]
        first, second = (codec.roundtrip(x) for x in vectors)
        for weights, wanted in (
            (None, (first + second) / 2),
            ([1.0, 3.0], (first + 3 * second) / 4),
        ):
            weight = None if weights is None else weights[replica]
            mean = world.mean(both[replica], weight=weight, codec=codec)
            found = torch.cat([local(x).flatten() for x in mt.tree.leaves(mean)])
            assert torch.equal(found, wanted if codec.sparse else codec.roundtrip(wanted)), place


def test_compressed_means(gloo):
    gloo.run(compressed_body)


def not_finite_body():
    """A NaN in one shard of one replica: no shard of that replica takes part."""
    mesh, replica, place, world = job_of_four()
    for codec in (None, mt.codecs.bf16()):
        for key in ("weight", "uneven", "last"):
            mine = sharded(values(replica), mesh)
            if replica == 1 and place == 0:
                mine[key].to_local().view(-1)[0] = torch.nan
            assert bool(mt.tree.all_finite(mine)) == (replica == 0)
            tx = mt.average_params() if codec is None else mt.mean(codec=codec)
            call = tx.average if codec is None else tx.update
            mean, state = call(mine, tx.init(mine), replicas=world)
            assert type(state.rejected) is torch.Tensor
            assert state.rejected.item() == replica
            if codec is None:
                assert all_bits(full(mean, mesh)) == all_bits(values(0)), key
            else:
                check = mt.tree.map(lambda x: x.bfloat16().float(), values(0))
                assert all_bits(full(mean, mesh)) == all_bits(check), key
    # The residual of what was not sent stays as it is, on all shards of the replica.
    tx = mt.error_feedback(mt.codecs.int8(4))
    mine = sharded(values(0), mesh)
    _, state = tx.update(mine, tx.init(mine))
    if replica == 1 and place == 0:
        mine["weight"].to_local()[0, 0] = torch.nan
    _, after = tx.update(mine, state)
    assert (all_bits(full(after, mesh)) == all_bits(full(state, mesh))) == (replica == 1)


def test_not_finite(gloo):
    gloo.run(not_finite_body)


def refusals_body():
    """Every process raises before anything is sent, and the job is alive afterwards."""
    mesh, _, _, replicas = job_of_four()
    mine = sharded(values(0), mesh)
    for group in (mesh["shard"], None):
        for tree in (mine, {"w": mine["weight"]}):
            world = mt.Distributed(group)
            for call in (world.mean, world.broadcast, world.gather):
                message = raises(ValueError, call, tree)
                assert "sharded over the mesh dimension 'shard'" in message, message
                assert "mesh[" in message
    message = raises(ValueError, mt.Distributed(mesh["shard"]).mean, {"w": mine["weight"]})
    assert "['w']" in message
    assert "Distributed(mesh['replicate'])" in message
    # Replicas whose shards of other places would be averaged: process 0 with 3, and 1 with 2.
    crossed, straight = dist.new_group([0, 3]), dist.new_group([1, 2])
    world = mt.Distributed(crossed if dist.get_rank() in (0, 3) else straight)
    message = raises(ValueError, world.mean, {"w": mine["weight"]})
    assert "at [0]" in message, message
    assert "at [1]" in message, message
    partial = DTensor.from_local(torch.ones(2), mesh["shard"], [Partial()], run_check=False)
    message = raises(TypeError, replicas.mean, [partial])
    assert "[0] is Partial" in message, message
    assert "redistribute" in message
    tx = mt.codecs.powersgd(1)
    assert "['weight']" in raises(TypeError, tx.init, {"weight": mine["weight"]})
    # What is not sharded is averaged over any group.
    assert mt.Distributed().mean(torch.tensor(float(dist.get_rank()))).item() == 1.5
    scale = mt.Distributed(mesh["shard"]).mean(mine["scale"])
    assert scale.to_local().item() == mine["scale"].to_local().item()


def test_refusals(gloo):
    gloo.run(refusals_body)


TRANSFORMS = {
    "diloco": lambda: mt.diloco(mt.adamw(0.1), every=2),
    "clipped": lambda: mt.local_sgd(
        mt.chain(mt.clip_by_global_norm(0.5), mt.sgd(0.1, momentum=0.9)), every=2
    ),
    "slowmo": lambda: mt.slowmo(mt.sgd(0.1), 0.1, every=2),
    "streaming": lambda: mt.streaming_diloco(mt.adam(0.1), every=2, fragments=2),
    "gossip": lambda: mt.chain(mt.sgd(0.1), mt.gossip()),
    "push_sum": lambda: mt.chain(mt.sgd(0.1), mt.push_sum()),
    "noloco": lambda: mt.chain(mt.sgd(0.1), mt.periodic(mt.noloco(), every=2)),
    "elastic": lambda: mt.chain(mt.sgd(0.1), mt.periodic(mt.elastic(), every=2)),
}


def training_body(name: str):
    """Sharded replicas make the steps of whole ones; saved and resumed in the middle."""
    mesh, replica, _, world = job_of_four()
    tx = TRANSFORMS[name]()

    def train(place, donate=False):
        params = place(values(0))
        state = tx.init(params)
        for t in range(6):
            grads = place(values(1 + 10 * t + replica))
            params, state = mt.step(tx, grads, params, state, replicas=world, donate=donate)
            if t == 2:
                saved = mt.state_dict(state)
                state = mt.load_state_dict(tx.init(place(values(9))), saved)
        return params, state

    plain, _ = train(lambda tree: tree)
    for donate in (False, True):
        split, state = train(lambda tree: sharded(tree, mesh), donate)
        assert {key: type(x) for key, x in split.items()} == {
            **dict.fromkeys(split, DTensor),
            "plain": torch.Tensor,
        }
        torch.testing.assert_close(full(split, mesh), plain)
        rejected = [x for key, x in mt.state_dict(state).items() if "rejected" in key]
        assert rejected
        assert all(type(x) is torch.Tensor for x in rejected)
    torch.testing.assert_close(
        mt.tree.global_norm(sharded(values(3), mesh)), mt.tree.global_norm(values(3))
    )


@pytest.mark.parametrize("name", TRANSFORMS)
def test_training(gloo, name):
    gloo.run(training_body, name)


def fully_sharded_body():
    """FSDP2 on one dimension of the mesh, and on both (hybrid: its replicas are equal)."""
    mesh, replica, _, world = job_of_four()
    for inner in (mesh["shard"], mesh):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=inner)
        params = dict(model.named_parameters())
        with torch.no_grad():
            for p in params.values():
                p.add_(replica)
        places = [p.to_local().data_ptr() for p in params.values()]
        world.mean(params, donate=True)
        assert [p.to_local().data_ptr() for p in params.values()] == places
        for name, p in params.items():
            torch.testing.assert_close(p.full_tensor(), start[name] + 0.5)
        model(torch.ones(2, 3)).sum().backward()  # FSDP goes on with what was written
        assert all(p.grad.placements == p.placements for p in params.values())


def test_fully_shard(gloo):
    gloo.run(fully_sharded_body)
