"""What a compiled XLA program communicates, and where: read from its text."""

from __future__ import annotations

import re

import numpy as np

COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(-start)?\("
)


class Program:
    """The computations of a compiled function, `jax.jit(f).lower(...).compile()`.

    Args:
        compiled: the function.
        replica_of: the replica that each device belongs to, by the device's number. Given that,
            a collective between devices of one replica does not count.
    """

    def __init__(self, compiled, replica_of: list[int] | None = None):
        self.replica_of = replica_of
        self.computations: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in compiled.as_text().splitlines():
            head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
            if head and not line.startswith(" "):
                lines = self.computations.setdefault("ENTRY" if head[1] else head[2], [])
            else:
                lines.append(line)

    def always(self) -> int:
        """The collectives outside of every conditional."""
        return self._count("ENTRY", into_branches=False)

    def branches(self) -> list[list[int]]:
        """For every conditional in which something is communicated: how often, by branch."""
        counts = []
        for line in (line for lines in self.computations.values() for line in lines):
            if " conditional(" not in line:
                continue
            called = re.search(r"branch_computations=\{([^}]*)\}", line)
            names = (
                re.findall(r"[\w.\-]+", called[1])
                if called
                else re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
            )
            counts.append([self._count(name, into_branches=True) for name in names])
        return [count for count in counts if any(count)]

    def _count(self, name: str, *, into_branches: bool) -> int:
        total = 0
        for line in self.computations[name]:
            total += bool(COLLECTIVE.search(line)) and self._crosses(line)
            if into_branches or " conditional(" not in line:
                for called in set(re.findall(r"%([\w.\-]+)", line)) & set(self.computations):
                    total += self._count(called, into_branches=into_branches)
        return total

    def _crosses(self, line: str) -> bool:
        if self.replica_of is None:
            return True
        return any(len({self.replica_of[d] for d in group}) > 1 for group in _groups(line))


def _groups(line: str) -> list[list[int]]:
    """The groups of devices, which are written in one of three ways."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line)
    if listed:  # {{0,4},{1,5}}
        return [[int(d) for d in group.split(",")] for group in re.findall(r"\{(.*?)\}", listed[1])]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:  # [4,2]<=[2,4]T(1,0): counted up in the second shape, transposed, in the first shape
        shape, tiles, order = (tuple(map(int, x.split(","))) if x else None for x in iota.groups())
        return np.arange(np.prod(tiles)).reshape(tiles).transpose(order).reshape(shape).tolist()
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    assert named, line  # mesh['a'=2,'b'=4] {'b'}: along these axes of a mesh
    sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", named[1])}
    along = re.findall(r"'\w+'", named[2])
    devices = np.arange(np.prod(list(sizes.values()))).reshape(list(sizes.values()))
    last = np.moveaxis(devices, [list(sizes).index(a) for a in along], range(-len(along), 0))
    return last.reshape(-1, np.prod([sizes[a] for a in along])).tolist()
