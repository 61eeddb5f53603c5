"""What stands around another transform, whose state is a field of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meantime.keywords import forwards, pick
from meantime.transform import Transform
from meantime.tree import Tree


def update_of(inner: Transform, field: str) -> Callable[..., Any] | None:
    """The `update` of `inner`, whose state is this field of the state; None if it has none."""
    if not inner.updates:
        return None

    @forwards(inner.update)
    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        updates, part = inner.update(
            updates, getattr(state, field), params, **pick(inner.update, extra)
        )
        return updates, state._replace(**{field: part})

    kernel = getattr(inner.update, "apply", None)
    if kernel is not None:

        def apply(updates: Tree, state: Any, params: Tree, **extra: Any) -> Any:
            done = kernel(updates, getattr(state, field), params, **extra)
            return None if done is None else (done[0], state._replace(**{field: done[1]}))

        update.apply = apply  # type: ignore[attr-defined]
    return update
