"""Context-parallel contenders of the benchmark against one process: spawned gloo ranks, float64, reference kernel.

The truth is dense attention row by row (or the unmodified model row by row); it shares nothing with the contenders.
A ring of two hides errors of order, so there are one, three and four ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from attention_reference import Site, dense_row
from ranks import Ranks
from torch import Tensor, distributed
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from augtree_fx.coverage.precision import KeepFloat64
from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.dynamic import DynamicRows
from augtree_fx.examples.bench.cp.ring_rows import RingRows
from augtree_fx.examples.bench.cp.ring_tree import RingTree
from augtree_fx.examples.bench.cp.rollout import Rollout
from augtree_fx.examples.bench.cp.ulysses import Ulysses

TOLERANCE = 1e-10  # relative to the largest value, float64: sums of some hundred terms, in another order
CPU = torch.device("cpu")

ROLLOUTS = {
    "one group": Rollout((37,), ((11, 9, 14),)),
    "groups of odd lengths": Rollout((29, 8, 41), ((5, 17), (13,), (9, 1, 23))),
    "one row": Rollout((24,), ((19,),)),
    "an empty response": Rollout((19, 9), ((0, 10), (12, 3))),
}
CONTENDERS: dict[str, Callable[[Any], Contender]] = {
    "ring": RingRows,
    "ring-reuse": RingTree,
    "ulysses": Ulysses,
    "dynamic": lambda group: kept_dynamic(),
}


@pytest.fixture(scope="module", params=[1, 3, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


@cache
def kept_dynamic(token_pairs: int = 50) -> DynamicRows:
    """One for each process: its groups are made once. Cheap tokens let sequences have unequal degrees."""
    return DynamicRows(distributed.group.WORLD, token_pairs)


def draw(rollout: Rollout, heads: int, kv_heads: int) -> list[Tensor]:
    """q, k, v and weights of the output for each distinct token."""
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(rollout.num_distinct, n, 8, generator=generator, dtype=torch.float64) for n in sizes]


def by_rows(rollout: Rollout, heads: int, kv_heads: int) -> list[Tensor]:
    """Output of each distinct token and the gradients of their weighted sum; a prompt counts once."""
    *inputs, weights = draw(rollout, heads, kv_heads)
    leaves = [x.requires_grad_() for x in inputs]
    site, total, out = Site(heads, kv_heads, scale=0.4), torch.zeros(()), torch.zeros_like(weights)
    weights = weights / torch.from_numpy(rollout.copies)[:, None, None]
    for begin, end in zip(rollout.row_starts[:-1], rollout.row_starts[1:], strict=True):
        tokens = rollout.distinct[begin:end]
        row, _ = dense_row(*(x[tokens] for x in leaves), None, site)
        total = total + (row * weights[tokens]).sum()
        out[tokens] = row.detach()
    return [out, *torch.autograd.grad(total, leaves)]


@dataclass
class Found:
    """What one rank found: errors relative to the largest value of the truth, and what it holds."""

    errors: dict[str, float]
    held: list[int]
    scored: list[int]
    target: list[int]


def check_attention(key: str, name: str, heads: int, kv_heads: int) -> Found:
    """A contender's output and gradients against the truth."""
    rollout, contender = ROLLOUTS[name], CONTENDERS[key](distributed.group.WORLD)
    shard = contender.shard(rollout, CPU)
    assert torch.equal(shard.position, torch.from_numpy(rollout.position)[shard.row_token])
    *inputs, weights = (x[shard.distinct] for x in draw(rollout, heads, kv_heads))
    if not contender.reuse:
        weights = weights / torch.from_numpy(rollout.copies)[shard.distinct][:, None, None]
    leaves = [x.clone().requires_grad_() for x in inputs]
    with contender.active(shard):
        out = contender.attend(*leaves, shard, 0.4, "reference")
        gradients = torch.autograd.grad(out, leaves, weights)
    truth = by_rows(rollout, heads, kv_heads)
    found = [truth[0].clone()]
    found[0][shard.distinct] = out.detach()
    for gradient, expected in zip(gradients, truth[1:], strict=True):
        total = torch.zeros_like(expected).index_add_(0, shard.distinct, gradient)
        distributed.all_reduce(total)
        found.append(total)
    pairs = zip(("out", "dq", "dk", "dv"), found, truth, strict=True)
    errors = {name: float((x - y).abs().max() / y.abs().max()) for name, x, y in pairs}
    held = shard.distinct if contender.reuse else shard.row_token.flatten()
    return Found(errors, held.tolist(), shard.scored.tolist(), shard.target.tolist())


def response_tokens(rollout: Rollout) -> list[int]:
    """Row token of every response token, counted by hand."""
    tokens, start = [], 0
    for prompt, group in zip(rollout.prompts, rollout.responses, strict=True):
        for length in group:
            tokens += range(start + prompt, start + prompt + length)
            start += prompt + length
    return tokens


@pytest.mark.parametrize("name", ROLLOUTS)
@pytest.mark.parametrize("key", CONTENDERS)
def test_attention_equals_dense_rows(ranks: Ranks, key: str, name: str) -> None:
    """And every token is held once, every response token scored once, by one rank."""
    heads, rollout = 2 * ranks.num_ranks if key == "ulysses" else 4, ROLLOUTS[name]
    results = ranks.run(check_attention, key, name, heads, heads // 2)
    for found in results:
        assert all(error <= TOLERANCE for error in found.errors.values()), found.errors
    count = rollout.num_distinct if key == "ring-reuse" else rollout.num_row_tokens
    assert sorted(token for found in results for token in found.held) == list(range(count))
    targets = response_tokens(rollout)
    assert sorted(number for found in results for number in found.scored) == list(range(len(targets)))
    for found in results:
        assert found.target == [targets[number] for number in found.scored]


def tiny(kind: str, kv_heads: int) -> Any:
    sizes = {
        "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2 * kv_heads,
        "num_key_value_heads": kv_heads, "head_dim": 8, "vocab_size": 61, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(Qwen3Config(**sizes)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**sizes))
    return made.double().train()


def ids_of(rollout: Rollout) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(61, (rollout.num_distinct,), generator=generator)[torch.from_numpy(rollout.distinct)]


def step_by_rows(model: Any, rollout: Rollout, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of all response tokens, and gradients of their weighted sum, one row after another."""
    ids, parts = ids_of(rollout), []
    bounds = zip(rollout.row_starts[:-1], rollout.row_starts[1:], rollout.flat_responses, strict=True)
    for begin, end, response in bounds:
        row = ids[begin:end]
        scores = model(row[None]).logits[0].log_softmax(-1)
        parts.append(scores[len(row) - response - 1 : -1].gather(-1, row[len(row) - response :, None])[:, 0])
    logps = torch.cat(parts)
    (logps * weights).sum().backward()
    return logps.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def check_step(key: str, name: str, kind: str, kv_heads: int, checkpointing: bool) -> dict[str, float]:
    """Errors of log-probs and of every parameter's gradient in one step of a tiny model."""
    rollout, contender = ROLLOUTS[name], CONTENDERS[key](distributed.group.WORLD)
    weights = torch.randn(len(rollout.scored), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with KeepFloat64():
        model = tiny(kind, kv_heads)
        logps, expected = step_by_rows(model, rollout, weights)
        model.zero_grad()
        if checkpointing:
            # A function mode is off inside backward, where layers are recomputed.
            settings = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), KeepFloat64())}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        shard = contender.shard(rollout, CPU)
        with contender.prepared(model), contender.active(shard):
            found = contender.log_probs(model, ids_of(rollout), shard, "reference")
            if shard.num_tokens:
                (found * weights[shard.scored]).sum().backward()
        contender.reduce_gradients(model)
    errors = {"log-probs": float((found.detach() - logps[shard.scored]).abs().max()) if len(found) else 0.0}
    for parameter, p in model.named_parameters():
        errors[parameter] = float((p.grad - expected[parameter]).abs().max() / expected[parameter].abs().max())
    return errors


@pytest.mark.parametrize(
    ("kind", "name", "checkpointing"), [("llama", "groups of odd lengths", False), ("qwen3", "one group", True)]
)
@pytest.mark.parametrize("key", CONTENDERS)
def test_step_of_a_model_equals_rows(ranks: Ranks, key: str, kind: str, name: str, checkpointing: bool) -> None:
    kv_heads = ranks.num_ranks if key == "ulysses" else 2
    for errors in ranks.run(check_step, key, name, kind, kv_heads, checkpointing):
        assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
