"""TRL's unmodified `GRPOTrainer` on a real RL environment (reasoning-gym), plain and with shared prompts.

The same job runs twice from the same weights and seeds: once as it is, once after `augtree_fx.transform(model)`. It
prints what the library found in a real batch, the losses and gradient norms side by side, and what the update stage
gained. Nothing is downloaded unless `--model` names a Hub model. The exit status is 1 when the two runs differ.

    python examples/grpo_trl.py
    python examples/grpo_trl.py --model Qwen/Qwen3-0.6B --task gcd --completion-tokens 256
"""

import argparse
import json
import os
import sys
import tempfile
import warnings

# huggingface_hub reads this once, at import: without --model the job must not touch the network.
os.environ.setdefault("HF_HUB_OFFLINE", "0" if any(argument.startswith("--model") for argument in sys.argv) else "1")

import reasoning_gym
import torch
import transformers
import trl
from _grpo_report import UpdateMeter, alone, format_report, summarize
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.trainer_callback import PrinterCallback

import augtree_fx

# For tokenizers that come without a chat template: the text of the messages and nothing else.
PLAIN_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def parse_args():
    """Read the command line; the defaults finish in about two minutes on two CPU cores."""
    parser = argparse.ArgumentParser(
        description="Run one GRPO job plain and through augtree_fx, compare losses, gradient norms and time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", help="Hub id or local path of a causal LM; without: a small random Qwen3")
    parser.add_argument("--task", default="chain_sum", help="name of a reasoning-gym dataset")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of each run")
    parser.add_argument("--generations", type=int, default=8, help="sampled completions per prompt (the group)")
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="worked examples are added up to this length")
    parser.add_argument("--completion-tokens", type=int, default=64, help="longest completion")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, task and sampling")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference that passes")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE")
    return parser.parse_args()


def build_tokenizer(model_name):
    """Return the tokenizer of `model_name`, or a byte-level one, which needs no file."""
    tokenizer = AutoTokenizer.from_pretrained(model_name) if model_name else ByT5Tokenizer(extra_ids=0)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    return tokenizer


def build_model(model_name, tokenizer, seed, dtype=torch.float32):
    """Return a causal LM; equal arguments give bitwise equal weights, so both runs start alike."""
    if model_name:
        return AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype)
    transformers.set_seed(seed)
    # Wide enough that the decoder layers, not the LM head or Python, take the time.
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=131_072,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).to(dtype)


def build_prompts(task, tokenizer, num_prompts, prompt_tokens):
    """Return a dataset of few-shot prompts: worked examples up to `prompt_tokens` tokens, then the question.

    Args:
        task: reasoning-gym dataset; its entries are used in order, each once.
        tokenizer: measures the length.
        num_prompts: rows of the result.
        prompt_tokens: the last worked example is the one that passes this length.

    Returns:
        Rows of `prompt` (one user message) and `entry_index`, which the reward needs to find the answer.
    """
    rows, index = [], 0
    for _ in range(num_prompts):
        text = ""
        while len(tokenizer(text, add_special_tokens=False)["input_ids"]) < prompt_tokens:
            text += f"Question: {task[index]['question']}\nAnswer: {task[index]['answer']}\n\n"
            index += 1
        text += f"Question: {task[index]['question']}\nAnswer:"
        rows.append({"prompt": [{"role": "user", "content": text}], "entry_index": index})
        index += 1
    return Dataset.from_list(rows)


def build_rewards(task):
    """Return the reward functions: the environment's own score, and a graded one that shapes it.

    Random weights never solve a task: every completion would score 0, every advantage would be 0, and equal gradients
    of zero prove nothing. The share of digits differs between completions from the first step on.
    """

    def environment_score(completions, entry_index, **_):
        return [task.score_answer(c[0]["content"], task[i]) for c, i in zip(completions, entry_index, strict=True)]

    def digit_share(completions, **_):
        texts = [completion[0]["content"] for completion in completions]
        return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in texts]

    return [environment_score, digit_share]


def trainer_config(args, output_dir, **changes):
    """Return the trainer's settings: stock GRPO in float32, one whole group a step, nothing written but the log."""
    settings = {
        "output_dir": output_dir,
        "seed": args.seed,
        "max_steps": args.steps,
        # A whole group in each micro-batch: the trainer shuffles rows before it splits them.
        "per_device_train_batch_size": args.generations,
        "num_generations": args.generations,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        # Two updates on each set of samples: in the first one the probability ratio is 1 whatever the model computes,
        # so only the loss of the second one compares the forward passes.
        "num_iterations": 2,
        "max_completion_length": args.completion_tokens,
        "learning_rate": 1e-4,
        "beta": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return trl.GRPOConfig(**(settings | changes))


def train(args, model, tokenizer, task, dataset, progress, enable=None, gather=alone, **changes):
    """Run `GRPOTrainer` for `args.steps` steps on `model` and return its meter.

    Args:
        enable: called with the trainer before it trains.
        gather: see `UpdateMeter`.
        **changes: settings of the trainer that are to be others.
    """
    meter = UpdateMeter(model, progress, gather)
    with tempfile.TemporaryDirectory() as output_dir:
        # The same samples in both runs: sampling draws from the global generator.
        transformers.set_seed(args.seed)
        trainer = trl.GRPOTrainer(
            model,
            build_rewards(task),
            args=trainer_config(args, output_dir, **changes),
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[meter],
        )
        trainer.remove_callback(PrinterCallback)
        if enable is not None:
            enable(trainer)
        trainer.train()
    meter.remove()
    return meter


def main():
    """Run both jobs, print the report, and return the exit status: 0 when the runs agree, 1 when not."""
    args = parse_args()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    tokenizer = build_tokenizer(args.model)
    task = reasoning_gym.create_dataset(args.task, size=100_000, seed=args.seed)
    dataset = build_prompts(task, tokenizer, num_prompts=args.steps, prompt_tokens=args.prompt_tokens)

    with tqdm(total=2 * args.steps, desc="plain", unit="step") as progress:
        plain = train(args, build_model(args.model, tokenizer, args.seed), tokenizer, task, dataset, progress)

        model = build_model(args.model, tokenizer, args.seed).to(plain.first_batch["input_ids"].device)
        model = augtree_fx.transform(model)
        report = str(augtree_fx.explain(model, **plain.first_batch))
        progress.set_description("augtree-fx")
        shared = train(args, model, tokenizer, task, dataset, progress)

    summary = summarize(plain.records, shared.records, args.tolerance)
    print(report, format_report(plain.records, shared.records, summary), sep="\n\n")
    if args.json:
        with open(args.json, "w", encoding="ascii") as file:
            json.dump(summary, file, indent=2)
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
