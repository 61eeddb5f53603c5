"""`AveragingOptimizer` is the optimizer inside, and averages in place."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.distributed as dist

import meantime as mt
from meantime.adapters import AveragingOptimizer, from_torch


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def loss_of(model, seed: int) -> torch.Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def wrapped(
    model, averager=None, inner=torch.optim.AdamW, replicas=None, inner_options=None, **options
):
    optimizer = inner(model.parameters(), **{"lr": 0.1, **(inner_options or {})})
    averager = averager or mt.periodic(mt.average_params(), every=2)
    return AveragingOptimizer(optimizer, averager, replicas=replicas or mt.Solo(), **options)


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


# --- one replica: the optimizer inside -------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop", "NAdam"])
def test_one_replica_is_the_inner_optimizer(name):
    plain, averaged = network(), network()
    inner = getattr(torch.optim, name)
    optimizer = inner(plain.parameters(), lr=0.1)
    train(plain, optimizer, 7)
    train(averaged, wrapped(averaged, inner=inner), 7)
    assert_equal(values(plain), values(averaged))


def test_closure_and_return_value():
    plain, averaged = network(), network()
    optimizers = (
        torch.optim.LBFGS(plain.parameters(), lr=0.1),
        wrapped(averaged, inner=torch.optim.LBFGS),
    )
    results = []
    for model, optimizer in zip((plain, averaged), optimizers, strict=True):

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        results.append([optimizer.step(closure).item() for _ in range(3)])
    assert results[0] == results[1]
    assert_equal(values(plain), values(averaged))


def test_groups_and_state_are_those_of_the_inner_optimizer_at_all_times():
    model = network()
    optimizer = wrapped(model)
    inner = optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults is inner.defaults

    def same():
        return optimizer.param_groups is inner.param_groups and optimizer.state is inner.state

    assert same()
    train(model, optimizer, 3)
    optimizer.load_state_dict(optimizer.state_dict())
    assert same()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})
    assert same()
    assert len(inner.param_groups) == 2


def test_schedulers_and_hooks():
    model = network()
    optimizer = wrapped(model, inner_options={"betas": (0.9, 0.99)})
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=10)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda _, saved: calls.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    train(model, optimizer, 1)
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post", "saved", "loaded"]


@pytest.mark.parametrize(
    "averager",
    [
        mt.periodic(mt.average_params(), every=3),
        mt.diloco(mt.identity(), every=3),
        mt.slowmo(mt.identity(), 0.1, every=3),
    ],
    ids=["average", "diloco", "slowmo"],
)
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_resume_equals_never_stopping(averager, stop):
    whole = network()
    train(whole, wrapped(whole, averager), 8)

    first = network()
    optimizer = wrapped(first, averager)
    train(first, optimizer, stop)
    buffer = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)

    second = network(seed=1)
    second.load_state_dict(saved["model"])
    resumed = wrapped(second, averager)
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, 8 - stop, start=stop)
    assert_equal(values(whole), values(second))


def test_a_state_that_does_not_fit_changes_nothing():
    model = network()
    optimizer = wrapped(model, mt.diloco(mt.identity(), every=3))
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    other = network()
    for wrong in (
        wrapped(other).state_dict(),
        torch.optim.AdamW(other.parameters()).state_dict(),
    ):
        with pytest.raises(ValueError, match=r"averager|does not fit"):
            optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for key, entries in before["state"].items():
        assert entries.keys() == after["state"][key].keys()
        assert_equal(entries.values(), after["state"][key].values())


def test_parameters_added_later_are_averaged_and_those_there_keep_their_anchor():
    model = network()
    optimizer = wrapped(model, mt.outer(mt.chain(mt.mean(), mt.sgd(0.5))))
    anchor = copy.deepcopy(mt.find(optimizer.averager_state, mt.OuterState).anchor)
    late = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late]})
    grown = mt.find(optimizer.averager_state, mt.OuterState).anchor
    assert_equal(grown[:-1], anchor)
    late.grad = torch.ones(2)
    optimizer.step()
    assert torch.allclose(late, torch.full((2,), 1 - 0.5 * 0.1), atol=1e-2)


def test_average_now_counts_as_no_step():
    model = network()
    world = mt.Recorded(mt.Solo())
    optimizer = wrapped(model, mt.periodic(mt.average_params(), every=4), replicas=world)
    synchronised = []
    for step in range(1, 9):
        train(model, optimizer, 1)
        if step == 2:
            optimizer.average_now()
        means = [name for name, _ in world.calls if name == "mean"]
        synchronised += [step] if means else []
        world.calls.clear()
    assert synchronised == [2, 4, 8]


def test_storage_strides_and_ties_survive():
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Conv2d(3, 2, 3))
    model = model.to(memory_format=torch.channels_last)
    tied = torch.nn.Linear(2, 2)
    tied.weight = torch.nn.Parameter(torch.ones(2, 2).share_memory_())
    parameters = [*model.parameters(), *tied.parameters()]
    places = [(p.data_ptr(), p.stride(), p.is_shared()) for p in parameters]
    optimizer = AveragingOptimizer(
        torch.optim.SGD(parameters, lr=0.1),
        mt.diloco(mt.identity(), every=1),
        replicas=mt.Solo(),
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [(p.data_ptr(), p.stride(), p.is_shared()) for p in parameters] == places


def test_parameters_in_an_arena_train_the_same():
    plain, moved = network(), network()
    optimizers = wrapped(plain), wrapped(moved, arena=True)
    assert len({p.untyped_storage().data_ptr() for p in moved.parameters()}) == 1
    for model, optimizer in zip((plain, moved), optimizers, strict=True):
        train(model, optimizer, 5)
    assert_equal(values(plain), values(moved))
    assert len({p.untyped_storage().data_ptr() for p in moved.parameters()}) == 1


def test_deepcopy_goes_its_own_way():
    model = network()
    optimizer = wrapped(model, mt.diloco(mt.identity(), every=2))
    train(model, optimizer, 1)
    other_model, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, 3, start=1)
    train(other_model, other, 3, start=1)
    assert_equal(values(model), values(other_model))
    assert other.optimizer is not optimizer.optimizer


def test_errors():
    model = network()
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        AveragingOptimizer(mt.sgd(0.1), mt.average_params(), replicas=mt.Solo())
    with pytest.raises(TypeError, match="transform"):
        AveragingOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), mt.average_params, replicas=mt.Solo()
        )

    with pytest.raises(TypeError, match="run a batch"):
        wrapped(torch.nn.LazyLinear(2))
    with pytest.raises(TypeError, match="meta device"):
        wrapped(torch.nn.Linear(2, 2, device="meta"))
    for option in ("buffers", "optimizer_state", "start"):
        with pytest.raises(ValueError, match=f"{option} must be one of .* got 'none'"):
            wrapped(model, **{option: "none"})
    with pytest.raises(ValueError, match=r"identity\(\)"):
        wrapped(model, mt.local_sgd(mt.sgd(0.1), every=2))
    optimizer = wrapped(model, mt.local_sgd(mt.identity(), every=2))
    before = values(model)
    for name in ("value", "now", "counts"):
        with pytest.raises(TypeError, match=f"takes no '{name}'"):
            optimizer.step(**{name: True})
    assert_equal(values(model), before)


def test_a_step_hands_the_averager_what_it_names():
    model = network()
    optimizer = wrapped(model, mt.periodic(mt.average_params(), every=mt.adacomm(4, block=4)))
    for step in range(8):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(value=torch.tensor(1.0 if step < 4 else 0.01))
    assert mt.find(optimizer.averager_state, mt.AdaCommState).period == 1


def test_an_averager_of_gradients_may_need_an_argument_of_the_step():
    def update(updates, state, params=None, *, factor):
        return mt.tree.map(lambda u: factor * u, updates), state

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = AveragingOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        mt.Transform(lambda params: mt.EmptyState(), update),
        replicas=mt.Solo(),
    )
    parameter.grad = torch.ones(2)
    optimizer.step(factor=0.25)
    assert parameter.tolist() == [0.75, 0.75]


class Failing(mt.Solo):
    """Its mean fails at the second call."""

    calls = 0

    def mean(self, tree, **options):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("a peer is gone")
        return mt.tree.map(lambda x: x + 1, tree)


def test_averaged_parameters_that_fail_leave_nothing_behind():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = AveragingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        mt.average_params(),
        replicas=Failing(),
        model=model,
    )
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="a peer is gone"), optimizer.averaged_parameters():
        pass
    assert_equal(list(model.state_dict().values()), list(before.values()))
    optimizer.step()


# --- whatever a plain optimizer can do -------------------------------------------------------


def test_pickle():
    model = network()
    optimizer = wrapped(model, mt.diloco(mt.identity(), every=3))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a `step` on the instance
    train(model, optimizer, 2)
    other_model, other = pickle.loads(pickle.dumps((model, optimizer)))
    assert repr(other.averager) == "diloco(identity(), every=3)"
    train(model, optimizer, 4, start=2)
    train(other_model, other, 4, start=2)
    assert_equal(values(model), values(other_model))


def test_step_hooks_see_and_change_the_arguments():
    model = network()
    optimizer = wrapped(model)
    seen = []
    optimizer.register_step_pre_hook(lambda _, args, kwargs: (args[:1], {"closure": lambda: 7.0}))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append((opt, kwargs)))
    train(model, optimizer, 1)
    assert optimizer.step() == 7.0
    assert seen[1][0] is optimizer
    assert list(seen[1][1]) == ["closure"]


def test_global_hooks_run_once():
    from torch.optim.optimizer import register_optimizer_step_post_hook

    model, calls = network(), []
    optimizer = wrapped(model)
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        train(model, optimizer, 3)
    finally:
        handle.remove()
    assert len(calls) == 3


def test_compiled_step_counts_and_averages():
    plain, compiled = network(), network()
    world = mt.Recorded(mt.Solo())
    inner = torch.optim.AdamW(plain.parameters(), lr=0.1)
    optimizer = wrapped(compiled, replicas=world)
    world.calls.clear()
    steps = [torch.compile(o.step, backend="eager") for o in (inner, optimizer)]
    for i in range(4):
        for model, step in zip((plain, compiled), steps, strict=True):
            model.zero_grad()
            loss_of(model, i).backward()
            step()
    assert [name for name, _ in world.calls] == ["mean", "mean"]
    assert_equal(values(plain), values(compiled))


@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(
    "averager",
    [
        mt.diloco(mt.identity(), every=3),
        mt.periodic(mt.outer(mt.chain(mt.mean(), from_torch(torch.optim.NAdam))), every=3),
    ],
    ids=["diloco", "from_torch"],
)
def test_checkpoints_of_torch_distributed(averager, inner):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, other = network(), network(seed=1)
    optimizer, resumed = wrapped(model, averager, inner), wrapped(other, averager, inner)
    train(model, optimizer, 4)
    saved, saved_optimizer = copy.deepcopy(get_state_dict(model, optimizer))
    set_state_dict(other, resumed, model_state_dict=saved, optim_state_dict=saved_optimizer)
    train(model, optimizer, 4, start=4)
    train(other, resumed, 4, start=4)
    assert_equal(values(model), values(other))


def test_creating_state_for_a_checkpoint_is_no_step():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    for inner in (torch.optim.AdamW, torch.optim.SGD):
        model = network()
        optimizer = wrapped(model, inner=inner)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        get_optimizer_state_dict(model, optimizer)
        assert mt.find(optimizer.averager_state, mt.PeriodicState).count == 0


def test_what_is_kept_of_a_parameter_is_saved_with_it_and_the_rest_with_all():
    def init(params):
        # One of what all share ends in a number and is shaped like the parameter of that number.
        slots = [None if p is None else {"a": torch.ones(2), "b": torch.ones(())} for p in params]
        return {
            "slots": slots,
            "shared": (torch.zeros(()), torch.ones(3)),
            "other": [torch.ones(1)],
        }

    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (2, 3, 4)]
    parameters[2].requires_grad_(False)
    averager = mt.Transform(init, average=lambda params, state: (params, state))
    optimizer = AveragingOptimizer(
        torch.optim.SGD(parameters, lr=1.0), averager, replicas=mt.Solo()
    )
    saved = optimizer.state_dict()
    for i in (0, 1):
        assert list(saved["state"][i]) == ["averager.slots.a", "averager.slots.b"]
    assert 2 not in saved["state"]
    packed = [name for name in saved["param_groups"][0] if name.startswith("averager.")]
    shared = ["other.0", "shared.0", "shared.1", "steps", "replica"]
    assert packed == [f"averager.{name}" for name in shared]
    saved["state"][1]["averager.slots.b"] = torch.zeros(())
    optimizer.load_state_dict(saved)
    first, second, _ = optimizer.averager_state["slots"]
    assert (first["b"], second["b"]) == (1, 0)
    saved["state"][1]["averager.slots.c"] = torch.zeros(())
    with pytest.raises(ValueError, match=r"unexpected \['slots.c of parameter 1'\]"):
        optimizer.load_state_dict(saved)


def test_a_plain_optimizer_loads_the_state():
    model = network()
    optimizer = wrapped(model)
    train(model, optimizer, 3)
    other = copy.deepcopy(model)
    plain = torch.optim.AdamW(other.parameters(), lr=1.0)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 1, start=3)
    train(other, plain, 1, start=3)
    assert_equal(values(model), values(other))


def test_what_the_inner_optimizer_has_besides():
    class Switching(torch.optim.SGD):
        def train(self):
            return "training"

    optimizer = wrapped(network(), inner=Switching)
    assert optimizer.train() == "training"
    with pytest.raises(AttributeError, match="eval"):
        optimizer.eval()


def test_a_frozen_parameter_takes_no_part_until_it_is_trained():
    model = network()
    model[0].weight.requires_grad_(False)
    world = mt.Recorded(mt.Solo())
    optimizer = wrapped(model, mt.outer(mt.chain(mt.mean(), mt.sgd(0.5))), replicas=world)
    world.calls.clear()
    train(model, optimizer, 1)
    frozen = world.bytes
    model[0].weight.requires_grad_()
    world.calls.clear()
    before = values(model)[0]
    train(model, optimizer, 1, start=1)
    assert world.bytes == frozen + 4 * model[0].weight.numel()
    assert not torch.equal(before, values(model)[0])


# --- gradient scalers ------------------------------------------------------------------------


def scaled_training(optimizer, model, overflows, unscale=False):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, overflow in enumerate(overflows):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (math.inf if overflow else 1.0)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW])
def test_a_gradient_scaler_works_as_on_the_inner_optimizer(inner, fused, unscale):
    plain, averaged = network(), network()
    overflows = [False, True, False, False]
    optimizer = inner(plain.parameters(), lr=0.1, fused=fused)
    expected = scaled_training(optimizer, plain, overflows, unscale)
    optimizer = wrapped(averaged, inner=inner, inner_options={"fused": fused})
    assert scaled_training(optimizer, averaged, overflows, unscale) == expected
    assert_equal(values(plain), values(averaged))
    assert mt.find(optimizer.averager_state, mt.PeriodicState).count == 4


# --- processes -------------------------------------------------------------------------------


def processes_body():
    rank = dist.get_rank()

    # Replicas start from the parameters of rank 0.
    model = network(seed=rank)
    optimizer = wrapped(model, replicas=mt.Distributed(), inner=torch.optim.SGD)
    assert_equal(values(model), values(network(seed=0)))

    # An overflow on one rank alone moves no schedule: they average after steps 2 and 4.
    scaled_training(optimizer, model, [False, rank == 1, False, False])
    means = mt.Distributed().gather(values(model))
    assert all(bool((x == x[0]).all()) for x in means)

    # A rank without gradients for a parameter takes part with it all the same.
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = AveragingOptimizer(
        torch.optim.SGD([first, second], lr=1.0), mt.average_params(), replicas=mt.Distributed()
    )
    (first if rank % 2 else second).grad = torch.ones(2)
    optimizer.step()
    assert first.tolist() == second.tolist() == [0.5, 0.5]

    # Levels of a hierarchy.
    world = mt.Distributed()
    model = network(seed=rank)
    optimizer = AveragingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        mt.hierarchical_sgd(mt.identity(), every={"node": 1, "world": 2}),
        replicas={"node": world.groups(2), "world": world},
    )
    assert_equal(values(model), values(network(seed=0)))
    spread = []
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, 10 * rank + step).backward()
        optimizer.step()
        weight = mt.Distributed().gather(model[0].weight.detach())
        spread.append([bool((weight[0] == weight[k]).all()) for k in range(4)])
    assert spread == [[True, True, False, False], [True] * 4]


def test_processes(gloo):
    gloo.run(processes_body)
