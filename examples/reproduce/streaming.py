"""Streaming DiLoCo: one fragment of the parameters at a time, and its result used later.

    python examples/reproduce/streaming.py

Douillard et al. 2025 (https://arxiv.org/abs/2501.18512).
"""

from functools import partial

from common import Claim, Experiment, Method, text
from report import main

import meantime as mt

EVERY, FRAGMENTS = 60, 4
DELAYS = 0, 1, 5
STREAMING = {tau: f"streaming DiLoCo, τ={tau}" for tau in DELAYS}
DILOCO = f"DiLoCo, H={EVERY}"


def methods(steps: int) -> dict[str, Method]:
    inner = mt.adamw(mt.schedules.warmup_cosine(2e-3, warmup=steps // 30, steps=steps))

    def streaming(delay: int, codec: mt.Codec | None = None) -> mt.Transform:
        return mt.streaming_diloco(inner, EVERY, FRAGMENTS, delay=delay, merge=0.5, codec=codec)

    return {
        DILOCO: Method(mt.diloco(inner, EVERY)),
        **{STREAMING[tau]: Method(streaming(tau)) for tau in DELAYS},
        "streaming DiLoCo, τ=5 int4": Method(streaming(5, mt.codecs.int4())),
    }


as_good = partial(Claim, as_good=True)
EXPERIMENT = Experiment(
    name="streaming",
    title=f"Streaming DiLoCo: {FRAGMENTS} fragments, each every {EVERY} steps",
    task=text,
    steps=1500,
    methods=methods,
    measures=("synchronisations", "megabytes", "peak", "loss"),
    axes=("peak", "loss"),
    claims=(
        *(as_good(f"τ={tau} is as good as DiLoCo", STREAMING[tau], DILOCO) for tau in DELAYS),
        as_good("4 bits are as good as 32", f"{STREAMING[5]} int4", STREAMING[5]),
        as_good("all in all no more is sent", STREAMING[5], DILOCO, "megabytes"),
        Claim("in no step more than about a quarter", STREAMING[5], DILOCO, "peak", 0.275),
    ),
)

if __name__ == "__main__":
    main(EXPERIMENT)
