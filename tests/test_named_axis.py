"""`NamedAxis`: replicas along an axis of `jax.vmap` or of a mesh under `jax.shard_map`."""

from __future__ import annotations

import numpy as np
import pytest

import meantime as mt

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

K = 4
WORLD = mt.NamedAxis("replica")


def stacked_tree():
    """Leaves with a leading axis of replicas."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=(K, *shape))

    return {
        "float32": jnp.asarray(normal(3, 2), jnp.float32),
        "bfloat16": jnp.asarray(normal(5), jnp.bfloat16),
        "float16": jnp.asarray(normal(5), jnp.float16),
        "complex64": jnp.asarray(normal(2) + 1j * normal(2), jnp.complex64),
        "int32": jnp.arange(K * 2).reshape(K, 2) % 5,
        "uint8": jnp.array([[0], [255], [3], [7]], jnp.uint8),
        "bool": jnp.eye(K, 3) > 0,
        "0-d": jnp.asarray(normal(), jnp.float32),
        "empty": jnp.zeros((K, 0, 3)),
        "none": None,
        "nested": [
            jnp.asarray(normal(2), jnp.float32),
            (None, jnp.asarray(normal(1), jnp.float32)),
        ],
    }


def by_vmap(function, *arguments):
    return jax.jit(jax.vmap(function, axis_name="replica"))(*arguments)


def by_shard_map(function, *arguments):
    def on_device(*arguments):
        results = function(*jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda x: x[None], results)

    mesh, spec = Mesh(np.array(jax.devices()[:K]), ("replica",)), PartitionSpec("replica")
    return jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    )(*arguments)


@pytest.fixture(params=[by_vmap, by_shard_map], ids=["vmap", "shard_map"])
def run(request):
    return request.param


def numbers(x):
    x = np.asarray(x)
    return x.astype(np.float64) if x.dtype.name in ("bfloat16", "float16", "float32") else x


def check(actual, function, trees, *, exact: bool = False) -> None:
    """`actual` is `function` of every leaf's NumPy array, axes (replica, ...), in its dtype."""
    assert jax.tree.structure(actual) == jax.tree.structure(trees)
    for path, x, y in zip(
        mt.tree.paths(trees), mt.tree.leaves(actual), mt.tree.leaves(trees), strict=True
    ):
        wanted = np.asarray(function(numbers(y))).astype(y.dtype)
        assert x.dtype == y.dtype, path
        assert x.shape == wanted.shape, path
        tolerance = {"bfloat16": 1e-2, "float16": 1e-3}.get(x.dtype.name, 1e-6)
        np.testing.assert_allclose(
            numbers(x),
            numbers(wanted),
            0 if exact else tolerance,
            0 if exact else tolerance / 10,
            err_msg=path,
        )


def inexact(x) -> bool:
    return np.issubdtype(x.dtype, np.inexact)


def mean_of(x, axis=0):
    return x.mean(axis, keepdims=True) if inexact(x) else x.max(axis, keepdims=True)


def test_mean(run):
    trees = stacked_tree()
    means = run(WORLD.mean, trees)
    check(means, lambda x: np.broadcast_to(mean_of(x), x.shape), trees)
    for leaf in jax.tree.leaves(means):  # the same bits on all replicas
        assert all((np.asarray(row) == np.asarray(leaf[0])).all() for row in leaf)


def test_half_precision_accumulates_in_float32(run):
    x = jnp.broadcast_to(jnp.array([60000.0, 6e-8], jnp.float16), (K, 2))
    assert (run(WORLD.mean, x) == x).all()
    x = jnp.array([256.0, 4.0, 4.0, 4.0], jnp.bfloat16)
    assert run(WORLD.mean, x).tolist() == [67.0] * K


@pytest.mark.parametrize("weights", [[1.0, 2.0, 0.5, 3.0], [3.0, 0.0, 1.0, 2.0], [0.0] * 4])
def test_weighted_mean(run, weights):
    trees = stacked_tree()

    def ruin(x):  # a replica of weight 0 may hold anything
        if not mt.arrays.is_inexact(x):
            return x
        taking_part = (np.array(weights) > 0).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(taking_part, x, jnp.nan).astype(x.dtype)

    def expected(x):
        if not inexact(x):
            return np.broadcast_to(mean_of(x), x.shape)
        with np.errstate(invalid="ignore"):
            mean = np.tensordot(weights, x, 1) / np.sum(weights)
        return np.broadcast_to(mean, x.shape)

    def function(x, weight):
        return WORLD.mean(x, weight=weight)

    actual = run(function, jax.tree.map(ruin, trees), jnp.array(weights))
    check(actual, expected, trees)


ORDER = [2, 0, 3, 1]


def test_gather_permute_broadcast_rank(run):
    trees = stacked_tree()
    check(run(WORLD.gather, trees), lambda x: np.stack([x] * K), trees, exact=True)
    permuted = run(lambda x: WORLD.permute(x, ORDER), trees)
    check(permuted, lambda x: x[ORDER], trees, exact=True)
    for by in (-1, 0, 1, 6):
        actual = run(lambda x, by=by: WORLD.shift(x, by), trees)
        check(actual, lambda x, by=by: np.roll(x, by, 0), trees, exact=True)
    for root in (0, 3):
        actual = run(lambda x, root=root: WORLD.broadcast(x, root), trees)
        check(actual, lambda x, root=root: np.broadcast_to(x[root], x.shape), trees, exact=True)
    assert run(lambda x: WORLD.rank + 0 * x, jnp.zeros(K, int)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_groups(run, size):
    trees, group = stacked_tree(), WORLD.groups(size)

    def split(x):
        return x.reshape(K // size, size, *x.shape[1:])

    def joined(function):
        return lambda x: function(split(x)).reshape(x.shape)

    def all_collectives(x):
        permuted = group.permute(x, list(reversed(range(size))))
        shifted, received = group.shift(x, 1), group.broadcast(x, size - 1)
        return group.mean(x), group.gather(x), permuted, shifted, received

    mean, gathered, permuted, shifted, received = run(all_collectives, trees)
    check(mean, joined(lambda x: np.broadcast_to(mean_of(x, 1), x.shape)), trees)
    check(gathered, lambda x: np.repeat(split(x), size, 0), trees, exact=True)
    order = list(reversed(range(size)))
    check(permuted, joined(lambda x: x[:, order]), trees, exact=True)
    check(shifted, joined(lambda x: np.roll(x, 1, 1)), trees, exact=True)
    check(received, joined(lambda x: np.broadcast_to(x[:, -1:], x.shape)), trees, exact=True)
    ranks = run(lambda x: group.rank + 0 * x, jnp.zeros(K, int))
    assert ranks.tolist() == [k % size for k in range(K)]


def test_weighted_mean_of_groups(run):
    group = WORLD.groups(2)
    x, weight = jnp.array([1.0, 3.0, jnp.nan, 5.0]), jnp.array([1.0, 3.0, 0.0, 2.0])
    actual = run(lambda x, weight: group.mean(x, weight=weight), x, weight)
    assert actual.tolist() == [2.5, 2.5, 5.0, 5.0]


def test_bad_permutations(run):
    with pytest.raises(ValueError, match=r"4 replicas once.*\[0, 0, 1, 2\]"):
        run(lambda x: WORLD.permute(x, [0, 0, 1, 2]), jnp.zeros(K))


def test_bad_groups(run):
    with pytest.raises(ValueError, match="4 replicas cannot be split into groups of 3"):
        run(WORLD.groups(3).mean, jnp.zeros(K))


def test_values_of_all_replicas(run):
    """A value that does not depend on the replica."""
    shared = jnp.array([1.5, -2.0])

    def function(x):
        results = (
            WORLD.mean(shared),
            WORLD.gather(shared)[1],
            WORLD.broadcast(shared, 2),
            WORLD.groups(2).mean(shared),
        )
        return jax.tree.map(lambda y: y + x, results)

    for result in run(function, jnp.zeros(K)):
        np.testing.assert_array_equal(result, np.broadcast_to(shared, (K, 2)))


@pytest.mark.parametrize("outside", [False, True])
def test_grad(outside):
    """By `jax.grad` outside of the `vmap`, as NumPy has it; inside, through a mean."""
    x = jnp.array([0.3, -1.0, 2.0, 0.7])
    scale = jnp.array([1.0, 2.0, 3.0, 4.0])
    matrix = np.full((K, K), 1 / K)

    def residual(x):
        return WORLD.mean(x) ** 2

    if outside:
        gradient = jax.grad(lambda x: (scale * jax.vmap(residual, axis_name="replica")(x)).sum())(x)
        expected = matrix.T @ (2 * np.asarray(scale) * (matrix @ np.asarray(x)))
    else:
        gradient = jax.vmap(jax.grad(residual), axis_name="replica")(x)
        expected = matrix.T @ (2 * (matrix @ np.asarray(x)))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_two_mesh_axes():
    """Levels are the axes of the mesh; both together are the world."""
    mesh = Mesh(np.array(jax.devices()[:K]).reshape(2, 2), ("node", "worker"))
    node, world = mt.NamedAxis("worker"), mt.NamedAxis(("node", "worker"))
    spec = PartitionSpec(("node", "worker"))

    def function(x):
        x = x[0]
        return jax.tree.map(
            lambda y: (y + 0 * x)[None],
            {
                "node": node.mean(x),
                "world": world.mean(x),
                "across": mt.NamedAxis("node").mean(x),
                "sizes": jnp.array(10 * node.size + world.size),
                "ranks": 10 * node.rank + world.rank,
                "shifted": world.shift(x, 1),
                "received": world.broadcast(x, 2),
            },
        )

    sharded = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    results = jax.tree.map(
        lambda x: x.tolist(), jax.jit(sharded)(jnp.array([0.0, 2.0, 10.0, 20.0]))
    )
    assert results == {
        "node": [1, 1, 15, 15],
        "world": [8] * 4,
        "across": [5, 11, 5, 11],
        "sizes": [24] * 4,
        "ranks": [0, 11, 2, 13],
        "shifted": [20, 0, 2, 10],
        "received": [10] * 4,
    }


def test_hierarchy_over_two_mesh_axes():
    mesh = Mesh(np.array(jax.devices()[:K]).reshape(2, 2), ("node", "worker"))
    levels = {"node": mt.NamedAxis("worker"), "world": mt.NamedAxis(("node", "worker"))}
    tx = mt.hierarchical_sgd(mt.sgd(1.0), {"node": 1, "world": 2})
    spec = PartitionSpec(("node", "worker"))

    def function(x):
        params, state, seen = 0 * x[0], tx.init(0 * x[0]), []
        for _ in range(2):
            params, state = mt.step(tx, x[0], params, state, replicas=levels)
            seen.append(params)
        return jnp.stack(seen)[None]

    sharded = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    steps = jax.jit(sharded)(jnp.array([0.0, 2.0, 10.0, 20.0]))
    assert steps.tolist() == [[-1, -16], [-1, -16], [-15, -16], [-15, -16]]


def test_eager_vmap_and_sweep():
    """Without jit, and in a further vmap outside."""
    x = jnp.arange(12.0).reshape(3, K)
    means = jax.vmap(jax.vmap(WORLD.mean, axis_name="replica"))(x)
    np.testing.assert_array_equal(means, np.broadcast_to(x.mean(1, keepdims=True), x.shape))


def test_pmap():
    x = jnp.arange(12.0).reshape(K, 3)
    means = jax.pmap(WORLD.mean, axis_name="replica", devices=jax.devices()[:K])(x)
    np.testing.assert_array_equal(means, np.broadcast_to(x.mean(0), x.shape))


def test_unknown_axis():
    with pytest.raises(NameError, match="replica"):
        WORLD.mean(jnp.zeros(2))


def test_repr():
    assert repr(mt.NamedAxis("replica")) == "NamedAxis('replica')"
    assert repr(mt.NamedAxis(("a", "b")).groups(2)) == "NamedAxis(('a', 'b')).groups(2)"


def test_bfloat16_training():
    """Parameters stay bfloat16 and the anchor is float32, under jit."""
    tx = mt.diloco(mt.sgd(0.1), every=2)

    def replica(target):
        params = jnp.zeros(2, jnp.bfloat16)
        state = tx.init(params)
        for _ in range(2):
            params, state = mt.step(tx, params - target, params, state, replicas=WORLD)
        return params, mt.find(state, mt.OuterState).anchor

    targets = jnp.arange(8.0).reshape(K, 2).astype(jnp.bfloat16)
    params, anchor = by_vmap(replica, targets)
    assert (params.dtype, anchor.dtype) == (jnp.bfloat16, jnp.float32)
    assert (params == params[0]).all()
    np.testing.assert_array_equal(params, anchor.astype(jnp.bfloat16))
    assert params[0, 0] > 0
