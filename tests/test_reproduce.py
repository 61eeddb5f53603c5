"""The experiments on papers, made small: only the order of the methods is tested."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("mlxtend")

FOLDER = Path(__file__).parents[1] / "examples" / "reproduce"
NAMES = ["diloco", "local_sgd", "streaming", "pareto"]


@pytest.fixture
def load(monkeypatch):
    """A script as a module: scripts import one another by bare names."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("common", "report", *NAMES):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def runs(script: ModuleType, steps: int, *methods: str) -> list[dict[str, float]]:
    """What is measured of each method in a short run of few replicas of a small network."""
    common, task = importlib.import_module("common"), script.EXPERIMENT.task
    small = task(hidden=128) if task is common.text else task()
    known = script.methods(steps)
    few = [known[name]._replace(replicas=min(4, known[name].replicas)) for name in methods]
    return [common.train(small, method, steps, seed=0) for method in few]


def test_diloco_is_between_data_parallel_and_averaging(load):
    order = ["data parallel", "DiLoCo, H=10", "plain averaging, H=10", "one replica"]
    losses = [run["loss"] for run in runs(load("diloco"), 320, *order)]
    assert losses == sorted(losses)


def test_longer_periods_are_worse_and_the_others_help(load):
    others = ["QSR", "gossip, ring", "gossip, exponential", "SlowMo, H=16"]
    local = [f"local SGD, H={h}" for h in (4, 16, 64)]
    found = runs(load("local_sgd"), 128, *others, *local)
    losses, rounds = ([run[k] for run in found] for k in ("train", "synchronisations"))
    assert losses[4] < losses[5] < losses[6]
    assert max(losses[:4]) < losses[5]
    assert rounds[0] < 0.75 * rounds[4]


def test_fragments_send_less_at_a_time(load):
    script = load("streaming")
    whole, *streamed = runs(script, 180, script.DILOCO, *script.STREAMING.values())
    assert max(run["peak"] for run in streamed) < 0.3 * whole["peak"]
    assert max(run["loss"] for run in streamed) < whole["loss"] + 0.1


@pytest.mark.parametrize("name", NAMES)
def test_every_method_runs(name, load):
    experiment = load(name).EXPERIMENT
    results = load("common").run(experiment, 4, 1)
    assert list(results) == list(experiment.methods(experiment.steps))


@pytest.mark.parametrize("name", NAMES)
def test_the_tables_are_of_these_results(name, load):
    report, experiment = load("report"), load(name).EXPERIMENT
    results = report.read(experiment, report.RESULTS)
    assert set(experiment.methods(experiment.steps)) <= set(results)
    table = (report.RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert table == report.tables(experiment, results)


def test_command(load, tmp_path):
    for path in load("report").RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    command = [sys.executable, FOLDER / "pareto.py", "--again", "--out", tmp_path]
    said = subprocess.run(
        command, check=True, capture_output=True, encoding="utf-8", timeout=60
    ).stdout
    assert (tmp_path / "pareto.md").read_text(encoding="utf-8") in said
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
