"""Which keyword arguments go where.

The functions of a transform accept the whole contract and what they name themselves; a
combinator accepts what its members name, and hands each member what that one names. An argument
that nobody names is an error, not a typo that goes unnoticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

CONTRACT = frozenset({"replicas", "now", "donate"})
"""Keyword arguments that every function of a transform accepts; one that has no use for them
need not name them."""


def keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """The keyword arguments a function of a transform names; None if it takes any."""
    if hasattr(function, "takes"):
        takes: frozenset[str] = function.takes
        return takes
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    # Behind updates (or params) and state; `params` is part of the call, not an extra argument.
    return frozenset(
        p.name
        for i, p in enumerate(parameters)
        if p.name != "params"
        and (p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and i >= 2))
    )


def accepting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, made to accept the whole contract and to refuse what it does not know."""
    named = keywords(function)
    if named is None or hasattr(function, "takes"):
        return function
    takes = named | CONTRACT

    def call(*arguments: Any, **extra: Any) -> Any:
        kept = {}
        for name, value in extra.items():
            if name in named or name == "params":
                kept[name] = value
            elif name not in CONTRACT:
                raise TypeError(unexpected(name, takes))
        return function(*arguments, **kept)

    call.takes = takes  # type: ignore[attr-defined]
    call.__doc__ = function.__doc__
    return call


def unexpected(name: str, takes: frozenset[str]) -> str:
    own = ", ".join(sorted(takes - CONTRACT)) or "none"
    return (
        f"unexpected keyword argument {name!r}: no member of this transform names it "
        f"(accepted: replicas, now, donate; named by members: {own})"
    )


def forwards(
    *functions: Callable[..., Any], hides: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function `(..., **extra)` that passes `extra` on to `functions`.

    What it accepts is then what it names itself and what they accept, less what it `hides`
    (arguments it provides to them). Hand the arguments over with `pick`.

    Example:
        >>> import torch, meantime as mt
        >>> def twice(inner):
        ...     @forwards(inner.update)
        ...     def update(updates, state, params=None, **extra):
        ...         updates, state = inner.update(updates, state, params, **extra)
        ...         return inner.update(updates, state, params, **extra)
        ...     return mt.Transform(inner.init, update, inner.average)
        >>> twice(mt.scale(3.0)).update(torch.ones(1), mt.EmptyState())[0]
        tensor([9.])
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        named = frozenset(
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        )
        parts = [keywords(f) for f in functions]
        if any(part is None for part in parts):
            return function
        takes = named.union(CONTRACT, *(p for p in parts if p is not None)) - frozenset(hides)

        def call(*arguments: Any, **extra: Any) -> Any:
            for name in extra:
                if name not in takes and name != "params":
                    raise TypeError(unexpected(name, takes))
            return function(*arguments, **extra)

        call.takes = takes  # type: ignore[attr-defined]
        call.__doc__ = function.__doc__
        return call

    return decorate


def pick(function: Callable[..., Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Those of the extra arguments that a function of a transform takes."""
    takes = keywords(function)
    if takes is None:
        return extra
    return {name: value for name, value in extra.items() if name in takes}
