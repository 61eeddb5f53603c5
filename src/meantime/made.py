"""Values that remember the call that made them.

A transform is a few closures, which can be neither printed nor pickled nor compared. The call
that made it can: `periodic(average_params(), every=8)` says all there is to say. So what the
decorated factories return is printed as that call, pickled as that call, and compared between
replicas as that call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Call(NamedTuple):
    """A function and its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def __repr__(self) -> str:
        bound = inspect.signature(self.function).bind(*self.arguments, **self.keywords)
        leading = next(iter(bound.signature.parameters), None)
        parts = []
        for name, value in bound.arguments.items():
            parameter = bound.signature.parameters[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                parts += [_shown(item) for item in value]
            elif parameter.kind is parameter.VAR_KEYWORD:
                parts += [f"{key}={_shown(item)}" for key, item in value.items()]
            elif value is not parameter.default and not _same(value, parameter.default):
                parts.append(_shown(value) if name == leading else f"{name}={_shown(value)}")
        return f"{self.function.__name__}({', '.join(parts)})"


class Made:
    """Base of what a decorated factory returns."""

    made_by: Call | None

    def __repr__(self) -> str:
        call = getattr(self, "made_by", None)
        return super().__repr__() if call is None else repr(call)

    def __reduce_ex__(self, protocol: Any) -> Any:
        call = getattr(self, "made_by", None)
        return super().__reduce_ex__(protocol) if call is None else (_call, tuple(call))


class MadeFunction(Made):
    """A function that a decorated factory returned."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)


def made(factory: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public factory: what it returns remembers the call."""

    @functools.wraps(factory)
    def make(*arguments: P.args, **keywords: P.kwargs) -> R:
        result: Any = factory(*arguments, **keywords)
        if not isinstance(result, Made):
            result = MadeFunction(result)
        result.made_by = Call(make, arguments, keywords)
        return result

    return make


def _call(function: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
    return function(*arguments, **keywords)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (str, int, float, tuple)) and bool(a == b)


def _shown(value: Any) -> str:
    """An argument as text that does not depend on the process: no addresses, no large arrays."""
    if isinstance(value, (Made, str, int, float, complex, type(None))):
        return repr(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_shown(k)}: {_shown(v)}' for k, v in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}" if value.shape else f"{float(value)!r}"
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return name.replace("<locals>.", "")
