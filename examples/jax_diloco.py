"""DiLoCo in JAX: a flax model, a replica on each of eight devices, one compiled step.

    python examples/jax_diloco.py

On a machine without eight accelerators, XLA makes eight devices of its CPU. Parameters, state
and batches have a leading axis of replicas; inside of `shard_map` a replica sees its own.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.getenv("XLA_FLAGS", "")

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import meantime as mt

STEPS, PERIOD, BATCH = 200, 20, 32
REPLICAS = min(8, jax.device_count())

bunch = load_digits()
order = jax.random.permutation(jax.random.key(0), len(bunch.data))
images, labels = jnp.asarray(bunch.data / 16, jnp.float32)[order], jnp.asarray(bunch.target)[order]
test_images, test_labels = images[1440:], labels[1440:]
shares = images[:1440].reshape(REPLICAS, -1, 64), labels[:1440].reshape(REPLICAS, -1)


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


graph, start = nnx.split(Network(nnx.Rngs(0)))
world = mt.NamedAxis("replica")
inner = mt.chain(mt.clip_by_global_norm(1.0), mt.adamw(2e-3))
tx = mt.diloco(inner, every=PERIOD, last=STEPS)


def loss(params, x, y):
    logits = nnx.merge(graph, params)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def local_step(params, state, images, labels, key):
    """What one replica does in a step."""
    rows = jax.random.randint(key, (BATCH,), 0, len(images))
    value, grads = jax.value_and_grad(loss)(params, images[rows], labels[rows])
    params, state = mt.step(tx, grads, params, state, replicas=world)
    return params, state, value


def on_replicas(function):
    """The function of one replica, on all of them."""

    def one(*arguments):
        results = function(*jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda x: x[None], results)

    each = jax.sharding.PartitionSpec("replica")
    return jax.shard_map(one, mesh=mesh, in_specs=each, out_specs=each)


mesh = jax.make_mesh((REPLICAS,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
params = jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), start)
state = jax.jit(on_replicas(tx.init))(params)
step = jax.jit(on_replicas(local_step), donate_argnums=(0, 1))
for i in range(1, STEPS + 1):
    keys = jax.random.split(jax.random.key(i), REPLICAS)
    params, state, values = step(params, state, *shares, keys)
    if i % (2 * PERIOD) == 0:
        print(f"step {i}: mean loss of {REPLICAS} replicas {values.mean():.3f}")

equal = all(bool((p == p[0]).all()) for p in jax.tree.leaves(params))
model = nnx.merge(graph, jax.tree.map(lambda p: p[0], params))
accuracy = (model(test_images).argmax(1) == test_labels).mean()
print(f"test accuracy {accuracy:.3f}, all replicas hold the same weights: {equal}")
