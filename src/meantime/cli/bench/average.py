"""`meantime bench average`: the mean over real processes of trees of leaves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

import meantime as mt
from meantime.adapters import arena
from meantime.cli.bench.timing import Timing, interleave, report, write_json
from meantime.cli.bench.trees import SHAPES, parse, tree
from meantime.cli.launching import launch

REFERENCE = "one all_reduce and div_"
RANKS = [2, 4]


def average(
    shapes: Annotated[
        list[str], typer.Option("--leaves", help="Trees to average, as COUNTxSIZE.")
    ] = SHAPES,
    ranks: Annotated[list[int], typer.Option(help="Numbers of processes.")] = RANKS,
    rounds: Annotated[int, typer.Option(min=2, help="Counted rounds.")] = 15,
    peers: Annotated[bool, typer.Option(help="Add torch's averager and accelerate's way.")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write the timings here.")] = None,
) -> None:
    """Average parameters over processes (gloo), against one bare all_reduce.

    The processes are new ones on this machine; under torchrun, those of the job.
    """
    results: dict[str, dict[str, Timing]] = {}
    of_job = dist.is_torchelastic_launched()
    if of_job:
        dist.init_process_group("gloo")
        ranks = [dist.get_world_size()]
    speaks = not of_job or dist.get_rank() == 0
    for size in ranks:
        for shape in shapes:
            count, length = parse(shape)
            title = f"mean over {size} processes, {count} leaves of {length:,} (float32)"
            arguments = count, length, rounds, peers
            measured = [_measure(*arguments)] if of_job else launch(_measure, size, *arguments)
            results[title] = measured[0]
            if speaks:
                report(title, results[title], count * length * 4)
    if out is not None and speaks:
        write_json(out, results)
    if of_job:
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # with gloo, torch 2.13 now and then aborts while the interpreter shuts down


def _measure(count: int, length: int, rounds: int, peers: bool) -> dict[str, Timing]:
    world, listed = mt.Distributed(), mt.Distributed()
    params = tree(count, length, seed=dist.get_rank())
    donated = tree(count, length, seed=dist.get_rank())
    moved = [torch.nn.Parameter(x) for x in tree(count, length, seed=dist.get_rank()).values()]
    arena(moved)
    differences = tree(count, length, seed=dist.get_rank())
    halved = mt.mean(codec=mt.codecs.bf16())
    averager = mt.average_params()
    state = averager.init(params)
    whole = torch.cat(list(params.values()))

    def reference() -> None:
        dist.all_reduce(whole)
        whole.div_(world.size)

    contenders: dict[str, Callable[[], object]] = {
        REFERENCE: reference,
        "meantime, pure": lambda: averager.average(params, state, replicas=world),
        "meantime, donated": lambda: averager.average(donated, state, replicas=world, donate=True),
        "meantime, donated, in an arena": lambda: averager.average(
            moved, state, replicas=listed, donate=True
        ),
        "meantime, donated, bfloat16 messages": lambda: halved.update(
            differences, halved.init(differences), replicas=world, donate=True
        ),
    }
    if peers:
        contenders.update(_peers(count, length))
    return interleave(contenders, REFERENCE, rounds, before=dist.barrier)


def _peers(count: int, length: int) -> dict[str, Callable[[], object]]:
    from torch.distributed.algorithms.model_averaging.utils import average_parameters

    group = dist.group.WORLD
    assert group is not None

    def parameters() -> list[torch.nn.Parameter]:
        leaves = tree(count, length, seed=dist.get_rank()).values()
        return [torch.nn.Parameter(x) for x in leaves]

    ours, theirs = parameters(), parameters()

    def one_by_one() -> None:
        """What accelerate's LocalSGD does."""
        for parameter in theirs:
            mean = parameter.data.clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            parameter.data = mean

    return {
        "torch average_parameters": lambda: average_parameters(iter(ours), group),
        "a collective a parameter": one_by_one,
    }
