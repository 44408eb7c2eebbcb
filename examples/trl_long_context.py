"""Context parallelism for TRL's GRPO, which refuses it: one long prompt, its completions and its tokens on all ranks.

Every rank samples some completions of a prompt, as TRL's trainer deals them under DDP. Plain, each rank computes the
prompt once for each of its completions; after `enable(trainer, rows="pooled")` all ranks compute it once, a share each.
The same job runs both ways from the same weights and seeds; losses, gradient norms, tokens and times are compared. The
exit status is 1 when the two runs differ.

    torchrun --nproc-per-node 2 examples/trl_long_context.py
    torchrun --nproc-per-node 8 examples/trl_long_context.py --model Qwen/Qwen3-1.7B --dtype bfloat16 \
        --gradient-checkpointing --prompt-tokens 32000 --generations 16 --completion-tokens 1024 --tolerance 0.05
"""

import argparse
import json
import sys
import warnings

import grpo_trl  # first: it keeps huggingface_hub off the network
import reasoning_gym
import torch
import transformers
from _grpo_report import format_report, summarize
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm import tqdm

from augtree_fx.integrations import trl as augtree_trl


def parse_args():
    """Read the command line; the defaults finish in about a minute on two CPU cores."""
    parser = argparse.ArgumentParser(
        description="Run one GRPO job on a long prompt under torchrun, plain and with pooled rows, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", help="Hub id or local path of a causal LM; without: a small random Qwen3")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="bfloat16 on GPUs")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="compute activations again in backward")
    parser.add_argument("--task", default="chain_sum", help="name of a reasoning-gym dataset")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of each run, two to a prompt")
    parser.add_argument("--generations", type=int, default=4, help="completions per prompt, spread over the ranks")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="worked examples are added up to this length")
    parser.add_argument("--completion-tokens", type=int, default=16, help="longest completion")
    parser.add_argument("--degree", type=int, help="ranks that compute together; without: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, task and sampling")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference that passes")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE")
    return parser.parse_args()


def gather(value):
    """What each rank has."""
    return gather_object([value])


def train(args, state, tokenizer, task, dataset, progress, enable=None):
    """Run the job on all ranks and return this rank's meter, whose figures are those of all."""
    model = grpo_trl.build_model(args.model, tokenizer, args.seed, getattr(torch, args.dtype))
    return grpo_trl.train(
        args, model, tokenizer, task, dataset, progress, enable, gather,
        per_device_train_batch_size=args.generations // state.num_processes,
        gradient_checkpointing=args.gradient_checkpointing,
        ddp_find_unused_parameters=False,
    )  # fmt: skip


def main():
    """Run both jobs, print the report on the first rank, and return the exit status: 0 when the runs agree."""
    args = parse_args()
    state = PartialState(cpu=not torch.cuda.is_available())
    if state.num_processes == 1:
        sys.exit("one process has nothing to share: run it as torchrun --nproc-per-node 2 examples/trl_long_context.py")
    if args.generations % state.num_processes:
        sys.exit(f"--generations must be a multiple of the {state.num_processes} ranks, got {args.generations}")
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    tokenizer = grpo_trl.build_tokenizer(args.model)
    task = reasoning_gym.create_dataset(args.task, size=100_000, seed=args.seed)
    dataset = grpo_trl.build_prompts(task, tokenizer, num_prompts=args.steps, prompt_tokens=args.prompt_tokens)

    def enable(trainer):
        augtree_trl.enable(trainer, rows="pooled", degree=args.degree, strict=True)

    with tqdm(total=2 * args.steps, desc="plain", unit="step", disable=not state.is_main_process) as progress:
        plain = train(args, state, tokenizer, task, dataset, progress)
        progress.set_description("pooled")
        pooled = train(args, state, tokenizer, task, dataset, progress, enable)

    summary = summarize(plain.records, pooled.records, args.tolerance)
    if state.is_main_process:
        print(f"{state.num_processes} ranks; tokens and rows are those of all ranks, times those of the slowest\n")
        print(format_report(plain.records, pooled.records, summary))
        if args.json:
            with open(args.json, "w", encoding="ascii") as file:
                json.dump(summary, file, indent=2)
    state.destroy_process_group()
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
