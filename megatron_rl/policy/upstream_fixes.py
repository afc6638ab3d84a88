"""Corrects faults of Megatron-Core that show, on any device, where Transformer Engine and Apex are absent.

Without them the distributed optimizer wraps torch.optim.Adam, and Megatron (0.16 to 0.19) mishandles its per-parameter
`step`. `apply()` is inert when either package is present. Routers ask for a function of Transformer Engine by a name
that is then not bound.
"""

from __future__ import annotations

from typing import Any


def apply_to_experts() -> None:
    """Install the corrections that a model with experts needs; a second call changes nothing.

    transformer/moe/moe_utils.py imports `te_general_gemm` within a `try` and later compares it with None.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def apply_to_latent_attention() -> None:
    """Install the correction that multi-head latent attention needs; a second call changes nothing.

    transformer/multi_latent_attention.py knows one layer that every rank holds as a whole, Transformer Engine's; the
    one it takes in its absence splits the features that all heads share, and loses gradients of theirs.
    """
    from megatron.core.transformer import multi_latent_attention

    from megatron_rl.policy.latent_attention import DuplicatedLinear

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = DuplicatedLinear


def apply() -> None:
    """Install the optimizer's corrections; a second call changes nothing."""
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer = distrib_optimizer.DistributedOptimizer
    if not getattr(optimizer.load_state_dict, "keeps_adam_step", False):
        _keep_adam_step(optimizer)


def _keep_adam_step(optimizer: Any) -> None:
    """optimizer/distrib_optimizer.py, two places.

    `_set_main_param_and_optimizer_states` copies every entry of the optimizer's state from the checkpoint's tensors,
    which hold no `step`: KeyError. `load_state_dict` gives all parameters one `step` tensor, which Adam then advances
    once per parameter.
    """
    set_states, load = optimizer._set_main_param_and_optimizer_states, optimizer.load_state_dict

    def set_states_with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        step = self.optimizer.state[main_param].get("step")
        set_states(self, model_param, tensors if step is None else {"step": step, **tensors})

    def load_with_own_steps(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    load_with_own_steps.keeps_adam_step = True  # type: ignore[attr-defined]
    optimizer._set_main_param_and_optimizer_states = set_states_with_step
    optimizer.load_state_dict = load_with_own_steps
