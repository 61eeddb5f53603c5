"""An outer optimizer whose replicas meet in pairs."""

from __future__ import annotations

from typing import NamedTuple

from meantime.arrays import Array
from meantime.averaging.anchors import anchor_of, restarted
from meantime.averaging.gossip import mean_with
from meantime.averaging.parameters import MeanState, average_params
from meantime.control import as_flag, cond, counter, increment, select, switch
from meantime.made import made
from meantime.replicas.base import Levels, Replicas, resolve
from meantime.schedules import check, check_integer
from meantime.state import keeps_apart
from meantime.transform import Transform
from meantime.tree import Tree, all_finite, leafwise, leaves, zeros_like


@keeps_apart()
class NoLoCoState(NamedTuple):
    """Rounds made (0-d int32), this replica's slow weights and momentum (at least float32, shaped
    like the parameters), and how many of its messages took no part."""

    count: Array
    slow: Tree
    momentum: Tree
    mean: MeanState


@leafwise(like="slow")
def _difference(params: Array, slow: Array) -> Array:
    return params - slow


@leafwise(like=("slow", "momentum"))
def _step(
    delta: Array, slow: Array, mean: Array, momentum: Array, a: float, b: float, c: float
) -> tuple[Array, Array]:
    momentum = a * momentum + b * delta - c * (slow - mean)
    return slow + momentum, momentum


@made
def noloco(
    learning_rate: float = 0.7,
    momentum: float = 0.5,
    pull: float = 0.7,
    seed: int = 0,
    over: str | None = None,
) -> Transform:
    r"""Momentum on pseudo-gradients, with one other replica at a time.

    Each replica keeps slow weights :math:`\phi_i`, the parameters of its last synchronisation. At
    every call of `average` it meets one replica :math:`j`, exchanges these and
    :math:`\Delta_i = \theta_i - \phi_i`, and restarts from the slow weights:

    .. math::
        \delta_i &\leftarrow \alpha\,\delta_i + \tfrac{\beta}{2} (\Delta_i + \Delta_j)
            - \gamma \big(\phi_i - \tfrac12 (\phi_i + \phi_j)\big) \\
        \phi_i &\leftarrow \phi_i + \delta_i, \qquad \theta_i \leftarrow \phi_i

    The mean of the slow weights moves as if all replicas had taken the mean of their
    pseudo-gradients, by SGD with momentum; :math:`\gamma` keeps them together.

    Args:
        learning_rate: :math:`\beta`.
        momentum: :math:`\alpha`, in [0, 1].
        pull: :math:`\gamma`, between :math:`\alpha` and :math:`2 + \alpha`; 0.7 in the authors'
            code.
        seed: of the pairs. Which replicas meet is a function of it and of the number of rounds; of
            an odd number of replicas one meets nobody.
        over: the level of a hierarchy, where `replicas` is a mapping.

    `chain(adamw(6e-4), periodic(noloco(), every=50))` is NoLoCo. With `average(..., now=True)` all
    replicas take the mean of their slow weights and of their momenta after the step: pass it at the
    end of training. A pseudo-gradient that is not finite takes no part.

    Raises:
        ValueError: a number is out of range.
        TypeError: `seed` is not an integer, a leaf of the parameters is an integer or a bool;
            `average` is called without `replicas`, or they have no level `over`.

    Kolehmainen et al. 2025 (https://arxiv.org/abs/2506.10911), section 3.

    Example:
        >>> import torch, meantime as mt
        >>> tx, world = mt.noloco(learning_rate=1.0, momentum=0.0, pull=1.0), mt.Vmapped(2)
        >>> def one_call(params):
        ...     return tx.average(params, tx.init(0 * params), replicas=world)[0]
        >>> torch.func.vmap(one_call)(torch.tensor([1.0, 3.0]))
        tensor([2., 2.])
    """
    check("learning_rate", learning_rate, 0)
    check("momentum", momentum, 0, 1)
    check("pull", pull, 0)
    check_integer("seed", seed, 0)
    everyone = average_params(over)

    def init(params: Tree) -> NoLoCoState:
        slow = anchor_of(params, "noloco")
        return NoLoCoState(counter(params), slow, zeros_like(slow), everyone.init(params))

    def average(
        params: Tree,
        state: NoLoCoState,
        *,
        replicas: Levels | None = None,
        now: bool | Array = False,
        counts: bool | Array = True,
    ) -> tuple[Tree, NoLoCoState]:
        world = resolve(replicas, over, "noloco")
        if not leaves(params):
            return params, state._replace(count=increment(state.count, counts))
        delta = _difference(params, state.slow)
        theirs, their_slow = _of_partner(delta, state.slow, state.count, seed, world)
        finite = all_finite(delta)
        both = select(
            finite | all_finite(theirs),
            lambda: mean_with(delta, [theirs]),
            lambda: zeros_like(delta),
        )
        between = mean_with(state.slow, [their_slow])
        rates = momentum, learning_rate, pull
        slow, momenta = _step(both, state.slow, between, state.momentum, *rates)
        mean = MeanState(state.mean.rejected + ~finite)

        def of_all(slow: Tree, momenta: Tree, mean: MeanState) -> tuple[Tree, Tree, MeanState]:
            (slow, momenta), mean = everyone.average((slow, momenta), mean, replicas=replicas)
            return slow, momenta, mean

        slow, momenta, mean = cond(as_flag(now), of_all, lambda *same: same, slow, momenta, mean)
        after = NoLoCoState(increment(state.count, counts), slow, momenta, mean)
        return restarted(slow, params), after

    return Transform(init, average=average)


def _of_partner(
    delta: Tree, slow: Tree, count: Array, seed: int, world: Replicas
) -> tuple[Tree, Tree]:
    """Those of the replica that this one meets, in a round that is drawn of as many as it takes
    for everybody to meet everybody."""
    rounds = pairings(world.size)
    drawn = _scrambled(_scrambled(count) ^ _scrambled(seed % 2**31)) % len(rounds)
    meet = [lambda *values, pairs=pairs: world.permute(values, pairs) for pairs in rounds]
    return switch(drawn, meet, delta, slow)


def pairings(size: int) -> list[list[int]]:
    """The rounds of a tournament, as the partner of each; by the circle method.

    In round `r` those meet whose sum is `2 r`, modulo the number of rounds. The one who would
    meet itself meets the last one, where that is outside of the circle.
    """
    circle = size - 1 + size % 2
    rounds = []
    for r in range(circle):
        partners = [(2 * r - k) % circle for k in range(circle)]
        if circle < size:
            partners[r] = circle
            partners.append(r)
        rounds.append(partners)
    return rounds


def _scrambled(x: Array) -> Array:
    """Sixteen bits that look random, of a number of 31 bits, which products stay in as well: int32
    arithmetic is the same in every library as long as nothing overflows."""
    for factor in (0x6C8F, 0x5A75, 0x7A4B):
        x = ((x & 0xFFFF) ^ (x >> 15)) * factor + 0x3C6F
    return (x & 0xFFFF) ^ (x >> 15)
