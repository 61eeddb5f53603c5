"""The stateful side: our transforms behind the interfaces of classic training scripts."""

from meantime.adapters.arena import arena as arena
from meantime.adapters.averaging_optimizer import AveragingOptimizer as AveragingOptimizer
from meantime.adapters.ddp_hook import post_local_hook as post_local_hook
from meantime.adapters.from_torch import TorchState as TorchState
from meantime.adapters.from_torch import from_torch as from_torch
from meantime.adapters.synchronisation import Synchronisation as Synchronisation
from meantime.adapters.transform_optimizer import TransformOptimizer as TransformOptimizer
