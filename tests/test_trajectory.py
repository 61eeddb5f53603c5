"""`ema`, `swa` and `lawa` keep the average they say, and touch nothing else."""

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meantime as mt
from meantime import tree
from meantime.testing.compare import close, same_bits
from meantime.testing.strategies import stacked_trees

settings = hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
trajectories = st.integers(1, 7).flatmap(stacked_trees)  # the steps along the leading axis


def snapshots(trajectory):
    steps = len(tree.leaves(trajectory)[0])
    return [tree.map(lambda x, i=i: x[i], trajectory) for i in range(steps)]


def run(tx, values, state=None):
    state = tx.init(values[0]) if state is None else state
    for params in values:
        unchanged, state = tx.average(params, state)
        assert unchanged is params
    return state


def check(tx, trajectory, weights):
    """After every step the average is that with these weights, by the number of snapshots."""
    values = snapshots(trajectory)
    scale = tree.map(lambda x: x.double(), trajectory)
    state = tx.init(values[0])
    for n in range(1, len(values) + 1):
        state = run(tx, [values[n - 1]], state)
        w = torch.tensor(weights(n), dtype=torch.float64)
        wanted = tree.map(
            lambda x, w=w, n=n: torch.tensordot(w, x[:n].double(), 1).to(
                torch.promote_types(x.dtype, torch.float32)
            ),
            trajectory,
        )
        close("average", state.average, wanted, f"after {n} snapshots", scale=scale)
    assert state.count == len(values)


@settings
@given(trajectories)
def test_swa_is_the_mean(trajectory):
    check(mt.swa(), trajectory, lambda n: [1 / n] * n)


@settings
@given(trajectories, st.integers(1, 4))
def test_lawa_is_the_mean_of_the_last(trajectory, k):
    def weights(n):
        taken = min(n, k)
        return [0.0] * (n - taken) + [1 / taken] * taken

    check(mt.lawa(k), trajectory, weights)


@settings
@given(trajectories, st.floats(0.0, 1.0))
def test_ema_forgets_exponentially(trajectory, decay):
    def weights(n):
        return [decay ** (n - 1)] + [(1 - decay) * decay ** (n - i) for i in range(2, n + 1)]

    check(mt.ema(decay), trajectory, weights)


@settings
@given(trajectories)
def test_warm_up_forgets_the_first_ones_sooner(trajectory):
    def weights(n):
        found = [1.0]
        for i in range(1, n):
            kept = min(0.35, (1 + i) / (10 + i))  # 2/11, 3/12, 4/13, then 0.35
            found = [w * kept for w in found] + [1 - kept]
        return found

    check(mt.ema(0.35, warmup=True), trajectory, weights)


@settings
@given(trajectories, st.floats(0.5, 0.99))
def test_a_schedule_of_the_decay_takes_the_bias_away(trajectory, decay):
    """An average that starts from zero, divided by the sum of its weights, is this schedule."""

    def weights(n):
        return [(1 - decay) * decay ** (n - i) / (1 - decay**n) for i in range(1, n + 1)]

    def schedule(count):
        return decay * (1 - decay**count) / (1 - decay ** (count + 1))

    check(mt.ema(schedule), trajectory, weights)


AVERAGERS = {"ema": lambda: mt.ema(0.9), "swa": mt.swa, "lawa": lambda: mt.lawa(2)}
every_averager = pytest.mark.parametrize("make", AVERAGERS.values(), ids=AVERAGERS)


@every_averager
def test_parameters_that_rest_are_their_own_average(make):
    params = {"w": torch.randn(50), "half": torch.randn(50).bfloat16()}
    state = run(make(), [params] * 4)
    same_bits("average", mt.averaged_params(state, params), params, "it moved")


def test_half_precision_is_averaged_in_single():
    """Where an average in bfloat16, of `AveragedModel` say, stays at its first value."""
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    tx = mt.ema(0.999)
    state = run(tx, [params] + 2000 * [{"w": 2 * params["w"]}])
    assert state.average["w"].dtype == torch.float32
    torch.testing.assert_close(
        state.average["w"], torch.full((3,), 2 - 0.999**2000), rtol=1e-5, atol=0
    )
    assert mt.averaged_params(state, params)["w"].dtype == torch.bfloat16


def test_ema_is_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    theirs = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    tx, state = mt.ema(0.9), mt.ema(0.9).init(list(model.parameters()))
    for _ in range(6):
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator))
        theirs.update_parameters(model)
        _, state = tx.average(list(model.parameters()), state)
    for mine, other in zip(state.average, theirs.parameters(), strict=True):
        assert not mine.requires_grad  # parameters are taken as they are, without their graph
        torch.testing.assert_close(mine, other.detach(), rtol=1e-14, atol=1e-14)


@every_averager
def test_integers_and_bools_are_copied(make):
    def params(x, n, flag):
        return {"x": torch.tensor(x), "n": torch.tensor(n), "flag": torch.tensor(flag)}

    tx, last = make(), params(3.0, 7, False)
    state = run(tx, [params(1.0, 2, True), last])
    assert 1.0 < state.average["x"] < 3.0
    assert state.average["n"] == 7
    assert state.average["n"].dtype == torch.int64
    assert not state.average["flag"]
    last["n"].fill_(8)
    assert state.average["n"] == 7


@every_averager
def test_a_call_that_stands_for_no_step_takes_no_snapshot(make):
    tx = make()
    before = run(tx, [torch.zeros(1), torch.ones(1)])
    _, after = tx.average(torch.full((1,), 9.0), before, now=True, counts=False)
    same_bits("state", after, before, "a snapshot was taken")


def test_inside_outer_the_anchor_is_averaged_after_every_outer_step():
    outer = mt.chain(mt.mean(), mt.sgd(0.7, momentum=0.9), mt.swa())
    tx = mt.chain(mt.sgd(0.1), mt.periodic(mt.outer(outer), every=3))
    params = torch.ones(2, dtype=torch.bfloat16)
    state, anchors = tx.init(params), []
    for step in range(1, 13):
        grads = params - step
        params, state = mt.step(tx, grads, params, state, replicas=mt.Solo())
        anchors += [mt.find(state, mt.OuterState).anchor] if step % 3 == 0 else []
        average = mt.find(state, mt.TrajectoryState)
        assert average.count == len(anchors)
        if anchors:
            torch.testing.assert_close(average.average, torch.stack(anchors).mean(0))
    assert not torch.equal(average.average, anchors[-1])


def test_finding_the_average():
    params = {"w": torch.ones(2, dtype=torch.float16)}
    tx = mt.named_chain(inner=mt.sgd(0.1), fast=mt.ema(0.5), slow=mt.ema(0.9))
    state = tx.init(params)
    fast, slow = mt.find_all(state, mt.TrajectoryState)
    assert mt.averaged_params(fast, params) is params  # no snapshot was taken
    _, state = tx.average(params, state)
    _, state = tx.average({"w": 3 * params["w"]}, state)
    with pytest.raises(LookupError, match=r"several .*find_all"):
        mt.averaged_params(state, params)
    fast, slow = (mt.averaged_params(s, params) for s in mt.find_all(state, mt.TrajectoryState))
    assert fast["w"].tolist() == [2.0, 2.0]
    assert slow["w"].tolist() == pytest.approx([1.2, 1.2], rel=1e-3)
    assert fast["w"].dtype == torch.float16
    with pytest.raises(LookupError, match="no state of type TrajectoryState"):
        mt.averaged_params(mt.sgd(0.1).init(params), params)
    with pytest.raises(ValueError, match="structure"):
        mt.averaged_params(state["fast"], {"v": params["w"]})


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_decays_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="decay"):
        mt.ema(bad)


def test_numbers_of_snapshots_are_checked():
    with pytest.raises(ValueError, match="k must be"):
        mt.lawa(0)
    with pytest.raises(TypeError, match="k must be"):
        mt.lawa(2.5)
