"""Drop-in replacements for the averagers of torch and accelerate.

The names, signatures, schedules and checkpoints of `torch.distributed.algorithms.model_averaging`,
`torch.distributed.optim.PostLocalSGDOptimizer`, the post-local SGD communication hook, and
`accelerate.local_sgd`. To migrate a script, change the imports. What happens to the parameters is
done by the transforms of this library: which parameters take part and when they are averaged is
the same on every rank, parameters are written in place, and the mean is the one described in
`Replicas.mean`.
"""

from meantime.adapters.dropin.accelerate import LocalSGD as LocalSGD
from meantime.adapters.dropin.averagers import (
    HierarchicalModelAverager as HierarchicalModelAverager,
)
from meantime.adapters.dropin.averagers import PeriodicModelAverager as PeriodicModelAverager
from meantime.adapters.dropin.hook import PostLocalSGDState as PostLocalSGDState
from meantime.adapters.dropin.hook import post_localSGD_hook as post_localSGD_hook
from meantime.adapters.dropin.parameters import average_parameters as average_parameters
from meantime.adapters.dropin.parameters import (
    average_parameters_or_parameter_groups as average_parameters_or_parameter_groups,
)
from meantime.adapters.dropin.parameters import get_params_to_average as get_params_to_average
from meantime.adapters.dropin.post_local_sgd import PostLocalSGDOptimizer as PostLocalSGDOptimizer
