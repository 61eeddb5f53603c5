"""Bytes against loss: what else averages, on the task of the other two.

    python examples/reproduce/diloco.py
    python examples/reproduce/streaming.py
    python examples/reproduce/pareto.py

Compressed gradients: PowerSGD, Vogels et al. 2019 (https://arxiv.org/abs/1905.13727). Eager
updates: Kale et al. 2025 (https://arxiv.org/abs/2502.12996). Overlap: Wang, Liang & Joshi 2020
(https://arxiv.org/abs/2002.09539). NoLoCo: Kolehmainen et al. 2025
(https://arxiv.org/abs/2506.10911). SparseLoCo: Sarfi et al. 2025
(https://arxiv.org/abs/2508.15706).
"""

from functools import partial

from common import Claim, Experiment, Method, text
from report import main

import meantime as mt

H = 50


def methods(steps: int) -> dict[str, Method]:
    rate = mt.schedules.warmup_cosine(2e-3, warmup=steps // 30, steps=steps)
    inner = mt.adamw(rate)
    qsr = mt.schedules.qsr(rate, alpha=6e-3, base=10, warmup=steps // 30)
    levels = {"node": 10, "world": H}
    # With DiLoCo's 0.7 and 0.9 the loss is 3.9: momentum overshoots on what comes a round late.
    eager = mt.outer(mt.chain(mt.eager_mean(), mt.sgd(0.4, momentum=0.6, nesterov=True)))
    transforms = {
        "data parallel, bf16": mt.chain(mt.mean(codec=mt.codecs.bf16()), inner),
        "data parallel, int8": mt.chain(mt.mean(codec=mt.codecs.int8()), inner),
        "PowerSGD, rank 4": mt.chain(mt.codecs.powersgd(4), inner),
        "post-local SGD, H=10": mt.post_local_sgd(inner, 10, steps // 4, last=steps),
        "QSR, H>=10": mt.local_sgd(inner, qsr, last=steps),
        "SlowMo, H=50": mt.slowmo(inner, rate, H, momentum=0.5, last=steps),
        "overlap, H=10": mt.chain(inner, mt.periodic(mt.overlapped(), 10, last=steps)),
        "gossip, exponential H=10": mt.chain(
            inner, mt.periodic(mt.gossip("exponential"), 10, last=steps)
        ),
        "NoLoCo, H=50": mt.chain(inner, mt.periodic(mt.noloco(), H, last=steps)),
        "eager updates, H=50": mt.chain(inner, mt.periodic(eager, H, last=steps)),
        "SparseLoCo, H=10": mt.sparse_loco(inner, 10, 1 / 32, last=steps),
    }
    return {
        **{name: Method(tx) for name, tx in transforms.items()},
        "hierarchical, H=10 and 50": Method(mt.hierarchical_sgd(inner, levels, last=steps), node=4),
    }


as_good = partial(Claim, as_good=True)
EXPERIMENT = Experiment(
    name="pareto",
    title="Bytes against loss: eight replicas learn to predict the next character",
    task=text,
    steps=1500,
    methods=methods,
    measures=("synchronisations", "megabytes", "peak", "loss"),
    axes=("megabytes", "loss"),
    claims=(
        as_good("gradients in 8 bits are as good", "data parallel, int8", "data parallel"),
        as_good("gradients of rank 4 are as good", "PowerSGD, rank 4", "data parallel"),
        as_good("eager updates are as good as DiLoCo", "eager updates, H=50", "DiLoCo, H=50"),
        as_good("NoLoCo is as good as DiLoCo", "NoLoCo, H=50", "DiLoCo, H=50"),
        Claim("SparseLoCo is better than DiLoCo", "SparseLoCo, H=10", "DiLoCo, H=10"),
        as_good("overlap is as good as averaging", "overlap, H=10", "plain averaging, H=10"),
        as_good(
            "gossip is as good as averaging", "gossip, exponential H=10", "plain averaging, H=10"
        ),
        as_good("hierarchical is, too", "hierarchical, H=10 and 50", "plain averaging, H=10"),
        Claim("SlowMo is better than averaging", "SlowMo, H=50", "plain averaging, H=50"),
    ),
    also=("diloco", "streaming"),
)

if __name__ == "__main__":
    main(EXPERIMENT)
