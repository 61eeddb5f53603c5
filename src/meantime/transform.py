"""The contract: three pure functions, and how they compose::

    init:    (params) -> state
    update:  (updates, state, params=None, **extra) -> (updates, state)
    average: (params, state, *, replicas=None, now=False, **extra) -> (params, state)

`update` turns this replica's gradients into updates. `average` is called exactly once after
every local step on every replica: it counts the steps and talks to the other replicas when a
synchronisation is due. Neither writes to what it is given.

Why counting lives in `average`: `update` can be skipped on one replica alone (a gradient
scaler that saw an overflow, gradient accumulation). If the schedule hung on it, replicas would
disagree about when to communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from meantime.arrays import Array
from meantime.keywords import accepting, forwards, keywords, pick, unexpected
from meantime.made import Made, made
from meantime.tree import Tree, leafwise


class EmptyState(NamedTuple):
    """The state of a transform that remembers nothing."""


class _Functions(NamedTuple):
    init: Callable[..., Any]
    update: Callable[..., tuple[Tree, Any]]
    average: Callable[..., tuple[Tree, Any]]


class Transform(Made, _Functions):
    r"""Three pure functions over pytrees of parameters.

    Write each function with just the keyword arguments it uses; `replicas`, `now` and `donate`
    are accepted (and dropped) for those that do not name them. Any other keyword argument that
    is not named raises `TypeError`.

    Args:
        init: `(params) -> state`.
        update: `(updates, state, params=None, **extra) -> (updates, state)`. By default the
            updates pass unchanged.
        average: `(params, state, *, replicas, now, **extra) -> (params, state)`. By default
            nothing is averaged, so every gradient transform is a `Transform`.

    Example:
        >>> import torch, meantime as mt
        >>> flip = mt.Transform(
        ...     init=lambda params: mt.EmptyState(),
        ...     update=lambda updates, state, params=None: (-updates, state),
        ... )
        >>> updates, state = flip.update(torch.ones(2), flip.init(torch.zeros(2)))
        >>> updates
        tensor([-1., -1.])
    """

    def __new__(
        cls,
        init: Callable[..., Any],
        update: Callable[..., tuple[Tree, Any]] | None = None,
        average: Callable[..., tuple[Tree, Any]] | None = None,
    ) -> Transform:
        return super().__new__(
            cls,
            init,
            _KEEP_UPDATES if update is None else accepting(update),
            _KEEP_PARAMS if average is None else accepting(average),
        )

    @property
    def updates(self) -> bool:
        """Whether `update` does anything."""
        return self.update is not _KEEP_UPDATES

    @property
    def averages(self) -> bool:
        """Whether `average` does anything."""
        return self.average is not _KEEP_PARAMS


def _keep_updates(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
    return updates, state


def _keep_params(params: Tree, state: Any) -> tuple[Tree, Any]:
    return params, state


_KEEP_UPDATES, _KEEP_PARAMS = accepting(_keep_updates), accepting(_keep_params)


def as_transform(member: Any) -> Transform:
    """Anything with `.init` and `.update` (an optax transformation, say) as a `Transform`."""
    if isinstance(member, Transform):
        return member
    if not (callable(getattr(member, "init", None)) and callable(getattr(member, "update", None))):
        raise TypeError(
            f"expected a transform (an object with .init and .update), got {member!r}"
            + (": call it first?" if callable(member) else "")
        )
    return Transform(member.init, member.update, getattr(member, "average", None))


@made
def identity() -> Transform:
    r"""Pass updates and parameters unchanged: :math:`u \leftarrow u`.

    Takes the place of the inner optimizer where a `torch.optim` optimizer does the local steps.

    Example:
        >>> import meantime as mt
        >>> tx = mt.local_sgd(mt.identity(), every=8)
    """
    return Transform(lambda params: EmptyState())


@made
def chain(*members: Any) -> Transform:
    """Apply members one after the other, in `update` and in `average`.

    Args:
        members: transforms, or anything with `.init` and `.update`. Extra keyword arguments
            go to the members that name them.

    Returns:
        A transform whose state is the tuple of the members' states.

    Raises:
        TypeError: a member is no transform; an extra argument that no member takes.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.chain(mt.clip_by_global_norm(1.0), mt.sgd(0.5))
        >>> params = torch.zeros(2)
        >>> updates, state = tx.update(torch.tensor([3.0, 4.0]), tx.init(params), params)
        >>> updates
        tensor([-0.3000, -0.4000])
    """
    return _chained(members, lambda states: tuple(states), lambda state: list(state))


@made
def named_chain(**members: Any) -> Transform:
    """`chain` with names: the state is a dict of the members' states.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.named_chain(clip=mt.clip(1.0), inner=mt.sgd(0.1, momentum=0.9))
        >>> sorted(tx.init(torch.zeros(2)))
        ['clip', 'inner']
    """
    names = list(members)
    return _chained(
        tuple(members.values()),
        lambda states: dict(zip(names, states, strict=True)),
        lambda state: [state[name] for name in names],
    )


def _chained(
    members: tuple[Any, ...], pack: Callable[[list[Any]], Any], unpack: Callable[[Any], list[Any]]
) -> Transform:
    parts = [as_transform(member) for member in members]
    updating = [i for i, part in enumerate(parts) if part.updates]
    averaging = [i for i, part in enumerate(parts) if part.averages]

    def states_of(state: Any) -> list[Any]:
        states = unpack(state)
        if len(states) != len(parts):
            raise ValueError(
                f"this chain has {len(parts)} members but its state has {len(states)}: "
                "was the state made by another transform?"
            )
        return states

    def init(params: Tree) -> Any:
        return pack([part.init(params) for part in parts])

    @forwards(*(parts[i].update for i in updating))
    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        states = states_of(state)
        for i in updating:
            updates, states[i] = parts[i].update(
                updates, states[i], params, **pick(parts[i].update, extra)
            )
        return updates, pack(states)

    @forwards(*(parts[i].average for i in averaging))
    def average(params: Tree, state: Any, **extra: Any) -> tuple[Tree, Any]:
        states = states_of(state)
        for i in averaging:
            params, states[i] = parts[i].average(params, states[i], **pick(parts[i].average, extra))
        return params, pack(states)

    def apply(updates: Tree, state: Any, params: Tree, **extra: Any) -> tuple[Tree, Any]:
        states = states_of(state)
        *first, last = updating
        for i in first:
            updates, states[i] = parts[i].update(
                updates, states[i], params, **pick(parts[i].update, extra)
            )
        params, states[last] = _descend(parts[last], updates, states[last], params, extra)
        return params, pack(states)

    tx = Transform(init, update if updating else None, average if averaging else None)
    if updating and hasattr(parts[updating[-1]].update, "apply"):
        tx.update.apply = apply  # type: ignore[attr-defined]
    return tx


@leafwise
def _add(params: Array, updates: Array) -> Array:
    return params + updates


def apply_updates(params: Tree, updates: Tree) -> Tree:
    r"""New parameters :math:`\theta + u`, in the dtype of the parameters.

    Raises:
        ValueError: the trees differ in structure.

    Example:
        >>> import torch, meantime as mt
        >>> mt.apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -0.5])})
        {'w': tensor([1.5000, 0.5000])}
    """
    return _add(params, updates)


def _descend(
    tx: Transform, updates: Tree, state: Any, params: Tree, extra: dict[str, Any]
) -> tuple[Tree, Any]:
    """`update` and `apply_updates`, in one kernel where the transform offers it."""
    arguments = pick(tx.update, extra)
    apply = getattr(tx.update, "apply", None)
    done = None if apply is None else apply(updates, state, params, **arguments)
    if done is None:
        updates, state = tx.update(updates, state, params, **arguments)
        done = apply_updates(params, updates), state
    return done


def step(tx: Any, grads: Tree, params: Tree, state: Any, **extra: Any) -> tuple[Tree, Any]:
    """One local step: `update`, `apply_updates`, `average`.

    On torch tensors the first two run in one fused kernel where there is one for the last member
    that updates (`sgd`, `adam`, `adamw`): the same mathematics, within rounding.

    Args:
        tx: a transform.
        grads: this replica's gradients, with the structure of the parameters.
        params, state: the parameters and the state to step from.
        extra: `replicas`, `now`, `donate` and what the members of `tx` name; each argument goes
            to `update`, to `average` or to both, wherever it is named. With `donate=True` the
            parameters and the state may be written to, which saves memory and time.

    Returns:
        New parameters and new state.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.local_sgd(mt.sgd(0.1), every=2)
        >>> params = torch.ones(2)
        >>> state = tx.init(params)
        >>> params, state = mt.step(tx, torch.ones(2), params, state, replicas=mt.Solo())
        >>> params
        tensor([0.9000, 0.9000])
    """
    tx = as_transform(tx)
    updating, averaging = keywords(tx.update), keywords(tx.average)
    if updating is not None and averaging is not None:
        for name in extra:
            if name not in updating and name not in averaging:
                raise TypeError(unexpected(name, updating | averaging))
    params, state = _descend(tx, grads, state, params, extra)
    if not tx.averages:
        return params, state
    return tx.average(params, state, **pick(tx.average, extra))
