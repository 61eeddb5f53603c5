"""The drop-ins do what torch's classes do where those are right, and the right thing elsewhere."""

import copy
import itertools
import math
import pickle
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import meantime as mt
from meantime.adapters import AveragingOptimizer, dropin, post_local_hook

TORCH = types.SimpleNamespace(
    PeriodicModelAverager=PeriodicModelAverager,
    HierarchicalModelAverager=HierarchicalModelAverager,
    PostLocalSGDOptimizer=PostLocalSGDOptimizer,
    PostLocalSGDState=torch_hook.PostLocalSGDState,
    post_localSGD_hook=torch_hook.post_localSGD_hook,
)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def loss_of(model, step):
    """On a batch of this rank alone."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + step))
    return model(x).square().mean()


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def post_local(impl, model, period=3, warmup=2, lr=0.1):
    inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return impl.PostLocalSGDOptimizer(inner, impl.PeriodicModelAverager(period, warmup))


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def ones(n=2, requires_grad=True):
    return torch.nn.Parameter(torch.ones(n), requires_grad)


def same_everywhere(x):
    everyone = mt.Distributed().gather(x.detach())
    return bool((everyone == everyone[0]).all())


# --- the schedule of torch -------------------------------------------------------------------


def averages(averager, steps=13):
    """What a parameter that is the rank's number becomes at each call."""
    p = torch.nn.Parameter(torch.zeros(1))
    found = []
    for _ in range(steps):
        p.data.fill_(dist.get_rank())
        p.grad = torch.ones(1)
        averager.average_parameters([p])
        found.append(p.item())
    return found


def schedules_body():
    for period, warmup in itertools.product((2, 3, 4), (0, 1, 2, 4)):
        found = [averages(i.PeriodicModelAverager(period, warmup)) for i in (TORCH, dropin)]
        assert found[0] == found[1], (period, warmup)
    for sizes in ({2: 2, 4: 4}, {2: 2, 3: 4}, {1: 1, 3: 2, 6: 4}):
        for warmup in (0, 1, 3, 4):
            found = [averages(i.HierarchicalModelAverager(sizes, warmup)) for i in (TORCH, dropin)]
            assert found[0] == found[1], (sizes, warmup)
    # From any call on, as if never stopped.
    hierarchical = dropin.HierarchicalModelAverager({2: 2, 3: 4}, 2)
    for averager in (dropin.PeriodicModelAverager(3, 2), hierarchical):
        whole = averages(averager)
        for start in range(9):
            averager.step = start
            assert averages(averager, 4) == whole[start : start + 4]
            assert averager.step == start + 4


def test_schedules(gloo):
    gloo.run(schedules_body)


def test_the_periodic_averager_is_a_transform_of_the_library():
    ours = dropin.PeriodicModelAverager(4, warmup_steps=2)
    ours._replicas = recorded = mt.Recorded(mt.Solo())
    tx = mt.periodic(mt.average_params(), every=4, after=2, first=3)
    p, state, world = ones(), tx.init([]), mt.Recorded(mt.Solo())
    for _ in range(12):
        ours.average_parameters([p])
        _, state = tx.average([p], state, replicas=world)
        assert len(recorded.calls) == len(world.calls)
    assert len(world.calls) == 3


# --- trajectories and checkpoints ------------------------------------------------------------


def trajectories_body():
    results = []
    for impl in (TORCH, dropin):
        pair = dist.new_subgroups(2)[0]
        model = DistributedDataParallel(network())
        model.register_comm_hook(impl.PostLocalSGDState(None, pair, 4), impl.post_localSGD_hook)
        optimizer = post_local(impl, model, warmup=4)
        train(model, optimizer, range(9))
        hierarchical = network()
        averager = impl.HierarchicalModelAverager({2: 2, 4: 4}, 2)
        inner = torch.optim.AdamW(hierarchical.parameters(), lr=0.05)
        train(hierarchical, impl.PostLocalSGDOptimizer(inner, averager), range(6))
        results.append(values(model) + values(hierarchical))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)


def test_trajectories_of_torch(gloo):
    gloo.run(trajectories_body)


def checkpoints_body():
    """Stop anywhere with one implementation, go on with the other one."""
    for stop in (1, 4):
        results = []
        for first, second in itertools.product((TORCH, dropin), repeat=2):
            model = network()
            optimizer = post_local(first, model)
            train(model, optimizer, range(stop))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            resumed = network()
            resumed.load_state_dict(saved[0])
            optimizer = post_local(second, resumed, lr=1.0)
            optimizer.load_state_dict(saved[1])
            assert optimizer.averager.step == stop
            train(resumed, optimizer, range(stop, 7))
            results.append(values(resumed))
        for other in results[1:]:
            torch.testing.assert_close(results[0], other, rtol=1e-5, atol=1e-7)


def test_checkpoints_interchange_with_torch(gloo):
    gloo.run(checkpoints_body)


def test_a_checkpoint_without_step():
    model = network()
    optimizer = post_local(dropin, model, warmup=9)
    train(model, optimizer, range(2))
    assert optimizer.averager.step == optimizer.state_dict()["step"] == 2
    plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    plain.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="does not contain a step counter") as caught:
        optimizer.load_state_dict(plain.state_dict())
    assert caught[0].filename == __file__
    assert optimizer.averager.step == 0
    for wrong, error in ((-1, ValueError), ("7", TypeError)):
        with pytest.raises(error, match="step of a state dict"):
            optimizer.load_state_dict({**plain.state_dict(), "step": wrong})


# --- an optimizer like any other -------------------------------------------------------------


def test_the_optimizer_is_the_one_inside():
    model = network()
    optimizer = post_local(dropin, model, warmup=99)
    inner = optimizer.optim
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=10)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()  # after loading, on the groups which the inner optimizer steps with
    assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert inner.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    assert optimizer.defaults is inner.defaults
    assert calls == ["step", "saved"]
    assert optimizer.averager.step == 1


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_count_on_their_own(clone):
    model = network()
    optimizer = post_local(dropin, model, warmup=99)
    train(model, optimizer, range(2))
    other_model, other = clone((model, optimizer))
    train(other_model, other, range(2, 3))
    assert (optimizer.averager.step, other.averager.step) == (2, 3)
    assert other.state_dict()["step"] == 3
    train(model, optimizer, range(2, 3))
    for x, y in zip(values(model), values(other_model), strict=True):
        assert torch.equal(x, y)


def distributed_checkpoint_body():
    model = network()
    optimizer = post_local(dropin, model)
    train(model, optimizer, range(4))
    saved = get_optimizer_state_dict(model, optimizer)
    fresh = post_local(dropin, model, lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such a checkpoint has no place for the step
        set_optimizer_state_dict(model, fresh, saved)
    assert fresh.param_groups[0]["lr"] == 0.1
    p = next(model.parameters())
    assert torch.equal(fresh.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])


def test_distributed_checkpoints(gloo):
    gloo.run(distributed_checkpoint_body)


# --- what torch gets wrong -------------------------------------------------------------------


def overflow_body():
    """An overflow on one rank alone moves no schedule."""
    model = network()
    optimizer = post_local(dropin, model, period=2, warmup=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        overflows = step == 1 and dist.get_rank() == 1
        scaler.scale(loss_of(model, step) * (math.inf if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.averager.step == 4
    assert same_everywhere(model[0].weight)  # averaged after steps 2 and 4


def missing_gradients_body():
    """Which parameters take part does not depend on who has gradients for them."""
    rank = dist.get_rank()
    first, second, frozen = ones(), ones(), ones(requires_grad=False)
    for p in (first, second, frozen):
        p.data.fill_(rank)
    (first if rank % 2 else second).grad = torch.ones(2)
    dropin.PeriodicModelAverager(2).average_parameters([first, second, frozen])
    assert [p[0].item() for p in (first, second, frozen)] == [1.5, 1.5, rank]
    first.data.fill_(rank)
    dropin.average_parameters_or_parameter_groups([{"params": [first, frozen]}])
    assert [p[0].item() for p in (first, frozen)] == [1.5, rank]
    dropin.average_parameters([frozen])
    assert frozen[0].item() == 1.5


def storage_body():
    """Parameters stay where they are, as they are."""
    rank = dist.get_rank()
    last = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last).weight
    shared = torch.nn.Parameter(torch.ones(2, 2).share_memory_())
    fused = torch.ones(4)
    parts = [torch.nn.Parameter(fused[:2]), torch.nn.Parameter(fused[2:])]
    parameters = [last, shared, *parts, shared]
    for p in parameters:
        p.data.fill_(rank)
    places = [(p.data_ptr(), p.stride(), p.is_shared()) for p in parameters]
    dropin.PeriodicModelAverager(1).average_parameters(parameters)
    assert [(p.data_ptr(), p.stride(), p.is_shared()) for p in parameters] == places
    assert all((p == 1.5).all() for p in parameters)
    assert (fused == 1.5).all()


def numbers_body():
    """Half precision neither overflows nor underflows; equal replicas stay what they are."""
    for value in (60000.0, 6e-8):
        p = torch.nn.Parameter(torch.full((3,), value, dtype=torch.float16))
        before = p.detach().clone()
        dropin.PeriodicModelAverager(2).average_parameters([p])
        assert torch.equal(p, before)
    three = dist.new_group([0, 1, 2])
    start = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for dtype, group in ((torch.float32, None), (torch.bfloat16, three), (torch.float32, three)):
        p = torch.nn.Parameter(start.to(dtype))
        before = p.detach().clone()
        dropin.average_parameters([p], group)
        # Three equal float32 have a sum with one rounding.
        rounding = 2**-23 if (dtype, group) == (torch.float32, three) else 0.0
        torch.testing.assert_close(p.detach(), before, rtol=rounding, atol=0)
    p = torch.nn.Parameter(start.clone())
    if dist.get_rank() == 2:  # a replica that is not finite takes no part
        p.data[0] = math.nan
    dropin.average_parameters([p], three)
    assert torch.equal(p, start)


def two_optimizers_body():
    """Optimizers that share an averager are averaged on the same schedule, each on its own."""
    averager = dropin.PeriodicModelAverager(2)
    parameters = ones(), ones(3)
    optimizers = [
        dropin.PostLocalSGDOptimizer(torch.optim.SGD([p], lr=1.0), averager) for p in parameters
    ]
    found = []
    for _ in range(4):
        for p, optimizer in zip(parameters, optimizers, strict=True):
            p.data.fill_(dist.get_rank())
            optimizer.step()
        found.append([bool((p == 1.5).all()) for p in parameters])
    assert found == [[True, True], [False, False]] * 2
    assert averager.step == 4
    optimizers[0].load_state_dict({**optimizers[0].state_dict(), "step": 1})
    assert [o.state_dict()["step"] for o in optimizers] == [1, 4]


def groups_body():
    """Processes outside of the group count, and keep what they have."""
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    for averager in (
        dropin.PeriodicModelAverager(2, process_group=group),
        dropin.HierarchicalModelAverager({1: 1, 2: 2}, process_group=group),
    ):
        found = averages(averager, 3)
        mine = 1.5 if rank in (1, 2) else rank
        assert found == [mine, rank, mine]
        assert averager.step == 3


def disagreement_body():
    """Other parameters on one rank are an error on all, after which nothing has changed."""
    averager = dropin.PeriodicModelAverager(2)
    p = torch.nn.Parameter(torch.full((3 if dist.get_rank() == 2 else 2,), float(dist.get_rank())))
    with pytest.raises(ValueError, match="rank 2 has"):
        averager.average_parameters([p])
    assert averager.step == 0
    assert (p == dist.get_rank()).all()


@pytest.mark.parametrize(
    "body",
    [
        overflow_body,
        missing_gradients_body,
        storage_body,
        numbers_body,
        two_optimizers_body,
        groups_body,
        disagreement_body,
    ],
)
def test_right_where_torch_is_wrong(gloo, body):
    gloo.run(body)


# --- communication hooks ---------------------------------------------------------------------


def line(hook, state=None):
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model.register_comm_hook(state, hook)
    return model


def gradients(model, steps, optimizer=None, backward_passes=1):
    """A gradient that is the rank's number before it is averaged, after each step."""
    found = []
    for _ in range(steps):
        for _ in range(backward_passes):
            model.zero_grad()
            (model(torch.ones(1, 1)) * dist.get_rank()).sum().backward()
        found.append(model.module.weight.grad.item())
        if optimizer is not None:
            optimizer.step()
    return found


def hook_body():
    rank = dist.get_rank()
    pair = 0.5 if rank < 2 else 2.5
    hook, make = dropin.post_localSGD_hook, dropin.PostLocalSGDState

    # Without a subgroup: those of the node, as torchrun counts them; all without torchrun.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        assert gradients(line(hook, make(None, None, 2)), 4) == [1.5, 1.5, pair, pair]
        patch.delenv("LOCAL_WORLD_SIZE")
        assert gradients(line(hook, make(None, None, 1)), 2) == [1.5, 1.5]
    assert gradients(line(hook, make(None, None, 1, False)), 2) == [1.5, rank]

    # A state can be saved, copied and pickled, with its groups.
    subgroup = dist.new_subgroups(2)[0]
    state, restored = make(None, subgroup, 2), make(None, subgroup, 2)
    gradients(line(hook, state), 1)
    restored.load_state_dict(state.state_dict())
    for other in (restored, copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert gradients(line(hook, other), 2) == [1.5, pair]
    assert state.iter == 1

    # It counts backward passes, or the steps of an averager.
    for tied, expected in ((False, [1.5, rank, rank]), (True, [1.5, 1.5, rank])):
        averager = dropin.PeriodicModelAverager(99, warmup_steps=2)
        model = line(hook, make(None, None, 2, False, averager=averager if tied else None))
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = dropin.PostLocalSGDOptimizer(inner, averager)
        assert gradients(model, 3, optimizer, backward_passes=2) == expected


def test_hook(gloo):
    gloo.run(hook_body)


def post_local_hook_body():
    rank = dist.get_rank()
    world = mt.Distributed()
    for over, mine in ((None, rank), (world.groups(2), 0.5 if rank < 2 else 2.5)):
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        optimizer = AveragingOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            mt.periodic(mt.average_params(), every=8, after=2),
            replicas=world,
        )
        model.register_comm_hook(None, post_local_hook(optimizer, over))
        assert gradients(model, 3, optimizer, backward_passes=3) == [1.5, 1.5, mine]
        resumed = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(resumed)
        assert gradients(model, 1, optimizer) == [mine]
    with pytest.raises(TypeError, match="over must be"):
        post_local_hook(optimizer, mt.Solo())
    with pytest.raises(TypeError, match="AveragingOptimizer"):
        post_local_hook(optimizer.optimizer)


def test_a_hook_on_the_schedule_of_the_optimizer(gloo):
    gloo.run(post_local_hook_body)


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: dropin.PeriodicModelAverager(0), ValueError, "period must be at least 1"),
        (lambda: dropin.PeriodicModelAverager(2.5), TypeError, "period must be an integer"),
        (lambda: dropin.PeriodicModelAverager(True), TypeError, "period must be an integer"),
        (lambda: dropin.PeriodicModelAverager(4, -1), ValueError, "warmup_steps must be"),
        (lambda: dropin.HierarchicalModelAverager({}), ValueError, "at least one period"),
        (lambda: dropin.HierarchicalModelAverager({0: 2}), ValueError, "a period must be"),
        (lambda: dropin.HierarchicalModelAverager({4: 2, 2: 4}), ValueError, "cannot follow"),
        (lambda: dropin.PostLocalSGDState(None, None, -1), ValueError, "start_localSGD_iter"),
        (lambda: dropin.average_parameters(ones()), TypeError, "one tensor"),
        (lambda: dropin.get_params_to_average([torch.ones(1)]), NotImplementedError, "Tensor"),
        (
            lambda: dropin.PeriodicModelAverager(2).average_parameters(iter(())),
            ValueError,
            "no parameters",
        ),
        (
            lambda: dropin.PostLocalSGDOptimizer(
                torch.optim.SGD([ones()], lr=0.1), mt.average_params()
            ),
            TypeError,
            "averager must be",
        ),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def sizes_body():
    for sizes, message in (({2: 2}, "must be 4, got 2"), ({2: 3, 4: 4}, "groups of 3")):
        with pytest.raises(ValueError, match=message):
            dropin.HierarchicalModelAverager(sizes)


def test_sizes_of_a_hierarchy(gloo):
    gloo.run(sizes_body)
