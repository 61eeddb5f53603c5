"""Parameters moved into one stretch of memory."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist

import meantime as mt
from meantime.adapters import arena
from tests.test_distributed import all_bits


class Network(torch.nn.Module):
    """Weights of several dtypes and layouts, tied in both ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.embedding = torch.nn.Embedding(10, 8)
        self.head = torch.nn.Linear(8, 10)
        self.head.weight = self.embedding.weight  # one parameter
        self.twin = torch.nn.Parameter(self.conv.bias.data)  # two parameters, one memory
        self.turned = torch.nn.Parameter(torch.randn(4, 6).T)
        self.narrow = torch.nn.Parameter(torch.randn(5, 7).bfloat16())
        self.spectrum = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.empty = torch.nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        features = self.conv(x).mean((2, 3)) * self.scale + self.twin
        return self.head(features) + self.embedding.weight.sum() + self.turned.sum()


def test_moves_parameters():
    model = Network()
    parameters = list(model.parameters())
    before = [(id(p), p.shape, p.stride(), p.dtype, p.requires_grad) for p in parameters]
    bits = all_bits(parameters)
    parameters[0].grad = gradient = torch.ones_like(parameters[0])

    buffers = arena(model.parameters())

    after = [(id(p), p.shape, p.stride(), p.dtype, p.requires_grad) for p in model.parameters()]
    assert after == before
    assert all_bits(parameters) == bits
    assert parameters[0].grad is gradient
    assert model.head.weight is model.embedding.weight
    assert model.twin.data_ptr() == model.conv.bias.data_ptr()
    # Each value once, in a buffer of its dtype; nothing else in it.
    assert {buffer.dtype for buffer in buffers} == {p.dtype for p in parameters}
    distinct = [p for p in parameters if p is not model.twin]
    for buffer in buffers:
        mine = [p for p in distinct if p.dtype == buffer.dtype]
        assert buffer.numel() == sum(p.numel() for p in mine)
        assert {p.untyped_storage().data_ptr() for p in mine if p.numel()} == {buffer.data_ptr()}
    total = sum(p.double().sum() for p in distinct if p.dtype == torch.float32)
    whole = next(buffer for buffer in buffers if buffer.dtype == torch.float32)
    torch.testing.assert_close(whole.double().sum(), total)
    # Whatever their lengths, most begin where vector units want them.
    assert all(
        p.data_ptr() % 64 == whole.data_ptr() % 64
        for p in distinct
        if p.dtype == torch.float32 and p.numel() % 16 == 0
    )


def test_training_goes_on_as_before():
    torch.manual_seed(1)
    batches = torch.randn(6, 4, 3, 5, 5)
    models = [Network(), Network()]
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step, x in enumerate(batches):
            if step == 3 and model is models[1]:
                arena(model.parameters())
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all_bits(models[0].state_dict()) == all_bits(models[1].state_dict())
    # It is saved once, however many parameters lie in it, and read into another model.
    saved = io.BytesIO()
    torch.save(models[1].state_dict(), saved)
    assert (
        saved.tell() < 2 * sum(p.numel() * p.element_size() for p in models[1].parameters()) + 2**14
    )
    saved.seek(0)
    other = Network()
    other.load_state_dict(torch.load(saved))
    assert all_bits(other.state_dict()) == all_bits(models[0].state_dict())
    assert all_bits(copy.deepcopy(models[1]).state_dict()) == all_bits(other.state_dict())


def unfit():
    weight = torch.nn.Linear(4, 4).weight
    shared = torch.nn.Parameter(torch.ones(3))
    shared.share_memory_()
    return {
        "meta": (torch.nn.Parameter(torch.empty(2, device="meta")), TypeError),
        "batch": (torch.nn.LazyLinear(2).weight, TypeError),
        "sparse": (torch.eye(2).to_sparse().requires_grad_(), TypeError),
        "MulBackward0": (weight * 2, TypeError),
        "Subclass": (torch.ones(2).as_subclass(Subclass), TypeError),
        "shared": (shared, ValueError),
        "fill": (torch.nn.Parameter(torch.ones(10)[2:6]), ValueError),
        "strides (4,)": (torch.nn.Parameter(torch.ones(16)[::4]), ValueError),
        "strides (0, 1)": (torch.nn.Parameter(torch.ones(1, 3).expand(2, 3)), ValueError),
    }


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("words", unfit())
def test_refuses_before_anything_is_moved(words):
    leaf, kind = unfit()[words]
    good = torch.nn.Linear(3, 3).weight
    place = good.data_ptr()
    with pytest.raises(kind, match=r"parameter 1") as caught:
        arena([good, leaf])
    assert words in str(caught.value)
    assert good.data_ptr() == place


def averaging_body():
    """What is averaged in the arena are the bits that would be without it; in one collective."""
    torch.manual_seed(dist.get_rank())
    sizes = [(512, 512), (512,), (10, 512), (10,), (512, 512), (), (512, 512), (512, 512)]
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    world, tx = mt.Distributed(), mt.average_params()
    pure, _ = tx.average(parameters, tx.init(parameters), replicas=world)
    (buffer,) = arena(parameters)
    messages = []
    original = dist.all_reduce

    def recorded(x, *arguments, **options):
        messages.append(x)
        return original(x, *arguments, **options)

    dist.all_reduce = recorded
    try:
        averaged, _ = tx.average(parameters, tx.init(parameters), replicas=world, donate=True)
    finally:
        dist.all_reduce = original
    assert averaged[0] is parameters[0]
    assert all_bits(parameters) == all_bits(pure)
    # The lengths 10 and 1 with the weight and the guard, and the rest where it is.
    small, large = messages
    assert small.numel() == 13
    assert (large.data_ptr(), large.numel()) == (buffer.data_ptr(), buffer.numel() - 11)


def test_average(gloo):
    gloo.run(averaging_body)
