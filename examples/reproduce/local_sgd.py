"""Local SGD and its relatives on handwritten digits, by the number of synchronisations.

    python examples/reproduce/local_sgd.py

Local SGD: Stich 2019 (https://arxiv.org/abs/1805.09767). Post-local and hierarchical: Lin et al.
2020 (https://arxiv.org/abs/1808.07217). SlowMo: Wang et al. 2020
(https://arxiv.org/abs/1910.00643). QSR: Gu et al. 2024 (https://arxiv.org/abs/2310.14423).
Gossip: Lian et al. 2017 (https://arxiv.org/abs/1705.09056), Assran et al. 2019
(https://arxiv.org/abs/1811.10792).
"""

from functools import partial

from common import Claim, Experiment, Method
from report import main

import meantime as mt
from meantime.cli import tasks

PERIODS = 1, 4, 16, 64, 300
LOCAL = {h: f"local SGD, H={h}" for h in PERIODS}


def methods(steps: int) -> dict[str, Method]:
    rate = mt.schedules.cosine(0.1, steps)
    inner = mt.sgd(rate, momentum=0.9)
    qsr = mt.schedules.qsr(rate, alpha=0.1, base=4)
    levels = {"node": 4, "world": 16}
    own = {
        "data parallel": mt.chain(mt.mean(), inner),
        **{LOCAL[h]: mt.local_sgd(inner, h, last=steps) for h in PERIODS},
        "one mean at the end": mt.local_sgd(inner, steps),
        "post-local SGD, H=16": mt.post_local_sgd(inner, 16, steps // 2, last=steps),
        "QSR": mt.local_sgd(inner, qsr, last=steps),
        "SlowMo, H=16": mt.slowmo(inner, rate, 16, momentum=0.5, last=steps),
        "SlowMo, H=64": mt.slowmo(inner, rate, 64, momentum=0.5, last=steps),
        "gossip, ring": mt.chain(inner, mt.gossip("ring")),
        "gossip, exponential": mt.chain(inner, mt.gossip("exponential")),
    }
    return {
        "one replica": Method(inner, replicas=1),
        **{name: Method(tx, shared=False) for name, tx in own.items()},
        "hierarchical": Method(
            mt.hierarchical_sgd(inner, levels, last=steps), shared=False, node=4
        ),
    }


accuracy, train = (partial(Claim, measure=measure) for measure in ("accuracy", "train"))
as_good = partial(accuracy, as_good=True)
EXPERIMENT = Experiment(
    name="local_sgd",
    title="Local SGD: eight replicas learn to read digits, each from 500 of its own",
    task=tasks.mnist,
    steps=600,
    methods=methods,
    measures=("synchronisations", "megabytes", "accuracy", "train"),
    axes=("synchronisations", "accuracy"),
    claims=(
        as_good("H=1 is as good as data parallel", LOCAL[1], "data parallel"),
        as_good("H=4 is as good as H=1", LOCAL[4], LOCAL[1]),
        as_good("H=16 is as good as H=1", LOCAL[16], LOCAL[1]),
        accuracy("H=64 is worse than H=16", LOCAL[64], LOCAL[16]),
        accuracy("H=300 is worse than H=64", LOCAL[300], LOCAL[64]),
        train("H=4 has a lower training loss than H=16", LOCAL[4], LOCAL[16]),
        train("H=16 has a lower training loss than H=64", LOCAL[16], LOCAL[64]),
        as_good("post-local is as good as data parallel", "post-local SGD, H=16", "data parallel"),
        as_good("QSR is as good as H=4", "QSR", LOCAL[4]),
        Claim("QSR takes two thirds of H=4's rounds", "QSR", LOCAL[4], "synchronisations", 0.67),
        train("SlowMo has a lower training loss, H=16", "SlowMo, H=16", LOCAL[16]),
        train("SlowMo has a lower training loss, H=64", "SlowMo, H=64", LOCAL[64]),
        as_good("hierarchical is as good as H=4", "hierarchical", LOCAL[4]),
        as_good("gossip on a ring is as good as data parallel", "gossip, ring", "data parallel"),
        as_good("so is one-peer exponential", "gossip, exponential", "data parallel"),
    ),
)

if __name__ == "__main__":
    main(EXPERIMENT)
