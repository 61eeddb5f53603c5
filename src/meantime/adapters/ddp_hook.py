"""Post-local SGD in `DistributedDataParallel`, on the schedule of the optimizer."""

# No postponed annotations here: DistributedDataParallel compares those of a hook.

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from meantime.adapters.averaging_optimizer import AveragingOptimizer
from meantime.replicas import Distributed, Solo


def post_local_hook(
    optimizer: AveragingOptimizer, over: Distributed | None = None
) -> Callable[[Any, GradBucket], Future[Tensor]]:
    r"""A communication hook for the warm-up of an optimizer that averages parameters after it.

    .. math::
        g_k &\leftarrow \tfrac1K \textstyle\sum_j g_j && t \le W \\
        g_k &\leftarrow \text{the mean over the group of } k \text{, or } g_k && t > W

    The warm-up :math:`W` is that of the optimizer's averager (`after` of `periodic`), and the
    steps are those which the optimizer counts: neither gradient accumulation nor a checkpoint
    can part the two.

    Args:
        optimizer: the optimizer. Its replicas, on the largest level, are processes.
        over: the processes that average their gradients after the warm-up, for example those of
            a node, `Distributed().groups(8)`; none if None.

    Returns:
        The hook, for `model.register_comm_hook(None, hook)`.

    Raises:
        TypeError: `optimizer` is no `AveragingOptimizer`, or its replicas or `over` are not
            processes.

    Lin et al. 2020 (https://arxiv.org/abs/1808.07217), section 3.

    Example:
        >>> import torch, meantime as mt
        >>> from meantime.adapters import AveragingOptimizer, post_local_hook
        >>> def optimizer_for(model):  # a DistributedDataParallel
        ...     optimizer = AveragingOptimizer(
        ...         torch.optim.SGD(model.parameters(), lr=0.1),
        ...         mt.periodic(mt.average_params(), every=8, after=100),
        ...         replicas=mt.Distributed(),
        ...     )
        ...     model.register_comm_hook(None, post_local_hook(optimizer))
        ...     return optimizer
    """
    if not isinstance(optimizer, AveragingOptimizer):
        raise TypeError(f"expected an AveragingOptimizer, got {optimizer!r}")
    world = optimizer._world
    if not isinstance(world, Distributed):
        raise TypeError(
            f"the optimizer needs replicas=Distributed(), as the model's, got {world!r}"
        )
    if over is not None and not isinstance(over, Distributed):
        raise TypeError(f"over must be a Distributed(...) or None, got {over!r}")

    def hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
        return mean_of(bucket.buffer(), world if optimizer.warming_up else over)

    return hook


def mean_of(gradients: Tensor, processes: Distributed | Solo | None) -> Future[Tensor]:
    """A future of the mean over processes, in place; of the gradients themselves without any.

    As in `DistributedDataParallel`, gradients are divided before they are summed.
    """
    if processes is None or isinstance(processes, Solo):
        own: Future[Tensor] = Future()
        own.set_result(gradients)
        return own
    gradients.div_(processes.size)
    work = dist.all_reduce(gradients, group=processes.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
