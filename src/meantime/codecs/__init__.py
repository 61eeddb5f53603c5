"""How a message is compressed, for `mean(codec=...)`.

| codec | bytes a value | of what is sent |
|---|---|---|
| `bf16()`, `fp16()` | 2 | rounded to half precision |
| `int8()`, `int4()` | 1, 1/2 | whole multiples of a scale, one scale a block |
| `topk(fraction)` | 6 `fraction` | the largest values of every block, exactly |
| `dct(codec)` | those of the codec | frequencies instead of values |

Compress differences (gradients, pseudo-gradients), not parameters: the error is relative to the
values of a block, and what parameters gain in a step is far smaller than they are.
`error_feedback` adds what one message lost to the next.

`powersgd(rank)` takes the place of `mean(codec=...)`: it sends matrices of low rank.
"""

from meantime.codecs.base import Codec as Codec
from meantime.codecs.casting import bf16 as bf16
from meantime.codecs.casting import fp16 as fp16
from meantime.codecs.cosine import dct as dct
from meantime.codecs.feedback import ErrorFeedbackState as ErrorFeedbackState
from meantime.codecs.feedback import error_feedback as error_feedback
from meantime.codecs.low_rank import PowerSGDState as PowerSGDState
from meantime.codecs.low_rank import powersgd as powersgd
from meantime.codecs.quantization import int4 as int4
from meantime.codecs.quantization import int8 as int8
from meantime.codecs.sparsification import topk as topk
