"""Post-local SGD in `DistributedDataParallel`: torch's communication hook `post_localSGD_hook`."""

# No postponed annotations here: DistributedDataParallel compares those of a hook.

from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from meantime.adapters.ddp_hook import mean_of
from meantime.adapters.dropin.averagers import ModelAverager
from meantime.adapters.dropin.processes import members, same_node
from meantime.replicas import Distributed, Solo
from meantime.schedules import check_integer


class PostLocalSGDState:
    """How long gradients are averaged over all processes, and over which ones afterwards.

    As in torch, backward passes that exchange gradients are counted: with gradient accumulation
    outside of `no_sync()` there are several to a step. Given an `averager`, its steps count
    instead. The state can be copied and pickled, groups included.

    Args:
        process_group: all processes; the default group if None.
        subgroup: the processes that average their gradients after the warm-up. If None, those
            of the same node: `LOCAL_WORLD_SIZE` consecutive ones (torchrun sets it), all
            processes if it is not set.
        start_localSGD_iter: the length of the warm-up.
        post_local_gradient_allreduce: whether gradients are averaged at all after the warm-up.
        averager: the averager whose steps count.

    Attributes:
        iter: what was counted, up to the end of the warm-up.

    Raises:
        ValueError: a negative warm-up.
        TypeError: it is not an integer.
    """

    def __init__(
        self,
        process_group: Any,
        subgroup: Any,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
        *,
        averager: ModelAverager | None = None,
    ):
        self.start_localSGD_iter = check_integer("start_localSGD_iter", start_localSGD_iter, 0)
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.averager = averager
        self.iter = 0
        self._all = members(process_group)
        self._near = None if subgroup is None else members(subgroup)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint needs: `iter`."""
        return {"iter": self.iter}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore what `state_dict` returned."""
        self.iter = check_integer("iter", state_dict["iter"], 0)

    def _participants(self, last_bucket: bool) -> Distributed | Solo | None:
        """Over whom a bucket of gradients is averaged."""
        if self.averager is not None:
            self.iter = min(self.averager.step, self.start_localSGD_iter)
        if self.iter < self.start_localSGD_iter:
            if last_bucket and self.averager is None:
                self.iter += 1
            return self._all
        if not self.post_local_gradient_allreduce:
            return None
        if self._near is None:
            self._near = same_node()
        return self._near


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[Tensor]:
    """A communication hook: average gradients over all processes, after a warm-up over some.

    Args:
        state: how long, and over which ones.
        bucket: gradients of this process.

    Returns:
        A future of the averaged gradients.

    Example:
        >>> from meantime.adapters.dropin import PostLocalSGDState, post_localSGD_hook
        >>> def register(model):  # a DistributedDataParallel
        ...     state = PostLocalSGDState(None, None, start_localSGD_iter=100)
        ...     model.register_comm_hook(state, post_localSGD_hook)
    """
    return mean_of(bucket.buffer(), state._participants(bucket.is_last()))
