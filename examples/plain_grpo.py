"""GRPO in a plain PyTorch loop, to copy: sample groups, score, and update with each prompt computed once.

The update goes through `augtree_fx.prefill`: prompts once, then responses in waves of `--wave-tokens` packed tokens,
one wave alive at a time, so that memory does not grow with the size of a group. Without `--model` it trains a small
random model on bytes, which learns within a minute on a CPU to write digits; nothing is downloaded.

    python examples/plain_grpo.py
    python examples/plain_grpo.py --model Qwen/Qwen3-0.6B --generations 16 --completion-tokens 512 --learning-rate 1e-6
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, Qwen3Config, Qwen3ForCausalLM

import augtree_fx

QUESTIONS = [
    "You are a clerk who answers in digits alone, without words, without spaces and without an explanation. "
    f"A shop sells {a} apples on Monday and {b} on Tuesday. How many apples does it sell on both days together? Answer:"
    for a in range(11, 31)
    for b in range(40, 45)
]


def reward(completion: str) -> float:
    """What to learn; put your own here. The share of digits."""
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="GRPO with shared prompts, in one file.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", help="Hub id or local path of a causal LM; without: a small random Qwen3")
    parser.add_argument("--steps", type=int, default=20, help="sets of samples; each is used for --updates updates")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps on each set of samples")
    parser.add_argument("--prompts", type=int, default=2, help="groups in a set of samples")
    parser.add_argument("--generations", type=int, default=8, help="sampled completions per prompt (the group)")
    parser.add_argument("--completion-tokens", type=int, default=24, help="longest completion")
    parser.add_argument("--wave-tokens", type=int, default=256, help="packed tokens of responses, alive at once")
    parser.add_argument("--clip", type=float, default=0.2, help="probability ratios are clipped to 1 -+ this")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.generations < 2:
        parser.error(f"--generations must be at least 2, got {args.generations}: advantages compare those of a prompt")
    return args


def build(args: argparse.Namespace):
    """Return model and tokenizer; the model is transformed in place, which is all the library needs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    else:
        tokenizer = ByT5Tokenizer(extra_ids=0)
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = Qwen3ForCausalLM(config)
    return augtree_fx.transform(model.to(device)), tokenizer


@dataclass
class Rollout:
    """Sampled groups: `responses[i]` answer `prompts[i]`; advantages of all rows, group after group."""

    prompts: list[Tensor]
    responses: list[list[Tensor]]
    rewards: Tensor
    advantages: Tensor


@torch.no_grad()
def sample(model, tokenizer, questions: list[str], args: argparse.Namespace) -> Rollout:
    """Sample a group for each question, and compare each response with its group."""
    prompts, responses, rewards = [], [], []
    for question in questions:
        prompt = tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device)
        rows = model.generate(
            prompt.expand(args.generations, -1),
            attention_mask=torch.ones_like(prompt).expand(args.generations, -1),
            max_new_tokens=args.completion_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=tokenizer.pad_token_id,
        )
        ends = [until_end(row, tokenizer.eos_token_id) for row in rows[:, prompt.shape[1] :]]
        prompts.append(prompt[0])
        responses.append(ends)
        rewards.append([reward(tokenizer.decode(row, skip_special_tokens=True)) for row in ends])
    grouped = torch.tensor(rewards, device=model.device)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    return Rollout(prompts, responses, grouped, advantages.flatten())


def until_end(tokens: Tensor, end: int) -> Tensor:
    """A response with its end token, without the padding after it."""
    found = (tokens == end).nonzero()
    return tokens[: int(found[0]) + 1] if len(found) else tokens


@torch.no_grad()
def old_logprobs(model, layout: augtree_fx.TreeLayout, args: argparse.Namespace) -> Tensor:
    """Log-probs of all tokens of responses, at their slots; those of the policy that sampled them, in training mode."""
    found = torch.zeros(layout.shape, device=model.device).flatten()
    with augtree_fx.prefill(model, layout, max_wave_tokens=args.wave_tokens) as tree:
        for wave in tree.waves():
            found[wave.slot] = wave.logprobs().float()
    return found


def update(model, optimizer, layout, rollout: Rollout, old: Tensor, args: argparse.Namespace) -> tuple[float, float]:
    """One optimizer step on all groups; the clipped objective, averaged over all tokens of responses.

    Returns:
        Loss, and norm of the gradient.
    """
    num_tokens = sum(len(response) for group in rollout.responses for response in group)
    total = 0.0
    optimizer.zero_grad()  # before the block: gradients from before it would be added on leaving
    with augtree_fx.prefill(model, layout, max_wave_tokens=args.wave_tokens) as tree:
        for wave in tree.waves():
            ratio = (wave.logprobs() - old[wave.slot]).exp()
            advantage = rollout.advantages[wave.row]
            objective = torch.minimum(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage)
            loss = -objective.sum() / num_tokens
            loss.backward()  # frees the wave
            total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total, norm.item()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    model, tokenizer = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    table = []
    for step in tqdm(range(args.steps), unit="step"):
        chosen = [QUESTIONS[(step * args.prompts + i) % len(QUESTIONS)] for i in range(args.prompts)]
        rollout = sample(model.eval(), tokenizer, chosen, args)
        layout = augtree_fx.TreeLayout.from_groups(rollout.prompts, rollout.responses, device=model.device)
        model.train()
        begin = time.perf_counter()
        old = old_logprobs(model, layout, args)
        losses = [update(model, optimizer, layout, rollout, old, args) for _ in range(args.updates)]
        seconds = time.perf_counter() - begin
        tokens = f"{layout.num_row_tokens:,} -> {layout.num_tokens:,}"
        table.append((step + 1, rollout.rewards.mean().item(), *losses[-1], tokens, layout.token_ratio, seconds))
    headers = ("step", "mean reward", "loss", "gradient norm", "tokens", "ratio", "update, s")
    print(tabulate(table, headers, floatfmt=("", ".3f", ".4f", ".3f", "", ".2f", ".2f")))


if __name__ == "__main__":
    main()
