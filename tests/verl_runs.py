"""verl's real FSDP engine on the CPU, in a process of its own: without Ray, rollouts, or a GPU.

verl has no platform for CPUs. The one here answers what the engine asks; everything else is verl's own code.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import augtree_fx

SETTINGS = ("use_remove_padding", "use_fused_kernels")  # of the model's config that a batch repeats


def use_cpu() -> None:
    """Install a platform on which verl's device is the CPU."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class PlatformCPU(PlatformCUDA):
        device_name = "cpu"
        device_module = SimpleNamespace(
            empty_cache=lambda: None, memory_allocated=lambda: 0, memory_reserved=lambda: 0, mem_get_info=lambda: (0, 0)
        )

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return torch.device("cpu")

        def communication_backend_name(self) -> str:
            return "gloo"

    platform_manager.set_platform(PlatformCPU())


@dataclass
class Outcome:
    """What some updates of an engine computed.

    Attributes:
        losses, grad_norms: of each update.
        log_probs: of the policy before the first update, one row after another.
        reference: the same with the adapter switched off.
        names: of the weights that go to the rollout engine.
        groups: rows of each prompt, for each micro-batch.
        num_shared, fallbacks: as `augtree_fx.explain` has them.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    log_probs: Tensor | None = None
    reference: Tensor | None = None
    names: list[str] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    num_shared: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


def engine(path: str, **changes: Any) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    given = {"use_remove_padding": False, "lora_rank": 0, **changes}
    if given.get("use_fused_kernels"):
        given["fused_kernel_options"] = {"impl_backend": "torch"}
    model = HFModelConfig(path=path, load_tokenizer=False, override_config={"attn_implementation": "sdpa"}, **given)
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    fsdp = FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", mixed_precision=precision, use_torch_compile=False)
    made = FSDPEngineWithLMHead(model, fsdp, FSDPOptimizerConfig(lr=1e-3, total_training_steps=8), CheckpointConfig())
    made.initialize()
    return made


def batch(**settings: Any) -> Any:
    """Four groups of four rows, each group in two separate runs of rows, as verl's own batches hold them."""
    from verl.utils import tensordict_utils

    generator = torch.Generator().manual_seed(5)

    def tokens(number: int) -> Tensor:
        return torch.randint(3, 259, (number,), generator=generator)

    prompts = [tokens(60 + 5 * group) for group in range(4)]
    order = [0, 0, 1, 1, 2, 2, 3, 3] * 2
    responses = [tokens(8 + row % 5) for row in range(len(order))]
    rows = [torch.cat([prompts[group], response]) for group, response in zip(order, responses, strict=True)]
    masks = [
        torch.cat([torch.zeros(len(row) - len(x)), torch.ones(len(x))]) for row, x in zip(rows, responses, strict=True)
    ]
    positions = [torch.arange(len(row)) for row in rows]
    tensors = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
        for name, values in (("input_ids", rows), ("position_ids", positions), ("loss_mask", masks))
    }
    given = {
        "use_dynamic_bsz": True, "max_token_len_per_gpu": 420, "temperature": 1.0, "use_fused_kernels": False,
        "use_remove_padding": False, "global_batch_size": len(rows), **settings,
    }  # fmt: skip
    return tensordict_utils.get_tensordict(tensor_dict=tensors, non_tensor_dict=given)


def policy_loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """A policy gradient with fixed advantages that tell rows apart; sums, so that micro-batches do not matter."""
    log_probs, mask, ids = (x.values() for x in (model_output["log_probs"], data["loss_mask"], data["input_ids"]))
    offsets = data["input_ids"].offsets()
    advantage = torch.cat([((row.sum() % 7) - 3.0).expand(len(row)) for row in ids.split(offsets.diff().tolist())])
    scored = torch.roll(mask, -1)  # log_probs[t] is that of token t + 1
    return -(log_probs * advantage * scored).sum() / 100, {}


def run(path: str, hooked: bool, settings: dict[str, Any], changes: dict[str, Any]) -> Outcome:
    """Score, update three times and sync weights, with the library's hooks or in verl as it is.

    Args:
        path: of a checkpoint.
        hooked: whether `augtree_fx.integrations.verl` is loaded, as verl does by ``external_lib``.
        settings: of the batch.
        changes: of the model's config.
    """
    import verl.models.transformers.monkey_patch as patches

    use_cpu()
    patches.is_trl_available = lambda: False  # verl looks for a class that this trl has no more
    torch.manual_seed(0)
    if hooked:
        made = engine(path, external_lib="augtree_fx.integrations.verl", **changes)
    else:
        made = engine(path, **changes)
    try:
        return _outcome(made, {**settings, **{key: changes[key] for key in SETTINGS if key in changes}}, hooked)
    finally:
        if hooked:
            sys.modules.pop("augtree_fx.integrations.verl").uninstall()


def _outcome(made: Any, settings: dict[str, Any], hooked: bool) -> Outcome:
    found = Outcome()
    with made.eval_mode():
        scored = made.forward_backward_batch(batch(**settings), loss_function=None, forward_only=True)
        found.log_probs = _log_probs(scored)
        if made.model_config.lora_rank:
            with made.disable_adapter():
                scored = made.forward_backward_batch(batch(**settings), loss_function=None, forward_only=True)
            found.reference = _log_probs(scored)
    handle = made.module.register_forward_pre_hook(partial(_note_groups, found), with_kwargs=True)
    with made.train_mode():
        for _ in range(3):
            made.optimizer_zero_grad()
            output = made.forward_backward_batch(batch(**settings), loss_function=policy_loss)
            found.losses.append(sum(output["loss"]))
            found.grad_norms.append(float(made.optimizer_step()))
    handle.remove()
    parameters, _ = made.get_per_tensor_param()
    found.names = [name for name, _ in parameters]
    if hooked:
        said = augtree_fx.explain(made.module)
        found.num_shared, found.fallbacks = said.num_shared, said.fallbacks
    return found


def _log_probs(scored: Any) -> Tensor:
    """Of all rows; their last tokens aside, which predict the first token of whatever row comes next."""
    return torch.cat([row[:-1] for row in scored["model_output"]["log_probs"].unbind()])


def _note_groups(found: Outcome, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ids, positions = kwargs["input_ids"], kwargs["position_ids"]
    starts = (positions == 0) if kwargs["attention_mask"] is None else torch.arange(ids.shape[1]).expand_as(ids) == 0
    first = ids[starts].tolist()  # prompts of different groups start with different tokens
    found.groups.append([first.count(token) for token in dict.fromkeys(first)])


def installed_and_undone() -> tuple[bool, bool]:
    """Whether `install` hooks verl, and whether `uninstall` leaves verl's own functions."""
    from verl.workers.engine.fsdp import transformer_impl

    def hooked() -> list[Any]:
        return [transformer_impl.FSDPEngine._build_module, transformer_impl.prepare_micro_batches]

    before = hooked()
    from augtree_fx.integrations import verl as integration  # importing it installs

    integration.install()
    during = hooked()
    integration.uninstall()
    sys.modules.pop(integration.__name__, None)
    return all(a is not b for a, b in zip(before, during, strict=True)), hooked() == before
