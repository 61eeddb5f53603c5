"""DiLoCo against plain averaging, one replica and data parallel training.

    python examples/reproduce/diloco.py

Douillard et al. 2023 (https://arxiv.org/abs/2311.08105).
"""

from functools import partial

from common import Claim, Experiment, Method, text
from report import main

import meantime as mt

PERIODS = 10, 50, 250
AVERAGING = {h: f"plain averaging, H={h}" for h in PERIODS}
DILOCO = {h: f"DiLoCo, H={h}" for h in PERIODS}


def methods(steps: int) -> dict[str, Method]:
    def inner(rate: float = 2e-3) -> mt.Transform:
        return mt.adamw(mt.schedules.warmup_cosine(rate, warmup=steps // 30, steps=steps))

    def diloco(every: int, codec: mt.Codec | None = None) -> mt.Transform:
        return mt.diloco(inner(), every, codec=codec, last=steps)

    return {
        "one replica": Method(inner(), replicas=1),
        "data parallel": Method(mt.chain(mt.mean(), inner())),
        "data parallel, 3 x rate": Method(mt.chain(mt.mean(), inner(6e-3))),
        **{AVERAGING[h]: Method(mt.local_sgd(inner(), h, last=steps)) for h in PERIODS},
        **{DILOCO[h]: Method(diloco(h)) for h in PERIODS},
        "DiLoCo, H=50 bf16": Method(diloco(50, mt.codecs.bf16())),
        "DiLoCo, H=50 int4": Method(diloco(50, mt.codecs.int4())),
        "DiLoCo, H=50 non-iid": Method(diloco(50), shared=False),
    }


as_good = partial(Claim, as_good=True)
EXPERIMENT = Experiment(
    name="diloco",
    title="DiLoCo: eight replicas learn to predict the next character",
    task=text,
    steps=1500,
    methods=methods,
    measures=("synchronisations", "megabytes", "loss"),
    axes=("megabytes", "loss"),
    claims=(
        *(
            Claim(f"DiLoCo, H={h}, is better than data parallel", DILOCO[h], "data parallel")
            for h in PERIODS
        ),
        *(
            Claim(f"DiLoCo is better than plain averaging, H={h}", DILOCO[h], AVERAGING[h])
            for h in PERIODS
        ),
        Claim("plain averaging is better than one replica", AVERAGING[250], "one replica"),
        Claim("H=50 is worse than H=10", DILOCO[10], DILOCO[50]),
        Claim("H=250 is worse than H=50", DILOCO[50], DILOCO[250]),
        as_good("bf16 messages are as good", "DiLoCo, H=50 bf16", DILOCO[50]),
        as_good("int4 messages are as good", "DiLoCo, H=50 int4", DILOCO[50]),
        as_good("shares of different text are as good", "DiLoCo, H=50 non-iid", DILOCO[50]),
    ),
)

if __name__ == "__main__":
    main(EXPERIMENT)
