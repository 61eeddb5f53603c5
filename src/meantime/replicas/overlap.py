"""Several collectives under way at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_DONE = object()


def overlapped(messages: Iterable[Iterator[None]]) -> None:
    """Run generators that yield where they would wait for a collective.

    Each one begins before those under way go on: what they wait for is done meanwhile. The order
    is the same on all replicas, as that of collectives must be.
    """
    under_way: list[Iterator[None]] = []
    for message in messages:
        next(message)
        under_way = [*_advanced(under_way), message]
    while under_way:
        under_way = _advanced(under_way)


def _advanced(messages: list[Iterator[None]]) -> list[Iterator[None]]:
    return [message for message in messages if next(message, _DONE) is not _DONE]
