"""The row kernels for NVIDIA GPUs, in Triton; `kernels.backend` chooses them, nothing else imports this package.

They are checked without a GPU in two ways. `tools/compile_kernels.py` compiles each of them to machine code and looks
at registers, spills and the width of memory accesses. The tests run them in Triton's interpreter, which executes the
same source with numpy, program by program, and is blind to:

- bfloat16 stores: it cuts the low bits off where a GPU rounds to nearest even. `launch.rounded` rounds before that,
  under a constexpr that is off on a GPU.
- bfloat16 `tl.dot`: it multiplies the raw bits. `linear` casts to float32 before the product, under a constexpr.
- races: programs and threads run one after another, so that a missing barrier goes unseen. The compile check looks for
  the barrier of the overlapping gradient in the machine code; tests/gpu runs it.
- precision: float32 `exp`, fused multiply-add and TF32 differ from numpy's; types that only the compiler refuses.
"""

from .gradient import logits_gradient
from .linear import linear_statistics
from .statistics import combine, merge, vocab_statistics
from .token_loss import KINDS, token_loss

__all__ = ["KINDS", "combine", "linear_statistics", "logits_gradient", "merge", "token_loss", "vocab_statistics"]
