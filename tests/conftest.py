"""Settings that must stand before the libraries are imported, and shared fixtures."""

from __future__ import annotations

import os

# Eight CPU devices for `jax.shard_map`; loopback and one thread for the processes of gloo.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest

from tests.processes import Pool


@pytest.fixture(scope="session")
def gloo() -> Iterator[Pool]:
    """Four processes of a `torch.distributed` job; `gloo.run(function, *arguments)`."""
    with Pool(4) as pool:
        yield pool


@pytest.fixture
def x64() -> Iterator[None]:
    """JAX with 64-bit types, for one test."""
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    """For what JAX computes, not how fast: XLA does most of its work in a third of the time."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
