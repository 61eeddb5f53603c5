"""The mean of compressed messages, given the collectives of a world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from meantime import arrays
from meantime.arrays import Array
from meantime.codecs import Codec
from meantime.codecs.base import Message, padded
from meantime.codecs.layout import on_vector
from meantime.tree import Tree

Collective = Callable[[Array], Array]


def mean_of_trees(
    values: Tree,
    weight: Array | None,
    codec: Codec,
    size: int,
    gather: Collective,
    all_max: Collective,
    exchange: Collective | None = None,
) -> Tree:
    """The mean of `Replicas.mean` with a codec; for the collectives see `mean_of_vectors`."""

    def mean(x: Array) -> Array:
        weights: Array = [1.0] * size
        if weight is not None:
            weights = gather(arrays.astype(weight, arrays.namespace(x).float32))
        return mean_of_vectors(x, weights, codec, size, gather, exchange)

    return on_vector(mean, values, all_max)


def mean_of_vectors(
    x: Array,
    weights: Array | Sequence[float],
    codec: Codec,
    size: int,
    gather: Collective,
    exchange: Collective | None = None,
) -> Array:
    """The mean of what arrives of the vectors of all replicas.

    Args:
        gather: the arrays of all replicas, one in each row.
        exchange: sends row k to replica k, and returns the rows that come from all. With it a
            replica receives a chunk from each other one, and sends the mean of the chunk to
            all. Sparse messages are gathered: the mean of a chunk would not be sparse.
    """
    if codec.sparse or exchange is None:
        everyone = tuple(gather(part) for part in codec.encode(x))
        mean = weighted_mean(_arrived(everyone, codec, size, x.shape[0]), weights)
        return mean if codec.sparse else codec.roundtrip(mean)
    # Chunks end where blocks do, so that they do not show in the result.
    chunks = padded(x, size * codec.block)
    length = chunks.shape[0]
    received = tuple(exchange(part.reshape(size, -1)) for part in codec.encode(chunks))
    mean = weighted_mean(_arrived(received, codec, size, length // size), weights)
    everyone = tuple(gather(part).reshape(-1) for part in codec.encode(mean))
    return codec.decode(everyone, length)[: x.shape[0]]


def _arrived(rows: Message, codec: Codec, size: int, length: int) -> Iterator[Array]:
    """The vector in each row of the messages."""
    return (codec.decode(tuple(part[k] for part in rows), length) for k in range(size))


def weighted_mean(vectors: Iterable[Array], weights: Array | Sequence[float]) -> Array:
    """The mean of what arrives; of weight 0, whatever it is, it takes no part.

    Summed in the order of ranks: in another order it is rounded otherwise.
    """
    total: Any = None
    weight: Any = 0.0
    for k, x in enumerate(vectors):
        w = weights[k]
        if not (isinstance(w, float) and w == 1):
            x = arrays.where(w > 0, w * x, 0.0)
        total = x if total is None else total + x
        weight = weight + w
    return total / weight
