"""Local SGD in JAX: the same transforms, an optax optimizer inside, one compiled program.

    python examples/jax_loop.py
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_loop.py

Trains four replicas: each on its own device by `jax.shard_map` where there are four, else all
on one by `jax.vmap`. What one replica does is the same.
"""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import meantime as mt

REPLICAS, STEPS, PERIOD, BATCH = 4, 300, 10, 32

bunch = load_digits()
order = jax.random.permutation(jax.random.key(0), len(bunch.data))
images, labels = jnp.asarray(bunch.data, jnp.float32)[order] / 16, jnp.asarray(bunch.target)[order]
split = 1436  # four shares of 359 images; 361 to test on
shares = images[:split].reshape(REPLICAS, -1, 64), labels[:split].reshape(REPLICAS, -1)

world = mt.NamedAxis("replica")
tx = mt.local_sgd(optax.adamw(2e-3), every=PERIOD, last=STEPS)


def forward(params, x):
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()


def train(params, images, labels, key):
    """What one replica does, from the first step to the last."""

    def local_step(carry, key):
        params, state = carry
        rows = jax.random.randint(key, (BATCH,), 0, len(images))
        value, grads = jax.value_and_grad(loss)(params, images[rows], labels[rows])
        updates, state = tx.update(grads, state, params, replicas=world)
        params = mt.apply_updates(params, updates)
        return tx.average(params, state, replicas=world), value

    keys = jax.random.split(key, STEPS)
    (params, _), losses = jax.lax.scan(local_step, (params, tx.init(params)), keys)
    return params, losses


k1, k2, k3 = jax.random.split(jax.random.key(1), 3)
start = {
    "w1": jax.random.normal(k1, (64, 64)) / 8,
    "b1": jnp.zeros(64),
    "w2": jax.random.normal(k2, (64, 10)) / 8,
    "b2": jnp.zeros(10),
}
starts = jax.tree.map(lambda x: jnp.broadcast_to(x, (REPLICAS, *x.shape)), start)
arguments = starts, *shares, jax.random.split(k3, REPLICAS)

if jax.device_count() >= REPLICAS:
    mesh = jax.make_mesh((REPLICAS,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    each = jax.sharding.PartitionSpec("replica")
    replicated = jax.shard_map(jax.vmap(train), mesh=mesh, in_specs=each, out_specs=each)
else:
    replicated = jax.vmap(train, axis_name="replica")
params, losses = jax.jit(replicated)(*arguments)

jnp.set_printoptions(precision=3)
equal = all(bool((p == p[0]).all()) for p in params.values())
first = {name: p[0] for name, p in params.items()}
accuracy = (forward(first, images[split:]).argmax(1) == labels[split:]).mean()
print(f"mean loss of each replica over the first {PERIOD} steps:", losses[:, :PERIOD].mean(1))
print(f"mean loss of each replica over the last {PERIOD} steps: ", losses[:, -PERIOD:].mean(1))
print(f"test accuracy {accuracy:.3f}, all replicas hold the same weights: {equal}")
