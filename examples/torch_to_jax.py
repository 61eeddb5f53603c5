"""Begin a run in torch and end it in JAX, in the middle of a round of DiLoCo.

    python examples/torch_to_jax.py

Four replicas train for 110 steps in torch; their parameters and the state of the transform go to
JAX, where the same transform makes 90 more. The result is that of 200 steps in torch.
"""

import jax
import jax.numpy as jnp
import torch
from sklearn.datasets import load_digits

import meantime as mt
from meantime.jax import to_jax

REPLICAS, HANDOVER, STEPS, PERIOD, BATCH = 4, 110, 200, 20, 32

bunch = load_digits()
generator = torch.Generator().manual_seed(0)
order = torch.randperm(len(bunch.data), generator=generator)
images = torch.tensor(bunch.data / 16, dtype=torch.float32)[order]
labels = torch.nn.functional.one_hot(torch.tensor(bunch.target)[order]).float()
test_images, test_labels = images[1440:], labels[1440:].argmax(1)
rows = torch.randint(1440, (STEPS, REPLICAS, BATCH), generator=generator)

tx = mt.diloco(mt.adamw(2e-3, weight_decay=0.1), every=PERIOD, last=STEPS)


def logits(params, x):
    """Operators only: the same function for both libraries."""
    hidden = x @ params["w1"] + params["b1"]
    return (hidden * (hidden > 0)) @ params["w2"] + params["b2"]


def torch_step(params, state, x, y):
    def loss(params):
        return -(torch.log_softmax(logits(params, x), -1) * y).sum(-1).mean()

    grads = torch.func.grad(loss)(params)
    return mt.step(tx, grads, params, state, replicas=mt.Vmapped(REPLICAS))


def jax_step(params, state, x, y):
    def loss(params):
        return -(jax.nn.log_softmax(logits(params, x)) * y).sum(-1).mean()

    grads = jax.grad(loss)(params)
    return mt.step(tx, grads, params, state, replicas=mt.NamedAxis("replica"))


def train(step, params, state, first, last, convert=lambda batch: batch):
    for i in range(first, last):
        params, state = step(params, state, *convert((images[rows[i]], labels[rows[i]])))
    return params, state


start = {
    "w1": torch.randn(64, 64, generator=generator) / 8,
    "b1": torch.zeros(64),
    "w2": torch.randn(64, 10, generator=generator) / 8,
    "b2": torch.zeros(10),
}
params = {name: p.expand(REPLICAS, *p.shape) for name, p in start.items()}
state = torch.func.vmap(tx.init)(params)
on_torch = torch.func.vmap(torch_step)
params, state = train(on_torch, params, state, 0, HANDOVER)

# A checkpoint is parameters and a flat dict. Both cross over without a copy, or from a file.
checkpoint = to_jax({"params": params, "state": mt.state_dict(state)})
template = jax.vmap(tx.init)(checkpoint["params"])
resumed = mt.load_state_dict(template, checkpoint["state"])
on_jax = jax.jit(jax.vmap(jax_step, axis_name="replica"))
ended, _ = train(on_jax, checkpoint["params"], resumed, HANDOVER, STEPS, to_jax)

params, _ = train(on_torch, params, state, HANDOVER, STEPS)
gap = max(float(jnp.abs(ended[name] - to_jax(params[name])).max()) for name in params)
one = {name: p[0] for name, p in ended.items()}
accuracy = (logits(one, to_jax(test_images)).argmax(1) == test_labels.numpy()).mean()
print(f"largest difference to {STEPS} steps in torch: {gap:.1e}")
print(f"test accuracy {accuracy:.3f}, after {HANDOVER} steps in torch and the others in JAX")
