"""`Distributed` with real processes. Bodies run in every process and assert there."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meantime as mt
from tests.processes import run, worlds_of_2_3_4


class Pair(NamedTuple):
    left: object
    right: object


def tree_of(rank: int) -> dict:
    """A tree of every kind of leaf; each rank's values can be known by all."""
    make = torch.Generator().manual_seed(rank)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=make, dtype=torch.float64).to(dtype)

    return {
        "float32": normal(3, 5),
        "float64": normal(7, dtype=torch.float64),
        "bfloat16": normal(4, 4, dtype=torch.bfloat16),
        "float16": normal(11, dtype=torch.float16),
        "complex64": torch.complex(normal(3, 2), normal(3, 2)),
        "int64": torch.tensor([rank, -rank, 2**40 + rank]),
        "bool": torch.tensor([rank == 0, rank == 1, False]),
        "uint8": torch.tensor([rank, 255 - rank], dtype=torch.uint8),
        "0-d": normal(),
        "empty": torch.empty(0, 3),
        "channels_last": normal(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": normal(6, 2).T,
        "strided": normal(10)[::2],
        "expanded": normal(1, 3).expand(4, 3),
        "none": None,
        "pair": Pair(normal(2), [normal(1), None, (normal(3),)]),
        "ordered": OrderedDict(z=normal(2), a=normal(2)),
        "parameter": torch.nn.Parameter(normal(5)),
    }


def numbers(x: torch.Tensor) -> np.ndarray:
    x = x.detach()
    return (x.double() if x.dtype in (torch.bfloat16, torch.float16, torch.float32) else x).numpy()


def expected_mean(leaves: list[torch.Tensor], weights=None) -> torch.Tensor:
    """NumPy's, of one leaf of all replicas, in the leaf's dtype."""
    first = leaves[0]
    values = np.stack([numbers(x) for x in leaves])
    if not (first.is_floating_point() or first.is_complex()):
        return torch.from_numpy(np.asarray(values.max(0)))
    weights = np.array([1.0] * len(leaves) if weights is None else weights)
    taking_part = weights > 0
    total = np.tensordot(weights[taking_part], values[taking_part], 1)
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: there is no mean
        mean = np.asarray(total / weights.sum())
    return torch.from_numpy(mean).to(first.dtype)


def bits(x: torch.Tensor) -> bytes:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def all_bits(tree) -> list[bytes]:
    return [bits(x) for x in mt.tree.leaves(tree)]


def check_mean(actual, trees, weights=None) -> None:
    columns = zip(*(mt.tree.leaves(tree) for tree in trees), strict=True)
    paths = mt.tree.paths(trees[0])
    for path, x, column in zip(paths, mt.tree.leaves(actual), columns, strict=True):
        wanted = expected_mean(list(column), weights)
        # rounded to half precision after the division only: at most one more rounding
        torch.testing.assert_close(
            x.detach(), wanted, equal_nan=True, msg=lambda text, path=path: f"{path}: {text}"
        )


def same_on_all(tree, group) -> None:
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, all_bits(tree), group=group)
    assert all(one == everyone[0] for one in everyone)


def raises(kind, function, *arguments, **options) -> str:
    """The message, and nothing left hanging: this is used where all ranks raise."""
    try:
        function(*arguments, **options)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} raised")


# --- the mean --------------------------------------------------------------------------------


def mean_body():
    rank = dist.get_rank()
    for size, group in worlds_of_2_3_4():
        trees = [tree_of(r) for r in range(size)]
        mine = trees[rank]
        before = all_bits(mine)
        world = mt.Distributed(group)
        assert (world.size, world.rank) == (size, rank)
        large = world.mean(mine)
        check_mean(large, trees)
        same_on_all(large, group)
        assert all_bits(mine) == before, "the mean wrote to its input"
        assert type(large["pair"]) is Pair
        assert large["none"] is None
        assert not any(x.requires_grad for x in mt.tree.leaves(large))
        assert large["channels_last"].is_contiguous(memory_format=torch.channels_last)
        # Leaves cut in the middle, several to a message, one element to a message.
        for bucket_bytes in (1, 8, 20, 100):
            small = mt.Distributed(group, bucket_bytes=bucket_bytes).mean(mine)
            if size == 2:  # the sum of two has but one order
                assert all_bits(small) == all_bits(large)
            check_mean(small, trees)
            same_on_all(small, group)


def test_mean(gloo):
    gloo.run(mean_body)


def bits_do_not_depend_on_buckets_body():
    """Of sums without rounding: gloo chooses the order of three summands by their place."""
    rank = dist.get_rank()
    for size, group in worlds_of_2_3_4():
        mine = mt.tree.map(
            lambda x: (x * 64).round() if x.is_floating_point() else x, tree_of(rank)
        )
        del mine["complex64"]
        large = all_bits(mt.Distributed(group).mean(mine))
        for bucket_bytes in (1, 8, 20, 100):
            small = all_bits(mt.Distributed(group, bucket_bytes=bucket_bytes).mean(mine))
            assert small == large, (size, bucket_bytes)


def test_bits_do_not_depend_on_buckets(gloo):
    gloo.run(bits_do_not_depend_on_buckets_body)


def weights_body():
    rank = dist.get_rank()
    for size, group in worlds_of_2_3_4():
        trees = [tree_of(r) for r in range(size)]
        # A replica of weight 0 may hold anything.
        ruined = mt.tree.map(
            lambda x: torch.full_like(x, torch.nan) if mt.arrays.is_inexact(x) else x, trees[1]
        )
        for weights in ([1.0, 2.5, 0.25, 3.0], [3, 0, 1, 2], [2.0, 0.0, 0.0, 0.0], [0.0] * 4):
            weights = weights[:size]
            mine = ruined if rank == 1 and weights[1] == 0 else trees[rank]
            for weight in (weights[rank], torch.tensor(weights[rank])):
                for world in (mt.Distributed(group), mt.Distributed(group, bucket_bytes=12)):
                    mean = world.mean(mine, weight=weight)
                    check_mean(mean, trees, weights)
                    same_on_all(mean, group)


def test_weights(gloo):
    gloo.run(weights_body)


def donate_body():
    """In place, with the same bits; storage and strides survive."""
    rank = dist.get_rank()
    for size, group in worlds_of_2_3_4():
        for weights in (None, [1.0, 0.0, 2.0, 0.5], [0.0] * 4):
            for bucket_bytes in (25 * 2**20, 20):
                world = mt.Distributed(group, bucket_bytes=bucket_bytes)
                weight = None if weights is None else weights[rank]
                mine = tree_of(rank)
                del mine["expanded"]  # its elements share memory: it cannot be written to
                if weights is not None and not any(weights):
                    for key in ("transposed", "strided", "channels_last"):
                        del mine[key]  # test_donate_without_weight
                pure = world.mean(mine, weight=weight)
                places = [(x.data_ptr(), x.stride()) for x in mt.tree.leaves(mine)]
                before = all_bits(mine)
                given = world.mean(mine, weight=weight, donate=True)
                for a, b in zip(mt.tree.leaves(given), mt.tree.leaves(mine), strict=True):
                    assert a is b
                assert [(x.data_ptr(), x.stride()) for x in mt.tree.leaves(mine)] == places
                if weights is not None and not any(weights[:size]):
                    # No mean: what is floating stays; integers take the maximum.
                    kept = [
                        (old, new)
                        for x, old, new in zip(
                            mt.tree.leaves(mine), before, all_bits(mine), strict=True
                        )
                        if mt.arrays.is_inexact(x)
                    ]
                    assert all(old == new for old, new in kept)
                else:
                    assert all_bits(mine) == all_bits(pure)


def test_donate(gloo):
    gloo.run(donate_body)


def donate_without_weight_body():
    world = mt.Distributed()
    tree = {"contiguous": torch.ones(2, 3), "transposed": torch.ones(6, 2).T}
    world.mean(tree, weight=0.0, donate=True)
    return [bool((x == 1).all()) for x in tree.values()]


def test_donate_without_weight(gloo):
    """There is no mean: donated leaves stay as they are, whatever their strides."""
    assert gloo.run(donate_without_weight_body) == [[True, True]] * 4


def half_precision_body():
    world = mt.Distributed()
    values = torch.tensor([60000.0, 6e-8, -60000.0], dtype=torch.float16)
    mean = world.mean({"x": values})["x"]
    assert torch.equal(mean, values), mean  # a sum in float16 is inf, a quotient first is 0
    mean = world.mean({"x": values}, weight=3.0)["x"]
    assert torch.equal(mean, values), mean
    # bfloat16: 256 + 1 is 256
    rank = dist.get_rank()
    values = torch.tensor([256.0 if rank == 0 else 4.0], dtype=torch.bfloat16)
    assert world.mean(values).item() == 67.0


def test_half_precision_accumulates_in_float32(gloo):
    gloo.run(half_precision_body)


class Counted:
    """Counts the calls of functions of `torch.distributed` while it is open."""

    def __init__(self, *names):
        self.names, self.count, self.originals = names, dict.fromkeys(names, 0), {}

    def __enter__(self):
        for name in self.names:
            original = self.originals[name] = getattr(dist, name)

            def call(*arguments, name=name, original=original, **options):
                self.count[name] += 1
                return original(*arguments, **options)

            setattr(dist, name, call)
        return self

    def __exit__(self, *_):
        for name, original in self.originals.items():
            setattr(dist, name, original)


def collectives_body():
    rank = dist.get_rank()
    small = {f"layer{i}": torch.full((i % 7 + 1,), float(rank)) for i in range(300)}
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast")
    world = mt.Distributed()
    with Counted(*names) as first:
        mean = world.mean(small)
    gathers = [first.count.pop(name) for name in names if name.startswith("all_gather")]
    assert sum(gathers) == 1  # the fingerprint, once
    assert first.count == {"all_reduce": 1, "broadcast": 0}
    assert all((x == 1.5).all() for x in mean.values())
    for call in (
        lambda: world.mean(small),
        lambda: world.mean(small, weight=2.0),
        lambda: world.mean(small, donate=True),
    ):
        with Counted(*names) as counted:
            call()
        assert counted.count == {**dict.fromkeys(names, 0), "all_reduce": 1}
    # The guard against values that are not finite costs no message of its own.
    tx = mt.average_params()
    with Counted(*names) as counted:
        tx.average(small, tx.init(small), replicas=mt.Distributed())
    assert counted.count["all_reduce"] == 1
    # 1200 floats in messages of 400 bytes; nothing is sent for empty trees.
    with Counted(*names) as counted:
        mt.Distributed(bucket_bytes=400).mean({"x": torch.ones(1200)})
    assert counted.count["all_reduce"] == 12
    with Counted(*names) as counted:
        assert mt.Distributed().mean({"x": None}) == {"x": None}
        mt.Distributed().mean({"x": torch.ones(0)})
    assert counted.count["all_reduce"] == 0
    # Nothing is due: nothing is called at all.
    tx = mt.local_sgd(mt.sgd(0.1), every=3)
    params, state = small, tx.init(small)
    counts = []
    for _ in range(6):
        with Counted(*names) as counted:
            params, state = mt.step(tx, small, params, state, replicas=world)
        counts.append(sum(counted.count.values()))
    assert [bool(c) for c in counts] == [False, False, True] * 2, counts
    assert counts[-1] == 1, counts


def test_number_of_collectives(gloo):
    gloo.run(collectives_body)


def in_place_body():
    """Donated leaves that are one stretch of memory are reduced there, the others beside it."""
    size, rank = 4, dist.get_rank()
    lengths = [2**19, 7, 2**19, 2**18, 1]
    trees = [
        {str(i): torch.randn(n, generator=torch.Generator().manual_seed(10 * r + i))
         for i, n in enumerate(lengths)}
        for r in range(size)
    ]  # fmt: skip
    buffer = torch.cat([trees[rank][key] for key in "02314"])
    parts = dict(zip("02314", buffer.split([lengths[int(i)] for i in "02314"]), strict=True))
    mine = {key: parts[key].view(2, -1) if key == "2" else parts[key] for key in trees[rank]}
    messages = []
    original = dist.all_reduce

    def recorded(x, *arguments, **options):
        messages.append((x.data_ptr(), x.numel()))
        return original(x, *arguments, **options)

    for weights in (None, [2.0, 1.0, 1.0, 0.5], [1.0, 0.0, 3.0, 1.0]):
        buffer.copy_(torch.cat([trees[rank][key] for key in "02314"]))
        world = mt.Distributed(bucket_bytes=2**22)
        weight = None if weights is None else weights[rank]
        pure = world.mean(mine, weight=weight)
        messages.clear()
        dist.all_reduce = recorded
        try:
            world.mean(mine, weight=weight, donate=True)
        finally:
            dist.all_reduce = original
        assert all_bits(mine) == all_bits(pure)
        mean = {key: x.flatten() for key, x in mine.items()}
        check_mean(mean, trees, weights)
        # 7 + 1 values and the weight, then two messages of whole leaves.
        assert [n for _, n in messages] == [8 + (weight is not None), 2**20, 2**18]
        start = buffer.data_ptr()
        places = [place for place, _ in messages[1:]]
        assert (places == [start, start + 2**22]) == (weight != 0)


def test_in_place(gloo):
    gloo.run(in_place_body)


def tied_body():
    rank = float(dist.get_rank())
    world = mt.Distributed()
    x = torch.full((3,), rank)
    mean = world.mean({"a": x, "b": x, "c": torch.full((3,), rank)})
    assert mean["a"] is mean["b"]
    assert mean["a"].tolist() == mean["c"].tolist() == [1.5] * 3
    # In place, tied by the object or by its memory.
    large = torch.full((2**21,), rank)
    world = mt.Distributed()
    world.mean({"a": large, "b": large, "c": large.view_as(large)}, donate=True)
    assert (large == 1.5).all()
    message = raises(ValueError, mt.Distributed().mean, [large, large[:3]], donate=True)
    assert "share memory" in message
    one_tied = [x, x if rank else x.clone()]
    message = raises(ValueError, mt.Distributed().mean, one_tied)
    assert "tied to [0]" in message, message


def test_tied_leaves(gloo):
    gloo.run(tied_body)


def float64_body():
    """The guard has no message of its own, whatever the dtype of the values."""
    rank = dist.get_rank()
    tx, world = mt.average_params(), mt.Distributed()
    for dtype in (torch.float64, torch.bfloat16, torch.complex128):
        params = {"w": torch.full((3,), rank, dtype=dtype), "b": torch.full((), rank, dtype=dtype)}
        state = tx.init(params)
        world = mt.Distributed()
        world.mean(params)  # compares trees
        with Counted("all_reduce", "all_gather") as counted:
            mean, _ = tx.average(params, state, replicas=world, weight=float(rank))
        assert counted.count == {"all_reduce": 1, "all_gather": 0}
        wanted = torch.tensor((1 + 4 + 9) / 6, dtype=dtype)
        assert (mean["w"] == wanted).all()
        assert mean["b"] == wanted


def test_guard_of_other_dtypes(gloo):
    gloo.run(float64_body)


# --- the other collectives -------------------------------------------------------------------


def gather_permute_broadcast_body():
    rank = dist.get_rank()
    for size, group in worlds_of_2_3_4():
        world = mt.Distributed(group)
        trees = [tree_of(r) for r in range(size)]
        mine = trees[rank]
        before = all_bits(mine)
        gathered = world.gather(mine)
        for i in range(size):
            row = mt.tree.map(lambda x, i=i: x[i], gathered)
            assert all_bits(row) == all_bits(trees[i])
        for x, y in zip(mt.tree.leaves(gathered), mt.tree.leaves(mine), strict=True):
            assert (x.shape, x.dtype) == ((size, *y.shape), y.dtype)
        for by in (-1, 0, 1, 2, 5):
            assert all_bits(world.shift(mine, by)) == all_bits(trees[(rank - by) % size])
        for sources in itertools.permutations(range(size)):
            assert all_bits(world.permute(mine, sources)) == all_bits(trees[sources[rank]])
        assert "once" in raises(ValueError, world.permute, mine, [0] * size)
        for root in range(size):
            received = world.broadcast(mine, root)
            assert all_bits(received) == all_bits(trees[root])
            assert [x.shape for x in mt.tree.leaves(received)] == [
                x.shape for x in mt.tree.leaves(mine)
            ]
        nan = torch.tensor([float("nan"), -0.0]) * (1 if rank else -1)
        assert len({bits(world.broadcast(nan)), *map(bits, world.gather(nan)[:1])}) == 1
        assert all_bits(mine) == before


def test_gather_permute_broadcast(gloo):
    gloo.run(gather_permute_broadcast_body)


def groups_body():
    rank = dist.get_rank()
    world = mt.Distributed()
    x = torch.tensor([float(rank)])
    for size, means in ((1, [0, 1, 2, 3]), (2, [0.5, 0.5, 2.5, 2.5]), (4, [1.5] * 4)):
        node = world.groups(size)
        assert (node.size, node.rank) == (size, rank % size)
        assert node.mean(x).item() == means[rank]
        start = rank // size * size
        assert node.gather(x).flatten().tolist() == list(range(start, start + size))
        assert node.shift(x, 1).item() == start + (rank - start - 1) % size
        assert node.broadcast(x, size - 1).item() == start + size - 1
    message = raises(ValueError, world.groups, 3)
    assert "4" in message
    assert "3" in message
    assert "0" in raises(ValueError, world.groups, 0)
    # Groups of a group are made by its own processes alone.
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        assert mt.Distributed(pair).groups(1).mean(x).item() == rank
        assert mt.Distributed(pair).mean(x).item() == 2.0
        assert mt.Distributed(pair).broadcast(x, 1).item() == 3.0
        assert mt.Distributed(pair).shift(x, 1).item() == 4 - rank


def test_groups(gloo):
    gloo.run(groups_body)


def groups_after_others_body():
    dist.new_group([0, 1])  # as a library may have done for its own purposes
    return mt.Distributed().groups(4).size


def test_groups_of_processes_that_are_in_different_groups(gloo):
    assert gloo.run(groups_after_others_body, timeout=15) == [4] * 4


def device_mesh_body():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    x = torch.tensor([float(rank)])
    replicate, shard = mt.Distributed(mesh["replicate"]), mt.Distributed(mesh["shard"])
    assert (replicate.size, replicate.rank) == (2, rank // 2)
    assert (shard.size, shard.rank) == (2, rank % 2)
    assert replicate.mean(x).item() == [1, 2, 1, 2][rank]
    assert shard.mean(x).item() == [0.5, 0.5, 2.5, 2.5][rank]
    assert replicate.broadcast(x).item() == rank % 2
    # Levels by mesh dimensions.
    tx = mt.hierarchical_sgd(mt.identity(), {"node": 1, "world": 2})
    params, state = x, tx.init(x)
    levels = {"node": shard, "world": mt.Distributed()}
    seen = []
    for _ in range(2):
        params, state = tx.average(params, state, replicas=levels)
        seen.append(params.item())
    assert seen == [[0.5, 0.5, 2.5, 2.5][rank], 1.5]


def test_device_mesh(gloo):
    gloo.run(device_mesh_body)


def hierarchical_body():
    rank = dist.get_rank()
    world = mt.Distributed()
    levels = {"node": mt.Recorded(world.groups(2)), "world": mt.Recorded(world)}
    tx = mt.hierarchical_sgd(mt.sgd(1.0), {"node": 2, "world": 4}, after=1)
    params, gradient = torch.zeros(1), torch.tensor([-float(2**rank)])
    state = tx.init(params)
    reference = np.zeros(4)
    for t in range(1, 10):
        params, state = mt.step(tx, gradient, params, state, replicas=levels)
        reference += 2.0 ** np.arange(4)
        if t > 1 and (t - 1) % 4 == 0:
            reference[:] = reference.mean()
        elif t > 1 and (t - 1) % 2 == 0:
            reference = np.repeat(reference.reshape(2, 2).mean(1), 2)
        assert params.item() == reference[rank], t
    assert [len(level.calls) for level in levels.values()] == [2, 2]
    message = raises(TypeError, mt.average_params("rack").average, params, None, replicas=levels)
    assert "rack" in message
    assert "node" in message


def test_hierarchical(gloo):
    gloo.run(hierarchical_body)


# --- errors ----------------------------------------------------------------------------------


def different_trees_body():
    """Every rank raises, says which leaf, and the job is alive afterwards."""
    rank = dist.get_rank()
    x = torch.zeros(2)
    odd = rank == 2
    cases = [
        ({"a": x, "b": torch.zeros(3 if odd else 2)}, ["'b'", "[2]", "[3]"]),
        ({"a": x, "b": x.double() if odd else x}, ["'b'", "float32", "float64"]),
        ({"a": x, ("c" if odd else "b"): x}, ["'b'", "'c'"]),
        ({"a": x, "b": x} if odd else {"a": x}, ["'b'", "nothing"]),
        ({"a": x} if odd else {"a": x, "b": x}, ["'b'", "nothing"]),
        ({"a": None} if odd else {"a": x}, ["'a'", "nothing"]),
    ]
    for tree, words in cases:
        message = raises(ValueError, mt.Distributed().mean, tree)
        assert "rank 2" in message, message
        for word in words:
            assert word in message, message
        everyone: list = [None] * 4
        dist.all_gather_object(everyone, message)
        assert len(set(everyone)) == 1
    # Through a transform, on the step where it is due.
    tx = mt.local_sgd(mt.sgd(0.1), every=2)
    params = {"layers": [{"w": torch.zeros(2, 2 + odd)}]}
    state = tx.init(params)
    world = mt.Distributed()
    params, state = mt.step(tx, params, params, state, replicas=world)
    message = raises(ValueError, mt.step, tx, params, params, state, replicas=world)
    assert "['layers'][0]['w']" in message
    assert mt.Distributed().mean(torch.tensor(float(rank))).item() == 1.5


def test_different_trees(gloo):
    gloo.run(different_trees_body, timeout=90)


def unfit_leaves_body():
    """Every rank raises before anything is sent."""
    meta = torch.empty(2, device="meta")
    lazy = torch.nn.LazyLinear(2).weight
    sparse = torch.eye(2).to_sparse()
    world = mt.Distributed()
    for leaf, words in ((meta, "meta"), (lazy, "batch"), (sparse, "sparse"), (1.5, "1.5")):
        for call in (world.mean, partial(world.mean, donate=True), world.gather, world.broadcast):
            with Counted("all_reduce", "all_gather", "broadcast") as counted:
                message = raises(TypeError, call, {"x": torch.ones(2), "y": leaf})
            assert message.startswith("['y']"), message
            assert words in message
            assert not any(counted.count.values())


def test_unfit_leaves(gloo):
    gloo.run(unfit_leaves_body)


def non_member_body():
    group = dist.new_group([0, 1])
    if dist.get_rank() >= 2:
        world = mt.Distributed(group)
        for call in (lambda: world.mean(torch.zeros(1)), lambda: world.size, lambda: world.rank):
            message = raises(RuntimeError, call)
            assert str(dist.get_rank()) in message
            assert "not a member" in message


def test_process_outside_of_the_group(gloo):
    gloo.run(non_member_body)


def test_not_initialised():
    assert not dist.is_initialized()
    world = mt.Distributed()  # may be made before init_process_group
    for call in (lambda: world.mean(torch.zeros(1)), lambda: world.size, lambda: world.groups(2)):
        with pytest.raises(RuntimeError, match="init_process_group"):
            call()


def two_processes_body():
    world = mt.Distributed()
    rank = dist.get_rank()
    mean = world.mean({"x": torch.tensor([float(rank)])})
    return world.size, world.rank, mean["x"].item()


def test_two_processes():
    """A job that is not a group of a larger one."""
    assert run(two_processes_body, 2) == [(2, 0, 0.5), (2, 1, 0.5)]


# --- replicas that are not finite, and one that skips ----------------------------------------


def not_finite_body():
    """One replica's NaN takes no part; all replicas go on with the same parameters."""
    rank = dist.get_rank()
    world = mt.Distributed()
    tx = mt.local_sgd(mt.sgd(1.0), every=1)
    params = {"w": torch.zeros(2), "b": torch.zeros(())}
    state = tx.init(params)
    grads = {"w": torch.tensor([-float(rank), 1.0]), "b": torch.tensor(0.0)}
    if rank == 3:
        grads["b"] = torch.tensor(float("inf"))
    params, state = mt.step(tx, grads, params, state, replicas=world)
    assert params["w"].tolist() == [1.0, -1.0]
    assert mt.find(state, mt.MeanState).rejected.item() == (rank == 3)
    # All of them: every replica keeps its own, and nobody hangs.
    grads = {"w": torch.full((2,), float("nan")), "b": torch.tensor(0.0)}
    params, state = mt.step(tx, grads, params, state, replicas=world)
    assert params["w"].isnan().all()
    assert mt.find(state, mt.MeanState).rejected.item() == 1 + (rank == 3)


def test_not_finite(gloo):
    gloo.run(not_finite_body)


def skipping_body():
    """A replica that skips an update still averages in step with the others."""
    rank = dist.get_rank()
    world = mt.Distributed()
    tx = mt.post_local_sgd(mt.sgd(1.0, momentum=0.5), every=2, warmup=0)
    params = torch.zeros(1)
    state = tx.init(params)
    for t in range(4):
        if rank != 1 or t != 0:
            updates, state = tx.update(torch.ones(1), state, params, replicas=world)
            params = mt.apply_updates(params, updates)
        params, state = tx.average(params, state, replicas=world)
    # Sums of ones with momentum 0.5: -1, -1.5, -1.75, -1.875; rank 1 is one behind.
    return params.item()


def test_a_replica_that_skips_an_update(gloo):
    results = gloo.run(skipping_body)
    usual, behind = -(1 + 1.5 + 1.75 + 1.875), -(1 + 1.5 + 1.75)
    assert results == [(3 * usual + behind) / 4] * 4
