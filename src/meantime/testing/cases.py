"""What a law is tried on, and what it raises when it is broken."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import optree
import torch

from meantime import tree
from meantime.keywords import pick
from meantime.replicas.recorded import Recorded
from meantime.replicas.solo import Solo
from meantime.testing.compare import Difference
from meantime.testing.strategies import Pair
from meantime.transform import Transform, apply_updates, as_transform
from meantime.tree import Tree


class LawViolation(AssertionError):
    """A transform broke a law.

    Attributes:
        law: the name of the law.
        path: the leaf where it shows; "" if it is not about a leaf.
        reason: what is wrong.
        example: what the transform was tried on; the smallest that the battery found.
    """

    def __init__(self, law: str, path: str, reason: str, example: str):
        self.law, self.path, self.reason, self.example = law, path, reason, example
        super().__init__(law, path, reason, example)

    def __str__(self) -> str:
        where = f" at {self.path}" if self.path else ""
        return f"law {self.law!r} is broken{where}: {self.reason}\n\ntried on\n{self.example}"


def describe(subject: Any) -> str:
    """A named tuple, one field a line."""
    fields = zip(subject._fields, subject, strict=True)
    return "\n".join(f"  {name} = {value}" for name, value in fields)


class Case(NamedTuple):
    """Parameters to start from, the gradients of every step, one of these steps (from 1), and
    the keyword arguments of every call (`replicas`, ...)."""

    params: Tree
    grads: tuple[Tree, ...]
    at: int = 1
    extra: Mapping[str, Any] = {"replicas": Solo()}

    def __str__(self) -> str:
        return describe(self)


Subject = TypeVar("Subject", contravariant=True)  # a Case, or what laws of averaging are tried on


class Law(Protocol[Subject]):
    """A function that raises `LawViolation` if a transform breaks it."""

    __name__: str

    def __call__(self, tx: Any, case: Subject) -> None: ...


def law(check: Callable[[Transform, Subject], None]) -> Law[Subject]:
    """Make a check a law: whatever fails in it becomes a `LawViolation` with the case."""

    @functools.wraps(check)
    def checked(tx: Any, case: Subject) -> None:
        try:
            check(as_transform(tx), case)
        except Difference as difference:
            path, reason = difference.path, difference.reason
            raise LawViolation(check.__name__, path, reason, str(case)) from None
        except Exception as error:
            first, *more = str(error).splitlines() or [""]
            reason = f"{type(error).__name__}: {first}" + (" ..." if more else "")
            raise LawViolation(check.__name__, "", reason, str(case)) from error

    return checked


def require(holds: bool, reason: str) -> None:
    """Raise `Difference` with that reason, about no leaf, unless it holds."""
    if not holds:
        raise Difference("", reason)


def call(function: Callable[..., Any], extra: Mapping[str, Any], *arguments: Any) -> Any:
    """A function of a transform, with those of the extra arguments that it takes."""
    return function(*arguments, **pick(function, dict(extra)))


def local_step(
    tx: Transform, grads: Tree, params: Tree, state: Any, extra: Any
) -> tuple[Tree, Any]:
    """`meantime.step`, with extra arguments that one of the functions need not take."""
    updates, state = call(tx.update, extra, grads, state, params)
    return call(tx.average, extra, apply_updates(params, updates), state)


def recorded(extra: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[], list[Any]]]:
    """The extra arguments with replicas that record, and a function that tells the record."""
    replicas = extra.get("replicas")
    if replicas is None:
        return dict(extra), list
    if not isinstance(replicas, Mapping):
        world = Recorded(replicas)
        return {**extra, "replicas": world}, lambda: list(world.calls)
    worlds = {name: Recorded(level) for name, level in replicas.items()}
    return (
        {**extra, "replicas": worlds},
        lambda: [(name, *entry) for name, level in worlds.items() for entry in level.calls],
    )


def on_leaves(function: Callable[..., Any], *arguments: Tree) -> tuple[Any, list[Any], Any]:
    """A function of trees as one of a flat list of leaves, for transforms (`vmap`, `jit`, ...)
    that know other trees than optree's.

    Returns:
        The function from leaves to leaves, the leaves of the arguments, and a function that
        puts the leaves of the last result back into its tree.
    """
    flat: list[Any]
    flat, spec = optree.tree_flatten(arguments)  # type: ignore[arg-type]
    structure: list[Any] = []

    def flattened(leaves: list[Any]) -> list[Any]:
        results, structure[:] = _flatten(function(*spec.unflatten(leaves)))
        return results

    return flattened, flat, lambda leaves: structure[0].unflatten(leaves)


def _flatten(values: Tree) -> tuple[list[Any], list[Any]]:
    leaves, spec = optree.tree_flatten(values)
    return leaves, [spec]


def vmapped(function: Callable[..., Any], *arguments: Tree) -> Any:
    """`torch.func.vmap(function)` over the leading axis of all leaves of optree trees."""
    flattened, leaves, rebuild = on_leaves(function, *arguments)
    return rebuild(torch.func.vmap(flattened)(leaves))


def snapshot(values: Tree) -> Tree:
    """Copies of all tensors."""
    return tree.map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, values)


def example_case(params: Tree = None, extra: Mapping[str, Any] | None = None) -> Case:
    """The one case for laws that take too long to be tried on many: random numbers, away from
    zero as laws about derivatives need it."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (x + x.sign() * 0.1).to(dtype)

    if params is None:
        params = {
            "weight": numbers(2, 3).T,
            "rest": [numbers(), None, Pair(numbers(3), numbers(2, dtype=torch.float64))],
            "empty": numbers(0),
        }
    grads = [tree.map(lambda x: numbers(*x.shape, dtype=x.dtype), params) for _ in range(4)]
    case = Case(params, tuple(grads), at=2)
    return case if extra is None else case._replace(extra=extra)
