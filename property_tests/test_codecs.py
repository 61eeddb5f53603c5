"""Laws of codecs, for vectors of any length and numbers of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import meantime as mt
from meantime import codecs, tree
from meantime.codecs.layout import decoded
from meantime.testing.cases import vmapped
from meantime.testing.compare import close, same_bits
from meantime.testing.strategies import replica_counts, stacked_trees, trees

lengths = st.integers(0, 70)
fractions = st.floats(0.01, 1.0)


def casting() -> st.SearchStrategy[codecs.Codec]:
    return st.sampled_from([codecs.bf16(), codecs.fp16()])


def integers() -> st.SearchStrategy[tuple[codecs.Codec, int, int]]:
    """With the number of levels and the block."""
    eight = st.integers(1, 40).map(lambda block: (codecs.int8(block), 127, block))
    four = st.integers(1, 20).map(lambda half: (codecs.int4(2 * half), 7, 2 * half))
    return eight | four


def sparse() -> st.SearchStrategy[codecs.Codec]:
    return st.builds(codecs.topk, fractions, block=st.integers(1, 40))


def of_values() -> st.SearchStrategy[codecs.Codec]:
    return casting() | integers().map(lambda drawn: drawn[0]) | sparse()


def of_frequencies() -> st.SearchStrategy[codecs.Codec]:
    return st.builds(codecs.dct, sparse(), st.integers(1, 12))


def all_codecs() -> st.SearchStrategy[codecs.Codec]:
    return of_values() | of_frequencies()


def vectors(magnitude: float = 2.0**100, length: Any = lengths) -> st.SearchStrategy[np.ndarray]:
    elements = st.floats(-magnitude, magnitude, width=32, allow_subnormal=False)
    return hnp.arrays(np.float32, length, elements=elements)


def arrived(codec: codecs.Codec, x: np.ndarray) -> np.ndarray:
    found = codec.roundtrip(torch.from_numpy(x.copy())).numpy()
    assert found.dtype == np.float32
    assert found.shape == x.shape
    return found


@given(all_codecs(), vectors())
def test_messages(codec: codecs.Codec, x: np.ndarray) -> None:
    message = codec.encode(torch.from_numpy(x.copy()))
    assert sum(part.numel() * part.element_size() for part in message) == codec.nbytes(len(x))
    for mine, again in zip(message, codec.encode(torch.from_numpy(x.copy())), strict=True):
        assert torch.equal(mine, again)


@given(of_values(), vectors())
def test_what_arrived_arrives_again(codec: codecs.Codec, x: np.ndarray) -> None:
    once = arrived(codec, x)
    np.testing.assert_array_equal(arrived(codec, once), once)


@given(of_frequencies(), vectors())
def test_frequencies_that_arrived_arrive_again(codec: codecs.Codec, x: np.ndarray) -> None:
    """Up to roundings."""
    once = arrived(codec, x)
    largest = abs(x.astype(np.float64)).max(initial=0)
    np.testing.assert_allclose(arrived(codec, once), once, rtol=0, atol=1e-5 * largest)


@given(all_codecs(), vectors())
def test_what_arrives_of_zeros_and_of_negatives(codec: codecs.Codec, x: np.ndarray) -> None:
    once = arrived(codec, x)
    assert np.isfinite(once).all()
    np.testing.assert_array_equal(arrived(codec, -x), -once)
    np.testing.assert_array_equal(arrived(codec, 0 * x), 0 * x)


@given(all_codecs(), st.lists(vectors(length=40), min_size=1, max_size=4))
def test_vmap_is_a_loop(codec: codecs.Codec, batch: list[np.ndarray]) -> None:
    found = torch.func.vmap(codec.roundtrip)(torch.from_numpy(np.stack(batch)))
    np.testing.assert_array_equal(found.numpy(), np.stack([arrived(codec, x) for x in batch]))


@given(all_codecs(), st.integers(0, 3), lengths, st.data())
def test_blocks_are_encoded_on_their_own(codec: codecs.Codec, blocks, rest, data) -> None:
    first = data.draw(vectors(length=blocks * codec.block))
    second = data.draw(vectors(length=rest))
    found = arrived(codec, np.concatenate([first, second]))
    np.testing.assert_array_equal(
        found, np.concatenate([arrived(codec, first), arrived(codec, second)])
    )


@given(vectors())
def test_error_of_half_precision(x: np.ndarray) -> None:
    assert (abs(arrived(codecs.bf16(), x) - x) <= 2.0**-8 * abs(x)).all()
    found = arrived(codecs.fp16(), x)
    inside = np.clip(x, -65504, 65504)
    assert (abs(found - inside) <= np.maximum(2.0**-11 * abs(inside), 2.0**-25)).all()


@given(integers(), vectors())
def test_error_of_integers(drawn: tuple[codecs.Codec, int, int], x: np.ndarray) -> None:
    """Half a level; the scale itself is rounded to eight bits."""
    codec, levels, block = drawn
    found = arrived(codec, x)
    for start in range(0, len(x), block):
        part = x[start : start + block].astype(np.float64)
        scale = abs(part).max() / levels * (1 + 2.0**-8)
        assert (abs(found[start : start + block] - part) <= scale / 2 + 2.0**-125).all()


@given(fractions, st.integers(1, 40), vectors())
def test_topk_keeps_the_largest(fraction: float, block: int, x: np.ndarray) -> None:
    found = arrived(codecs.topk(fraction, block=block), x)
    for start in range(0, len(x), block):
        part, kept = x[start : start + block], found[start : start + block]
        count = int(np.ceil(fraction * len(part)))
        assert np.count_nonzero(kept) <= count
        assert ((kept == part) | (kept == 0)).all()
        assert sorted(abs(kept))[-count:] == sorted(abs(part))[-count:]


@given(st.integers(1, 40), vectors(2.0**60))
def test_frequencies_hold_the_energy(length: int, x: np.ndarray) -> None:
    """What is sent and what is lost are orthogonal, and all of them are all there is."""
    size = np.linalg.norm(x.astype(np.float64)) + 2.0**-100
    everything = arrived(codecs.dct(codecs.topk(1.0), length), x)
    np.testing.assert_allclose(everything, x, rtol=0, atol=1e-5 * size)
    kept = arrived(codecs.dct(codecs.topk(0.3), length), x)
    lost = x.astype(np.float64) - kept
    assert abs(np.vdot(kept.astype(np.float64), lost)) <= 1e-5 * size**2


@given(all_codecs(), replica_counts().flatmap(lambda k: st.tuples(st.just(k), stacked_trees(k))))
def test_mean_is_that_of_what_arrives(codec: codecs.Codec, replicated: Any) -> None:
    size, params = replicated
    params = tree.cast(params, torch.float32)
    found = vmapped(lambda x: mt.Vmapped(size).mean(x, codec=codec), params)
    sent = vmapped(lambda x: decoded(codec, x), params)

    def mean(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x[0])
        for replica in x:
            total = total + replica
        return total / size

    wanted = tree.map(mean, sent)
    wanted = wanted if codec.sparse else decoded(codec, wanted)
    wanted = tree.map(lambda x: x.expand(size, *x.shape), wanted)
    found, wanted = (tree.map(lambda x: x + 0.0, t) for t in (found, wanted))  # no -0
    same_bits("mean", found, wanted, "not the mean of what arrives")


@given(all_codecs(), replica_counts(8), trees(dtypes=[torch.float32, torch.bfloat16]))
def test_replicas_that_stayed_at_the_anchor(codec: codecs.Codec, size: int, params: Any) -> None:
    tx = mt.outer(mt.chain(mt.error_feedback(codec), mt.mean(codec=codec), mt.sgd(1.0)))
    everywhere = tree.map(lambda x: x.expand(size, *x.shape).clone(), params)

    def synchronised(params: Any) -> Any:
        return tx.average(params, tx.init(params), replicas=mt.Vmapped(size))[0]

    found = vmapped(synchronised, everywhere)
    same_bits("params", found, everywhere, "replicas that did not move were moved")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(all_codecs(), st.lists(vectors(2.0**15, length=20), min_size=1, max_size=5))
def test_error_feedback_loses_nothing(
    dtype: torch.dtype, codec: codecs.Codec, drawn: list[np.ndarray]
) -> None:
    tx = mt.error_feedback(codec)
    updates = [torch.from_numpy(x.copy()).to(dtype) for x in drawn]
    state = tx.init(updates[0])
    total = torch.zeros(20, dtype=torch.double)
    size = torch.ones(20, dtype=torch.double)
    for u in updates:
        sent, state = tx.update(u, state)
        total += u.double() - codec.roundtrip(sent.float())
        size += u.double().abs()
    close("residual", state.residual, total.float(), "something was lost", scale=size * 4)


@given(
    st.integers(1, 3),
    st.integers(5, 12),
    st.integers(5, 12),
    replica_counts(),
    st.integers(0, 2**20),
)
def test_matrices_of_low_rank(rank: int, rows: int, columns: int, size: int, seed: int) -> None:
    """A mean of that rank arrives as it is; of others nothing is lost, and nothing is added."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    tx = codecs.powersgd(rank, seed=seed)
    low = normal(rows, rank) @ normal(size, rank, columns)  # with the same columns on all replicas
    rest = [normal(size, rows, columns) for _ in range(3)]

    def rounds(*updates: torch.Tensor) -> Any:
        state, results = tx.init(updates[0]), []
        for u in updates:
            before = state.residuals
            arrived, state = tx.update(u, state, replicas=mt.Vmapped(size))
            results.append((arrived, u, before, state.residuals))
        return results

    results = vmapped(rounds, low, *rest)
    # Up to roundings, and the first factor may be nearly singular.
    wrong = (results[0][0] - low.mean(0)).abs().max()
    assert wrong <= 1e-6 * low.abs().max()
    total = torch.zeros(rows, columns, dtype=torch.float64)
    for arrived, u, before, after in results:
        assert (arrived == arrived[:1]).all()
        total += u.mean(0) - arrived[0]
        # What is lost is a projection of what was there.
        pays = rank * (rows + columns) < rows * columns
        for e, then in zip(after, before, strict=True) if pays else ():
            there = torch.linalg.matrix_norm(u + then)
            assert (torch.linalg.matrix_norm(e) <= there * (1 + 1e-9)).all()
    lost = results[-1][3][0].mean(0) if pays else torch.zeros_like(total)
    close("residual", lost, total, "something was lost", scale=low.abs().max() + 10)
