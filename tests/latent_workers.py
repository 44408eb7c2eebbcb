"""What ranks run in tests of latents: bytes that travel, adapters, and planted faults."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import families
import torch
from cp_workers import averaged, model_and_truth, parallel_model, state_of, wave_errors
from fault_workers import said
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

import augtree_fx
from augtree_fx.coverage import tiny
from augtree_fx.dtensor_ops import attention, collectives
from augtree_fx.dtensor_ops.attention import Latents
from augtree_fx.dtensor_ops.schedules import GATHER_KV, ROTATE_KV
from augtree_fx.transforms.expansion import Expansion

NAME = "deepseek_v3"


def step_errors(model: nn.Module, batch: families.Batch, truth: families.Result) -> dict[str, float]:
    with families.KeepFloat64():
        return families.errors(averaged(families.computed(model, batch)), truth)


def bytes_moved(schedule: str, waves: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Elements of keys, and of their gradients, that this rank hands to collectives: keys and values, then latents."""
    with mock.patch.object(Expansion, "latents", lambda *_: None):
        expanded = _moved(schedule, waves)
    return expanded, _moved(schedule, waves)


def explained() -> str:
    """What `explain` says of a batch."""
    plain, batch, _ = model_and_truth(NAME, 2, "right")
    return str(augtree_fx.explain(parallel_model(plain), **batch.inputs()))


def _moved(schedule: str, waves: bool) -> dict[str, int]:
    found = {"keys": 0, "gradients": 0}
    gather, pass_on, exchange = collectives.gather, collectives.pass_on, collectives.exchange_equal
    arriving, home = attention._arriving, attention._sent_home
    what = ["other"]

    def within(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            before, what[0] = what[0], name
            try:
                result = function(*args)
                return iter([*result]) if name == "keys" else result
            finally:
                what[0] = before

        return call

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, group: Any) -> Any:
            if what[0] in found:
                found[what[0]] += tensor.numel()
            return function(tensor, group)

        return call

    patches = [
        mock.patch.object(attention, "_arriving", within("keys", arriving)),
        mock.patch.object(attention, "_sent_home", within("gradients", home)),
        mock.patch.object(collectives, "gather", counted(gather)),
        mock.patch.object(collectives, "pass_on", counted(pass_on)),
        mock.patch.object(collectives, "exchange_equal", counted(exchange)),
    ]
    plain, batch, _ = model_and_truth(NAME, 2, "right")
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        if waves:
            wave_errors(NAME, 2, 9, schedule)
        else:
            families.computed(parallel_model(plain, schedule=schedule), batch)
    if schedule == GATHER_KV:  # what is sent to each other rank and to itself
        found["gradients"] //= distributed.get_world_size()
    else:  # a step for each other rank
        found = {key: number // (distributed.get_world_size() - 1) for key, number in found.items()}
    return found


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of low rank, as adapters of PEFT have it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(3)
        size = {"dtype": base.weight.dtype, "generator": generator}
        self.a = nn.Parameter(0.3 * torch.randn(2, base.in_features, **size))
        self.b = nn.Parameter(0.3 * torch.randn(base.out_features, 2, **size))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + hidden @ self.a.T @ self.b.T


def adapted_errors(schedule: str) -> dict[str, float]:
    """Adapters on the expansion, put in after transform; nothing else takes gradients."""
    plain, batch, _ = model_and_truth(NAME, 2, "right")

    def adapt(model: nn.Module) -> nn.Module:
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj = Adapted(layer.self_attn.kv_b_proj)
        return model

    with families.KeepFloat64():
        truth = families.reference(adapt(copy.deepcopy(plain)), batch)
    assert len(truth.gradients) == 6
    return step_errors(parallel_model(plain, schedule=schedule, wrap=adapt), batch, truth)


class Elsewhere(nn.Module):
    """A linear layer whose weight is a parameter of another module, as those of flattened parameters are."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.held = [weight]

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.held[0].T


def elsewhere_errors() -> dict[str, float]:
    """The expansion's gradients would be lost, so keys and values travel."""
    plain, batch, _ = model_and_truth(NAME, 2, "right")

    def move(model: nn.Module) -> nn.Module:
        for layer in model.model.layers:
            layer.weight = layer.self_attn.kv_b_proj.weight
            layer.self_attn.kv_b_proj = Elsewhere(layer.weight)
        return model

    with families.KeepFloat64():
        truth = families.reference(move(copy.deepcopy(plain)), batch)
    return step_errors(parallel_model(plain, schedule=ROTATE_KV, wrap=move), batch, truth)


def replaced() -> tuple[str, float]:
    """What is said when the expansion's weight is another one when backward comes, and the error of the next step."""
    plain, batch, truth = model_and_truth(NAME, 2, "right")
    model = parallel_model(plain, schedule=ROTATE_KV)
    smaller = {name: each[:3] for name, each in batch.inputs().items()}  # less is under way than the next step sends
    loss = model(**smaller, use_cache=False).logits.sum()
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.weight = nn.Parameter(layer.self_attn.kv_b_proj.weight.detach().clone())
    text = said(loss.backward)
    with families.KeepFloat64():
        found = averaged(families.computed(parallel_model(plain, schedule=ROTATE_KV), batch))
    return text, max(families.errors(found, truth).values())


def checkpointed_errors() -> dict[str, float]:
    """Layers under checkpointing, whose recomputation moves latents again; no router, it would compute in float32."""
    plain, batch, truth = _without_upcasts()
    model = parallel_model(plain, schedule=ROTATE_KV)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return families.errors(averaged(families.computed(model, batch)), truth)


def _without_upcasts() -> tuple[nn.Module, families.Batch, families.Result]:
    _, batch, _ = model_and_truth(NAME, 2, "right")
    plain = families.build(NAME, torch.float64, attention="sdpa", first_k_dense_replace=3).train()
    plain.model.rotary_emb = families.Float64Rope(8)
    for module in [*plain.modules()]:
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, families.Float64Norm(child))
    return plain, batch, families.reference(plain, batch)


def unit_errors() -> dict[str, float]:
    """The expansion is a unit of FSDP2, sharded again when attention runs, but not in recomputation."""
    plain, batch, truth = _without_upcasts()
    model = parallel_model(plain, schedule=ROTATE_KV)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer.self_attn.kv_b_proj)
        fully_shard(layer)
    fully_shard(model)
    logits = batch.rows_of(model(**batch.inputs(), use_cache=False).logits)
    families.objective(logits, batch.tokens).backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return families.errors(families.Result([x.detach() for x in logits], gradients), truth)


def sharded_latent_errors() -> dict[str, float]:
    """FSDP2 over the same ranks, whose parameters are gathered when a layer's backward begins."""
    from test_parallel_wrappers import fsdp2

    plain, batch, truth = model_and_truth(NAME, 2, "right")
    model = parallel_model(plain, schedule=ROTATE_KV, wrap=fsdp2)
    with families.KeepFloat64():
        model.zero_grad()
        logits = batch.rows_of(model(**batch.inputs(), use_cache=False).logits)
        families.objective(logits, batch.tokens).backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == truth.gradients.keys()
    return families.errors(families.Result([x.detach() for x in logits], gradients), truth)


def half_precision_errors(autocast: bool) -> tuple[float, float]:
    """Largest relative error of a gradient in bfloat16, on these ranks and in one process, against float64."""
    plain, batch, truth = model_and_truth(NAME, 2, "right")
    plain = copy.deepcopy(plain).to(torch.float32 if autocast else torch.bfloat16)

    def worst(model: nn.Module) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):  # backward runs outside of it
            logits = batch.rows_of(model(**batch.inputs(), use_cache=False).logits)
        result = families.result_of(model, logits, batch)
        result = averaged(result) if state_of(model).lanes is not None else result
        wide = {name: x.double() for name, x in result.gradients.items()}
        found = families.errors(families.Result([x.double() for x in result.logits], wide), truth)
        return max(error for name, error in found.items() if "self_attn" in name)

    alone = augtree_fx.transform(copy.deepcopy(plain), costs=augtree_fx.CostModel.free())
    model = parallel_model(plain, schedule=ROTATE_KV)
    found = worst(model)
    assert state_of(model).num_shared == 1
    return found, worst(alone)


def errors_of_type(model_type: str) -> dict[str, float]:
    """A tiny model of another type with latents, on these ranks; how often they travelled is checked."""
    plain = tiny.build(model_type, "eager").double().train()
    rows = [[run % plain.config.vocab_size for run in row] for row in families.rollout(3)]
    batch = families.padded(rows, "right")
    with families.KeepFloat64():
        truth = families.reference(plain, batch)
    with mock.patch.object(attention, "_arriving", mock.Mock(side_effect=_ARRIVING)) as arriving:
        errors = step_errors(parallel_model(plain, schedule=ROTATE_KV), batch, truth)
    assert arriving.call_args_list and all(len(call.args[0]) == 1 for call in arriving.call_args_list)
    return errors


def _wrong_rank(moving: Any, lane: attention.Lane) -> Any:
    """The latents of two visitors are swapped."""
    return iter([*_ARRIVING(moving, lane)][::-1])


def _stale(*arguments: Any) -> Any:
    """Backward is sent other latents than forward was."""
    with mock.patch.object(attention, "_arriving", lambda moving, lane: _ARRIVING([0.9 * x for x in moving], lane)):
        return _BACKWARD(*arguments)


def _lost_home(*arguments: Any) -> tuple[Tensor, ...]:
    """No latent hears of other ranks' queries."""
    return tuple(torch.zeros_like(x) for x in _SENT_HOME(*arguments))


def _lost_parameters(self: Latents, *arguments: Any) -> list[Tensor | None]:
    """Weights of the expansion hear of own tokens alone."""
    found = _GRADIENTS(self, *arguments)
    return [found[0], *(None for _ in found[1:])]


_ARRIVING, _BACKWARD, _SENT_HOME = attention._arriving, attention.backward, attention._sent_home
_GRADIENTS = Latents.gradients

# What is replaced, by what, and whether logits are wrong too.
PLANTED: dict[str, tuple[tuple[Any, str, Any], bool]] = {
    "latents of the wrong rank": ((attention, "_arriving", _wrong_rank), True),
    "stale latents in backward": ((attention, "backward", _stale), False),
    "gradients of latents that stay away": ((attention, "_sent_home", _lost_home), False),
    "gradients of the expansion that are lost": ((Latents, "gradients", _lost_parameters), False),
}


def planted_latent_errors() -> dict[str, dict[str, float]]:
    """Errors of a model with each fault, and without."""
    plain, batch, truth = model_and_truth(NAME, 3, "right")
    errors = {"none": step_errors(parallel_model(plain, schedule=ROTATE_KV), batch, truth)}
    for name, (patch, _) in PLANTED.items():
        with mock.patch.object(*patch):
            errors[name] = step_errors(parallel_model(plain, schedule=ROTATE_KV), batch, truth)
    return errors
