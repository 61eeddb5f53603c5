"""What steps and means cost in memory: exact counts, no times."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import meantime as mt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's page counts")

LEAVES = [(1024, 1024)] * 16  # 64 MiB


def faults_of_steps(donate: bool) -> int:
    """Pages that ten steps in steady state have to ask the system for."""
    torch.set_num_threads(1)
    params = [torch.ones(shape) for shape in LEAVES]
    grads = [torch.ones(shape) for shape in LEAVES]
    tx = mt.adamw(0.1)
    state = tx.init(params)
    before = 0
    for step in range(15):
        if step == 5:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        params, state = mt.step(tx, grads, params, state, donate=donate)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_donated_steps_take_no_new_memory():
    """In a fresh process, as the state of the heap is part of the question."""
    code = "from tests.test_memory import faults_of_steps; print(faults_of_steps(donate=True))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).parent.parent,
    )
    assert run.returncode == 0, run.stderr
    pages = 64 * 2**20 // resource.getpagesize()
    assert int(run.stdout) < pages // 100


def memory() -> dict[str, int]:
    """What this process holds now and held at most, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}


def extra_memory_of_mean(donate: bool) -> float:
    """The peak of a mean over what was held before, in bytes."""
    world = mt.Distributed()
    params = [torch.ones(1024, 1024) for _ in range(40)]  # 160 MiB
    world.mean(params[:1])
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = memory()["VmRSS"]
    world.mean(params, donate=donate)
    return memory()["VmHWM"] - before


def test_a_donated_mean_takes_two_buckets_whatever_the_size_of_the_model(gloo):
    assert max(gloo.run(extra_memory_of_mean, True)) < 64 * 2**20


def test_a_pure_mean_takes_the_result_and_two_buckets(gloo):
    assert max(gloo.run(extra_memory_of_mean, False)) < (160 + 64) * 2**20
