"""`TransformOptimizer` is to torch what any other optimizer is."""

import copy
import io
import math
import pickle

import pytest
import torch

import meantime as mt
from meantime.adapters import TransformOptimizer, from_torch
from tests import checkpoints


def adamw(lr, weight_decay=0.01):
    return mt.adamw(lr, weight_decay=weight_decay)


def sgd(lr, momentum=0.9, nesterov=False):
    return mt.sgd(lr, momentum=momentum, nesterov=nesterov)


def compressed(lr):
    """Has state in float32 whatever the parameters are."""
    return mt.chain(mt.error_feedback(mt.codecs.topk(0.5, block=4)), mt.sgd(lr, momentum=0.9))


def parted(lr):
    """Keeps state for some of the parameters in one place, for the others in another."""
    return mt.partition(
        {"matrix": mt.adam(lr), "vector": mt.sgd(lr, momentum=0.5)},
        lambda params: mt.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params),
    )


def fromtorch(lr):
    return from_torch(torch.optim.NAdam, lr=lr)


MAKES = [adamw, sgd, compressed, parted, fromtorch]
every_make = pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)


def network(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
    return torch.nn.Sequential(*layers).to(dtype)


def loss_of(model, step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return model(x.to(model[0].weight.dtype)).square().mean()


def train(model, optimizer, steps, start=0, scheduler=None):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def assert_close(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def groups(model):
    return [
        {"params": model[0].parameters(), "lr": 0.05, "weight_decay": 0.1},
        {"params": model[2].parameters()},
    ]


# --- it trains -------------------------------------------------------------------------------


def test_adamw_with_a_scheduler_and_two_groups():
    mine, theirs = network(torch.float64), network(torch.float64)
    for model, optimizer in (
        (mine, TransformOptimizer(groups(mine), adamw, lr=0.01)),
        (theirs, torch.optim.AdamW(groups(theirs), lr=0.01)),
    ):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        train(model, optimizer, 20, scheduler=scheduler)
    assert_close(values(mine), values(theirs))


def test_a_scheduler_that_cycles_the_momentum():
    mine, theirs = network(torch.float64), network(torch.float64)
    for model, optimizer in (
        (mine, TransformOptimizer(mine.parameters(), sgd, lr=0.1)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)),
    ):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=12)
        train(model, optimizer, 12, scheduler=scheduler)
    assert_close(values(mine), values(theirs))


@every_make
def test_it_is_the_loop_of_steps(make):
    model = network()
    params = values(model)
    train(model, TransformOptimizer(model.parameters(), make, lr=0.1), 5)
    other, tx = network(), make(0.1)
    state = tx.init(params)
    for step in range(5):
        grads = torch.autograd.grad(loss_of(other, step), list(other.parameters()))
        params, state = mt.step(tx, list(grads), params, state)
        with torch.no_grad():
            for parameter, value in zip(other.parameters(), params, strict=True):
                parameter.copy_(value)
    assert_equal(values(model), params)


def test_a_torch_optimizer_there_and_back():
    mine, theirs = network(), network()
    train(mine, TransformOptimizer(mine.parameters(), fromtorch, lr=0.1), 5)
    train(theirs, torch.optim.NAdam(theirs.parameters(), lr=0.1), 5)
    assert_equal(values(mine), values(theirs))


def test_closures_and_hooks():
    model = network()
    optimizer = TransformOptimizer(model.parameters(), sgd, lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        calls.append("closure")
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    with torch.no_grad():  # the closure has its gradients all the same
        first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first
    assert calls == ["pre", "closure", "post"] * 2


def test_a_learning_rate_in_a_tensor_is_read_at_every_step():
    mine, theirs = network(torch.float64), network(torch.float64)
    for model, optimizer in (
        (mine, TransformOptimizer(mine.parameters(), adamw, lr=torch.tensor(0.1))),
        (theirs, torch.optim.AdamW(theirs.parameters(), lr=torch.tensor(0.1))),
    ):
        train(model, optimizer, 2)
        optimizer.param_groups[0]["lr"].fill_(0.01)
        train(model, optimizer, 2, start=2)
    torch.testing.assert_close(values(mine), values(theirs), rtol=1e-7, atol=1e-7)


@every_make
def test_storage_strides_and_ties_survive(make):
    layers = torch.nn.Conv2d(2, 3, 3), torch.nn.Conv2d(3, 2, 3)
    model = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
    shared = torch.nn.Parameter(torch.ones(2, 2).share_memory_())
    view = shared.detach().view(-1)
    parameters = [*model.parameters(), shared]
    places = [(p.data_ptr(), p.stride(), p.is_shared()) for p in parameters]
    optimizer = TransformOptimizer(parameters, make, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [(p.data_ptr(), p.stride(), p.is_shared()) for p in parameters] == places
    assert torch.equal(view, shared.view(-1))
    assert (view < 1).any()


# --- parameters without a gradient -----------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_parameters_without_a_gradient_are_skipped(name):
    """Each has the number of steps of its own, as in torch."""
    rules = {
        "adamw": (adamw, lambda p: torch.optim.AdamW(p, lr=0.1)),
        "sgd": (sgd, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    }
    make, theirs = rules[name]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(4)]
    optimizers, params = [], []
    for build in (lambda p: TransformOptimizer(p, make, lr=0.1), theirs):
        params.append([torch.nn.Parameter(x.clone()) for x in start])
        optimizers.append(build(params[-1]))
    for step in range(12):
        for i, pair in enumerate(zip(*params, strict=True)):
            # The first always, the second every other time, the third late, the last never.
            present = [True, step % 2 == 0, step > 6, False][i]
            grad = torch.randn(3, generator=generator, dtype=torch.float64)
            for parameter in pair:
                parameter.grad = grad.clone() if present else None
        for optimizer in optimizers:
            optimizer.step()
    assert_close(*params)
    assert torch.equal(params[0][3], start[3])
    assert params[0][3] not in optimizers[0].state
    counts = [int(optimizers[0].state[p]["0.count"]) for p in params[0][:3]]
    assert counts == [12, 6, 5]


# --- checkpoints -----------------------------------------------------------------------------


@every_make
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_equals_never_stopping(make, dtype):
    whole = network(dtype)
    train(whole, TransformOptimizer(groups_of_lr(whole), make, lr=0.1), 6)

    first = network(dtype)
    optimizer = TransformOptimizer(groups_of_lr(first), make, lr=0.1)
    train(first, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    second = network(dtype, seed=1)
    second.load_state_dict(saved["model"])
    resumed = TransformOptimizer(groups_of_lr(second), make, lr=9.0)
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, 3, start=3)
    assert_equal(values(whole), values(second))


def groups_of_lr(model):
    return [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters()}]


def test_a_loaded_state_is_a_copy():
    model = network()
    optimizer = TransformOptimizer(model.parameters(), adamw, lr=0.1)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    other_model = network()
    other = TransformOptimizer(other_model.parameters(), adamw, lr=0.1)
    other.load_state_dict(saved)
    train(other_model, other, 2)
    for i, entries in before["state"].items():
        for name, value in entries.items():
            assert torch.equal(value, saved["state"][i][name])
            assert value.dtype == other.state_dict()["state"][i][name].dtype


def lookalike(lr, weight_decay=0.01):
    return mt.sgd(lr, momentum=0.9, weight_decay=weight_decay)


def wrong_states(model):
    """Of other rules, also with the same hyperparameters, of torch, of other shapes and groups."""
    yield r"has no \['weight_decay'\]", trained(model, sgd, momentum=0.0).state_dict()
    yield r"parameter 0 of group 0: .*missing .*'0\.mu'", trained(model, lookalike).state_dict()
    yield r"missing .*'0\.count'", torch_trained(model).state_dict()
    wider = TransformOptimizer([torch.nn.Parameter(torch.ones(7)) for _ in range(4)], adamw, lr=0.1)
    for parameter in wider.param_groups[0]["params"]:
        parameter.grad = torch.ones(7)
    wider.step()
    yield r"parameter 0 of group 0: .*'0\.mu'", wider.state_dict()
    groups = TransformOptimizer(groups_of_lr(model), adamw, lr=0.1)
    yield "parameter group", groups.state_dict()


def trained(model, make, **options):
    optimizer = TransformOptimizer(model.parameters(), make, lr=0.1, **options)
    train(model, optimizer, 1)
    return optimizer


def torch_trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    return optimizer


@pytest.mark.parametrize("which", range(5))
def test_a_state_that_does_not_fit_changes_nothing(which):
    model = network()
    optimizer = trained(model, adamw)
    before = copy.deepcopy(optimizer.state_dict())
    reason, wrong = list(wrong_states(network()))[which]
    with pytest.raises(ValueError, match=reason):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for i, entries in before["state"].items():
        assert_equal(entries.values(), after["state"][i].values())
    train(model, optimizer, 1)


def test_hooks_of_loading_see_and_change_what_is_loaded():
    model = network()
    optimizer = trained(model, adamw)
    seen = []

    def before(_, saved):
        seen.append(saved["state"][0]["0.count"])
        groups = [{**group, "lr": 0.7} for group in saved["param_groups"]]
        return {**saved, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [1, "loaded"]
    assert optimizer.param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_copy_goes_its_own_way(way):
    model = network()
    optimizer = trained(model, adamw)
    if way == "pickle":
        other_model, other = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        other_model, other = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (other_model, other)):
        train(m, o, 2, start=1)
    assert_equal(values(model), values(other_model))
    assert optimizer.state[model[0].weight]["0.count"] == 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@every_make
def test_distributed_checkpoint(make, tmp_path):
    whole = network()
    train(whole, TransformOptimizer(groups_of_lr(whole), make, lr=0.1), 4)

    model = network()
    optimizer = TransformOptimizer(groups_of_lr(model), make, lr=0.1)
    train(model, optimizer, 2)
    checkpoints.save(tmp_path, model, optimizer)

    second = network(seed=1)
    resumed = TransformOptimizer(groups_of_lr(second), make, lr=0.1)
    checkpoints.load(tmp_path, second, resumed)
    train(second, resumed, 2, start=2)
    assert_equal(values(whole), values(second))


# --- hyperparameters -------------------------------------------------------------------------


def test_defaults_of_make_are_hyperparameters():
    model = network()
    optimizer = TransformOptimizer(groups(model), adamw, lr=0.01)
    first, second = optimizer.param_groups
    assert (first["lr"], first["weight_decay"]) == (0.05, 0.1)
    assert (second["lr"], second["weight_decay"]) == (0.01, 0.01)


def test_a_change_of_the_form_of_the_state_is_refused_before_anything_moves():
    model = network()
    optimizer = TransformOptimizer(groups_of_lr(model), sgd, lr=0.1, momentum=0.9)
    train(model, optimizer, 1)
    before = values(model)
    optimizer.param_groups[1]["momentum"] = 0.0
    with pytest.raises(ValueError, match=r"parameter group 1 would be .*0\.trace"):
        train(model, optimizer, 1)
    assert_equal(values(model), before)
    optimizer.param_groups[1]["momentum"] = 0.5
    train(model, optimizer, 1)


def test_parameters_added_later():
    mine, theirs = network(torch.float64), network(torch.float64)
    for model, optimizer in (
        (mine, TransformOptimizer(mine[0].parameters(), adamw, lr=0.1)),
        (theirs, torch.optim.AdamW(theirs[0].parameters(), lr=0.1)),
    ):
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
        train(model, optimizer, 2, start=2)
    assert_close(values(mine), values(theirs))


def test_errors():
    model = network()
    optimizer = TransformOptimizer(model[0].parameters(), adamw, lr=0.1)
    for bad in ({"lr": -1.0}, {"weight_decay": "much"}):
        with pytest.raises((ValueError, TypeError), match="must be"):
            optimizer.add_param_group({"params": model[2].parameters(), **bad})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match="wd"):
        TransformOptimizer(model.parameters(), adamw, lr=0.1, wd=0.1)
    with pytest.raises(TypeError, match="lr"):
        TransformOptimizer(model.parameters(), adamw)
    with pytest.raises(TypeError, match="expected a transform"):
        TransformOptimizer(model.parameters(), lambda lr: lr, lr=0.1)
    with pytest.raises(TypeError, match="AveragingOptimizer"):
        TransformOptimizer(model.parameters(), lambda lr: mt.local_sgd(mt.sgd(lr), 4), lr=0.1)
    model[0].bias.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


# --- gradient scalers ------------------------------------------------------------------------


def test_a_gradient_scaler_skips_it_as_any_other():
    mine, theirs = network(torch.float64), network(torch.float64)
    for model, optimizer in (
        (mine, TransformOptimizer(mine.parameters(), adamw, lr=0.1)),
        (theirs, torch.optim.AdamW(theirs.parameters(), lr=0.1)),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step, overflow in enumerate([False, True, False]):
            optimizer.zero_grad()
            loss = loss_of(model, step) * (math.inf if overflow else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_close(values(mine), values(theirs))
    assert optimizer.state[theirs[0].weight]["step"] == 2
