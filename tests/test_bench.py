"""`meantime bench`: its contenders do the same, and it says what is missing."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

from meantime.cli.bench import app, peers
from meantime.cli.bench.memory import extra_memory
from meantime.cli.bench.step import _contenders


@pytest.mark.parametrize("rule", ["adamw", "sgd", "lion"])
def test_all_contenders_make_the_same_steps(rule):
    pytest.importorskip("optax")
    contenders = {**_contenders(rule, 3, 7), **peers.optax_steps(rule, 1e-3, 3, 7)}
    if rule == "lion":
        contenders = {k: run for k, run in contenders.items() if not k.startswith("torch")}
    elif find_spec("torchopt") is not None:
        contenders.update(peers.torchopt_steps(rule, 1e-3, 3, 7))
    expected = None
    for name, run in contenders.items():
        for _ in range(3):
            params = run()
        values = [torch.tensor(x.tolist()) for _, x in sorted(params.items())]
        expected = expected or values
        for mine, reference in zip(values, expected, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6, msg=name)


def test_diloco_by_hand_is_ours():
    pytest.importorskip("optax")
    found = []
    for run in peers.diloco_rounds(3, replicas=2, batch=4).values():
        for _ in range(3):
            params = run()
        found.append([torch.tensor(x.tolist()) for x in params.values()])
    for other in found[1:]:
        for mine, reference in zip(other, found[0], strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


def test_a_run_with_json(tmp_path):
    file = tmp_path / "step.json"
    arguments = ["step", "--leaves", "2x10", "--rounds", "2", "--rule", "sgd", "--json", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (timings,) = json.loads(file.read_text()).values()
    assert timings["torch fused"]["ratio"] == 1
    assert timings["meantime step donated"]["median"] > 0
    assert "meantime step donated" in result.output


def test_the_processes_of_a_job(tmp_path):
    file = tmp_path / "average.json"
    launcher = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = ["meantime.cli", "bench", "average", "--leaves", "3x10", "--rounds", "2"]
    subprocess.run(
        [sys.executable, "-m", *launcher, "--nproc-per-node", "2", "-m", *command, "--json", file],
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
    )
    ((title, timings),) = json.loads(file.read_text()).items()
    assert "2 processes" in title
    assert timings["one all_reduce and div_"]["ratio"] == 1


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchopt", None)
    arguments = ["step", "--leaves", "2x10", "--rounds", "2", "--peers"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "meantime[bench]" in result.output
    assert CliRunner().invoke(app, ["step", "--rule", "adagrad"]).exit_code == 2


def test_extra_memory():
    size = 64 * 2**20
    kept = torch.ones(1)
    assert extra_memory(lambda: kept.add_(1)) < 2**20
    taken = extra_memory(lambda: torch.ones(size, dtype=torch.uint8))
    assert size * 0.9 < taken < size * 1.2
