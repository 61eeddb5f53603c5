"""What a factory returns is printed, pickled and compared as the call that made it."""

import copy
import pickle

import pytest
import torch

import meantime as mt
from tests.zoo import LEVELLED, ZOO


def outcome(tx, name):
    params = {"w": torch.tensor([1.0, -2.0]), "b": torch.tensor(0.5)}
    worlds = {"node": mt.Solo(), "world": mt.Solo()} if name in LEVELLED else mt.Solo()
    state = tx.init(params)
    for _ in range(3):
        params, state = mt.step(
            tx, {"w": params["w"], "b": params["b"]}, params, state, replicas=worlds
        )
    return [params["w"], params["b"], *mt.state_dict(state).values()]


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_transform_is_made_again(name):
    tx = ZOO[name]()
    # A local function among the arguments can be copied but not pickled.
    again = copy.deepcopy(tx) if "<lambda>" in repr(tx) else pickle.loads(pickle.dumps(tx))
    assert repr(again) == repr(tx) == repr(ZOO[name]())
    assert "0x" not in repr(tx)
    for a, b in zip(outcome(tx, name), outcome(again, name), strict=True):
        assert torch.equal(a, b)


def test_what_is_printed():
    tx = mt.diloco(
        mt.adamw(mt.schedules.cosine(1e-3, 100), weight_decay=0.1), every=8, momentum=0.9
    )
    assert repr(tx) == "diloco(adamw(cosine(0.001, steps=100), weight_decay=0.1), every=8)"
    tx = mt.outer(mt.chain(mt.mean(codec=mt.codecs.int8(128)), mt.sgd(torch.tensor(1.0))))
    assert repr(tx) == "outer(chain(mean(codec=int8(128)), sgd(1.0)))"
    assert repr(mt.named_chain(inner=mt.sgd(0.1))) == "named_chain(inner=sgd(0.1))"
    tx = mt.partition({"a": mt.sgd(1.0)}, labels={"x": "a"})
    assert repr(tx) == "partition({'a': sgd(1.0)}, labels={'x': 'a'})"


def test_a_transform_without_a_call_is_a_tuple():
    tx = mt.Transform(lambda params: mt.EmptyState())
    assert repr(tx).startswith("Transform(init=")
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(tx)


def test_codecs_and_schedules():
    x = torch.linspace(-1, 1, 10)
    for codec in (mt.codecs.bf16(), mt.codecs.int4(block=2), mt.codecs.topk(0.3)):
        again = pickle.loads(pickle.dumps(codec))
        assert repr(again) == repr(codec)
        assert torch.equal(again.roundtrip(x), codec.roundtrip(x))
    schedule = mt.schedules.join(
        [mt.schedules.linear(0.0, 1.0, 5), mt.schedules.constant(1.0)], boundaries=[5]
    )
    again = pickle.loads(pickle.dumps(schedule))
    assert [again(t) for t in range(8)] == [schedule(t) for t in range(8)]
