"""`from_torch` makes transforms of the optimizers of torch, with the same numbers."""

import pytest
import torch
from torch import optim

import meantime as mt
from meantime.adapters import TorchState, from_torch
from meantime.testing import check_transform

RULES = {
    "sgd": (optim.SGD, {}),
    "sgd_momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "sgd_nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (optim.Adam, {"amsgrad": True, "foreach": True}),
    "adamw": (optim.AdamW, {"maximize": True}),
    "adamw_fused": (optim.AdamW, {"fused": True}),
    "nadam": (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (optim.RAdam, {}),
    "adamax": (optim.Adamax, {}),
    "adadelta": (optim.Adadelta, {}),
    "adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "rprop": (optim.Rprop, {}),
    "asgd": (optim.ASGD, {"t0": 2}),
    "adafactor": (optim.Adafactor, {}),
}
if hasattr(optim, "Muon"):  # torch 2.9
    RULES["muon"] = (optim.Muon, {})
every_rule = pytest.mark.parametrize("name", RULES)
NOT_EAGER = ("vectorises", "differentiates", "compiles", "runs_on_jax")


def make(name, lr=0.1):
    kind, options = RULES[name]
    return from_torch(kind, lr=lr, **options)


def start(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return {"a": draw(3, 4), "rest": [draw(4, 2), None, draw(2, 3).T]}


def gradients(params, steps):
    """Laid out in memory as the parameters, as autograd lays them out."""
    generator = torch.Generator().manual_seed(1)

    def draw(p):
        return torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))

    return [mt.tree.map(draw, params) for _ in range(steps)]


def in_torch(optimizer_class, options, params, grads):
    """The parameters after each step, and the optimizer."""
    leaves = [torch.nn.Parameter(p.clone()) for p in mt.tree.leaves(params)]
    optimizer = optimizer_class(leaves, **options)
    for step in grads:
        for leaf, grad in zip(leaves, mt.tree.leaves(step), strict=True):
            leaf.grad = grad.clone()
        optimizer.step()
        yield [leaf.detach().clone() for leaf in leaves], optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_rule
def test_the_numbers_are_those_of_torch(name, dtype):
    """Bit for bit: parameters and state, from the first step on."""
    kind, options = RULES[name]
    params, tx = start(dtype), make(name)
    state, grads = tx.init(params), gradients(params, 6)
    for step, (wanted, optimizer) in zip(
        grads, in_torch(kind, {"lr": 0.1, **options}, params, grads), strict=True
    ):
        params, state = mt.step(tx, step, params, state)
        assert all(map(torch.equal, mt.tree.leaves(params), wanted))
        slots = [state.slots["a"], state.slots["rest"][0], state.slots["rest"][2]]
        for found, kept in zip(slots, optimizer.state.values(), strict=bool(optimizer.state)):
            assert found.keys() == kept.keys()
            for key in kept:
                assert torch.equal(found[key], kept[key])
                assert found[key].dtype == kept[key].dtype


@every_rule
def test_it_is_a_transform(name):
    # torch divides by the number of elements of a leaf in Adafactor, and Muon takes matrices.
    params = start() if name in ("adafactor", "muon") else None
    check_transform(make(name), params=params, examples=5, skip=NOT_EAGER)


def test_as_the_outer_optimizer_it_is_diloco():
    results = []
    for outer in (make("sgd_nesterov", lr=0.7), mt.sgd(0.7, 0.9, nesterov=True)):
        averager = mt.periodic(mt.outer(mt.chain(mt.mean(), outer)), every=3)
        tx, params = mt.chain(mt.adamw(0.1), averager), start(torch.float64)
        state = tx.init(params)
        for grads in gradients(params, 9):
            params, state = mt.step(tx, grads, params, state, replicas=mt.Solo())
        results.append(mt.tree.leaves(params))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_schedule_of_the_learning_rate():
    schedule = mt.schedules.linear(0.5, 0.1, steps=4)
    params, tx = start(), make("adam", lr=schedule)
    state, grads = tx.init(params), gradients(params, 6)
    torch_steps = in_torch(optim.Adam, {"lr": 0.5, "weight_decay": 0.1}, params, grads)
    for count, step in enumerate(grads):
        params, state = mt.step(tx, step, params, state)
        wanted, optimizer = next(torch_steps)
        optimizer.param_groups[0]["lr"] = schedule(count + 1)
        assert all(map(torch.equal, mt.tree.leaves(params), wanted))


@every_rule
def test_donation_steps_in_place(name):
    params, tx = start(), make(name)
    state = tx.init(params)
    for grads in gradients(params, 3):
        kept, kept_state = mt.step(tx, grads, params, state)
        places = [x.data_ptr() for x in mt.tree.leaves(params)]
        params, state = mt.step(tx, grads, params, state, donate=True)
        assert [x.data_ptr() for x in mt.tree.leaves(params)] == places
        for mine, other in zip(
            mt.tree.leaves((params, state)), mt.tree.leaves((kept, kept_state)), strict=True
        ):
            assert torch.equal(mine, other)


def test_a_new_state_is_that_of_a_new_optimizer_in_a_checkpoint_too():
    """Zeros stand for what the first step makes: for Adagrad's 0.5, for SGD's missing buffer."""
    for name in ("adagrad", "sgd_momentum"):
        params, tx = start(), make(name)
        state = tx.init(params)
        restored = mt.load_state_dict(tx.init(params), mt.state_dict(state))
        (grads,) = gradients(params, 1)
        first, _ = mt.step(tx, grads, params, restored)
        ((wanted, _),) = in_torch(*_with_lr(name), params, [grads])
        assert all(map(torch.equal, mt.tree.leaves(first), wanted))


def _with_lr(name):
    kind, options = RULES[name]
    return kind, {"lr": 0.1, **options}


def test_the_state_is_found_and_named():
    state = mt.chain(mt.clip(1.0), make("adam")).init({"w": torch.ones(2, dtype=torch.bfloat16)})
    found = mt.find(state, TorchState)
    assert found.slots["w"]["exp_avg"].dtype == torch.bfloat16
    names = ["1.count", "1.slots.w.exp_avg", "1.slots.w.exp_avg_sq", "1.slots.w.step"]
    assert sorted(mt.state_dict(state)) == names


def test_a_tree_without_leaves():
    tx = make("adam")
    assert mt.step(tx, None, None, tx.init(None))[0] is None


def test_a_break_of_the_graph_under_compile():
    tx, params = make("adam"), {"w": torch.ones(2)}
    state, grads = tx.init(params), {"w": torch.full((2,), 3.0)}

    def one(grads, params, state):
        return mt.step(tx, mt.tree.map(lambda g: 2 * g, grads), params, state)

    wanted, found = (
        one(grads, params, state),
        torch.compile(one, backend="eager")(grads, params, state),
    )
    for x, y in zip(mt.tree.leaves(found), mt.tree.leaves(wanted), strict=True):
        assert torch.equal(x, y)


class KeepsANumber(optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["calls"] = 1


class KeepsItInTheGroup(optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1


class ChangesItsState(optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if p.grad.any():
                self.state[p]["seen"] = torch.ones(())


def test_optimizers_that_are_no_function_of_their_state_are_refused():
    params = {"w": torch.ones(2)}
    with pytest.raises(TypeError, match=r"KeepsANumber.*'calls' = 1.*not a tensor"):
        from_torch(KeepsANumber, lr=0.1).init(params)
    with pytest.raises(TypeError, match=r"KeepsItInTheGroup.*\['calls'\] in its parameter groups"):
        from_torch(KeepsItInTheGroup, lr=0.1).init(params)
    tx = from_torch(ChangesItsState, lr=0.1)
    with pytest.raises(TypeError, match=r"from \[\] to \['seen'\]"):
        tx.update(params, tx.init(params), params)


def test_errors():
    params = {"w": torch.ones(2)}
    with pytest.raises(TypeError, match=r"LBFGS.*closure"):
        from_torch(optim.LBFGS, lr=0.1)
    with pytest.raises(TypeError, match=r"takes a class.*got an object of type SGD"):
        from_torch(optim.SGD([torch.ones(1)], lr=0.1))
    with pytest.raises(ValueError, match="learning rate"):
        from_torch(optim.SGD, lr=-1.0)
    with pytest.raises(TypeError, match="momentun"):
        from_torch(optim.SGD, lr=0.1, momentun=0.9)
    tx = make("adam")
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params))
    with pytest.raises(TypeError, match=r"\['n'\] is torch.int64"):
        tx.init({"n": torch.tensor(1)})
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(tx.init)(torch.ones(2, 2))


def test_jax_arrays_are_refused():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="steps floating torch tensors"):
        make("adam").init({"w": jax.numpy.ones(2)})
