"""The launcher of processes itself: a failing or hanging body is reported and poisons nothing."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from tests.processes import Pool, ProcessError


def ranks(offset):
    everyone = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(everyone, torch.tensor([dist.get_rank() + offset]))
    return everyone.tolist()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("a body that fails on one rank")
    dist.barrier()  # the others wait for it


def hang_on(rank):
    if dist.get_rank() != rank:
        threading.Event().wait()  # for ever


def test_pool_survives_failing_and_hanging_bodies():
    with Pool(2) as pool:
        assert pool.run(ranks, 10) == [[10, 11], [10, 11]]
        first = [worker.pid for worker in pool._workers]
        assert pool.run(ranks, 0) == [[0, 1], [0, 1]]
        assert [worker.pid for worker in pool._workers] == first
        with pytest.raises(ProcessError, match=r"(?s)rank 1 .*fails on one rank"):
            pool.run(fail_on, 1)
        assert pool.run(ranks, 5) == [[5, 6], [5, 6]]
        workers = list(pool._workers)
        with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2"):
            pool.run(hang_on, 0, timeout=2)
        assert not any(worker.is_alive() for worker in workers)
