"""Codecs: what arrives of a vector, and means of what arrives in every world.

The references are NumPy loops over the formulas; all that is compared is compared bit for bit.
"""

from __future__ import annotations

import math
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import meantime as mt
from meantime import codecs
from meantime.testing import check_averager, check_transform
from tests.processes import worlds_of_2_3_4
from tests.test_memory import memory

K = 4

# --- references ------------------------------------------------------------------------------


def bfloat(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().float().numpy()


def half(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)


def levelled(x: np.ndarray, levels: int, block: int) -> np.ndarray:
    result = np.zeros_like(x)
    for start in range(0, len(x), block):
        part = x[start : start + block]
        scale = bfloat(np.array([np.abs(part).max() * np.float32(1 / levels)]))[0]
        if scale > 0:
            result[start : start + block] = np.round(part / scale) * scale
    return result


def largest(x: np.ndarray, fraction: float, block: int) -> np.ndarray:
    result = np.zeros_like(x)
    for start in range(0, len(x), block):
        part = x[start : start + block]
        order = sorted(range(len(part)), key=lambda i, part=part: (-abs(part[i]), i))
        for i in order[: math.ceil(fraction * len(part))]:
            result[start + i] = part[i]
    return result


def frequencies(x: np.ndarray, length: int, inverse: bool = False) -> np.ndarray:
    """With the matrix in units of 2**-24, and each part in units of 2**-23 of its power of two."""
    result = np.zeros_like(x)
    for start in range(0, len(x), length):
        part = x[start : start + length].astype(np.float64)
        n, power = len(part), np.exp2(np.floor(np.log2(np.abs(part).max() or 1.0)))
        k, j = np.arange(n)[:, None], np.arange(n)
        matrix = np.sqrt((2 - (k == 0)) / n) * np.cos(np.pi * (2 * j + 1) * k / (2 * n))
        matrix = np.round(matrix * 2**24).astype(np.int64)
        whole = np.round(part / power * 2**23).astype(np.int64)
        total = (matrix.T if inverse else matrix) @ whole
        result[start : start + n] = total * (power * 2.0**-47)
    return result


def of_frequencies(x: np.ndarray, reference, length: int) -> np.ndarray:
    return frequencies(reference(frequencies(x, length)), length, inverse=True)


CODECS = {
    "bf16": (codecs.bf16(), bfloat),
    "fp16": (codecs.fp16(), half),
    "int8": (codecs.int8(), partial(levelled, levels=127, block=256)),
    "int8, block 3": (codecs.int8(3), partial(levelled, levels=127, block=3)),
    "int4": (codecs.int4(), partial(levelled, levels=7, block=64)),
    "int4, block 6": (codecs.int4(6), partial(levelled, levels=7, block=6)),
    "topk": (codecs.topk(0.1), partial(largest, fraction=0.1, block=4096)),
    "topk, block 5": (codecs.topk(0.3, block=5), partial(largest, fraction=0.3, block=5)),
    "dct": (
        codecs.dct(codecs.topk(0.1, block=96), length=64),
        partial(of_frequencies, reference=partial(largest, fraction=0.1, block=96), length=64),
    ),
}
LENGTHS = [0, 1, 2, 7, 64, 255, 257, 5000]


def mean_of(vectors, weights, codec, reference) -> np.ndarray:
    total, weight = np.float32(0), np.float32(0)
    for x, w in zip(vectors, weights, strict=True):
        if w > 0:
            total = total + np.float32(w) * reference(x)
            weight = weight + np.float32(w)
    mean = total / weight
    return mean if codec.sparse else reference(mean)


def values(length: int, seed: int = 0) -> np.ndarray:
    """Of many sizes, some of them equal, some zero."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=length) * 10.0 ** rng.integers(-3, 3, size=length)
    x[rng.random(length) < 0.1] = 0.5
    x[rng.random(length) < 0.1] = 0.0
    return x.astype(np.float32)


def equal(actual, wanted) -> None:
    actual, wanted = np.asarray(actual), np.asarray(wanted)
    assert actual.dtype == wanted.dtype
    np.testing.assert_array_equal(actual, wanted)


@pytest.fixture(params=CODECS)
def name(request) -> str:
    if request.param == "dct":
        request.getfixturevalue("x64")  # without which JAX rounds the products
    return request.param


# --- one vector ------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_roundtrip(name, length):
    codec, reference = CODECS[name]
    x = values(length)
    before = x.copy()
    wanted = reference(x)
    message = codec.encode(torch.from_numpy(x))
    assert sum(part.numel() * part.element_size() for part in message) == codec.nbytes(length)
    equal(codec.decode(message, length), wanted)
    equal(codec.roundtrip(x), wanted)  # NumPy
    if name != "dct":
        equal(codec.roundtrip(torch.from_numpy(wanted)), wanted)
    equal(x, before)


def test_roundtrip_in_jax(name):
    jax = pytest.importorskip("jax")
    codec, reference = CODECS[name]
    for length in (0, 7, 257, 5000):
        x = values(length)
        message, arrived = jax.jit(lambda x: (codec.encode(x), codec.roundtrip(x)))(x)
        equal(arrived, reference(x))
        for mine, theirs in zip(codec.encode(x), message, strict=True):
            equal(theirs, mine)
    equal(codec.roundtrip(jax.numpy.asarray(x)), reference(x))


def test_roundtrip_of_a_batch(name):
    codec, reference = CODECS[name]
    batch = np.stack([values(300, seed) for seed in range(3)])
    wanted = np.stack([reference(x) for x in batch])
    equal(torch.func.vmap(codec.roundtrip)(torch.from_numpy(batch)), wanted)
    jax = pytest.importorskip("jax")
    equal(jax.vmap(codec.roundtrip)(batch), wanted)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_roundtrip_compiles(name):
    """By a compiler that drops casts."""
    codec, reference = CODECS[name]
    torch._dynamo.reset()
    compiled = torch.compile(codec.roundtrip, fullgraph=True)
    equal(compiled(torch.from_numpy(values(300))), reference(values(300)))


def test_special_values(name):
    codec, _ = CODECS[name]
    assert not codec.roundtrip(torch.zeros(10)).any()
    # Scales underflow, or are so small that their rounding doubles or halves them.
    for tiny in (1e-45, *(2.0**-135 * np.arange(1, 1000, 7, np.float32))):
        arrived = codec.roundtrip(torch.full((10,), float(tiny)))
        assert ((arrived >= 0) & (arrived <= 2 * tiny)).all()
    # A NaN of any sign and payload stays one, as the mean without any weight is NaN.
    for bits in (0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1):
        x = np.ones(10, np.float32)
        x.view(np.int32)[3] = bits
        with np.errstate(invalid="ignore"):
            both = codec.roundtrip(x), codec.roundtrip(torch.from_numpy(x))
        assert codec.sparse or all(np.isnan(np.asarray(arrived)[3]) for arrived in both)


def test_halves_at_the_ends_of_their_range():
    x = np.array([65504, 65519, 65520, 1e30, 2.0**-14, 6.1e-5, 6e-8, 3e-8, 2.9e-8], np.float32)
    equal(codecs.fp16().roundtrip(x), half(x))
    equal(codecs.fp16().roundtrip(-x), -half(x))
    ties = np.arange(1.0, 1.1, 2.0**-9, np.float32)
    equal(codecs.bf16().roundtrip(ties), bfloat(ties))


@pytest.mark.parametrize("codec", [codec for codec, _ in CODECS.values()], ids=list(CODECS))
def test_whole_blocks_are_encoded_on_their_own(codec):
    first, second = values(3 * codec.block, 1), values(2 * codec.block + codec.block // 2, 2)
    together = codec.encode(np.concatenate([first, second]))
    for part, *parts in zip(together, codec.encode(first), codec.encode(second), strict=True):
        equal(part, np.concatenate(parts))


def test_errors():
    for make in (codecs.int8, codecs.int4, partial(codecs.topk, 0.5)):
        for block in (0, -2, 2.0, "8"):
            with pytest.raises(ValueError, match=repr(block)):
                make(block=block)
    with pytest.raises(ValueError, match="even"):
        codecs.int4(block=7)
    with pytest.raises(ValueError, match="32768"):
        codecs.topk(0.5, block=2**15 + 1)
    for length in (0, 2.0, 257):
        with pytest.raises(ValueError, match=repr(length)):
            codecs.dct(codecs.int8(), length)
    for fraction in (0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="fraction"):
            codecs.topk(fraction)
    for codec in (codecs.int8, "int8", 8):
        for member in (
            partial(mt.mean, codec=codec),
            partial(mt.error_feedback, codec),
            partial(codecs.dct, codec),
        ):
            with pytest.raises(TypeError, match=r"codecs\.int8\(\)"):
                member()
    with pytest.raises(TypeError, match="call it first"):
        mt.mean(codec=codecs.int8)
    for decay in (-0.1, 1.5):
        with pytest.raises(ValueError, match="decay"):
            mt.error_feedback(codecs.int8(), decay)


# --- means -----------------------------------------------------------------------------------


def leaves_of(rank: int) -> dict[str, np.ndarray]:
    """Leaves that end inside of blocks, in the order of the vector, and others."""
    rng = np.random.default_rng(100 + rank)
    x = values(613, rank)
    return {
        "0-d": x[:1].reshape(()),
        "empty": x[:0].reshape(0, 3),
        "matrix": x[1:601].reshape(20, 30),
        "rank": np.array([rank, -rank], np.int32),
        "some": np.array([rank == 2, False]),
        "strided": x[601:609].reshape(2, 4),
        "z": rng.normal(size=5).astype(np.float16),
    }


def as_torch(leaves: dict[str, np.ndarray]) -> dict:
    tree = {key: torch.from_numpy(x.copy()) for key, x in leaves.items()}
    tree["strided"] = tree["strided"].T.contiguous().T
    return tree


def wanted_mean(codec, reference, weights=(1,) * K, ranks=range(K)) -> dict[str, np.ndarray]:
    trees = [leaves_of(rank) for rank in ranks]
    floats = [key for key, x in trees[0].items() if x.dtype.kind == "f"]
    vectors = [np.concatenate([t[key].ravel().astype(np.float32) for key in floats]) for t in trees]
    mean, start, result = mean_of(vectors, weights, codec, reference), 0, {}
    for key, x in trees[0].items():
        if key in floats:
            result[key] = mean[start : start + x.size].reshape(x.shape).astype(x.dtype)
            start += x.size
        else:
            result[key] = np.max([t[key] for t in trees], 0)
    return result


def check_mean(found, wanted) -> None:
    for key, x in wanted.items():
        equal(found[key], x)


WEIGHTS = [None, (1, 1, 1, 1), (1, 2.5, 0.25, 3), (3, 0, 1, 2), (0, 0, 0, 0.3)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_mean_of_simulated_replicas(name, weights):
    codec, reference = CODECS[name]
    world = mt.Vmapped(K)
    stacked = mt.tree.map(lambda *xs: torch.stack(xs), *(as_torch(leaves_of(r)) for r in range(K)))
    if weights is None:
        found = torch.func.vmap(lambda x: world.mean(x, codec=codec))(stacked)
    else:
        for x in stacked.values():  # a replica of weight 0 may hold anything
            if x.is_floating_point() and 0 in weights:
                x[weights.index(0)] = torch.nan
        found = torch.func.vmap(lambda x, w: world.mean(x, weight=w, codec=codec))(
            stacked, torch.tensor(weights, dtype=torch.float32)
        )
    wanted = wanted_mean(codec, reference, weights or (1,) * K)
    for rank in range(K):
        check_mean(mt.tree.map(lambda x, rank=rank: x[rank], found), wanted)


def test_mean_of_groups(name):
    codec, reference = CODECS[name]
    stacked = mt.tree.map(lambda *xs: torch.stack(xs), *(as_torch(leaves_of(r)) for r in range(K)))
    group = mt.Vmapped(K).groups(2)
    found = torch.func.vmap(lambda x: group.mean(x, codec=codec))(stacked)
    for rank in range(K):
        wanted = wanted_mean(codec, reference, (1, 1), [[0, 1], [2, 3]][rank // 2])
        check_mean(mt.tree.map(lambda x, rank=rank: x[rank], found), wanted)


@pytest.mark.parametrize("weights", [WEIGHTS[0], WEIGHTS[1], WEIGHTS[3]], ids=str)
@pytest.mark.parametrize("mapped", ["vmap", "shard_map"])
@pytest.mark.parametrize("name", ["fp16", "int8, block 3", "int4", "topk"])
def test_mean_over_a_named_axis(name, weights, mapped):
    jax = pytest.importorskip("jax")
    codec, reference = CODECS[name]
    stacked = {key: np.stack([leaves_of(r)[key] for r in range(K)]) for key in leaves_of(0)}

    def mean(x, w):
        weight = None if weights is None else w
        return mt.NamedAxis("replica").mean(x, weight=weight, codec=codec)

    def on_device(*arguments):
        result = mean(*jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda x: x[None], result)

    if mapped == "vmap":
        function = jax.vmap(mean, axis_name="replica")
    else:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:K]), ("replica",))
        spec = jax.sharding.PartitionSpec("replica")
        function = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec)
    found = jax.jit(function)(stacked, np.array(weights or (1,) * K, np.float32))
    wanted = wanted_mean(codec, reference, weights or (1,) * K)
    for rank in range(K):
        mine = {key: x[rank] for key, x in found.items()}
        for key, x in wanted.items():
            if weights == (1, 1, 1, 1) or x.dtype.kind != "f":
                equal(mine[key], x)
            elif codec.sparse:
                np.testing.assert_allclose(mine[key], x, rtol=1e-6)
            else:
                # XLA fuses products with the sum, and makes a product of a division by a constant:
                # few values are rounded to another level.
                assert np.count_nonzero(np.asarray(mine[key]) != x) <= 1 + 0.01 * x.size


def test_mean_over_a_part_of_a_named_axis():
    jax = pytest.importorskip("jax")
    codec, reference = CODECS["int4"]
    group = mt.NamedAxis("replica").groups(2)
    stacked = {key: np.stack([leaves_of(r)[key] for r in range(K)]) for key in leaves_of(0)}
    found = jax.vmap(lambda x: group.mean(x, codec=codec), axis_name="replica")(stacked)
    for rank in range(K):
        wanted = wanted_mean(codec, reference, (1, 1), [[0, 1], [2, 3]][rank // 2])
        check_mean({key: x[rank] for key, x in found.items()}, wanted)


def test_mean_of_one_replica(name):
    codec, reference = CODECS[name]
    wanted = wanted_mean(codec, reference, (1,), [0])
    mine = leaves_of(0)
    check_mean(mt.Solo().mean(as_torch(mine), codec=codec), wanted)
    check_mean(mt.Solo().mean(as_torch(mine), weight=torch.tensor(0.3), codec=codec), wanted)
    check_mean(mt.Solo().mean(mine, codec=codec), wanted)  # NumPy
    nan = mt.Solo().mean(as_torch(mine), weight=torch.tensor(0.0), codec=codec)
    assert nan["matrix"].isnan().all()


def test_complex_and_double_values():
    values = {"c": torch.tensor([3 - 2j, 0.1 + 0.2j]), "d": torch.tensor([1.5], dtype=torch.double)}
    found = mt.Solo().mean(values, codec=codecs.bf16())
    assert found["c"].dtype == torch.complex64
    assert found["d"].dtype == torch.double
    torch.testing.assert_close(found, values, rtol=2**-8, atol=0)
    assert mt.Solo().mean({"none": None, "i": torch.tensor(3)}, codec=codecs.int8())["i"] == 3


def test_recorded_bytes(name):
    codec, _ = CODECS[name]
    world = mt.Recorded(mt.Solo())
    world.mean(as_torch(leaves_of(0)), codec=codec)
    floats = 1 + 600 + 8 + 5
    assert world.calls == [("mean", codec.nbytes(floats) + 2 * 4 + 2)]
    world.mean({"c": torch.zeros(3, dtype=torch.complex64)}, codec=codec)
    assert world.calls[1] == ("mean", codec.nbytes(6))


def test_the_guard_of_the_mean_is_not_compressed():
    """Whether a replica has a weight is sent as a bool beside the values."""
    codec, world = codecs.topk(0.25), mt.Recorded(mt.Solo())
    tx = mt.mean(codec=codec)
    x = torch.tensor([100.0, 1.0, 200.0, 2.0])
    updates, _ = tx.update(x, tx.init(x), replicas=world, weight=torch.tensor(0.5))
    assert updates.tolist() == [0.0, 0.0, 200.0, 0.0]
    assert world.bytes == codec.nbytes(4) + 1


# --- processes -------------------------------------------------------------------------------


def mean_body():
    """The same numbers, however the vector is cut."""
    rank = dist.get_rank()
    for size, group in worlds_of_2_3_4():
        for codec, reference in CODECS.values():
            for weights in WEIGHTS if size == K else WEIGHTS[::2]:
                weights = (weights or (1,) * K)[:size]
                if not any(weights):
                    continue
                wanted = wanted_mean(codec, reference, weights, range(size))
                mine = {**as_torch(leaves_of(rank)), "none": None}
                if weights[rank] == 0:
                    mine["matrix"] *= torch.nan
                weight = None if weights == (1,) * size else weights[rank]
                before = mt.tree.map(torch.clone, mine)
                for bucket_bytes in (3000, 25 * 2**20):
                    world = mt.Distributed(group, bucket_bytes=bucket_bytes)
                    found = world.mean(mine, weight=weight, codec=codec)
                    check_mean(found, wanted)
                    assert found["none"] is None
                torch.testing.assert_close(mine, before, rtol=0, atol=0, equal_nan=True)
                places = [x.data_ptr() for x in mt.tree.leaves(mine)]
                found = world.mean(mine, weight=weight, codec=codec, donate=True)
                assert [x.data_ptr() for x in mt.tree.leaves(found)] == places
                check_mean(mine, wanted)


def test_mean_of_processes(gloo):
    gloo.run(mean_body, timeout=100)


def without_weight_body():
    world = mt.Distributed()
    tree = {"x": torch.ones(2, 3), "t": torch.ones(6, 2).T, "i": torch.tensor([dist.get_rank()])}
    pure = world.mean(tree, weight=0.0, codec=codecs.int8())
    assert pure["x"].isnan().all()
    assert pure["t"].isnan().all()
    assert pure["i"].item() == 3
    world.mean(tree, weight=0.0, codec=codecs.int8(), donate=True)
    assert all((tree[key] == 1).all() for key in "xt")
    # All of them rejected: updates become zeros.
    tx = mt.mean(codec=codecs.topk(0.5))
    nan = {"w": torch.tensor([torch.nan, 1.0])}
    updates, state = tx.update(nan, tx.init(nan), replicas=world)
    assert updates["w"].tolist() == [0.0, 0.0]
    assert state.rejected == 1
    # One of them: the mean of the others.
    mine = nan if dist.get_rank() == 1 else {"w": torch.tensor([0.0, dist.get_rank() * 3.0])}
    updates, state = tx.update(mine, state, replicas=world)
    assert updates["w"].tolist() == [0.0, 5.0]
    assert state.rejected == 1 + (dist.get_rank() == 1)


def test_not_finite(gloo):
    gloo.run(without_weight_body)


def bytes_body():
    """What this process sends to others, and how often."""
    sent: list[list[int]] = []
    original = dist.batch_isend_irecv

    def counted(operations):
        sends = [op.tensor for op in operations if op.op is dist.isend]
        sent.append([x.numel() * x.element_size() for x in sends])
        return original(operations)

    dist.batch_isend_irecv = counted
    try:
        length = 4 * 1024
        world = mt.Distributed()
        world.mean(torch.zeros(length))  # compares trees
        for name in ("bf16", "fp16", "int8", "int4", "topk"):
            codec, _ = CODECS[name]
            sent.clear()
            world.mean(torch.zeros(length), codec=codec)
            # A quarter to each of three others and the mean of a quarter to each, or all to each.
            share = codec.nbytes(length) // (1 if codec.sparse else K)
            assert [sum(sizes) for sizes in sent] == [3 * share] * (1 if codec.sparse else 2), name
        # Messages of bounded size.
        sent.clear()
        mt.Distributed(bucket_bytes=4096).mean(torch.zeros(length), codec=codecs.bf16())
        assert sent == [[512] * 3] * 8
        # The guard needs the weights of all, and one bool, which is reduced.
        sent.clear()
        tx = mt.mean(codec=codecs.int8())
        updates = torch.zeros(length)
        tx.update(updates, tx.init(updates), replicas=world)
        assert sent[0] == [4] * 3
        assert sum(map(sum, sent)) == (4 + 2 * (1024 + 8)) * 3
    finally:
        dist.batch_isend_irecv = original


def test_bytes_on_the_wire(gloo):
    gloo.run(bytes_body)


def extra_memory_of_mean(codec) -> float:
    """The peak of a mean over what was held before, in bytes."""
    world = mt.Distributed()
    params = [torch.ones(1024, 1024) for _ in range(40)]  # 160 MiB
    world.mean(params[:1], codec=codec)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = memory()["VmRSS"]
    world.mean(params, codec=codec, donate=True)
    return memory()["VmHWM"] - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's page counts")
@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_memory_does_not_grow_with_the_model(gloo, name):
    # Three stretches of a bucket each, and what glibc keeps.
    assert max(gloo.run(extra_memory_of_mean, CODECS[name][0])) < 100 * 2**20


def dtensor_body():
    """Each shard is compressed with those of the same place; error feedback knows it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica, place = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
    world = mt.Distributed(mesh["replicate"])
    codec, reference = CODECS["int4, block 6"]
    wholes = [values(20, seed).reshape(10, 2) for seed in range(2)]
    shards = [np.split(x, 2)[place].ravel() for x in wholes]
    mine = {
        "w": DTensor.from_local(
            torch.from_numpy(np.split(wholes[replica], 2)[place]),
            mesh["shard"],
            [Shard(0)],
            run_check=False,
        )
    }
    found = world.mean(mine, codec=codec)
    assert found["w"].placements == mine["w"].placements
    assert found["w"].shape == (10, 2)
    equal(found["w"].to_local().flatten(), mean_of(shards, (1, 1), codec, reference))
    tx = mt.error_feedback(codec)
    sent, state = tx.update(mine, tx.init(mine))
    lost = shards[replica] - reference(shards[replica])
    equal(state.residual["w"].to_local().flatten(), lost)
    equal(sent["w"].to_local().flatten(), shards[replica])


def test_dtensor(gloo):
    gloo.run(dtensor_body)


# --- transforms ------------------------------------------------------------------------------


def averager(codec, feedback: bool = False) -> mt.Transform:
    members = [mt.error_feedback(codec)] if feedback else []
    return mt.outer(mt.chain(*members, mt.mean(codec=codec), mt.sgd(1.0)))


@pytest.mark.parametrize("feedback", [False, True])
def test_replicas_that_stayed_at_the_anchor_stay(name, feedback):
    codec, _ = CODECS[name]
    tx = averager(codec, feedback)
    params = {key: x for key, x in as_torch(leaves_of(0)).items() if key in ("matrix", "z", "0-d")}

    def rounds(_):
        found, state = params, tx.init(params)
        for _ in range(3):
            found, state = tx.average(found, state, replicas=mt.Vmapped(K))
        return found

    for key, x in torch.func.vmap(rounds)(torch.arange(K)).items():
        equal(x, params[key].expand(K, *params[key].shape))


def quadratic(tx, steps: int = 400) -> torch.Tensor:
    """The distance of each replica from the optimum of the mean of ill-conditioned quadratics."""
    rng = torch.Generator().manual_seed(0)
    scales = torch.logspace(-0.7, 0, 50)
    targets = torch.randn(50, generator=rng) + 0.1 * torch.randn(K, 50, generator=rng)

    def train(target):
        params = {"x": torch.zeros(50)}
        state = tx.init(params)
        for _ in range(steps):
            grads = {"x": scales * (params["x"] - target)}
            params, state = mt.step(tx, grads, params, state, replicas=mt.Vmapped(K))
        return params["x"]

    return (torch.func.vmap(train)(targets) - targets.mean(0)).abs().amax(1)


def diloco(*members, momentum: float) -> mt.Transform:
    outer = mt.chain(*members, mt.sgd(0.5, momentum=momentum))
    return mt.chain(mt.sgd(0.3), mt.periodic(mt.outer(outer), every=4))


@pytest.mark.parametrize(
    ("codec", "tolerance"),
    [
        (codecs.bf16(), 1e-3),
        (codecs.int8(16), 1e-3),
        (codecs.int4(16), 1e-2),
        (codecs.topk(0.25, block=16), 0.06),
    ],
    ids=["bf16", "int8", "int4", "topk"],
)
def test_compressed_diloco_converges(codec, tolerance):
    plain = quadratic(diloco(mt.mean(), momentum=0.5))
    found = quadratic(diloco(mt.error_feedback(codec), mt.mean(codec=codec), momentum=0.5))
    assert plain.max() < 1e-3
    assert found.max() < tolerance
    assert (found == found[0]).all()


def test_training_over_two_mesh_axes():
    """Compressed DiLoCo in a `lax.scan`; the replicas are those of both axes of a mesh."""
    jax = pytest.importorskip("jax")
    codec = codecs.int4(4)
    tx = diloco(mt.error_feedback(codec), mt.mean(codec=codec), momentum=0.5)
    targets = values(K * 10, 7).reshape(K, 10) / 100

    def train(world, params, target):
        def body(carry, _):
            params, state = carry
            return mt.step(tx, params - target, params, state, replicas=world), None

        return jax.lax.scan(body, (params, tx.init(params)), length=8)[0][0]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:K]).reshape(2, 2), ("node", "worker"))
    spec = jax.sharding.PartitionSpec(("node", "worker"))
    world = mt.NamedAxis(("node", "worker"))
    function = jax.shard_map(
        lambda target: train(world, 0 * target[0], target[0])[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    found = jax.jit(function)(targets)

    def simulated(target):
        params, state = torch.zeros(10), tx.init(torch.zeros(10))
        for _ in range(8):
            params, state = mt.step(tx, params - target, params, state, replicas=mt.Vmapped(K))
        return params

    wanted = torch.func.vmap(simulated)(torch.from_numpy(targets))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_error_feedback_is_what_makes_coarse_messages_converge():
    codec = codecs.topk(0.1, block=50)
    without = quadratic(diloco(mt.mean(codec=codec), momentum=0.0))
    found = quadratic(diloco(mt.error_feedback(codec), mt.mean(codec=codec), momentum=0.0))
    assert found.max() < 0.3 * without.max()


def test_error_feedback_loses_nothing(name):
    """The sum of what arrived and the residual is the sum of the updates."""
    codec, reference = CODECS[name]
    tx = mt.error_feedback(codec)
    updates = [torch.from_numpy(values(300, seed)) for seed in range(20)]
    state = tx.init(updates[0])
    arrived = torch.zeros(300, dtype=torch.double)
    for u in updates:
        sent, state = tx.update(u, state)
        arrived += torch.from_numpy(reference(sent.numpy()))
    total = torch.stack(updates).double().sum(0)
    size = torch.stack(updates).abs().sum(0).max()
    assert (arrived + state.residual - total).abs().max() <= 1e-6 * size


def test_error_feedback_decays():
    codec = codecs.topk(0.5)
    tx = mt.error_feedback(codec, decay=0.5)
    state = tx.init(torch.zeros(2))
    sent, state = tx.update(torch.tensor([3.0, 2.0]), state)
    sent, state = tx.update(torch.tensor([0.0, 0.0]), state)
    assert sent.tolist() == [0.0, 1.0]
    assert state.residual.tolist() == [0.0, 0.0]


def test_error_feedback_in_half_precision_counts_what_is_sent():
    """The residual is float32, and knows the rounding of the updates as well."""
    codec = codecs.int8()
    tx = mt.error_feedback(codec)
    state = tx.init(torch.zeros(300, dtype=torch.bfloat16))
    assert state.residual.dtype == torch.float32
    total, arrived = torch.zeros(300), torch.zeros(300)
    for seed in range(10):
        u = torch.from_numpy(values(300, seed)).bfloat16()
        sent, state = tx.update(u, state)
        assert sent.dtype == torch.bfloat16
        total += u.float()
        arrived += codec.roundtrip(sent.float())
    torch.testing.assert_close(arrived + state.residual, total, rtol=1e-5, atol=1e-3)


def test_error_feedback_survives_updates_that_are_not_finite():
    tx = mt.error_feedback(codecs.topk(0.5))
    _, state = tx.update(torch.tensor([3.0, 2.0]), tx.init(torch.zeros(2)))
    sent, after = tx.update(torch.tensor([torch.nan, 1.0]), state)
    assert sent.isnan().any()  # `mean` rejects it
    assert after.residual.tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    "codec",
    [codecs.bf16(), codecs.int8(4), codecs.topk(0.5, block=3)],
    ids=["bf16", "int8", "topk"],
)
def test_laws_of_transforms(codec):
    # Of float64 the messages are float32: too coarse for finite differences.
    skip = ["differentiates"] if codec.sparse else []
    check_transform(mt.error_feedback(codec), examples=5, skip=skip)
    check_transform(mt.mean(codec=codec), examples=5, skip=skip)
    check_averager(averager(codec), examples=5)


# --- matrices of low rank --------------------------------------------------------------------

SHAPES = {"conv": (6, 2, 4), "square": (5, 5), "thin": (4, 2), "vector": (7,)}
RANK, ROUNDS = 2, 4


def matrix_updates() -> list[dict[str, np.ndarray]]:
    """With axes (replica, ...), of every round; float64."""
    rng = np.random.default_rng(5)
    return [
        {key: rng.normal(size=(K, *shape)) for key, shape in SHAPES.items()} for _ in range(ROUNDS)
    ]


def low_rank_by_hand(first, updates, weights) -> list[np.ndarray]:
    """One leaf, (replica, rows, columns) in every round: what arrives, as the paper has it."""
    q, residual, arrived = first, np.zeros_like(updates[0]), []
    for u in updates:
        m = u + residual
        p, _ = np.linalg.qr(np.tensordot(weights, m @ q, 1) / weights.sum())
        own = m.swapaxes(1, 2) @ p
        q = np.tensordot(weights, own, 1) / weights.sum()
        arrived.append(p @ q.T)
        residual = m - p @ own.swapaxes(1, 2)
    return arrived


def low_rank_rounds(replicas, updates: list, weight) -> tuple:
    """What arrives in every round, of the updates of one replica, and the last state."""
    tx = codecs.powersgd(RANK)
    state = tx.init(updates[0])
    arrived = []
    for u in updates:
        mean, state = tx.update(u, state, replicas=replicas, weight=weight)
        arrived.append([mean[key] for key in SHAPES])
    return arrived, state.factors, state.residuals


def check_low_rank(found: list, weights) -> None:
    """`found` has axes (round, leaf, replica, ...)."""
    updates = matrix_updates()
    state = codecs.powersgd(RANK).init(
        {key: torch.zeros(shape).double() for key, shape in SHAPES.items()}
    )
    factors = dict(zip(["conv", "square"], state.factors, strict=True))
    for i, key in enumerate(SHAPES):
        leaf = [u[key] for u in updates]
        if key in factors:
            leaf = [u.reshape(K, u.shape[1], -1) for u in leaf]
            wanted = low_rank_by_hand(factors[key].numpy(), leaf, weights)
        else:
            wanted = [np.tensordot(weights, u, 1) / weights.sum() for u in leaf]
        for found_in_round, x in zip(found, wanted, strict=True):
            for mine in np.asarray(found_in_round[i]):
                np.testing.assert_allclose(mine, x.reshape(SHAPES[key]), rtol=1e-9, atol=1e-9)


POWERS = np.array([1.0, 0.5, 0.0, 2.0])


def test_low_rank_of_simulated_replicas():
    updates = [mt.tree.map(torch.from_numpy, u) for u in matrix_updates()]
    world = mt.Vmapped(K)
    found, factors, residuals = torch.func.vmap(partial(low_rank_rounds, world))(
        updates, torch.from_numpy(POWERS)
    )
    check_low_rank(found, POWERS)
    assert all((x == x[0]).all() for x in factors)
    assert [x.shape[1:] for x in residuals] == [SHAPES["conv"], SHAPES["square"]]


@pytest.mark.parametrize("mapped", ["vmap", "shard_map"])
def test_low_rank_over_a_named_axis(mapped, x64):
    jax = pytest.importorskip("jax")
    one = partial(low_rank_rounds, mt.NamedAxis("replica"))

    def on_device(*arguments):
        return jax.tree.map(lambda x: x[None], one(*jax.tree.map(lambda x: x[0], arguments)))

    if mapped == "vmap":
        function = jax.vmap(one, axis_name="replica")
    else:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:K]), ("replica",))
        spec = jax.sharding.PartitionSpec("replica")
        function = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec)
    found, factors, _ = jax.jit(function)(matrix_updates(), POWERS)
    check_low_rank(found, POWERS)
    assert all((x == x[:1]).all() for x in factors)


def low_rank_body():
    rank = dist.get_rank()
    updates = [mt.tree.map(lambda x: torch.from_numpy(x[rank]), u) for u in matrix_updates()]
    world = mt.Recorded(mt.Distributed())
    found, factors, _ = low_rank_rounds(world, updates, POWERS[rank])
    # Two means a round: images and what is sent as it is, then the answers.
    sizes = [8 * 2 * (6 + 5) + 8 * (8 + 7) + 4, 8 * 2 * (8 + 5)]
    assert world.calls == [("mean", size) for size in sizes] * ROUNDS
    # All of them rejected, and then one.
    tx = codecs.powersgd(RANK)
    state = tx.init(updates[0])
    _, state = tx.update(updates[0], state, replicas=world)
    ruined = {**updates[1], "square": updates[1]["square"] * torch.nan}
    mean, after = tx.update(ruined, state, replicas=world)
    assert not any(x.any() for x in mean.values())
    assert after.rejected == 1
    equal(after.residuals[1], state.residuals[1])
    equal(after.factors[1], state.factors[1])
    mean, after = tx.update(ruined if rank == 2 else updates[1], state, replicas=world)
    assert all(x.isfinite().all() for x in mean.values())
    assert (after.residuals[0] == state.residuals[0]).all() == (rank == 2)
    return found, [x.numpy() for x in factors], [x.numpy() for x in mean.values()]


def test_low_rank_of_processes(gloo):
    found, factors, means = zip(*gloo.run(low_rank_body), strict=True)
    for same in (*zip(*factors, strict=True), *zip(*means, strict=True)):
        for x in same:
            equal(x, same[0])
    stacked = [
        [np.stack([found[k][r][i].numpy() for k in range(K)]) for i in range(len(SHAPES))]
        for r in range(ROUNDS)
    ]
    check_low_rank(stacked, POWERS)


def test_low_rank_diloco_converges():
    """To a matrix of full rank, by messages of rank one: what they lose comes later."""
    rng = torch.Generator().manual_seed(0)
    targets = torch.randn(10, 8, generator=rng) + 0.1 * torch.randn(K, 10, 8, generator=rng)
    outer = mt.outer(mt.chain(codecs.powersgd(1), mt.sgd(0.2)))
    tx = mt.chain(mt.sgd(0.3), mt.periodic(outer, every=4))

    def train(target):
        params = torch.zeros(10, 8)
        state = tx.init(params)
        for _ in range(300):
            params, state = mt.step(tx, params - target, params, state, replicas=mt.Vmapped(K))
        return params

    found = torch.func.vmap(train)(targets)
    assert (found - targets.mean(0)).abs().max() < 1e-3
    assert (found == found[0]).all()


def test_low_rank_laws_and_errors():
    check_transform(codecs.powersgd(1), examples=5)
    check_averager(mt.outer(mt.chain(codecs.powersgd(1), mt.sgd(1.0))), examples=5)
    for rank in (0, -1, 2.0, True, "2"):
        with pytest.raises(ValueError, match="rank"):
            codecs.powersgd(rank)
    tx = codecs.powersgd(1)
    with pytest.raises(TypeError, match="powersgd has to communicate"):
        tx.update(torch.ones(3, 3), tx.init(torch.ones(3, 3)))
    # The first factor depends on the seed and on the place of the leaf.
    pair = {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}
    first, other = codecs.powersgd(1).init(pair), codecs.powersgd(1, seed=1).init(pair)
    drawn = [*first.factors, *other.factors]
    assert all((a != b).all() for i, a in enumerate(drawn) for b in drawn[:i])
