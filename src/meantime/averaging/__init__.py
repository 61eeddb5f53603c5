"""Averagers: what acts in `average`, when, and the recipes made of them."""

from meantime.averaging.fragments import fragments as fragments
from meantime.averaging.fragments import partition as partition
from meantime.averaging.outer import OuterState as OuterState
from meantime.averaging.outer import outer as outer
from meantime.averaging.parameters import MeanState as MeanState
from meantime.averaging.parameters import average_params as average_params
from meantime.averaging.parameters import mean as mean
from meantime.averaging.periodic import AlternateState as AlternateState
from meantime.averaging.periodic import PeriodicState as PeriodicState
from meantime.averaging.periodic import alternate as alternate
from meantime.averaging.periodic import periodic as periodic
from meantime.averaging.recipes import diloco as diloco
from meantime.averaging.recipes import hierarchical_sgd as hierarchical_sgd
from meantime.averaging.recipes import local_sgd as local_sgd
from meantime.averaging.recipes import post_local_sgd as post_local_sgd
from meantime.averaging.recipes import slowmo as slowmo
from meantime.averaging.recipes import streaming_diloco as streaming_diloco
from meantime.averaging.slow_momentum import SlowMomentumState as SlowMomentumState
from meantime.averaging.slow_momentum import slow_momentum as slow_momentum
from meantime.averaging.trajectory import TrajectoryState as TrajectoryState
from meantime.averaging.trajectory import averaged_params as averaged_params
from meantime.averaging.trajectory import ema as ema
from meantime.averaging.trajectory import lawa as lawa
from meantime.averaging.trajectory import swa as swa
from meantime.averaging.warmup import WarmupState as WarmupState
from meantime.averaging.warmup import warmup_mean as warmup_mean
