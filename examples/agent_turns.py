"""Trajectories of agents, each assistant turn a sample of its own, computed as one deep tree.

Trainers of agents cut a trajectory into as many samples as it has assistant turns: all that came before is the prompt,
the turn is what is scored. The samples repeat each other almost entirely, and so do the trajectories of a group:

    system and tools | task | turn 1 | tool output | turn 2 | tool output | turn 3
    sample 1  ---------------========
    sample 2  -----------------------------------------========
    sample 3  -------------------------------------------------------------------========       - prompt   = scored

Here the loss and every gradient of a batch are computed three ways: with the unmodified model, with the transformed
one in one forward, and with `augtree_fx.prefill`, which holds one wave at a time. Random weights and tokens.

    python examples/agent_turns.py
    python examples/agent_turns.py --trajectories 8 --turns 6
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import augtree_fx

VOCABULARY = 1000
TOLERANCE = 1e-4  # float32, gradients of one parameter relative to its largest one


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Agent trajectories, turn by turn, with and without sharing.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tasks", type=int, default=2, help="groups; all of them share the system prompt")
    parser.add_argument("--trajectories", type=int, default=4, help="of each task")
    parser.add_argument("--turns", type=int, default=4, help="of the assistant, in each trajectory")
    parser.add_argument("--system-tokens", type=int, default=256, help="system prompt with tools")
    parser.add_argument("--wave-tokens", type=int, default=512, help="packed tokens that are alive at once")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.tasks, args.trajectories, args.turns) < 1:
        parser.error("--tasks, --trajectories and --turns must be at least 1: there is nothing to compute else")
    return args


@dataclass
class Samples:
    """Padded samples as a trainer makes them.

    Args:
        input_ids, attention_mask: `[samples, length]`, padded on the right.
        scored: `[samples, length]`, true at the tokens of the turn that a sample is for.
        advantages: `[samples]`, those of a trajectory for each of its turns.
    """

    input_ids: Tensor
    attention_mask: Tensor
    scored: Tensor
    advantages: Tensor


def draw(args: argparse.Namespace) -> Samples:
    """Trajectories of random tokens, cut into samples."""
    torch.manual_seed(args.seed)
    system = tokens(args.system_tokens)
    samples, turns, advantages = [], [], []
    for _ in range(args.tasks):
        task = tokens(64)
        for advantage in torch.randn(args.trajectories).tolist():
            context = torch.cat([system, task])
            for turn in range(args.turns):
                answer, output = tokens(16 + 8 * (turn % 3)), tokens(40)
                samples.append(torch.cat([context, answer]))
                turns.append(len(answer))
                advantages.append(advantage)
                context = torch.cat([context, answer, output])
    lengths = torch.tensor([len(sample) for sample in samples])
    column = torch.arange(int(lengths.max()))
    mask = column < lengths[:, None]
    scored = mask & (column >= (lengths - torch.tensor(turns))[:, None])
    return Samples(
        torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), mask.long(), scored, torch.tensor(advantages)
    )


def tokens(number: int) -> Tensor:
    return torch.randint(VOCABULARY, (number,))


def in_one_forward(model: Qwen3ForCausalLM, samples: Samples) -> float:
    """What any trainer does; the transformed model finds the tree by itself."""
    logits = model(samples.input_ids, attention_mask=samples.attention_mask, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, samples.input_ids[:, 1:, None])[..., 0]
    scored = samples.scored[:, 1:]
    loss = -(logprobs * scored * samples.advantages[:, None]).sum() / samples.scored.sum()
    loss.backward()
    return loss.item()


def in_waves(model: Qwen3ForCausalLM, samples: Samples, wave_tokens: int) -> float:
    """Branches that have branches, a turn that others follow, are prompts again, for those."""
    layout = augtree_fx.TreeLayout.from_padded(samples.input_ids, samples.attention_mask)
    total = 0.0
    with augtree_fx.prefill(model, layout, max_wave_tokens=wave_tokens, scored=samples.scored) as tree:
        for wave in tree.waves():
            loss = -(wave.logprobs() * samples.advantages[wave.row]).sum() / samples.scored.sum()
            loss.backward()
            total += loss.item()
    return total


def measured(model: Qwen3ForCausalLM, step: Callable[[], float]) -> tuple[float, float, list[Tensor]]:
    """Loss, seconds and gradients of a step; the second of two, so that nothing is made for the first time."""
    for _ in range(2):
        model.zero_grad()
        begin = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - begin
    return loss, seconds, [parameter.grad for parameter in model.parameters()]


def main() -> int:
    """Print what is shared and the three ways side by side; returns 1 if they differ."""
    args = parse_args()
    torch.manual_seed(args.seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    plain = Qwen3ForCausalLM(config)
    model = augtree_fx.transform(copy.deepcopy(plain))
    samples = draw(args)
    explained = augtree_fx.explain(model, input_ids=samples.input_ids, attention_mask=samples.attention_mask)
    runs = {
        "unmodified model": measured(plain, lambda: in_one_forward(plain, samples)),
        "transformed, one forward": measured(model, lambda: in_one_forward(model, samples)),
        "transformed, waves": measured(model, lambda: in_waves(model, samples, args.wave_tokens)),
    }
    base_loss, base_seconds, base = runs["unmodified model"]
    table, worst = [], 0.0
    for name, (loss, seconds, gradients) in runs.items():
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients, base, strict=True))
        worst = max(worst, error, abs(loss - base_loss) / abs(base_loss))
        table.append((name, loss, f"{error:.1e}", f"{seconds:.2f}", f"{base_seconds / seconds:.1f}x"))
    print(explained.layout)
    print(tabulate(table, ("", "loss", "gradient error", "seconds", "speed"), floatfmt=".6f", disable_numparse=[2, 3]))
    print("PASSED: same loss and gradients" if worst <= TOLERANCE else f"FAILED: they differ by {worst:.1e}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
