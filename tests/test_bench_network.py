"""`meantime bench network`: arguments, the plan of the network, the report, and real hosts."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

from meantime.cli.bench import app
from meantime.cli.bench.network import hosts as network_hosts
from meantime.cli.bench.network.hosts import Network, bits, connected, obstacle
from meantime.cli.bench.network.methods import METHODS, Settings
from meantime.cli.bench.network.processes import launch
from meantime.cli.bench.network.report import draw, print_table, speed_up, typical, write_json
from meantime.cli.bench.network.training import Run
from meantime.cli.launching import ReplicaError

SETTINGS = Settings(
    methods=("ddp", "diloco"),
    hosts=2,
    rate=10**8,
    period=20,
    target=2.5,
    seconds=100,
    steps=1000,
    hidden=64,
    batch=8,
    repeats=3,
)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["network", *arguments])
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("rate", "expected"), [("500kbit", 500_000), ("100mbit", 10**8), ("1gbit", 10**9)]
)
def test_rates(rate, expected):
    assert bits(rate) == expected


@pytest.mark.parametrize("rate", ["100", "fast", "0mbit", "-1mbit", "1.5mbit", "100MB", ""])
def test_what_is_no_rate(rate):
    with pytest.raises(ValueError, match="is not a rate"):
        bits(rate)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "fast"], "'fast' is not a rate, such as 500kbit"),
        (["--methods", "ddp,sgd"], "'sgd': choose from ddp, data-parallel"),
        (["--period", "15"], "streaming-diloco: every=15 must be a multiple of fragments=2"),
        (["--hosts", "1"], "should be greater than or equal to 2"),
    ],
)
def test_argument_errors(arguments, said):
    assert said in run(*arguments, code=2)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sys.platform", "darwin", "which only Linux has"),
        ("shutil.which", lambda command: None, "the command ip and tc is missing: install"),
        ("os.geteuid", lambda: 1000, "only root may"),
    ],
)
def test_where_no_network_can_be_set_up(name, value, said, monkeypatch, tmp_path):
    monkeypatch.setattr(network_hosts.sys, "platform", "linux")
    monkeypatch.setattr(network_hosts.shutil, "which", lambda command: f"/sbin/{command}")
    monkeypatch.setattr(network_hosts.os, "geteuid", lambda: 0, raising=False)
    assert obstacle() is None
    module, attribute = name.split(".")
    monkeypatch.setattr(getattr(network_hosts, module), attribute, value)
    output = run("--out", str(tmp_path), "--hidden", "8", code=1)
    assert output.startswith("Error: ")
    assert said in output


@pytest.mark.parametrize("hosts", [2, 5, 16])
def test_the_plan_of_a_network(hosts):
    network = Network("name", hosts, 10**8)
    addresses = {ipaddress.ip_address(network.address(rank)) for rank in range(hosts)}
    assert len(addresses) == hosts
    assert all(address.is_private for address in addresses)
    commands = list(network.commands())
    added = {command.split()[-1] for command in commands if command.startswith("ip netns add")}
    assert added == set(network.namespaces)
    assert len(added) == hosts + 1
    # Everything else happens inside of them, and both ends of every cable are shaped.
    inside = [command.split()[:3] for command in commands if "netns add" not in command]
    assert all(option == "-n" and name in added for _, option, name in inside)
    shaped = [command for command in commands if " tbf rate 100000000bit " in command]
    assert len(shaped) == 2 * hosts


def test_the_bucket_holds_what_is_sent_at_once():
    def burst(rate: int) -> int:
        words = next(c for c in Network("name", 2, rate).commands() if "tbf" in c).split()
        return int(words[words.index("burst") + 1])

    assert burst(10**6) == 65536  # the largest packet
    assert burst(10**10) == 5_000_000  # 4 ms


def runs() -> list[Run]:
    """Two methods with three seeds; one run of DiLoCo fails."""
    result = []
    for seed, (slow, fast) in enumerate([(100.0, 9.0), (90.0, 30.0), (80.0, 10.0)]):
        result += [
            Run("ddp", seed, [2, 4], [slow / 2, slow], [3.0, 2.4], 10**9, 9e8, True, True),
            Run("diloco", seed, [20, 40], [fast / 2, fast], [3.0, 2.5], 10**8, 9e7, seed < 2, True),
        ]
    return result


def test_the_typical_run_is_the_median_and_a_failed_one_is_late():
    chosen = typical(runs())
    assert [run.seconds[-1] for run in chosen.values()] == [90.0, 30.0]
    assert speed_up(chosen["diloco"], chosen) == 3.0
    assert speed_up(chosen["ddp"], chosen) == 1.0
    failed = runs()[-1]
    assert speed_up(failed, chosen) is None
    assert speed_up(failed, {"diloco": failed}) is None


def test_the_table(tmp_path):
    console = Console(width=80, record=True, file=(tmp_path / "said").open("w"))
    print_table(console, SETTINGS, runs())
    text = console.export_text()
    rows = {line[:16].strip(): line[16:].split() for line in text.splitlines()}
    assert rows["DDP (torch)"] == ["90.0", "1.0", "4", "0.04", "1,000", "900", "80.0"]
    assert rows["DiLoCo"] == ["30.0", "3.0", "40", "1.33", "100", "90", "8.0"]
    assert "Of 3 runs of each method, the one with the median time." in text
    assert "…" not in text


def test_every_method_fits_into_the_table_and_into_the_plot(tmp_path):
    every = [
        Run(name, 0, [1], [600.0 + i], [2.6], 10**9, 1e9, reached=i > 2)
        for i, name in enumerate(METHODS)
    ]
    console = Console(width=80, record=True, file=(tmp_path / "said").open("w"))
    print_table(console, SETTINGS, every)
    text = console.export_text()
    assert "> 600" in text
    assert "…" not in text
    draw(tmp_path / "network.png", SETTINGS, every)
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")


def test_json(tmp_path):
    write_json(tmp_path / "network.json", SETTINGS, runs())
    document = json.loads((tmp_path / "network.json").read_text())
    assert document["settings"]["rate"] == 10**8
    assert [run["method"] for run in document["runs"]] == ["ddp", "diloco"] * 3


@cache
def reason() -> str:
    """Why there can be no hosts here."""
    told = obstacle()
    if told is not None:
        return told
    allowed = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "root may not make namespaces here" if allowed.returncode else ""


real = pytest.mark.skipif(bool(reason()), reason=f"needs network namespaces: {reason()}")


def namespaces() -> set[str]:
    """Those of this benchmark, of all processes."""
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in said.stdout.splitlines() if line.startswith("meantime-")}


@real
def test_real_hosts(tmp_path):
    before, interfaces = namespaces(), os.listdir("/sys/class/net")
    names = ["ddp", "data-parallel", "diloco", "diloco-int8"]
    small = ["--hidden", "128", "--batch", "4", "--steps", "8", "--period", "4", "--target", "0"]
    file = tmp_path / "network.json"
    said = run(*small, "--methods", ",".join(names), "--out", str(tmp_path), "--json", str(file))
    assert "> " in said
    assert (tmp_path / "network.png").exists()
    document = json.loads(file.read_text())
    runs = {run["method"]: run for run in document["runs"]}
    assert list(runs) == names
    for run_ in runs.values():
        assert run_["steps"][-1] == 8
        # Headers, acknowledgements and barriers.
        assert 1 < run_["sent"] / run_["counted"] < 1.2
        # A link does not carry more than its rate, but what the buckets hold at first.
        assert run_["seconds"][-1] > 0.9 * run_["sent"] * 8 / 10**8 - 0.05
    assert runs["data-parallel"]["losses"] == pytest.approx(runs["ddp"]["losses"], abs=1e-3)
    assert runs["ddp"]["counted"] == pytest.approx(4 * runs["diloco"]["counted"], rel=1e-3)
    assert runs["diloco"]["counted"] == pytest.approx(4 * runs["diloco-int8"]["counted"], rel=0.02)
    assert namespaces() == before
    assert os.listdir("/sys/class/net") == interfaces


def say_and_fail(send, word: str) -> None:
    """Every host says who it is; then the second one fails, for which the others wait."""
    rank = dist.get_rank()
    send((rank, dist.get_world_size(), word))
    dist.barrier()
    if rank == 1:
        raise ArithmeticError("out of numbers")
    dist.barrier()


@real
def test_three_hosts_and_one_that_fails():
    before, heard = namespaces(), []
    with connected(3, 10**8) as network:
        with pytest.raises(ReplicaError, match=r"on host 1 (.|\n)*out of numbers"):
            launch(network, heard.append, say_and_fail, "well")
        assert not any(_pids(network.host(rank)) for rank in range(3))
    assert sorted(heard) == [(rank, 3, "well") for rank in range(3)]
    assert namespaces() == before


@real
def test_interrupted(tmp_path):
    code = "from meantime.cli.bench import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "network", "--hidden", "8", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    mine = f"meantime-{process.pid}-"
    host = f"{mine}0"
    deadline = time.monotonic() + 60
    while not (pids := _pids(host)) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.1)
    assert pids
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "Interrupted: no host and no process is left.\n"
    assert not [name for name in namespaces() if name.startswith(mine)]
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def _pids(namespace: str) -> list[str]:
    said = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return said.stdout.split()
