"""The same trajectory in every world, and nothing is communicated when nothing is due."""

from __future__ import annotations

import re

import numpy as np
import pytest

import meantime as mt
from tests import worlds

NAMES = list(worlds.RECIPES)


def check(actual: np.ndarray, name: str, tolerance: float = 1e-11) -> None:
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, worlds.run_numpy(name), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def processes(gloo):
    return gloo.run(worlds.run_processes)


@pytest.mark.parametrize("name", NAMES)
def test_references_differ(name):
    """The problem tells the recipes apart, else agreement would say little."""
    mine = worlds.run_numpy(name)
    others = [worlds.run_numpy(other) for other in NAMES if other != name]
    assert all(np.abs(mine - other).max() > 1e-3 for other in others)
    assert np.ptp(mine, axis=1).max() > 1e-2  # replicas go apart between synchronisations


@pytest.mark.parametrize("name", NAMES)
def test_vmapped(name):
    check(worlds.run_vmapped(name), name)


@pytest.mark.parametrize("name", NAMES)
def test_processes(name, processes):
    check(np.stack([rank[name] for rank in processes], 1), name)


@pytest.mark.parametrize("name", NAMES)
def test_jax_vmap(name, x64):
    check(worlds.run_jax_vmap(name), name, worlds.RECIPES[name].jax_tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_shard_map(name, x64):
    check(worlds.run_shard_map(name), name, worlds.RECIPES[name].jax_tolerance)


# --- what runs when nothing is due -----------------------------------------------------------

COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|collective-permute|all-to-all)(-start)?\(")


def computations(hlo: str) -> dict[str, list[str]]:
    """The lines of every computation of an HLO module, by its name; ENTRY is the entry."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            lines = found.setdefault("ENTRY" if head[1] else head[2], [])
        else:
            lines.append(line)
    return found


def collectives(found: dict[str, list[str]], name: str, *, into_branches: bool) -> int:
    """Collectives in a computation and in what it calls."""
    total = 0
    for line in found[name]:
        total += bool(COLLECTIVE.search(line))
        if into_branches or " conditional(" not in line:
            for called in set(re.findall(r"%([\w.\-]+)", line)) & set(found):
                total += collectives(found, called, into_branches=into_branches)
    return total


def branches(found: dict[str, list[str]]) -> list[list[int]]:
    """For every conditional, the collectives of each of its branches."""
    counts = []
    for lines in found.values():
        for line in lines:
            if " conditional(" not in line:
                continue
            called = re.search(r"branch_computations=\{([^}]*)\}", line)
            names = (
                re.findall(r"[\w.\-]+", called[1])
                if called
                else re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
            )
            counts.append([collectives(found, name, into_branches=True) for name in names])
    return counts


def compiled(tx):
    """A scan over steps: its counters are no constants that the compiler could decide upon."""
    import jax
    import jax.numpy as jnp

    loop = worlds.jax_loop(tx, mt.NamedAxis(("node", "worker")))
    params = jax.tree.map(lambda x: jnp.stack([jnp.float32(x)] * 4), worlds.start())
    x, y = (jnp.float32(a) for a in worlds.data())
    text = jax.jit(worlds.sharded(loop)).lower(params, x, y).compile().as_text()
    return computations(text)


def test_counting_of_collectives():
    """An unconditional mean is seen outside of every conditional."""
    pytest.importorskip("jax")
    found = compiled(mt.chain(mt.mean(), mt.sgd(0.1)))
    assert collectives(found, "ENTRY", into_branches=False) > 0


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "slowmo"])
def test_not_due_runs_no_collective(name):
    pytest.importorskip("jax")
    tx = worlds.RECIPES[name].transform()
    found = compiled(tx)
    assert collectives(found, "ENTRY", into_branches=False) == 0
    communicating = [counts for counts in branches(found) if any(counts)]
    assert len(communicating) == 1
    wait, synchronise = sorted(communicating[0])
    assert (wait, synchronise > 0) == (0, True)
    # w, b, the weight and its mean: four sums and what the compiler fuses of them
    assert synchronise <= 4


def test_warmup_is_a_branch():
    """Averaged gradients and averaged parameters: one branch each."""
    pytest.importorskip("jax")
    tx = worlds.RECIPES["post_local_sgd, momentum"].transform()
    found = compiled(tx)
    assert collectives(found, "ENTRY", into_branches=False) == 0
    assert [sorted(map(bool, c)) for c in branches(found) if any(c)] == [[False, True]] * 2


def test_state_is_a_scan_carry_in_shard_map():
    """Every state keeps its type, varying axes included, from one step to the next."""
    jax = pytest.importorskip("jax")
    world = mt.NamedAxis(("node", "worker"))
    levels = {"node": mt.NamedAxis("worker"), "world": world}
    seen = []
    for recipe in worlds.RECIPES.values():
        tx, replicas = recipe.transform(), levels if recipe.levels else world

        def types(params, x, y, tx=tx, replicas=replicas):
            state = tx.init(params)
            before = jax.tree.map(jax.typeof, (params, state))
            after = worlds.one_step(tx, jax.grad(worlds.loss), replicas, params, state, x, y)
            seen.append((before, jax.tree.map(jax.typeof, after)))
            return params

        params = jax.tree.map(lambda x: jax.numpy.stack([x] * 4), worlds.start())
        x, y = (a[:, 0] for a in worlds.data())
        jax.eval_shape(worlds.sharded(types), params, x, y)
    assert len(seen) == len(worlds.RECIPES)
    for before, after in seen:
        assert jax.tree.structure(before) == jax.tree.structure(after)
        assert jax.tree.leaves(before) == jax.tree.leaves(after)
