"""Blocks for multi-token prediction change nothing of the hidden states that the model hands on."""

import pytest
import torch

from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import layout, make_config
from tests.tiny import tiny_model

pytestmark = pytest.mark.parallel

VOCAB, TOKENS = 128, 12


def build(kind, path, tied, predicted):
    """A GPTModel or PolicyModel with `predicted` blocks of multi-token prediction; equal names have equal weights."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from megatron_rl.config import read_hf_config
    from megatron_rl.policy.layer_spec import block_spec
    from megatron_rl.policy.model import rotary_frequencies, transformer_config

    cfg, hf = make_config(path), read_hf_config(path)
    config = transformer_config(hf, cfg.model, cfg.parallel)
    config.mtp_num_layers = predicted or None
    spec = block_spec(config, rotary_frequencies(hf), None)
    model = kind(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=64,
        position_embedding_type="none",
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if predicted else None,
    )
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(sum(name.encode())))
    return model


def run_models(path):
    """In a rank: by whether embeddings are tied, logits of Megatron's model, and of ours with a second prediction."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_rl.policy.gpt import PolicyModel

    tokens = torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    borders = torch.tensor([0, 5, TOKENS], dtype=torch.int32)
    packed = PackedSeqParams("thd", borders, borders, max_seqlen_q=7, max_seqlen_kv=7)
    inputs = (tokens, torch.arange(TOKENS)[None], None)
    found = {}
    with layout(make_config(path), alone=True):
        for tied in (False, True):
            model = build(PolicyModel, path, tied, 1)
            assert any("mtp" in name for name, _ in model.named_parameters())
            hidden = model(*inputs, packed_seq_params=packed).detach()
            logits = build(GPTModel, path, tied, 0)(*inputs, packed_seq_params=packed).detach()
            found[tied] = logits, (hidden @ model.output_weight.t()).detach()
    return found


def test_hidden_states_are_those_of_the_model_without_other_heads(tmp_path):
    path = tiny_model(tmp_path / "tiny", layers=2, vocab_size=VOCAB)
    for logits, projected in run_ranks(1, run_models, str(path))[0].values():
        assert logits.shape == (1, TOKENS, VOCAB)
        torch.testing.assert_close(projected, logits, rtol=1e-5, atol=1e-5)
