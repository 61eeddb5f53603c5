"""Laws of federated learning, of outer optimizers of one replica, and of the inner state."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meantime as mt
from meantime import tree
from meantime.testing.cases import vmapped
from meantime.testing.compare import close, same_bits
from meantime.testing.strategies import replica_counts, trees, trees_like
from property_tests.test_training import inners, periods, problems, same_training

RATE = 0.1
STEPS = 9


class Clients(NamedTuple):
    """What all replicas want, and in each step who makes an update and with what weight."""

    params: Any
    wanted: Any
    busy: torch.Tensor
    weight: torch.Tensor

    @property
    def size(self) -> int:
        return self.busy.shape[1]

    def pull(self, params: Any, wanted: Any) -> Any:
        return tree.map(lambda p, c: 0.5 * (p - c), params, wanted)

    def push(self, params: Any, wanted: Any) -> Any:
        """A gradient that does not depend on where the replica is."""
        return wanted

    def train(self, tx: mt.Transform, grad: Any, steps: int = STEPS) -> list[tuple[Any, Any]]:
        """All replicas' parameters and states after every step."""
        world = mt.Vmapped(self.size)

        def step(params: Any, state: Any, wanted: Any, busy: Any, weight: Any) -> Any:
            extra = {"replicas": world, "weight": weight}
            grads = grad(params, wanted)
            updates, after = tx.update(grads, state, params, **mt.pick(tx.update, extra))
            made = (mt.apply_updates(params, updates), after)
            params, state = tree.map(lambda a, b: torch.where(busy, a, b), made, (params, state))
            return tx.average(params, state, **mt.pick(tx.average, extra))

        params = tree.map(lambda x: x.expand(self.size, *x.shape).clone(), self.params)
        state = vmapped(tx.init, params)
        found = []
        for i in range(steps):
            params, state = vmapped(step, params, state, self.wanted, self.busy[i], self.weight[i])
            found.append((params, state))
        return found


@st.composite
def clients(draw: st.DrawFn, min_size: int = 1) -> Clients:
    """Not everybody is busy in every step or takes part in every round."""
    size = draw(replica_counts(4).filter(lambda size: size >= min_size))
    params = draw(trees(dtypes=[torch.float64], magnitude=10.0, max_leaves=3))
    wanted = draw(trees_like(params, leading=(size,), magnitude=10.0))

    def table(elements: st.SearchStrategy[Any]) -> torch.Tensor:
        row = st.lists(elements, min_size=size, max_size=size)
        return torch.tensor(draw(st.lists(row, min_size=STEPS, max_size=STEPS)))

    return Clients(params, wanted, table(st.booleans()), table(st.sampled_from([0.0, 1.0, 3.0])))


def equally(clients: Clients) -> Clients:
    """Everybody is busy in every step and takes part in every round."""
    everyone = torch.ones_like(clients.weight)
    return clients._replace(busy=everyone > 0, weight=everyone)


def similar(name: str, found: Any, wanted: Any, claim: str) -> None:
    scale = tree.map(lambda x: x.double().abs() + 10.0, wanted)
    close(name, found, wanted, claim, scale=scale, roundings=256)


ROUNDS = {
    "fedavg": lambda every: mt.fedavg(mt.sgd(RATE, momentum=0.5), every),
    "fedprox": lambda every: mt.fedprox(mt.sgd(RATE), every, strength=0.3),
    "fedyogi": lambda every: mt.fedyogi(mt.sgd(RATE), every, learning_rate=0.1, tau=0.1),
    "scaffold": lambda every: mt.chain(mt.periodic(mt.scaffold(RATE), every), mt.sgd(RATE)),
    "fednova": lambda every: mt.chain(mt.periodic(mt.fednova(), every), mt.sgd(RATE)),
}


@pytest.mark.parametrize("name", ROUNDS)
@given(clients(min_size=2), periods, st.data())
def test_who_takes_no_part_has_no_influence(
    name: str, clients: Clients, every: int, data: Any
) -> None:
    """A replica of weight 0, and one that is not finite, which is counted."""
    rank = data.draw(st.integers(0, clients.size - 1))
    bad = data.draw(st.sampled_from([float("nan"), float("inf"), 1e4]))
    clients = clients._replace(busy=clients.busy | True)
    clients.weight[:, rank] = 0.0 if bad == 1e4 else 1.0
    clients.weight[:, rank - 1] = 1.0  # somebody always does take part
    silent = clients._replace(weight=clients.weight.clone())
    silent.weight[:, rank] = 0.0
    spoilt = clients._replace(wanted=tree.map(lambda x: _with(x, rank, bad), clients.wanted))
    tx = ROUNDS[name](every)
    wanted = silent.train(tx, silent.push)
    found = spoilt.train(tx, spoilt.push)
    for i in range(every - 1, STEPS, every):
        same_bits("params", found[i][0], wanted[i][0], "one that takes no part has influence")
    rejected = mt.find(found[-1][1], mt.MeanState).rejected[rank]
    is_bad = bad != 1e4 and any(x.numel() for x in tree.leaves(clients.params))
    assert rejected == (STEPS // every if is_bad else 0)


def _with(x: torch.Tensor, rank: int, value: float) -> torch.Tensor:
    x = x.clone()
    x[rank] = value
    return x


# --- limits -----------------------------------------------------------------------------------


@given(problems(), periods)
def test_fedavg_of_an_optimizer_without_a_state_is_local_sgd(problem: Any, every: int) -> None:
    tx = mt.fedavg(mt.sgd(RATE), every)
    same_training(problem, tx, mt.local_sgd(mt.sgd(RATE), every), steps=7, bits=True)


@given(problems())
def test_no_momentum_is_left_of_the_round_before(problem: Any) -> None:
    tx = mt.fedavg(mt.sgd(RATE, momentum=0.9), every=1)
    same_training(problem, tx, mt.local_sgd(mt.sgd(RATE), every=1), steps=7, bits=True)


@given(problems(), inners, periods)
def test_fedprox_of_strength_0_is_fedavg(problem: Any, inner: mt.Transform, every: int) -> None:
    tx = mt.fedprox(inner, every, strength=0.0)
    same_training(problem, tx, mt.fedavg(inner, every), steps=7, bits=True)


@given(clients(), periods)
def test_fednova_of_equal_numbers_of_steps_is_weighted_averaging(
    clients: Clients, every: int
) -> None:
    clients = clients._replace(busy=clients.busy | True)
    tx = mt.chain(mt.periodic(mt.fednova(), every), mt.sgd(RATE))
    # An anchor is kept where nobody takes part.
    outer = mt.outer(mt.chain(mt.mean(), mt.sgd(1.0)))
    plain = mt.chain(mt.periodic(outer, every), mt.sgd(RATE))
    found, wanted = (clients.train(x, clients.pull)[-1][0] for x in (tx, plain))
    similar("params", found, wanted, "not the mean")


@given(problems(), st.sampled_from(["adam", "yogi"]), st.sampled_from([1e-3, 0.5, 1e3]), periods)
def test_a_second_moment_that_stays_as_it_began_divides_by_two_tau(
    problem: Any, rule: Any, tau: float, every: int
) -> None:
    moments = mt.scale_by_server_moments(rule, b1=0.0, b2=1.0, tau=tau)
    server = mt.chain(mt.mean(), moments, mt.scale_by_learning_rate(2 * tau))
    tx = mt.chain(mt.sgd(RATE), mt.periodic(mt.outer(server), every))
    same_training(problem, tx, mt.local_sgd(mt.sgd(RATE), every), steps=7)


@given(problems(size=1), inners, periods)
def test_snoo_without_momentum_is_lookahead(problem: Any, inner: mt.Transform, every: int) -> None:
    tx = mt.snoo(inner, every, learning_rate=0.5, momentum=0.0)
    same_training(problem, tx, mt.lookahead(inner, every), steps=7, bits=True)


@given(problems(size=1), inners, periods, st.floats(0.0, 0.95))
def test_snoo_is_diloco_of_one_replica(
    problem: Any, inner: mt.Transform, every: int, momentum: float
) -> None:
    numbers = {"learning_rate": 0.8, "momentum": momentum}
    tx = mt.snoo(inner, every, **numbers)
    same_training(problem, tx, mt.diloco(inner, every, **numbers), steps=7, bits=True)


@pytest.mark.parametrize("nesterov", [False, True])
@given(
    st.lists(st.floats(-10, 10), min_size=1, max_size=8), st.floats(0.1, 0.95), st.floats(0.1, 2.0)
)
def test_bmuf_is_torch_sgd_on_what_the_blocks_change(
    nesterov: bool, deltas: list[float], momentum: float, rate: float
) -> None:
    found, wanted = torch.zeros(1).double(), torch.zeros(1).double()
    tx = mt.bmuf(mt.identity(), 1, momentum=momentum, learning_rate=rate, nesterov=nesterov)
    state = tx.init(found)
    optimizer = torch.optim.SGD([wanted], rate, momentum, nesterov=nesterov)
    for delta in deltas:
        found, state = tx.average(found - delta, state, replicas=mt.Solo())
        wanted.grad = torch.tensor([delta], dtype=torch.float64)
        optimizer.step()
    similar("params", found, wanted, "differs from torch.optim.SGD")


def test_sixty_blocks_of_bmuf() -> None:
    """As Nesterov's momentum goes; to add the look-ahead to the model makes 795.03 of it."""
    tx, params = mt.bmuf(mt.identity(), every=1), torch.zeros(()).double()
    state = tx.init(params)
    for _ in range(60):
        params, state = tx.average(params - 1, state, replicas=mt.Solo())
    assert round(-params.item(), 2) == 431.02


# --- unlike clients ---------------------------------------------------------------------------


@given(clients(), periods)
def test_scaffolds_variates_have_the_mean_that_all_know(clients: Clients, every: int) -> None:
    """Whoever takes part and however many updates they made."""
    tx = mt.chain(mt.periodic(mt.scaffold(RATE, 0.7), every), mt.sgd(RATE))
    for _, state in clients.train(tx, clients.pull):
        found = mt.find(state, mt.ScaffoldState)
        weight = found.weight / found.weight.sum()
        mean = tree.map(
            lambda x, w=weight: (w @ x.reshape(len(x), -1)).view(x.shape[1:]), found.own
        )
        mean = tree.map(lambda x: x.expand(clients.size, *x.shape), mean)
        similar("common", found.common, mean, "not the mean of the variates")


@given(clients(), periods)
def test_scaffold_stops_the_drift(clients: Clients, every: int) -> None:
    """Of gradients that stay what they are, all is known after a round of all replicas."""
    clients = equally(clients)
    tx = mt.chain(mt.periodic(mt.scaffold(RATE), every), mt.sgd(RATE))
    for i, (params, _) in enumerate(clients.train(tx, clients.push), start=1):
        if i > every:
            first = tree.map(lambda x: x[:1].expand(x.shape), params)
            similar("params", params, first, "replicas drift apart")


@given(clients())
def test_scaffold_sends_one_message(clients: Clients) -> None:
    world = mt.Recorded(mt.Solo())
    tx = mt.scaffold(RATE)
    tx.average(clients.params, tx.init(clients.params), replicas=world)
    assert len(world.calls) == 1


@given(clients(), periods)
def test_fednova_goes_where_all_want_however_often_each_steps(clients: Clients, every: int) -> None:
    """Along the mean gradient of those who took part, as far as they went on average."""
    steps = every
    clients = clients._replace(weight=torch.ones_like(clients.weight))
    tx = mt.chain(mt.periodic(mt.fednova(), every), mt.sgd(RATE))
    found = clients.train(tx, clients.push, steps)[-1][0]
    made = clients.busy[:steps].sum(0).double()
    moved = (made > 0).double() / max(int((made > 0).sum()), 1)

    def expected(start: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
        direction = (moved @ grads.reshape(len(grads), -1)).view(start.shape)
        return (start - RATE * (moved @ made) * direction).expand(grads.shape)

    wanted = tree.map(expected, clients.params, clients.wanted)
    similar("params", found, wanted, "those who step more often count more")


# --- the state of the inner optimizer -----------------------------------------------------------


@given(problems(), st.booleans())
def test_momentum_that_is_averaged_every_step_is_data_parallel(
    problem: Any, nesterov: bool
) -> None:
    inner = mt.sgd(RATE, momentum=0.9, nesterov=nesterov)
    averaged = mt.average_state(inner, {"trace": mt.average_params()})
    tx = mt.chain(averaged, mt.average_params())
    same_training(problem, tx, mt.chain(mt.mean(), inner), steps=5)


@given(problems(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))
def test_desloc_averages_each_moment_in_its_period(
    problem: Any, every: int, first: int, second: int
) -> None:
    """And only then; nothing else of the state is the same on all replicas."""
    tx = mt.desloc(mt.adam(RATE), every, {"mu": first, "nu": second})
    clients = equally(
        Clients(problem.params, problem.pulls[0], *[torch.ones(STEPS, problem.size)] * 2)
    )
    for i, (params, state) in enumerate(clients.train(tx, clients.pull), start=1):
        adam = mt.find(state, mt.AdamState)
        assert adam.count.tolist() == [i] * problem.size
        for leaf in tree.leaves(adam.nu):
            assert (leaf >= 0).all()
        for values, period in ((params, every), (adam.mu, first), (adam.nu, second)):
            if i % period == 0:
                same = tree.map(lambda x: x[:1].expand(x.shape).clone(), values)
                same_bits("values", values, same, f"replicas differ after step {i}")


@given(problems(), inners, periods)
def test_desloc_that_never_averages_moments_is_local_sgd(
    problem: Any, inner: mt.Transform, every: int
) -> None:
    tx = mt.desloc(inner, every, {})
    same_training(problem, tx, mt.local_sgd(inner, every), steps=7)


@pytest.mark.parametrize("rule", ["adam", "yogi", "adagrad"])
@given(
    trees(dtypes=[torch.float32]).flatmap(
        lambda params: st.tuples(st.just(params), st.lists(trees_like(params), max_size=6))
    ),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    st.sampled_from([1e-3, 1.0]),
)
def test_second_moments_of_servers_are_not_negative(
    rule: Any, drawn: Any, b2: float, tau: float
) -> None:
    params, deltas = drawn
    tx = mt.scale_by_server_moments(rule, b2=b2, tau=tau)
    state = tx.init(params)
    for delta in deltas:
        updates, state = tx.update(delta, state)
        assert all((leaf >= 0).all() for leaf in tree.leaves(state.nu))
        assert all(leaf.isfinite().all() for leaf in tree.leaves(updates))
