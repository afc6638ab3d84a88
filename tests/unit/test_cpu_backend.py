"""Every entry of the CPU backend is needed: without it, the Megatron code it names fails; with all, it works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_rl import cpu_backend
from tests.parallel.launch import run_ranks, this_rank

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU backend is inert on a machine with CUDA")

# ------------------------------------------------------ the Megatron code behind each entry; runs on two gloo ranks


def _alone() -> torch.distributed.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _config(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True, **options)


def _wrapped_linear() -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = _config()
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return [DistributedDataParallel(config, ddp_config, torch.nn.Linear(2, 2))]


def gradient_buffer() -> None:
    _wrapped_linear()


def send_nothing() -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    communicator = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), _config())
    communicator._communicate(
        tensor_send_next=None, tensor_send_prev=None, recv_prev=False, recv_next=False, tensor_shape=(1, 1, 1)
    )


def add_random_streams() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    before = torch.get_rng_state()
    tracker.add("a", 1)
    tracker.add("b", 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(tracker.states_["a"], tracker.states_["b"])


def fork_random_stream() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.states_["a"] = torch.Generator().manual_seed(1).get_state()
    before = torch.get_rng_state()
    with tracker.fork("a"):
        drawn = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(1)))


def dispatch_tokens() -> None:
    """Two tokens to two experts of this rank."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None  # it is kept by the class
    config = _config(num_moe_experts=2, moe_ffn_hidden_size=8, moe_router_topk=2, moe_token_dispatcher_type="alltoall")
    dispatcher = MoEAlltoAllTokenDispatcher(2, [0, 1], config, get_default_pg_collection())
    tokens, chosen = torch.arange(16.0).view(2, 1, 8), torch.ones(2, 2, dtype=torch.bool)
    dispatched = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(tokens, chosen, chosen.float()))
    arrived, counts, _ = dispatcher.dispatch_postprocess(*dispatched)
    assert counts.tolist() == [2, 2]
    assert torch.equal(arrived, tokens[:, 0].repeat(2, 1))


def exchange_tokens() -> None:
    """As Megatron's all_to_all does with more than one rank."""
    from megatron.core.transformer.moe import token_dispatcher

    splits = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([3]), as_numpy=True)
    arrived = torch.empty(3, 1)
    torch.distributed.all_to_all_single(arrived, torch.ones(3, 1), splits, splits, group=_alone())
    assert torch.equal(arrived, torch.ones(3, 1))


def gather_uneven_parts() -> None:
    """Rank 0 has one row and rank 1 two; the gradient of each is the sum of both ranks', 2 for a plain sum."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    world = torch.distributed.group.WORLD
    part = torch.full((world.rank() + 1, 3), float(world.rank()), requires_grad=True)
    whole = gather_from_sequence_parallel_region(part, group=world, output_split_sizes=[1, 2])
    whole.sum().backward()
    assert torch.equal(whole[:, 0], torch.tensor([0.0, 1.0, 1.0]))
    assert torch.equal(part.grad, torch.full_like(part, 2.0))


def run_schedule() -> None:
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    model = torch.nn.Linear(2, 2)
    model.model_type = ModelType.encoder_or_decoder
    model.config = _config(calculate_per_token_loss=True)
    model.set_input_tensor = lambda _: None

    def step(_: Any, model: Any) -> Any:
        return model(torch.ones(1, 2)), lambda out: (out.sum(), torch.ones((), dtype=torch.int), {})

    forward_backward_no_pipelining(
        forward_step_func=step,
        data_iterator=iter(()),
        model=model,
        num_microbatches=1,
        seq_length=1,
        micro_batch_size=1,
    )
    assert torch.equal(model.bias.grad, torch.ones(2))


def build_fp32_optimizer() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    config = OptimizerConfig(optimizer="adam", lr=0.1)
    assert FP32Optimizer(torch.optim.Adam([torch.zeros(1)]), config, lambda *_: None).get_loss_scale() == 1


def gradient_norm() -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    norm = get_grad_norm_fp32([torch.full((4,), 3.0)], grad_stats_parallel_group=_alone())
    assert norm == pytest.approx(6.0)


def build_distributed_optimizer() -> None:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True)
    get_megatron_optimizer(config, _wrapped_linear())


def tie_embedding_over_stages() -> None:
    """Megatron's own code on the first of two stages; the group of the tied copies is this rank alone."""
    from types import SimpleNamespace

    from megatron.core.models.common.language_module.language_module import LanguageModule

    weight = torch.nn.Parameter(torch.ones(2))
    stage = SimpleNamespace(
        pre_process=False,
        post_process=False,
        share_embeddings_and_output_weights=True,
        config=SimpleNamespace(pipeline_model_parallel_size=2, mtp_num_layers=0),
        vp_stage=None,
        vp_size=None,
        pp_group=_alone(),
        embd_group=_alone(),
        shared_embedding_or_output_weight=lambda: weight,
        _is_in_embd_group=lambda: True,
    )
    LanguageModule.setup_embeddings_and_output_layer(stage)
    assert torch.equal(weight.data, torch.ones(2))


CHECKS: dict[str, Callable[[], None]] = {
    "current_device": gradient_buffer,
    "synchronize": send_nothing,
    "rng_state": add_random_streams,
    "rng_tracker": fork_random_stream,
    "streams": dispatch_tokens,
    "split_sizes": exchange_tokens,
    "uneven_parts": gather_uneven_parts,
    "literals_schedules": run_schedule,
    "literals_optimizer": build_fp32_optimizer,
    "literals_clip_grads": gradient_norm,
    "literals_utils": gradient_norm,
    "tensor_type": build_distributed_optimizer,
    "tensor_cuda": tie_embedding_over_stages,
}


def try_all() -> dict[str, tuple[str, str]]:
    """By entry: what its check raised with the whole backend, and what without this entry ('' = nothing)."""
    from megatron_rl.config.parallel import ParallelConfig
    from megatron_rl.policy import distributed

    distributed.initialize(this_rank(), ParallelConfig(data_parallel_size=2), seed=1, timeout_s=60)
    outcomes = {}
    for name, check in CHECKS.items():
        raised = []
        for exclude in ((), (name,)):
            cpu_backend.uninstall()
            cpu_backend.install(exclude=exclude)
            try:
                check()
                raised.append("")
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")
        outcomes[name] = (raised[0], raised[1])
    cpu_backend.uninstall()
    cpu_backend.install()
    distributed.shutdown()
    return outcomes


# ---------------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[str, str]]:
    return run_ranks(2, try_all, timeout=120)[0]


def test_every_entry_has_a_check() -> None:
    assert [entry.name for entry in cpu_backend.ENTRIES] == list(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_entry_makes_its_place_work_and_is_needed_for_it(name: str, outcomes: dict[str, tuple[str, str]]) -> None:
    with_all, without = outcomes[name]
    assert with_all == ""
    assert without != ""


def test_uninstall_puts_everything_back() -> None:
    cpu_backend.uninstall()  # of an earlier test
    before = (torch.cuda.current_device, torch.Tensor.cuda, torch.Tensor.type)
    cpu_backend.install(exclude=[name for name in CHECKS if name.startswith(("literals", "rng"))])
    assert torch.zeros(1).cuda().device.type == "cpu"
    cpu_backend.uninstall()
    assert (torch.cuda.current_device, torch.Tensor.cuda, torch.Tensor.type) == before


def test_tensor_types_are_only_renamed_for_the_optimizer() -> None:
    cpu_backend.install(exclude=[name for name in CHECKS if name != "tensor_type"])
    assert torch.zeros(1).type() == "torch.FloatTensor"
    cpu_backend.uninstall()


def test_nothing_is_replaced_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    assert cpu_backend.install() is False
    assert torch.cuda.current_device is before
