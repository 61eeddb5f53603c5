"""`AveragingOptimizer` among real processes: what goes along with the parameters, and what may
differ between ranks."""

import copy
import io
import logging
import math
import pickle
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import meantime as mt
from meantime.adapters import AveragingOptimizer
from tests import checkpoints

SIZE = 4


def network(seed: int = 0, norm: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    middle = torch.nn.BatchNorm1d(3) if norm else torch.nn.Tanh()
    return torch.nn.Sequential(torch.nn.Linear(4, 3), middle, torch.nn.Linear(3, 1))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def wrapped(module, averager=None, inner=torch.optim.SGD, **options):
    averager = averager or mt.periodic(mt.average_params(), every=2)
    options = {"replicas": mt.Distributed(), **options}
    return AveragingOptimizer(inner(module.parameters(), lr=0.1), averager, **options)


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        model(batch(10 * step + dist.get_rank())).square().mean().backward()
        optimizer.step()


def same_on_all_ranks(tensors) -> bool:
    gathered = mt.Distributed().gather([x.detach().clone() for x in tensors])
    return all(bool((x == x[:1]).all()) for x in gathered)


def copies(model):
    return [x.detach().clone() for x in model.state_dict().values()]


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def raised(kind, action) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


# --- buffers and the state of the optimizer inside -------------------------------------------


def buffers_body():
    rank = dist.get_rank()
    outputs = {}
    for policy in ("mean", "broadcast", "ignore"):
        model = network(norm=True)
        optimizer = wrapped(model, model=model, buffers=policy)
        statistics = model[1]
        train(model, optimizer, 1)
        local = statistics.running_mean.clone()
        if rank == 3:
            statistics.num_batches_tracked += 5
        train(model, optimizer, 1, start=1)
        outputs[policy] = same_on_all_ranks([*model.parameters(), *model.buffers()])
        if policy == "mean":
            assert not same_on_all_ranks([local])
            assert int(statistics.num_batches_tracked) == 7  # the largest
    assert outputs == {"mean": True, "broadcast": True, "ignore": False}

    # An infinite buffer on one replica does not reach the others; one on all stays.
    model = network(norm=True)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    optimizer = wrapped(model, model=model)
    if rank == 1:
        model[1].running_var[0] = math.inf
    optimizer.average_now()
    assert bool(torch.isfinite(model[1].running_var).all())
    assert model.mask.tolist() == [0.0, -math.inf]


def test_buffers(gloo):
    gloo.run(buffers_body)


def optimizer_state_body():
    found = {}
    for policy in ("keep", "average", "reset"):
        model = network()
        optimizer = wrapped(model, inner=torch.optim.AdamW, optimizer_state=policy)
        train(model, optimizer, 1)
        first = {k: v["exp_avg"].clone() for k, v in optimizer.state.items()}
        train(model, optimizer, 1, start=1)
        entries = list(optimizer.state.values())
        found[policy] = bool(entries) and same_on_all_ranks([e["exp_avg"] for e in entries])
        assert not same_on_all_ranks(list(first.values()))
        assert all(int(e["step"]) == 2 for e in entries)
        assert all(bool((e["exp_avg_sq"] >= 0).all()) for e in entries)
        assert bool(entries) == (policy != "reset")
        train(model, optimizer, 1, start=2)  # goes on
    assert found == {"keep": False, "average": True, "reset": False}

    # A rank that never had a gradient has no moments: named on all ranks, instead of a hang.
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = AveragingOptimizer(
        torch.optim.AdamW([used, unused]),
        mt.average_params(),
        replicas=mt.Distributed(),
        optimizer_state="average",
    )
    used.grad = torch.ones(2)
    if dist.get_rank() != 2:
        unused.grad = torch.ones(2)
    message = raised(ValueError, optimizer.step)
    assert "exp_avg of parameter 1, rank 2 has nothing" in message


def test_the_state_of_the_optimizer_inside(gloo):
    gloo.run(optimizer_state_body)


# --- equal starts, equal plans ---------------------------------------------------------------


def start_body():
    rank = dist.get_rank()

    # A different schedule, tree or start is named on every rank.
    every = 8 if rank == 2 else 4
    message = raised(
        ValueError,
        lambda: wrapped(network(), mt.periodic(mt.average_params(), every=every)),
    )
    assert "every=4" in message
    assert "rank 2 has periodic(average_params(), every=8)" in message
    odd = torch.nn.Linear(4, 3, bias=rank != 1)
    assert "rank 1 has nothing" in raised(ValueError, lambda: wrapped(odd))
    model = network()
    if rank == 3:
        with torch.no_grad():
            model[2].weight[0, 1] += 1
    assert "rank 3" in raised(ValueError, lambda: wrapped(model, start="check"))

    # Without a check, rank 0 is where all start, buffers included.
    model = network(seed=rank, norm=True)
    model[1].running_mean.fill_(rank)
    optimizer = wrapped(model, model=model)
    assert equal(copies(model)[:3], copies(network(seed=0, norm=True))[:3])
    assert model[1].running_mean.tolist() == [0.0] * 3

    # So do parameters that come later.
    late = torch.nn.Parameter(torch.full((2,), float(rank)))
    optimizer.add_param_group({"params": [late]})
    assert late.tolist() == [0.0, 0.0]
    late.grad = torch.full((2,), float(rank))
    optimizer.step()
    late.grad = None
    optimizer.step()
    assert torch.allclose(late, torch.tensor(-0.15))


def test_starts(gloo):
    gloo.run(start_body)


def kinds_body():
    rank = float(dist.get_rank())
    parameters = [
        torch.nn.Parameter(torch.tensor(rank)),
        torch.nn.Parameter(torch.empty(0, 3)),
        torch.nn.Parameter(torch.full((2,), rank, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.full((2,), rank, dtype=torch.float64)),
        torch.nn.Parameter(torch.full((2,), 60000.0, dtype=torch.float16)),
        torch.nn.Parameter(torch.full((2,), 6e-8, dtype=torch.float16)),
        torch.nn.Parameter(torch.full((2,), rank * (1 + 1j))),
        torch.nn.Parameter(torch.full((2, 3), rank).t()),
        torch.nn.Parameter(torch.full((2,), int(rank)), requires_grad=False),
    ]
    optimizer = AveragingOptimizer(
        torch.optim.SGD(parameters, lr=1.0),
        mt.average_params(),
        replicas=mt.Distributed(),
        start="broadcast",
    )
    with torch.no_grad():
        for i in (0, 2, 3, 6, 7, 8):
            parameters[i].add_(int(rank))
    optimizer.average_now()
    found = [p.detach().flatten()[:1].tolist() for p in parameters]
    tiny = torch.tensor(6e-8, dtype=torch.float16).item()
    assert found == [[1.5], [], [1.5], [1.5], [60000.0], [tiny], [1.5], [1.5], [int(rank)]]

    from torch.distributed.optim import ZeroRedundancyOptimizer

    shared = ZeroRedundancyOptimizer([parameters[0]], torch.optim.SGD, lr=1.0)
    message = raised(
        TypeError,
        lambda: AveragingOptimizer(shared, mt.average_params(), replicas=mt.Distributed()),
    )
    assert "fully_shard" in message


def test_kinds_of_parameters_and_optimizers(gloo):
    gloo.run(kinds_body)


def copies_body():
    world = mt.Distributed()
    levels = {"node": world.groups(2), "world": world}
    model = network()
    averager = mt.hierarchical_sgd(mt.identity(), every={"node": 1, "world": 2})
    optimizer = wrapped(model, averager, replicas=levels)
    train(model, optimizer, 1)
    others = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    train(model, optimizer, 2, start=1)
    for other, its_optimizer in others:
        train(other, its_optimizer, 2, start=1)
        assert equal(copies(model), copies(other))
        assert its_optimizer.replicas["node"].size == 2


def test_copies_and_pickles_with_groups(gloo):
    gloo.run(copies_body)


# --- warm-up ---------------------------------------------------------------------------------


def warmup_body():
    rank = dist.get_rank()
    averager = mt.post_local_sgd(mt.identity(), every=3, warmup=4)
    model, reference = network(), network()
    optimizer = wrapped(model, averager, inner=torch.optim.AdamW)
    parallel = DistributedDataParallel(reference)
    plain = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    for step in range(4):
        assert optimizer.warming_up
        train(model, optimizer, 1, start=step)
        train(parallel, plain, 1, start=step)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert not optimizer.warming_up
    train(model, optimizer, 2, start=4)
    assert not same_on_all_ranks(model.parameters())
    train(model, optimizer, 1, start=6)
    assert same_on_all_ranks(model.parameters())

    # Overflows in the warm-up: those that did not overflow decide; all together skip the step.
    model = network()
    optimizer = wrapped(model, averager)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    moved = []
    for overflow in (rank == 1, True, False):
        before = copies(model)
        optimizer.zero_grad()
        loss = model(batch(rank)).square().mean() * (math.inf if overflow else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert same_on_all_ranks(model.parameters())
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
        moved.append(not equal(before, copies(model)))
    assert moved == [True, False, True]

    # A rank without gradients for some parameters gets the mean of those of all.
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = AveragingOptimizer(
        torch.optim.SGD([first, second], lr=1.0), averager, replicas=mt.Distributed()
    )
    (first if rank % 2 else second).grad = torch.ones(2)
    optimizer.step()
    assert first.tolist() == second.tolist() == [-0.5, -0.5]


def test_gradients_are_averaged_in_the_warmup(gloo):
    gloo.run(warmup_body)


# --- evaluation, metrics ---------------------------------------------------------------------


def evaluation_body():
    model = network(norm=True)
    optimizer = wrapped(model, mt.periodic(mt.average_params(), every=10), model=model)
    train(model, optimizer, 3)
    own = copies(model)
    places = [p.data_ptr() for p in model.parameters()]
    expected = mt.Distributed().mean([p.detach().clone() for p in model.parameters()])
    with optimizer.averaged_parameters():
        assert same_on_all_ranks(model.state_dict().values())
        for mean, shown in zip(expected, model.parameters(), strict=True):
            assert torch.allclose(mean, shown, atol=1e-7)
        assert "averaged_parameters" in raised(RuntimeError, optimizer.step)
    assert equal(own, copies(model))
    assert places == [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError), optimizer.averaged_parameters():
        raise ZeroDivisionError
    assert equal(own, copies(model))
    train(model, optimizer, 7, start=3)  # it was no step: the tenth synchronises
    assert same_on_all_ranks(model.parameters())

    # With an average along the trajectory that is shown: bfloat16 weights that move too little to
    # be seen in a bfloat16 average are seen in ours.
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = AveragingOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        mt.chain(mt.periodic(mt.average_params(), every=2), mt.ema(0.999)),
        replicas=mt.Distributed(),
    )
    for step in range(2001):
        weight.grad = torch.full_like(weight, -1.0 if step == 1 else 0.0)
        optimizer.step()
    assert float(mt.find(optimizer.averager_state, mt.TrajectoryState).average[0]) == pytest.approx(
        2 - 0.999**2000, abs=1e-4
    )
    with optimizer.averaged_parameters():
        assert weight.item() == 1.8671875  # 1.8648 in bfloat16
    assert weight.item() == 2.0


def test_averaged_parameters(gloo):
    gloo.run(evaluation_body)


def metrics_body():
    done = []
    model = network()
    optimizer = wrapped(model, mt.diloco(mt.identity(), every=3), on_synchronisation=done.append)
    anchor = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 2)
    assert done == []
    assert optimizer.last_synchronisation is None
    optimizer.zero_grad()
    model(batch(dist.get_rank())).square().mean().backward()
    optimizer.optimizer.register_step_post_hook(lambda *_: done.append(copies(model)))
    optimizer.step()
    local, metrics = done
    mean = mt.Distributed().mean([x.clone() for x in local])
    drift = sum(float((a - b).square().sum()) for a, b in zip(local, mean, strict=True))
    values = sum(x.numel() for x in local)
    delta = sum(float((a - b).square().sum()) for a, b in zip(anchor, mean, strict=True))
    assert metrics is optimizer.last_synchronisation
    assert (metrics.step, metrics.participants) == (3, SIZE)
    assert metrics.nbytes == 4 * values + 4
    assert metrics.seconds > 0
    assert metrics.drift == pytest.approx(math.sqrt(drift / values), rel=1e-3)
    assert metrics.pseudo_gradient_norm == pytest.approx(math.sqrt(delta), rel=1e-3)

    # Without a callback nothing is measured that would take memory, and all is logged.
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("meantime")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    optimizer = wrapped(model, mt.periodic(mt.average_params(), every=1))
    train(model, optimizer, 1)
    logger.removeHandler(handler)
    assert optimizer.last_synchronisation.drift is None
    assert "after step 1: 4 replicas" in records[0].getMessage()


def test_metrics(gloo):
    gloo.run(metrics_body)


# --- uneven data -----------------------------------------------------------------------------


def join_body():
    rank = dist.get_rank()
    for averager in (
        mt.periodic(mt.average_params(), every=2),
        mt.post_local_sgd(mt.identity(), every=2, warmup=2),
        mt.diloco(mt.identity(), every=2),
    ):
        model = network()
        optimizer = wrapped(model, averager)
        with Join([optimizer]):
            train(model, optimizer, 8 if rank == 0 else 5)
        assert mt.find(optimizer.averager_state, mt.PeriodicState).count == 8
        assert same_on_all_ranks(model.parameters())

    # Only those with data count: the last mean is that of ranks 0 and 1.
    value = torch.nn.Parameter(torch.zeros(1))
    optimizer = AveragingOptimizer(
        torch.optim.SGD([value], lr=1.0),
        mt.periodic(mt.average_params(), every=2),
        replicas=mt.Distributed(),
    )
    with Join([optimizer]):
        for _ in range(2 if rank < 2 else 1):
            value.grad = torch.full((1,), -float(rank + 1))
            optimizer.step()
    assert value.item() == (2 * 1 + 2 * 2) / 2


def test_uneven_data(gloo):
    gloo.run(join_body)


# --- checkpoints -----------------------------------------------------------------------------


def own_state_body(folder):
    rank = dist.get_rank()
    averager = mt.diloco(mt.identity(), every=4)

    def fresh(seed):
        model = network(seed)
        return model, wrapped(model, averager, inner=torch.optim.AdamW)

    model, optimizer = fresh(0)
    train(model, optimizer, 6)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    checkpoints.save(folder, model, optimizer, rank)
    train(model, optimizer, 5, start=6)

    file.seek(0)
    other, resumed = fresh(1)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, 5, start=6)
    assert equal(copies(model), copies(other))

    other, resumed = fresh(2)
    checkpoints.load(folder, other, resumed, rank)
    train(other, resumed, 5, start=6)
    assert equal(copies(model), copies(other))

    # The state of rank 0 in the middle of a round is not that of the others.
    model, optimizer = fresh(0)
    train(model, optimizer, 6)
    package = [{"model": model.state_dict(), "optimizer": copy.deepcopy(optimizer.state_dict())}]
    dist.broadcast_object_list(package)
    before = copy.deepcopy(optimizer.state_dict())
    if rank == 0:
        optimizer.load_state_dict(package[0]["optimizer"])
    else:
        message = raised(ValueError, lambda: optimizer.load_state_dict(package[0]["optimizer"]))
        assert "the state of replica 0" in message
        state = optimizer.state_dict()["state"]
        assert all(torch.equal(state[0][k], v) for k, v in before["state"][0].items())
        optimizer.load_state_dict(package[0]["optimizer"], of_any_replica=True)

    # After a synchronisation it is.
    optimizer.average_now()
    package = [copy.deepcopy(optimizer.state_dict())]
    dist.broadcast_object_list(package)
    optimizer.load_state_dict(package[0])
    model, optimizer = fresh(0)
    train(model, optimizer, 4)
    package = [copy.deepcopy(optimizer.state_dict())]
    dist.broadcast_object_list(package)
    optimizer.load_state_dict(package[0])


APART = {
    "gossip": lambda: mt.periodic(mt.gossip(), every=2),
    "push_sum": lambda: mt.periodic(mt.push_sum(), every=2),
    "noloco": lambda: mt.periodic(mt.noloco(), every=2),
    "elastic": lambda: mt.periodic(mt.elastic(), every=2),
    "overlapped": lambda: mt.periodic(mt.overlapped(), every=2),
    "delayed": lambda: mt.delayed(mt.periodic(mt.average_params(), every=2), steps=1),
}


def apart_body():
    """Replicas that stay apart at a synchronisation meet at one that is forced."""
    for make in APART.values():
        model = network()
        optimizer = wrapped(model, make())
        train(model, optimizer, 4)
        assert optimizer.last_synchronisation.step == 4
        assert not same_on_all_ranks(model.parameters())
        package = [copy.deepcopy(optimizer.state_dict())]
        dist.broadcast_object_list(package)
        if dist.get_rank():
            with pytest.raises(ValueError, match="the state of replica 0"):
                optimizer.load_state_dict(package[0])
        optimizer.average_now()
        assert same_on_all_ranks(model.parameters())
        package = [copy.deepcopy(optimizer.state_dict())]
        dist.broadcast_object_list(package)
        optimizer.load_state_dict(package[0])


def test_replicas_that_stay_apart(gloo):
    gloo.run(apart_body)


def test_checkpoints(gloo):
    with tempfile.TemporaryDirectory() as folder:
        gloo.run(own_state_body, folder)
