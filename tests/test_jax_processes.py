"""JAX on several processes: two of two devices each, which talk by gloo."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import meantime as mt

pytest.importorskip("jax")

PROCESSES, DEVICES, STEPS = 2, 2, 6
TARGETS = np.array([[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0], [2.0, 2.0]], np.float32)


def recipes():
    return {
        "hierarchical": mt.hierarchical_sgd(mt.sgd(0.2), every={"node": 2, "world": 4}),
        "diloco": mt.diloco(mt.adam(0.1), every=3, over="world"),
    }


def train(tx, levels, target):
    """The trajectory of one replica that descends to a target of its own."""
    import jax

    def step(carry, _):
        params, state = carry
        params, state = mt.step(tx, params - target, params, state, replicas=levels)
        return (params, state), params

    start = 0 * target
    return jax.lax.scan(step, (start, tx.init(start)), length=STEPS)[1]


def work(address: str, rank: int, results: str) -> None:
    """One process: nodes are the processes, workers their devices."""
    import jax
    from jax.experimental import multihost_utils
    from jax.sharding import PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, rank, initialization_timeout=60)
    assert jax.process_count() == PROCESSES
    axes = ("node", "worker")
    mesh = jax.make_mesh(
        (PROCESSES, DEVICES), axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )
    levels = {"node": mt.NamedAxis("worker"), "world": mt.NamedAxis(axes)}
    spec = PartitionSpec(axes)
    mine = TARGETS[rank * DEVICES : (rank + 1) * DEVICES]
    targets = multihost_utils.host_local_array_to_global_array(mine, mesh, spec)
    found = {}
    for name, tx in recipes().items():

        def on_device(target, tx=tx):
            return train(tx, levels, target[0])[None]

        trajectory = jax.jit(
            jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
        )(targets)
        found[name] = multihost_utils.global_array_to_host_local_array(trajectory, mesh, spec)
    np.savez(results, **found)


def simulated(tx) -> np.ndarray:
    """The same replicas, by `vmap` in this process."""
    import jax

    world = mt.NamedAxis("replica")
    levels = {"node": world.groups(DEVICES), "world": world}
    return jax.jit(jax.vmap(lambda t: train(tx, levels, t), axis_name="replica"))(TARGETS)


def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = "import sys; from tests.test_jax_processes import work; "
    code += "work(sys.argv[1], int(sys.argv[2]), sys.argv[3])"
    results = [tmp_path / f"{rank}.npz" for rank in range(PROCESSES)]
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
    }
    logs = [tmp_path / f"{rank}.txt" for rank in range(PROCESSES)]
    with contextlib.ExitStack() as stack:
        jobs = []
        for rank in range(PROCESSES):
            log = stack.enter_context(logs[rank].open("w"))
            command = [sys.executable, "-c", code, address, str(rank), results[rank]]
            jobs.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            stack.callback(jobs[-1].kill)
        codes = [job.wait(timeout=90) for job in jobs]
    assert codes == [0] * PROCESSES, "\n".join(log.read_text()[-3000:] for log in logs)
    found = [np.load(path) for path in results]
    for name, tx in recipes().items():
        actual = np.concatenate([one[name] for one in found])
        np.testing.assert_allclose(actual, simulated(tx), rtol=1e-5, atol=1e-6, err_msg=name)
        assert (actual[:, -1] == actual[0, -1]).all() == (name == "diloco")  # step 6 of 3 and of 4
