"""Replicas on a mesh of eight devices: what they compute, and what they communicate when."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import meantime as mt
from tests.hlo import Program

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402


def make_mesh(axis_type, **sizes: int):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes))


def loss(params, x, y):
    return jnp.square(jnp.tanh(x @ params["w1"]) @ params["w2"] - y).mean()


def problem(replicas: int, steps: int):
    """Parameters and batches with a leading axis of replicas; batches have one of steps before."""
    rng = np.random.default_rng(0)
    w1, w2 = rng.normal(size=(8, 16)) / 3, rng.normal(size=(16, 4)) / 4
    params = {"w1": np.stack([w1] * replicas), "w2": np.stack([w2] * replicas)}
    x = rng.normal(size=(steps, replicas, 6, 8))
    y = rng.normal(size=(steps, replicas, 6, 4))
    return jax.tree.map(lambda a: a.astype(np.float32), (params, x, y))


def local_step(tx, replicas, params, state, x, y):
    return mt.step(tx, jax.grad(loss)(params, x, y), params, state, replicas=replicas)


def on_mesh(mesh, axes, function):
    """What one replica does, for all: arguments and results have a leading axis of replicas.

    Axes of the mesh that are not among `axes` are inside of a replica, and left to the compiler.
    """

    def one(*arguments):
        results = function(*jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda x: x[None], results)

    spec = PartitionSpec(axes)
    return jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(axes))
    )


def train(init, step, params, x, y):
    """The parameters after each step, and the last state."""
    state, trajectory = init(params), []
    for batch in zip(x, y, strict=True):
        params, state = step(params, state, *batch)
        trajectory.append(params)
    return jax.tree.map(lambda *p: np.stack(p), *trajectory), state


def simulated(tx, replicas, params, x, y):
    """The same on one device, by `vmap`."""
    init, step = (
        jax.jit(jax.vmap(f, axis_name="replica"))
        for f in (tx.init, partial(local_step, tx, replicas))
    )
    return train(init, step, params, x, y)[0]


def check(found, expected, synchronised):
    """Close, and all replicas hold the same bits after each of these steps and no other."""
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], rtol=2e-5, atol=2e-6, err_msg=name)
        equal = [bool((step == step[0]).all()) for step in values]
        assert [i for i, same in enumerate(equal, start=1) if same] == synchronised


def test_post_local_sgd_on_eight_replicas():
    mesh, world = make_mesh(AxisType.Auto, replica=8), mt.NamedAxis("replica")
    tx = mt.post_local_sgd(mt.sgd(0.3, momentum=0.9), every=3, warmup=2)
    init = on_mesh(mesh, ("replica",), tx.init)
    step = on_mesh(mesh, ("replica",), partial(local_step, tx, world))
    params, x, y = problem(8, steps=8)
    found, state = train(init, step, params, x, y)
    check(found, simulated(tx, world, params, x, y), synchronised=[1, 2, 5, 8])

    program = Program(step.lower(params, state, x[0], y[0]).compile())
    assert program.always() == 0
    # Gradients in the warm-up, parameters afterwards: in one message each, or in none.
    assert sorted(map(sorted, program.branches())) == [[0, 1], [0, 1]]


def test_hierarchical_sgd_on_two_nodes_of_four():
    axes = ("node", "worker")
    mesh = make_mesh(AxisType.Auto, node=2, worker=4)
    levels = {"node": mt.NamedAxis("worker"), "world": mt.NamedAxis(axes)}
    tx = mt.hierarchical_sgd(mt.sgd(0.3), every={"node": 2, "world": 4})
    init, step = (on_mesh(mesh, axes, f) for f in (tx.init, partial(local_step, tx, levels)))
    params, x, y = problem(8, steps=5)
    found, state = train(init, step, params, x, y)
    world = mt.NamedAxis("replica")
    replicas = {"node": world.groups(4), "world": world}
    check(found, simulated(tx, replicas, params, x, y), synchronised=[4])
    nodes = found["w1"][1].reshape(2, 4, 8, 16)  # after step 2
    assert (nodes == nodes[:, :1]).all()
    assert not np.array_equal(nodes[0], nodes[1])

    compiled = step.lower(params, state, x[0], y[0]).compile()
    everywhere, between_nodes = Program(compiled), Program(compiled, [d // 4 for d in range(8)])
    assert everywhere.always() == 0
    # Due or not; and where it is due, inside of the node or over the world.
    assert [sorted(counts) for counts in everywhere.branches()] == [[1, 1], [0, 2]]
    assert [sorted(counts) for counts in between_nodes.branches()] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_diloco_with_parameters_sharded_inside_of_each_replica(axis_type):
    """The norm of the gradients and the check for finite messages see all shards."""
    mesh, world = make_mesh(axis_type, replica=2, fsdp=4), mt.NamedAxis("replica")
    tx = mt.diloco(mt.chain(mt.clip_by_global_norm(0.05), mt.adamw(0.05)), every=3)
    init = on_mesh(mesh, ("replica",), tx.init)
    step = on_mesh(mesh, ("replica",), partial(local_step, tx, world))
    params, x, y = problem(2, steps=7)

    def shard(values):
        def one(a):
            spec = PartitionSpec("replica", "fsdp") if a.ndim == 3 else PartitionSpec("replica")
            return jax.device_put(a, NamedSharding(mesh, spec))

        return jax.tree.map(one, values)

    sharded = shard(params)
    state = shard(init(sharded))
    # Batches are whole in a replica: its devices hold a part of the parameters each.
    batches = [
        jax.device_put(a, NamedSharding(mesh, PartitionSpec(None, "replica"))) for a in (x, y)
    ]
    with jax.set_mesh(mesh):
        found, new = train(lambda params: state, step, sharded, *batches)
        compiled = step.lower(sharded, state, batches[0][0], batches[1][0]).compile()
    check(found, simulated(tx, world, params, x, y), synchronised=[3, 6])
    for a in jax.tree.leaves(new):
        assert a.sharding.shard_shape(a.shape)[1:] == (
            (a.shape[1] // 4, a.shape[2]) if a.ndim == 3 else ()
        )
    within, between = Program(compiled), Program(compiled, [d // 4 for d in range(8)])
    assert within.always() > between.always() == 0
    assert [sorted(counts) for counts in between.branches()] == [[0, 1]]
