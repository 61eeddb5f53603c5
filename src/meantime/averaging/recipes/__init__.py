"""Published algorithms as compositions of a few lines, each with the paper's defaults.

Every recipe takes the inner optimizer first; `identity()` where a `torch.optim` optimizer does
the local steps. Every period is in local steps.
"""

from meantime.averaging.recipes.local import hierarchical_sgd as hierarchical_sgd
from meantime.averaging.recipes.local import local_sgd as local_sgd
from meantime.averaging.recipes.local import post_local_sgd as post_local_sgd
from meantime.averaging.recipes.outer import diloco as diloco
from meantime.averaging.recipes.outer import slowmo as slowmo
from meantime.averaging.recipes.outer import streaming_diloco as streaming_diloco
