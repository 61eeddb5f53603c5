"""Gradient transforms: what acts in `update`. One algorithm a file."""

from meantime.optimizers.adam import AdamState as AdamState
from meantime.optimizers.adam import adam as adam
from meantime.optimizers.adam import adamw as adamw
from meantime.optimizers.adam import scale_by_adam as scale_by_adam
from meantime.optimizers.adaptive import ServerMomentsState as ServerMomentsState
from meantime.optimizers.adaptive import scale_by_server_moments as scale_by_server_moments
from meantime.optimizers.clipping import clip as clip
from meantime.optimizers.clipping import clip_by_global_norm as clip_by_global_norm
from meantime.optimizers.decay import add_decayed_weights as add_decayed_weights
from meantime.optimizers.delayed_nesterov import DelayedNesterovState as DelayedNesterovState
from meantime.optimizers.delayed_nesterov import delayed_nesterov as delayed_nesterov
from meantime.optimizers.lion import LionState as LionState
from meantime.optimizers.lion import lion as lion
from meantime.optimizers.lion import scale_by_lion as scale_by_lion
from meantime.optimizers.scaling import ScheduleState as ScheduleState
from meantime.optimizers.scaling import scale as scale
from meantime.optimizers.scaling import scale_by_learning_rate as scale_by_learning_rate
from meantime.optimizers.scaling import scale_by_schedule as scale_by_schedule
from meantime.optimizers.scaling import scale_by_sign as scale_by_sign
from meantime.optimizers.sgd import TraceState as TraceState
from meantime.optimizers.sgd import sgd as sgd
from meantime.optimizers.sgd import trace as trace
