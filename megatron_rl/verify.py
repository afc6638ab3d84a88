"""Log-probs of Megatron against those of transformers on the same texts, and the first layer where they part.

Both models are held whole, in fp32, in this process: this checks a conversion, it is no conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.cluster.bootstrap import Place
from megatron_rl.config import read_hf_config
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.files import regular
from megatron_rl.policy import distributed
from megatron_rl.policy.model import build_model
from megatron_rl.policy.sharded_state import load_weights
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert.opened import open_checkpoint
from megatron_rl.weights.convert.torch_dist import find_torch_dist
from megatron_rl.weights.load import load_hf_weights

SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and then it goes home.",
    "To make 24 from 3, 5 and 7 one may try sums, differences and products of these numbers.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "Water boils at a lower temperature on a mountain than at sea level, because the air is thinner there.",
    "Le train de nuit part à vingt-deux heures et arrive le lendemain matin.",
    "Yes.",
)
MAX_TOKENS = 1024
"""Of one text; what is longer is cut."""
_TIMEOUT_S = 600


@dataclass(frozen=True)
class Verdict:
    """What `verify_log_probs` found; log-probs are natural logarithms of next-token probabilities."""

    texts: int
    tokens: int
    max_abs: float
    mean_abs: float
    tolerance: float
    first_deviation: str | None
    """The first module whose outputs differ, in transformers' words, with the relative difference; None when equal."""

    @property
    def is_equal(self) -> bool:
        return self.max_abs <= self.tolerance


def read_texts(file: Path) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
        WeightsError: it cannot be read, or has none.
    """
    try:
        lines = [line for line in regular(file).read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"{file}: cannot be read ({error}); give a text file with one text a line") from error
    if not lines:
        raise WeightsError(f"{file}: holds no text; give one a line")
    return lines


def verify_log_probs(weights: Path, reference: Path, texts: Sequence[str], tolerance: float) -> Verdict:
    """Compare Megatron with `weights` (of either format) and transformers with the Hugging Face directory `reference`.

    Raises:
        WeightsError: either is missing or damaged, the weights do not fit the model, or no text has two tokens.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # What is missing, damaged or of another model is said here, in one message.
    theirs_on_disk = open_checkpoint(reference)
    if find_torch_dist(reference) is not None:
        raise WeightsError(
            f"{reference}: a Megatron checkpoint, which transformers cannot read; name the Hugging Face directory to "
            "compare with (--hf)"
        )
    theirs_on_disk.as_hf()
    open_checkpoint(weights, reference).as_hf()
    try:
        tokenizer = AutoTokenizer.from_pretrained(reference)
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{reference}: no tokenizer that transformers reads ({str(error).splitlines()[0]}); copy it from the model"
        ) from error
    ids = [torch.tensor(tokenizer(text).input_ids[:MAX_TOKENS]) for text in texts]
    ids = [tokens for tokens in ids if len(tokens) > 1]
    if not ids:
        raise WeightsError(f"{reference}: its tokenizer makes no text of two tokens; give longer ones")
    theirs = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval()
    with torch.no_grad(), one_rank():
        ours = _Megatron(weights, reference)
        gaps = [
            (_log_probs(ours(tokens), tokens) - _log_probs(theirs(tokens[None]).logits[0], tokens)).abs()
            for tokens in ids
        ]
        # A NaN on one side is a difference that no comparison of numbers shows.
        worst = [float(gap.nan_to_num(nan=float("inf")).max()) for gap in gaps]
        deviation = None
        if not max(worst) <= tolerance:
            deviation = _first_deviation(ours, theirs, ids[worst.index(max(worst))])
    every = torch.cat(gaps)
    return Verdict(len(ids), len(every), max(worst), float(every.mean()), tolerance, deviation)


@contextmanager
def one_rank() -> Iterator[None]:
    """A world of this process alone, whatever the environment says."""
    distributed.initialize(Place(0, 1, 0, _Alone()), ParallelConfig(), 0, _TIMEOUT_S, "cpu")
    try:
        yield
    finally:
        distributed.shutdown()


class _Alone:
    """Nobody else is to be met."""

    def meet(self, serve: Callable[[], tuple[Any, int]], connect: object, timeout_s: float) -> Any:
        store, _ = serve()
        return store


class _Megatron:
    """The model, and what it computes for one text."""

    def __init__(self, weights: Path, reference: Path) -> None:
        hf, cfg = read_hf_config(reference), ModelConfig(path=str(reference), dtype="float32")
        (chunk,) = build_model(hf, cfg, ParallelConfig())
        self.model, self._vocab_size = chunk.eval(), hf.vocab_size
        folder = find_torch_dist(weights)
        if folder is None:
            load_hf_weights([self.model], hf, weights)
        else:
            load_weights(folder, [self.model])

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [T, vocab_size]."""
        from megatron.core.packed_seq_params import PackedSeqParams

        bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=len(tokens),
            max_seqlen_kv=len(tokens),
        )
        hidden = self.model(tokens[None], None, None, packed_seq_params=packed)[0]
        return hidden @ self.model.output_weight[: self._vocab_size].T


def _log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def _first_deviation(ours: _Megatron, theirs: Any, tokens: Tensor, tolerance: float = 1e-4) -> str:
    """The first module, in the order of the network, whose outputs differ by more than `tolerance` of the largest."""
    decoder, base = ours.model.decoder, theirs.model
    own = _modules(ours.model.embedding, decoder.layers, "self_attention", decoder.final_layernorm)
    mine = _outputs(own, lambda: ours(tokens))
    expected = _outputs(_modules(base.embed_tokens, base.layers, "self_attn", base.norm), lambda: theirs(tokens[None]))
    for name in mine:
        a, b = mine[name].reshape(len(tokens), -1), expected[name].reshape(len(tokens), -1)
        gap = float(((a - b).abs().max() / b.abs().max()).nan_to_num(nan=float("inf")))
        if not gap <= tolerance:
            return f"{name} (outputs differ by {gap:.1e} of their largest)"
    return "lm_head (all layers agree)"


def _modules(embedding: Any, layers: Any, attention: str, norm: Any) -> dict[str, Any]:
    """By transformers' names, in the order of the network; `attention`: what a layer calls its own."""
    found: dict[str, Any] = {"model.embed_tokens": embedding}
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{index}"
        found |= {f"{prefix}.self_attn": getattr(layer, attention), f"{prefix}.mlp": layer.mlp, prefix: layer}
    return found | {"model.norm": norm}


def _outputs(modules: dict[str, Any], call: Callable[[], object]) -> dict[str, Tensor]:
    """What each module returned in one call, under its name."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: object, __: object, output: Any) -> None:
            # A copy: Megatron adds the residual in place.
            found[name] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(keep(name)).remove)
        call()
    return found
