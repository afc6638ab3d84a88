#!/usr/bin/env python3
"""Loads a converted checkpoint by Megatron-LM's own `load_checkpoint`, on one CPU, and compares all weights.

    git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM megatron-lm
    python tools/load_with_megatron_lm.py megatron-lm megatron/Qwen3-0.6B --hf models/Qwen3-0.6B

The arguments are those of the checkpoint (`--use-checkpoint-args`), and the few that Megatron-LM does not take from
there. The model is Megatron-Core's GPTModel with its local layer spec: Transformer Engine needs a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = """
--use-checkpoint-args --auto-detect-ckpt-format --ckpt-format torch_dist --no-load-optim --no-load-rng
--micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 2 --transformer-impl local --use-cpu-initialization
--attention-backend unfused --no-persist-layer-norm --no-gradient-accumulation-fusion --no-rope-fusion
--no-bias-dropout-fusion --no-bias-swiglu-fusion --no-masked-softmax-fusion
"""


def main() -> int:
    """Load and compare; 0 when every tensor is the source's, bit for bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "megatron_lm", type=Path, help="a clone of Megatron-LM, of the installed Megatron-Core's version"
    )
    parser.add_argument("checkpoint", type=Path, help="what `convert hf-to-megatron` has written")
    parser.add_argument("--hf", type=Path, required=True, help="what it was written from")
    asked = parser.parse_args()
    sys.path[:0] = [str(asked.megatron_lm), str(ROOT)]
    found = load(asked.checkpoint, asked.hf)
    from safetensors.torch import load_file

    source = {name: tensor for file in asked.hf.glob("*.safetensors") for name, tensor in load_file(file).items()}
    wrong = [name for name in source if name not in found or not found[name].equal(source[name])]
    print(f"{len(source)} tensors, {len(wrong)} wrong" + "".join(f"\n  {name}" for name in wrong[:10]))
    return 1 if wrong else 0


def load(checkpoint: Path, hf_dir: Path) -> dict[str, Any]:
    """The weights of Megatron-LM's model afterwards, by Hugging Face name."""
    from megatron_rl import cpu_backend
    from megatron_rl.config import read_hf_config
    from megatron_rl.verify import one_rank
    from megatron_rl.weights.export import export_hf_weights

    hf = read_hf_config(hf_dir)
    with one_rank():
        from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
        from megatron.training import arguments, checkpointing, global_vars

        checkpointing.torch = cpu_backend.torch_without_cuda()
        sys.argv = ["", "--load", str(checkpoint), *OPTIONS.split(), "--norm-epsilon", str(hf.rms_norm_eps)]
        sys.argv += ["--qk-layernorm"] if hf.qk_norm else []
        os.environ.update(RANK="0", WORLD_SIZE="1")
        args, _ = checkpointing.load_args_from_checkpoint(arguments.parse_args())
        args.vocab_size = None  # the padded size is the checkpoint's
        arguments.validate_args(args)
        global_vars.set_args(args)
        init_num_microbatches_calculator(0, None, 1, 1, 1, False)
        model = _model(args, arguments.core_transformer_config_from_args(args))
        checkpointing.load_checkpoint([model], None, None)
        return dict(export_hf_weights([model], hf))


def _model(args: Any, config: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    for layer in spec.layer_specs:
        if issubclass(layer.submodules.mlp.module, MoELayer):
            # As Transformer Engine's spec stores it; the local one names it as if it were fused with the experts.
            layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


if __name__ == "__main__":
    sys.exit(main())
