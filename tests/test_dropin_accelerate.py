"""Local SGD in the loops of accelerate: its own `LocalSGD` is the reference where it is right."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import meantime as mt
from meantime.adapters import AveragingOptimizer, dropin

pytest.importorskip("accelerate")


@contextlib.contextmanager
def accelerator(**options):
    """An `Accelerator` in this process of the pool, which it forgets afterwards."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget():
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._reset_state()

    rank, size = (str(n) for n in (dist.get_rank(), dist.get_world_size()))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size)):
            patch.setenv(name, value)
        patch.setenv("LOCAL_WORLD_SIZE", size)
        forget()
        try:
            yield Accelerator(cpu=True, **options)
        finally:
            forget()


def plain():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@contextlib.contextmanager
def prepared(**options):
    with accelerator(**options) as acc:
        yield acc, *acc.prepare(*plain())


def update(accelerator, model, optimizer, seed):
    """A micro-batch of this rank's own."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    loss = model(torch.randn(4, 3, generator=generator)).float().square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def weights(model):
    return next(model.parameters()).detach().clone()


def same(model):
    everyone = mt.Distributed().gather(weights(model))
    return bool((everyone == everyone[0]).all())


def run(accelerator, model, optimizer, local_sgd, steps):
    """The weights after each step."""
    found = []
    for step in range(steps):
        update(accelerator, model, optimizer, step)
        local_sgd.step()
        found.append(weights(model))
    return found


def train(local_sgd_class, accelerator, steps, every):
    """The weights after each step, and at the end."""
    model, optimizer = accelerator.prepare(*plain())
    with local_sgd_class(accelerator, model, local_sgd_steps=every) as local_sgd:
        found = run(accelerator, model, optimizer, local_sgd, steps)
    assert model.require_backward_grad_sync
    return [*found, weights(model)], same(model)


def parity_body():
    from accelerate.local_sgd import LocalSGD

    for options in ({}, {"mixed_precision": "bf16"}):
        with accelerator(**options) as acc:
            for steps, every in ((7, 3), (6, 3), (2, 5)):
                theirs, ours = (train(c, acc, steps, every) for c in (LocalSGD, dropin.LocalSGD))
                assert theirs[1]
                assert ours[1]
                torch.testing.assert_close(theirs[0], ours[0], rtol=1e-6, atol=1e-7)


def accumulation_body():
    """A step is an update: averages come between two of them, never inside of one."""
    with prepared(gradient_accumulation_steps=2) as (acc, model, optimizer):
        found = []
        with dropin.LocalSGD(acc, model, local_sgd_steps=2) as local_sgd:
            for micro_batch in range(8):
                with acc.accumulate(model):
                    update(acc, model, optimizer, micro_batch)
                    local_sgd.step()
                found.append(same(model))
            assert local_sgd.num_steps == 4
        # Equal at the start, apart after the first update, equal after the second one.
        assert found == [True, False, False, True, True, False, False, True]


def exception_body():
    """On the way out of an exception nothing is communicated, and the model is restored."""
    with prepared() as (acc, model, optimizer):
        local_sgd = dropin.LocalSGD(acc, model, local_sgd_steps=8)
        local_sgd._replicas = recorded = mt.Recorded(mt.Distributed())
        before = []

        def fail():
            with local_sgd:  # after other steps on every rank
                before.extend(run(acc, model, optimizer, local_sgd, 1 + dist.get_rank()))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert not recorded.calls
        assert torch.equal(weights(model), before[-1])
        assert model.require_backward_grad_sync

        local_sgd._replicas = None  # the average at the end fails
        with pytest.raises(TypeError, match="has to communicate"), local_sgd:
            local_sgd.step()
        assert model.require_backward_grad_sync


def twice_body():
    """Nothing is averaged at the end when the last step was, and again in the next context."""
    with prepared() as (acc, model, optimizer):
        local_sgd = dropin.LocalSGD(acc, model, local_sgd_steps=2)
        local_sgd._replicas = recorded = mt.Recorded(mt.Distributed())
        counts = []
        for steps in (4, 1, 0):
            with local_sgd:
                run(acc, model, optimizer, local_sgd, steps)
            counts.append(len(recorded.calls))
            assert same(model)
        assert counts[:2] == [2, 3]


def disabled_body():
    with prepared() as (acc, model, optimizer):
        with dropin.LocalSGD(acc, model, None, enabled=False) as local_sgd:
            update(acc, model, optimizer, 0)
            local_sgd.step()
            assert same(model)  # gradients were exchanged
        with pytest.raises(TypeError, match=r"accelerator\.prepare\(\) returned, got Linear"):
            dropin.LocalSGD(acc, torch.nn.Linear(1, 1), 4)


def optimizers_body():
    """The averaging optimizers work inside and outside of what `prepare` returns."""

    def averaging(optimizer):
        return AveragingOptimizer(
            optimizer, mt.periodic(mt.average_params(), every=2), replicas=mt.Distributed()
        )

    def post_local(optimizer):
        return dropin.PostLocalSGDOptimizer(optimizer, dropin.PeriodicModelAverager(2, 1))

    for wrap in (averaging, post_local):
        for inside in (True, False):
            with accelerator(gradient_accumulation_steps=2) as acc:
                model, optimizer = plain()
                first, second = (wrap, acc.prepare) if inside else (acc.prepare, wrap)
                optimizer = second(first(optimizer))
                found = []
                for micro_batch in range(8):
                    with acc.accumulate(model):
                        update(acc, model, optimizer, micro_batch)
                    found.append(same(model))
                assert found == [True, False, False, True, True, False, False, True]


@pytest.mark.parametrize(
    "body",
    [
        parity_body,
        accumulation_body,
        exception_body,
        twice_body,
        disabled_body,
        optimizers_body,
    ],
)
def test_processes(gloo, body):
    gloo.run(body)


def fake(kind):
    from accelerate import DistributedType

    return SimpleNamespace(distributed_type=DistributedType[kind], sync_gradients=True)


def test_one_process_is_left_alone():
    model = torch.nn.Linear(1, 1)
    with dropin.LocalSGD(fake("NO"), model, 2) as local_sgd:
        local_sgd.step()
    assert not local_sgd.enabled
    assert local_sgd.num_steps == 1


@pytest.mark.parametrize(
    ("kind", "every", "error"),
    [
        ("NO", 0, ValueError),
        ("NO", -2, ValueError),
        ("MULTI_CPU", 2.5, TypeError),
        ("MULTI_CPU", True, TypeError),
        ("MULTI_GPU", None, TypeError),
        ("FSDP", 2, NotImplementedError),
        ("DEEPSPEED", 2, NotImplementedError),
    ],
)
def test_errors(kind, every, error):
    with pytest.raises(error, match=r"local_sgd_steps|one whole model"):
        dropin.LocalSGD(fake(kind), torch.nn.Linear(1, 1), every)
