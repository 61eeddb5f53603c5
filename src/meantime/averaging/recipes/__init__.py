"""Published algorithms as compositions of a few lines, with the papers' defaults where they have.

A recipe takes the inner optimizer first; `identity()` where a `torch.optim` optimizer does the
local steps. (`demo` is an optimizer itself.) Every period is in local steps.
"""

from meantime.averaging.recipes.compressed import demo as demo
from meantime.averaging.recipes.compressed import sparse_loco as sparse_loco
from meantime.averaging.recipes.federated import fedadagrad as fedadagrad
from meantime.averaging.recipes.federated import fedadam as fedadam
from meantime.averaging.recipes.federated import fedavg as fedavg
from meantime.averaging.recipes.federated import fedavgm as fedavgm
from meantime.averaging.recipes.federated import fedprox as fedprox
from meantime.averaging.recipes.federated import fedyogi as fedyogi
from meantime.averaging.recipes.local import desloc as desloc
from meantime.averaging.recipes.local import hierarchical_sgd as hierarchical_sgd
from meantime.averaging.recipes.local import local_sgd as local_sgd
from meantime.averaging.recipes.local import post_local_sgd as post_local_sgd
from meantime.averaging.recipes.lookahead import lookahead as lookahead
from meantime.averaging.recipes.lookahead import snoo as snoo
from meantime.averaging.recipes.outer import bmuf as bmuf
from meantime.averaging.recipes.outer import diloco as diloco
from meantime.averaging.recipes.outer import slowmo as slowmo
from meantime.averaging.recipes.outer import streaming_diloco as streaming_diloco
