"""What lets SGLang's ordinary wheel run without a GPU: a folder for the PYTHONPATH of the server alone.

SGLang 0.5.23 has a CPU back end, but its wheel is built for CUDA; three of its imports or calls fail without one. Each
is answered by one file in `shims/`, none of which changes what is computed:

- `sgl_kernel/`: kernels that the wheel of `sglang-kernel` holds for CUDA. SGLang imports names from it and, on a CPU
  without AMX, calls none of them; one that is called raises.
- `sitecustomize.py`: PyPI's torchvision is built against CUDA as well, so its operators are not registered; SGLang
  imports it for models with images.
- `megatron_rl_sglang_cpu.py`: a plugin by SGLang's own mechanism; the buffer of routed experts is allocated without
  being pinned for CUDA.
"""

from __future__ import annotations

from pathlib import Path

SHIMS = Path(__file__).resolve().parent / "shims"
