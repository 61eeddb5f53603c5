"""Pure functional optimizers for training with periodic parameter averaging.

Each replica trains on its own in the meantime; then they take the mean.
"""

from meantime import schedules as schedules
from meantime.averaging import AlternateState as AlternateState
from meantime.averaging import MeanState as MeanState
from meantime.averaging import OuterState as OuterState
from meantime.averaging import PeriodicState as PeriodicState
from meantime.averaging import SlowMomentumState as SlowMomentumState
from meantime.averaging import WarmupState as WarmupState
from meantime.averaging import alternate as alternate
from meantime.averaging import average_params as average_params
from meantime.averaging import diloco as diloco
from meantime.averaging import hierarchical_sgd as hierarchical_sgd
from meantime.averaging import local_sgd as local_sgd
from meantime.averaging import mean as mean
from meantime.averaging import outer as outer
from meantime.averaging import periodic as periodic
from meantime.averaging import post_local_sgd as post_local_sgd
from meantime.averaging import slow_momentum as slow_momentum
from meantime.averaging import slowmo as slowmo
from meantime.averaging import warmup_mean as warmup_mean
from meantime.optimizers import AdamState as AdamState
from meantime.optimizers import ScheduleState as ScheduleState
from meantime.optimizers import TraceState as TraceState
from meantime.optimizers import adam as adam
from meantime.optimizers import adamw as adamw
from meantime.optimizers import add_decayed_weights as add_decayed_weights
from meantime.optimizers import clip as clip
from meantime.optimizers import clip_by_global_norm as clip_by_global_norm
from meantime.optimizers import scale as scale
from meantime.optimizers import scale_by_adam as scale_by_adam
from meantime.optimizers import scale_by_learning_rate as scale_by_learning_rate
from meantime.optimizers import scale_by_schedule as scale_by_schedule
from meantime.optimizers import sgd as sgd
from meantime.optimizers import trace as trace
from meantime.replicas import Distributed as Distributed
from meantime.replicas import NamedAxis as NamedAxis
from meantime.replicas import Recorded as Recorded
from meantime.replicas import Replicas as Replicas
from meantime.replicas import Solo as Solo
from meantime.replicas import Vmapped as Vmapped
from meantime.state import find as find
from meantime.state import find_all as find_all
from meantime.state import load_state_dict as load_state_dict
from meantime.state import state_dict as state_dict
from meantime.transform import EmptyState as EmptyState
from meantime.transform import Transform as Transform
from meantime.transform import apply_updates as apply_updates
from meantime.transform import chain as chain
from meantime.transform import forwards as forwards
from meantime.transform import identity as identity
from meantime.transform import named_chain as named_chain
from meantime.transform import pick as pick
from meantime.transform import step as step
from meantime.tree import leafwise as leafwise
