"""Averaging of parameters at once: `torch.distributed.algorithms.model_averaging.utils`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meantime.adapters.dropin.processes import members
from meantime.adapters.in_place import write
from meantime.averaging import average_params
from meantime.replicas.base import Levels
from meantime.transform import Transform

# The parameters of a module, or the parameter groups of an optimizer.
Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


def average_parameters(params: Iterable[Tensor], process_group: Any = None) -> None:
    r"""Set parameters to their mean over the processes, in place.

    .. math:: \theta_k \leftarrow \tfrac1K \sum_j \theta_j

    Args:
        params: the parameters, in the same order on all processes.
        process_group: the processes; the default group if None. On a process outside of the
            group nothing happens.

    Raises:
        TypeError: `params` is one tensor.
        ValueError: the processes hand over different parameters; nothing is averaged then.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from meantime.adapters.dropin import average_parameters
        >>> def epoch_end(model):
        ...     average_parameters(model.parameters(), dist.group.WORLD)
    """
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of parameters, such as [p], got one tensor")
    parameters = list(dict.fromkeys(params))
    averager = average_params()
    averaged(averager, parameters, averager.init(parameters), members(process_group))


def average_parameters_or_parameter_groups(params: Parameters, process_group: Any = None) -> None:
    """Average the parameters that require gradients, whether this process has some or not.

    Args:
        params: the parameters of a module, or the parameter groups of an optimizer.
        process_group: see `average_parameters`.

    Raises:
        NotImplementedError: something else than parameters and parameter groups.
    """
    average_parameters(trained(flat(params)), process_group)


def get_params_to_average(params: Parameters) -> list[Tensor]:
    """The parameters that have gradients on this process.

    As in torch; the averagers do not ask it, since its answer may differ between processes.

    Args:
        params: the parameters of a module, or the parameter groups of an optimizer.

    Raises:
        NotImplementedError: something else than parameters and parameter groups.

    Example:
        >>> import torch
        >>> from meantime.adapters.dropin import get_params_to_average
        >>> used, unused = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
        >>> used.sum().backward()
        >>> get_params_to_average([used, unused]) == [used]
        True
    """
    return [p for p in flat(params) if p.grad is not None]


def flat(params: Parameters) -> list[Tensor]:
    """All parameters, each once."""
    found: list[Tensor] = []
    for item in params:
        if isinstance(item, dict):
            found += item["params"]
        elif isinstance(item, torch.nn.Parameter):
            found.append(item)
        else:
            raise NotImplementedError(
                "expected the parameters of a module or the parameter groups of an optimizer, "
                f"got {type(item).__name__}"
            )
    return list(dict.fromkeys(found))


def trained(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those which take part: the same on all processes, whoever has gradients."""
    return [p for p in parameters if p.requires_grad]


@torch.no_grad()
def averaged(
    averager: Transform, parameters: list[Tensor], state: Any, replicas: Levels, **extra: Any
) -> Any:
    """Call a transform's `average`, write to the parameters in place, return the new state."""
    values, state = averager.average(parameters, state, replicas=replicas, donate=True, **extra)
    write(parameters, values)
    return state
