"""Tiny models of 15 families, rollouts as rows of tokens, and the reference that tests compare with.

The reference is built from the rows and shares no code with the library: each row alone, without padding, goes through
the unmodified model with the positions that it has in the batch. (A float64 eager model gives NaN at padding that sees
no key, and the NaN spreads; so the unmodified PADDED forward is no reference.)
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

transformers_logging.set_verbosity_error()
warnings.filterwarnings("ignore", message=".*use_reentrant.*")

VOCABULARY = 97
WINDOW = 8
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_SLIDING = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, **_SLIDING},
    "gemma3_text": {"query_pre_attn_scalar": 16, **_SLIDING},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        **_SLIDING,
    },
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "glm4": {"head_dim": 16},
    "cohere2": _SLIDING,
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "granite": {"attention_multiplier": 0.3},
    "smollm3": {"no_rope_layers": [1, 0, 1], "use_sliding_window": False},
}
FAMILIES = tuple(_FAMILIES)
STYLES = ("right", "left", "trl")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Matmuls of tiny models take up to 100 times as long when two threads wait for cores that others use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(name: str, **changes: object) -> object:
    """Config of a tiny model of a family."""
    return CONFIG_MAPPING[name](**{**_COMMON, **_FAMILIES[name], **changes})


def build(
    name: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    attention: str = "eager",
    auto_class: type = AutoModelForCausalLM,
    **changes: object,
) -> PreTrainedModel:
    """A tiny model in evaluation mode, every parameter random and away from 0 (norms, biases and sinks too)."""
    options = {"attn_implementation": attention, "experts_implementation": "eager"}
    model = auto_class.from_config(config_of(name, **changes), **options)
    randomise(model, seed)
    return model.to(dtype).eval()


def randomise(model: nn.Module, seed: int) -> None:
    """Fill every parameter so that no gradient is trivially 0 and activations keep their size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("sinks"):
                parameter.copy_(noise)  # logits are of this size, so a sink takes a fair share of the softmax
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.ndim == 1:
                parameter.add_(0.3 * noise)  # scale of a norm: it starts from 1, in some families from 0
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


class Float64Norm(nn.Module):
    """RMSNorm without the up-cast to float32, around the parameter of another one."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)


class Float64Rope(nn.Module):
    """Rotary embedding in float64."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.frequencies = 1e4 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None] * self.frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def without_upcasts(name: str) -> PreTrainedModel:
    """A llama (or a model of its modules) that computes in float64 throughout, without the patch of `KeepFloat64`."""
    model = build(name, torch.float64, attention="sdpa").train()
    model.model.rotary_emb = Float64Rope(16)
    model.model.norm = Float64Norm(model.model.norm)
    for layer in model.model.layers:
        layer.input_layernorm = Float64Norm(layer.input_layernorm)
        layer.post_attention_layernorm = Float64Norm(layer.post_attention_layernorm)
    return model


Row = list[Tensor]


def rollout(depth: int, seed: int = 0) -> list[Row]:
    """Rows of a rollout, shuffled: ``[prompt, response]`` at depth 2, ``[prompt, turn, response]`` at depth 3.

    Prompts are longer than the window, turns shorter, responses unequal and sometimes empty; one row is there twice,
    and one row shares nothing with any other.
    """
    generator = torch.Generator().manual_seed(seed)

    def run(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (length,), generator=generator)

    rows: list[Row] = []
    for prompt_length in (13, 10):
        prompt = run(prompt_length)
        for turn_length in (5, 6)[: 2 * depth - 4] or (None,):
            shared = [prompt] if turn_length is None else [prompt, run(turn_length)]
            rows += [[*shared, run(length)] for length in (7, 0, 11, 3)]
    rows.append(list(rows[2]))
    rows.append([run(9), *(run(2) for _ in range(depth - 1))])
    order = torch.randperm(len(rows), generator=generator).tolist()
    return [rows[index] for index in order]


@dataclass(frozen=True)
class Batch:
    """Rows as a trainer passes them, and for the reference: each row's tokens, first column and first position."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor | None
    tokens: list[Tensor]
    column: list[int]
    position: list[int]

    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of a model's forward."""
        given = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return given if self.position_ids is None else {**given, "position_ids": self.position_ids}

    def rows_of(self, output: Tensor) -> list[Tensor]:
        """Valid tokens of each row of a ``[batch, sequence, ...]`` output."""
        return [
            output[row, first : first + len(tokens)]
            for row, (tokens, first) in enumerate(zip(self.tokens, self.column, strict=True))
        ]


def padded(rows: list[Row], style: str) -> Batch:
    """Pad rows: ``right``; ``left`` with positions that count tokens; ``trl``, prompt left, completion right.

    Without ``position_ids`` a transformers model takes the column, left padding included.
    """
    tokens = [torch.cat(row) for row in rows]
    ends = [len(row[0]) if style == "trl" else len(whole) for row, whole in zip(rows, tokens, strict=True)]
    column = [0] * len(rows) if style == "right" else [max(ends) - end for end in ends]
    width = max(first + len(whole) for first, whole in zip(column, tokens, strict=True)) + (style == "right")
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, (first, whole) in enumerate(zip(column, tokens, strict=True)):
        input_ids[row, first : first + len(whole)] = whole
        mask[row, first : first + len(whole)] = 1
    positions = mask.cumsum(1) - 1 if style == "left" else None
    return Batch(input_ids, mask, positions, tokens, column, column if style == "trl" else [0] * len(rows))


def objective(row_logits: list[Tensor], tokens: list[Tensor]) -> Tensor:
    """Sum over rows of a policy-gradient loss: the log-probability of every next token, times a random advantage."""
    generator = torch.Generator().manual_seed(7)
    total = row_logits[0].new_zeros(())
    for logits, row in zip(row_logits, tokens, strict=True):
        advantage = torch.randn(len(row) - 1, generator=generator, dtype=torch.float64).to(logits.dtype)
        picked = logits[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
        total = total - (advantage * picked).sum()
    return total


@dataclass(frozen=True)
class Result:
    """Logits at the valid tokens of each row, and the gradient of every parameter."""

    logits: list[Tensor]
    gradients: dict[str, Tensor]


def result_of(model: nn.Module, logits: list[Tensor], batch: Batch) -> Result:
    """Backward of `objective`; parameters that take no gradient are left out."""
    model.zero_grad()
    objective(logits, batch.tokens).backward()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gradients = {name: parameter.grad.clone() for name, parameter in trained}
    model.zero_grad()
    return Result([row.detach() for row in logits], gradients)


def reference(model: nn.Module, batch: Batch) -> Result:
    """What an unmodified model computes for each row alone."""
    logits = []
    for tokens, first in zip(batch.tokens, batch.position, strict=True):
        positions = torch.arange(first, first + len(tokens))[None]
        mask = torch.ones_like(positions)
        logits.append(model(tokens[None], attention_mask=mask, position_ids=positions, use_cache=False).logits[0])
    return result_of(model, logits, batch)


def computed(model: nn.Module, batch: Batch) -> Result:
    """What a model computes for the batch in one forward."""
    return result_of(model, batch.rows_of(model(**batch.inputs(), use_cache=False).logits), batch)


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return ((got - expected).abs().max() / expected.abs().max()).item()


def errors(got: Result, expected: Result, compare: Callable[[Tensor, Tensor], float] = error) -> dict[str, float]:
    """Error of the logits and of every gradient, by name."""
    assert got.gradients.keys() == expected.gradients.keys()
    by_name = {name: compare(got.gradients[name], expected.gradients[name]) for name in expected.gradients}
    return {"logits": compare(torch.cat(got.logits), torch.cat(expected.logits)), **by_name}


class KeepFloat64(TorchFunctionMode):
    """Turn the float32 up-casts of modelling code (norms, RoPE, softmax, routers) into float64 ones.

    Build models outside of it: their buffers would differ.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = list(args), dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)
