"""Rows of a real vocabulary on the GPU, and their log-probs, entropy and gradient in float64; no tests here."""

import torch
from torch import Tensor

from megatron_rl.kernels.vocab_rows import Rows

VOCABULARY, PADDED = 151936, 152064


def random_logits(tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, PADDED] with a few high ones, as a model's; targets [T], a fifth masked; temperatures [T]."""
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(tokens, PADDED, generator=generator, device="cuda")
    top = torch.randint(0, VOCABULARY, (tokens, 8), generator=generator, device="cuda")
    logits.scatter_add_(1, top, 12 + 4 * torch.rand(tokens, 8, generator=generator, device="cuda"))
    logits[:, VOCABULARY:] = torch.nan
    target = top[:, 0].where(torch.rand(tokens, generator=generator, device="cuda") > 0.2, -1)
    temperature = 0.7 + torch.rand(tokens, generator=generator, device="cuda")
    return logits.to(dtype), target, temperature


def exact(logits: Tensor, target: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy [T] float64, differentiable, 0 at masked rows."""
    log_p = (logits.double()[:, :VOCABULARY] / temperature.double()[:, None]).log_softmax(1)
    live = target >= 0
    log_probs = log_p.gather(1, target.clamp(min=0)[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    return torch.where(live, log_probs, 0.0), torch.where(live, entropy, 0.0)


def live_rows(logits: Tensor, target: Tensor, temperature: Tensor) -> Rows:
    """What the row kernels are given."""
    index = (target >= 0).nonzero().squeeze(1)
    return Rows(logits, target[index], index, (1 / temperature[index])[:, None], VOCABULARY)
