"""Transforms that act on parts of the tree."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch

import meantime as mt


def train(tx, target, steps, world):
    """A quadratic with leaves of three sizes; all parameters after every step."""
    params = {"a": torch.zeros(4), "b": [torch.zeros(2, 3), None], "c": torch.zeros(())}
    state, history = tx.init(params), []
    for _ in range(steps):
        grads = mt.tree.map(lambda p: p - target, params)
        params, state = mt.step(tx, grads, params, state, replicas=world)
        history.append(torch.cat([x.reshape(-1) for x in mt.tree.leaves(params)]))
    return torch.stack(history)


def test_one_fragment_is_diloco():
    targets, world = torch.randn(3, generator=torch.Generator().manual_seed(0)), mt.Vmapped(3)

    def run(tx):
        return torch.func.vmap(lambda target: train(tx, target, 13, world))(targets)

    whole = run(mt.diloco(mt.sgd(0.1), every=4))
    assert torch.equal(run(mt.streaming_diloco(mt.sgd(0.1), every=4, fragments=1)), whole)
    assert not torch.equal(run(mt.streaming_diloco(mt.sgd(0.1), every=4, fragments=2)), whole)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_leaf_is_synchronised_once_a_round(count):
    tx = mt.streaming_diloco(mt.sgd(0.1), every=6, fragments=count)
    params = {"a": torch.zeros(4), "b": torch.zeros(3), "c": torch.zeros(2)}
    state = tx.init(params)
    sent: dict[int, int] = {}
    for step in range(1, 13):
        world = mt.Recorded(mt.Solo())
        params, state = mt.step(tx, params, params, state, replicas=world)
        sent |= {step: world.bytes - 4 * len(world.calls)} if world.calls else {}
    assert list(sent) == list(range(6 // count, 13, 6 // count))
    # All leaves, twice, none of them in between.
    assert sum(sent.values()) == 2 * mt.tree.nbytes(params)
    assert max(sent.values()) < mt.tree.nbytes(params) or count == 1


def test_fragments_are_of_similar_size_and_none_is_empty():
    def cut(*sizes, count):
        return mt.fragments(count)([torch.zeros(n) for n in sizes])

    assert cut(5, 5, 5, 5, count=2) == [0, 0, 1, 1]
    assert cut(100, 1, 1, 1, count=4) == [0, 1, 2, 3]
    assert cut(1, 1, 1, 100, count=2) == [0, 0, 0, 1]


class Block(NamedTuple):
    norm: Any
    weight: Any


def test_fragments_of_whole_layers():
    """Numbers order the layers, not the spelling of their names."""
    model = {f"blocks.{i}.{name}": torch.zeros(3) for i in range(11) for name in ("w", "norm.b")}
    model |= {"embedding": torch.zeros(20), "head.w": torch.zeros(4), "head.b": torch.zeros(1)}
    strided = mt.fragments(3, "strided")(model)
    of_block = [strided[f"blocks.{i}.w"] for i in range(11)]
    assert of_block == [(of_block[0] + i) % 3 for i in range(11)]
    assert all(strided[f"blocks.{i}.norm.b"] == of_block[i] for i in range(11))
    assert strided["head.w"] == strided["head.b"]
    sequential = mt.fragments(3, "sequential")(model)
    of_block = [sequential[f"blocks.{i}.w"] for i in range(11)]
    assert of_block == sorted(of_block)
    assert set(sequential.values()) == {0, 1, 2}
    nested = {"blocks": [Block(torch.zeros(1), torch.zeros(2)) for _ in range(4)]}
    assert mt.fragments(2, "strided")(nested) == {
        "blocks": [Block(0, 0), Block(1, 1), Block(0, 0), Block(1, 1)]
    }


def test_tied_leaves_are_in_one_fragment():
    shared = torch.zeros(3)
    model = {"blocks.0.w": shared, "blocks.1.w": torch.zeros(3), "head": shared}
    for pattern in ("size", "sequential", "strided"):
        labels = mt.fragments(2, pattern)(model)
        assert labels["head"] == labels["blocks.0.w"] != labels["blocks.1.w"]


def test_partition_updates_each_part_with_its_own_rule():
    params = {"w": torch.ones(2), "b": torch.ones(1), "e": torch.ones(3)}
    labels = {"w": "decayed", "b": "plain", "e": "decayed"}
    rules = {"decayed": mt.adamw(0.1, weight_decay=0.5), "plain": mt.sgd(0.1, momentum=0.9)}
    tx = mt.partition(rules, labels)
    whole, state = params, tx.init(params)
    parts = {
        label: {name: x for name, x in params.items() if labels[name] == label} for label in rules
    }
    states = {label: rules[label].init(part) for label, part in parts.items()}
    for _ in range(3):
        whole, state = mt.step(tx, whole, whole, state)
        for label, part in parts.items():
            updates, states[label] = rules[label].update(part, states[label], part)
            parts[label] = mt.apply_updates(part, updates)
    for name, label in labels.items():
        assert torch.equal(whole[name], parts[label][name])


def test_in_jax():
    tx = mt.streaming_diloco(mt.sgd(0.1), every=4, fragments=2)
    world = mt.NamedAxis("replica")

    def local(target):
        params = {"a": jnp.zeros(4), "b": jnp.zeros(2)}
        state = tx.init(params)
        for _ in range(8):
            grads = jax.tree.map(lambda p: p - target, params)
            params, state = mt.step(tx, grads, params, state, replicas=world)
        return params

    jitted = jax.jit(jax.vmap(local, axis_name="replica"))(jnp.arange(3.0))
    assert (jitted["b"] == jitted["b"][0]).all()
    assert not (jitted["a"] == jitted["a"][0]).all()  # its fragment was due at step 6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mt.fragments(0), "at least 1"),
        (lambda: mt.fragments(2, "random"), "pattern must be"),
        (
            lambda: mt.fragments(2, "strided")({"0.w": torch.zeros(1), "0.b": torch.zeros(1)}),
            "layers",
        ),
        (lambda: mt.streaming_diloco(mt.sgd(0.1), every=4, fragments=2, delay=5), "delay=5"),
        (lambda: mt.fragments(3)([torch.zeros(1), torch.zeros(1)]), "2 leaves"),
        (lambda: mt.streaming_diloco(mt.sgd(0.1), every=10, fragments=4), "multiple"),
        (
            lambda: mt.partition({"a": mt.sgd(0.1)}, {"w": "b"}).init({"w": torch.zeros(1)}),
            r"\['w'\] is labelled 'b'",
        ),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_labels_follow_the_leaves_in_a_compiled_graph_too():
    tx = mt.partition({0: mt.scale(-1.0), 1: mt.scale(-2.0)}, mt.fragments(2))
    params = {"z": torch.ones(4), "a": torch.ones(1), "m": torch.ones(2)}  # keys out of order
    expected, _ = tx.update(params, tx.init(params), params)
    step = torch.compile(lambda p, s: tx.update(p, s, p)[0], backend="eager", fullgraph=True)
    for name, update in step(params, tx.init(params)).items():
        assert torch.equal(update, expected[name])
