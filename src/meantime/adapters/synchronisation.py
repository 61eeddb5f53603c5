"""What is known about a synchronisation, for logging."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meantime import tree
from meantime.codecs import Codec
from meantime.codecs.layout import local
from meantime.replicas import Recorded
from meantime.replicas.base import Levels, Replicas
from meantime.tree import Tree


class Synchronisation(NamedTuple):
    """A synchronisation of this replica with others.

    Attributes:
        step: the number of local steps made.
        participants: how many replicas took part.
        nbytes: the bytes of this replica's messages.
        seconds: how long it took, waiting for slower replicas included.
        drift: the root mean square distance of this replica's parameters from their mean,
            :math:`\\|\\theta_k - \\bar\\theta\\| / \\sqrt d`; None where it was not measured.
        pseudo_gradient_norm: the norm of the mean pseudo-gradient of an outer optimizer; None
            where there is none or it was not measured.
    """

    step: int
    participants: int
    nbytes: int
    seconds: float
    drift: float | None = None
    pseudo_gradient_norm: float | None = None

    def __str__(self) -> str:
        text = (
            f"synchronisation after step {self.step}: {self.participants} replicas, "
            f"{self.nbytes / 1e6:.3g} MB, {self.seconds:.3g} s"
        )
        if self.drift is not None:
            text += f", drift {self.drift:.3g}"
        if self.pseudo_gradient_norm is not None:
            text += f", pseudo-gradient norm {self.pseudo_gradient_norm:.3g}"
        return text


@dataclass
class Measured(Recorded):
    """Replicas with a record which, if asked to measure, also knows how far messages were from
    their means. A measured mean does not work in place: it needs the memory of its result."""

    measure: bool = False
    distance: float = 0.0  # squared, summed over all values
    norm: float = 0.0  # of the means, likewise
    values: int = 0

    def clear(self) -> None:
        """Forget what was recorded."""
        self.calls.clear()
        self.seconds, self.distance, self.norm, self.values = 0.0, 0.0, 0.0, 0

    def mean(
        self,
        tree: Tree,
        *,
        weight: Any = None,
        codec: Codec | None = None,
        donate: bool = False,
    ) -> Tree:
        if not self.measure:
            return super().mean(tree, weight=weight, codec=codec, donate=donate)
        result = super().mean(tree, weight=weight, codec=codec)
        self._compare(tree, result)
        return result

    def _compare(self, messages: Tree, means: Tree) -> None:
        for x, mean in zip(tree.leaves(messages), tree.leaves(means), strict=True):
            # What accompanies the parameters (a weight, say) is a 0-d value.
            if isinstance(x, Tensor) and x.ndim and (x.is_floating_point() or x.is_complex()):
                mine, common = local(x).reshape(-1), local(mean).reshape(-1)
                self.distance += float(torch.linalg.vector_norm(mine - common)) ** 2
                self.norm += float(torch.linalg.vector_norm(common)) ** 2
                self.values += mine.numel()

    @property
    def drift(self) -> float | None:
        return math.sqrt(self.distance / self.values) if self.values else None


class Recorder:
    """The replicas an optimizer talks to, on one level or several, with what they did.

    Attributes:
        levels: the replicas to hand to a transform.
        world: those of the largest level.
    """

    levels: Levels

    def __init__(self, replicas: Levels):
        if isinstance(replicas, Mapping):
            named = {name: Measured(level) for name, level in replicas.items()}
            self.levels, self._records = named, list(named.values())
        else:
            record = Measured(replicas)
            self.levels, self._records = record, [record]
        self._largest = max(self._records, key=lambda record: record.size)

    @property
    def world(self) -> Replicas:
        return self._largest.replicas

    @property
    def communicated(self) -> bool:
        return any(record.calls for record in self._records)

    @property
    def globally(self) -> bool:
        """Whether the largest level took part."""
        return bool(self._largest.calls)

    @property
    def reached(self) -> Measured:
        """The largest level that took part."""
        return max((r for r in self._records if r.calls), key=lambda record: record.size)

    def measure(self, measure: bool) -> None:
        for record in self._records:
            record.measure = measure

    def clear(self) -> None:
        for record in self._records:
            record.clear()

    def summary(self, step: int, seconds: float, outer: bool) -> Synchronisation:
        """What was recorded; whether the messages were pseudo-gradients of an `outer` optimizer."""
        measured = max(self._records, key=lambda record: record.values)
        return Synchronisation(
            step,
            self.reached.size,
            sum(record.bytes for record in self._records),
            seconds,
            measured.drift,
            math.sqrt(measured.norm) if outer and measured.values else None,
        )
