"""The stateful side: our transforms behind the interfaces of classic training scripts."""

from meantime.adapters.averaging_optimizer import AveragingOptimizer as AveragingOptimizer
