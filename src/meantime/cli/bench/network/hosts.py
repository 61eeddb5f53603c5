"""Hosts on a slow network, inside this machine.

Every host is a Linux network namespace with one interface, and so is the switch that joins them.
Both ends of every cable are shaped, as a full-duplex link is. No interface of the machine itself
is touched, and nothing leaves it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from meantime.cli.launching import Interrupted, handling

INTERFACE = "eth0"
"""What every host calls its interface."""

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class NetworkError(Exception):
    """What keeps the network from being set up, as a sentence."""


@dataclass(frozen=True)
class Network:
    """The plan of a network.

    Attributes:
        name: what the names of its namespaces begin with.
        hosts: how many there are.
        rate: of every link in each direction, in bits a second.
    """

    name: str
    hosts: int
    rate: int

    def host(self, rank: int) -> str:
        """The namespace of a host."""
        return f"{self.name}-{rank}"

    def address(self, rank: int) -> str:
        """The address of a host, which only the other hosts can see."""
        return f"10.76.0.{rank + 1}"

    @property
    def switch(self) -> str:
        """The namespace of the switch."""
        return f"{self.name}-switch"

    @property
    def namespaces(self) -> list[str]:
        return [self.switch, *map(self.host, range(self.hosts))]

    def commands(self) -> Iterator[str]:
        """What sets it up."""
        # A token bucket has to hold the largest packet that the kernel hands over at once, and
        # what the link carries between two ticks of its clock.
        shape = f"root tbf rate {self.rate}bit burst {max(2**16, self.rate // 2000)} latency 50ms"
        yield f"ip netns add {self.switch}"
        yield f"ip -n {self.switch} link add switch up type bridge"
        for rank in range(self.hosts):
            host, port = self.host(rank), f"port{rank}"
            yield f"ip netns add {host}"
            yield f"ip -n {host} link set lo up"
            yield (
                f"ip -n {host} link add {INTERFACE} type veth peer name {port} netns {self.switch}"
            )
            yield f"ip -n {host} address add {self.address(rank)}/24 dev {INTERFACE}"
            yield f"tc -n {host} qdisc add dev {INTERFACE} {shape}"
            yield f"tc -n {self.switch} qdisc add dev {port} {shape}"
            yield f"ip -n {self.switch} link set {port} master switch up"
            yield f"ip -n {host} link set {INTERFACE} up"


def bits(rate: str) -> int:
    """Bits a second, from a rate such as 100mbit.

    Raises:
        ValueError: it is not such a rate.
    """
    match = re.fullmatch(r"(\d+)(kbit|mbit|gbit)", rate)
    if match is None or not int(match[1]):
        raise ValueError(f"{rate!r} is not a rate, such as 500kbit, 100mbit or 1gbit")
    return int(match[1]) * UNITS[match[2]]


def obstacle() -> str | None:
    """Why no network can be set up here, as a sentence; None if it can be tried."""
    if sys.platform != "linux":
        return "the hosts are network namespaces, which only Linux has"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"the command {' and '.join(missing)} is missing: install iproute2"
    if os.geteuid() != 0:
        return "only root may set up network namespaces: run it with sudo, or in a container"
    return None


@contextmanager
def connected(hosts: int, rate: int) -> Iterator[Network]:
    """A network that is removed at the end, whatever ends it.

    Raises:
        NetworkError: it cannot be set up here.
        Interrupted: by Ctrl-C, say.
    """
    reason = obstacle()
    if reason is not None:
        raise NetworkError(reason)
    network = Network(f"meantime-{os.getpid()}", hosts, rate)
    with handling(_interrupt):
        try:
            for command in network.commands():
                _run(command)
            yield network
        finally:
            with handling(signal.SIG_IGN):
                for namespace in network.namespaces:
                    _ip_or_tc(f"ip netns delete {namespace}")  # it may not have been added


def _run(command: str) -> None:
    done = _ip_or_tc(command)
    if done.returncode:
        raise NetworkError(f"`{command}` failed: {done.stderr.strip()}")


def _ip_or_tc(command: str) -> subprocess.CompletedProcess[str]:
    # In a session of its own: Ctrl-C in a terminal does not reach it.
    return subprocess.run(
        command.split(), capture_output=True, text=True, check=False, start_new_session=True
    )


def _interrupt(number: int, frame: object) -> None:
    raise Interrupted(number)
