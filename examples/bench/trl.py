"""``bench trl``: the update stage of TRL's `GRPOTrainer` on completions that are given: plain, ours, and ours pooled.

A step is what the trainer does between two generations: forward, loss, metrics, backward, clipping, optimizer, on one
group. Its rollouts are handed to it (`rollout_func`), once; its first step, which also scores them, is the warm-up.
Under torchrun a group is spread over all ranks, each of which has the whole model (DDP).
"""

from __future__ import annotations

import functools
import importlib.metadata
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from augtree_fx.examples.bench import models, timing
from augtree_fx.examples.bench.contenders import TOLERANCE
from augtree_fx.examples.bench.cp.world import World
from augtree_fx.examples.bench.grpo import Outcome
from augtree_fx.examples.bench.models import Work
from augtree_fx.examples.bench.shapes import Shape

PLAIN, OURS, POOLED = "plain", "augtree", "pooled"
KEYS = (PLAIN, OURS, POOLED)
# AdamW, as TRL has it, and at ten times its rate: bfloat16 weights would keep none of a smaller step.
LEARNING_RATE = 1e-5
FIRST_ID, NUM_IDS = 3, 256  # of the byte tokenizer, which decodes completions for rewards


@dataclass(frozen=True)
class Options:
    """What to measure; see ``--help``."""

    model: str
    layers: int | None
    shapes: list[Shape]
    dtype: torch.dtype
    repeats: int
    rows: int
    kernel: str
    baseline_kernel: str
    skip: list[str]
    json: str | None


@dataclass(frozen=True)
class Contender:
    """One way to run the trainer.

    Attributes:
        key: one of `KEYS`.
        rows: of a micro-batch on a rank.
        steps: micro-batches of a rank.
        num_ranks: that a group is spread over.
    """

    key: str
    rows: int
    steps: int
    num_ranks: int

    @property
    def name(self) -> str:
        micro = f"{self.rows} row{'s' * (self.rows > 1)} a micro-batch"
        apart = ", each rank its own rows" if self.key == OURS and self.num_ranks > 1 else ""
        return {PLAIN: "TRL, ", OURS: "TRL, augtree, ", POOLED: "TRL, augtree, pooled, "}[self.key] + micro + apart

    def work(self, shape: Shape) -> list[Work]:
        """What all ranks compute together, in trees as `tokens_of` has them."""
        scored = shape.branches * shape.response // self.num_ranks
        if self.key == PLAIN:
            return [Work(shape.num_row_tokens, shape.row_pairs, scored * self.num_ranks)]
        if self.key == POOLED:
            return [Work(shape.num_tokens, shape.tree_pairs, scored * self.num_ranks)]
        own = Shape(shape.prompt, self.rows, shape.response)
        return [Work(own.num_tokens, own.tree_pairs, scored)] * self.num_ranks


def contenders(options: Options, shape: Shape, num_ranks: int) -> list[Contender]:
    """Plain first: what the others are compared with.

    Raises:
        ValueError: ranks do not divide the responses, or micro-batches the rows of a rank.
    """
    own, rest = divmod(shape.branches, num_ranks)
    if rest or own % options.rows:
        raise ValueError(
            f"{shape.branches} responses must be split over {num_ranks} ranks in micro-batches of {options.rows} rows; "
            f"use a number of responses that {num_ranks * options.rows} divides"
        )
    found = [Contender(PLAIN, options.rows, own // options.rows, num_ranks), Contender(OURS, own, 1, num_ranks)]
    found += [Contender(POOLED, own, 1, num_ranks)] if num_ranks > 1 else []
    return [each for each in found if each.key not in options.skip]


def run(world: World, options: Options) -> int:
    """Measure all shapes, a table for each.

    Returns:
        0, or 1 when a contender of ours did not run or failed the parity gate, or the plain trainer did not run.
    """
    found = timing.environment(world.device) | {"trl": importlib.metadata.version("trl")}
    dtype = str(options.dtype).removeprefix("torch.")
    ceiling = timing.matmul_tflops(world.device, options.dtype)
    header = {"environment": found, "ranks": world.size, "ceiling_tflops": ceiling, "dtype": dtype}
    results = timing.Results(options.json if world.rank == 0 else None, **header)
    world.say(f"{world.size} x {timing.describe(found)}\n{dtype}, matmul {ceiling:.4g} TFLOP/s, slowest rank, "
              f"median of {options.repeats} updates after one")  # fmt: skip
    passed = True
    for shape in options.shapes:
        layers = options.layers or models.SIZES[options.model].num_hidden_layers
        kept = results.case(model=options.model, layers=layers, shape=vars(shape), bounds=_bounds(options.dtype))
        plain: Outcome | None = None
        for contender in contenders(options, shape, world.size):
            timing.free_memory(world.device)
            row: dict[str, Any] = {"name": contender.name, "key": contender.key, "passed": None, "reason": None}
            kept["rows"].append(row)
            row.update(world.attempt(functools.partial(measure, world, options, shape, contender)))
            outcome = row.pop("outcome", None)
            plain = outcome if contender.key == PLAIN else plain
            conclude(kept, row, ceiling, world.size, None if plain is None or outcome is None else (outcome, plain))
            results.save()
        world.say(f"\n{table(kept)}")
        passed &= all(row["passed"] for row in kept["rows"])
    return int(not passed)


def _bounds(dtype: torch.dtype) -> dict[str, float]:
    """Largest differences that pass.

    A loss is a mean of advantages, of size 1, times probability ratios: its difference is at most that of log-probs.
    """
    return {"loss": TOLERANCE[dtype]["log_probs"]} | {
        name: TOLERANCE[dtype][name] for name in ("grad_norm", "gradients")
    }


def conclude(
    kept: dict[str, Any], row: dict[str, Any], ceiling: float, num_ranks: int, outcomes: tuple[Outcome, Outcome] | None
) -> None:
    """Compare a row with the plain trainer's, and add what follows from its time where it passes.

    Args:
        outcomes: of the row's first update, and of the plain trainer's; ``None`` where one of them did not run.
    """
    if outcomes is None:
        return
    plain = kept["rows"][0]
    row["passed"] = True
    if row["key"] != PLAIN:
        pairs = {name: list(zip(row[name], plain[name], strict=True)) for name in ("loss", "grad_norm")}
        row["differences"] = {
            "loss": max(abs(a - b) for a, b in pairs["loss"]),
            "grad_norm": max(abs(a - b) / abs(b) for a, b in pairs["grad_norm"]),
            "gradients": outcomes[0].differences(outcomes[1])["gradients"],
        }
        row["passed"] = all(row["differences"][name] <= bound for name, bound in kept["bounds"].items())
    row["mfu"] = row["model_flop"] / 1e9 / row["time"].median_ms / num_ranks / ceiling
    if row["passed"]:
        row["speed_up"] = plain["time"].median_ms / row["time"].median_ms
        row["flop_ceiling"] = plain["executed_flop"] / row["executed_flop"]
        row["of_flop_ceiling"] = row["speed_up"] / row["flop_ceiling"]


def measure(world: World, options: Options, shape: Shape, contender: Contender) -> dict[str, Any]:
    """Train a fresh model, the same for all contenders, and time its updates.

    Raises:
        RuntimeError: ours computed other tokens than a group has.
    """
    from augtree_fx.integrations import trl as integration

    model = models.build(options.model, options.layers, world.device, options.dtype)
    models.use_rows_kernel(model, options.baseline_kernel if contender.key == PLAIN else "sdpa")
    timing.reset_peak(world.device)
    with tempfile.TemporaryDirectory() as folder:
        trainer, clock = build_trainer(model, shape, contender, options, world, folder)
        if contender.key != PLAIN:
            integration.enable(
                trainer, strict=True, rows="pooled" if contender.key == POOLED else None, kernel=options.kernel
            )
        trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    works = contender.work(shape)
    if contender.key != PLAIN and {log.get("augtree/computed_tokens") for log in logs} != {works[0].tokens}:
        seen = [(log.get("augtree/computed_tokens"), log.get("augtree/unshared_batches")) for log in logs]
        raise RuntimeError(f"a group has {works[0].tokens} tokens, computed tokens and unshared batches were {seen}")
    times = [max(step) for step in zip(*world.all_of(clock.times_ms[1:]), strict=True)]
    return {
        "time": timing.summary(times), "times_ms": times, "peak_gib": world.peak_gib(),
        "tokens": sum(work.tokens for work in works),
        "loss": [log["loss"] for log in logs], "grad_norm": [log["grad_norm"] for log in logs],
        "executed_flop": sum(work.executed_flop(model, checkpointing=True) for work in works),
        "model_flop": sum(work.model_flop(model) for work in works), "outcome": clock.outcome,
    }  # fmt: skip


def build_trainer(
    model: Any, shape: Shape, contender: Contender, options: Options, world: World, folder: str
) -> tuple[Any, Any]:
    """A `GRPOTrainer` of TRL with its defaults where they do not matter, and the clock of its updates."""
    import trl
    from datasets import Dataset
    from transformers import ByT5Tokenizer, TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    generator = torch.Generator().manual_seed(0)
    prompt, *responses = (
        torch.randint(FIRST_ID, FIRST_ID + NUM_IDS, (length,), generator=generator).tolist()
        for length in (shape.prompt, *[shape.response] * shape.branches)
    )
    for number, response in enumerate(responses):
        response[0] = FIRST_ID + number % NUM_IDS  # else some would share their first token too

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        begin = trainer.accelerator.process_index * len(prompts)
        mine = responses[begin : begin + len(prompts)]
        return {"prompt_ids": [prompt] * len(mine), "completion_ids": mine, "logprobs": None}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) % 17 / 17 for ids in completion_ids]

    class Clock(TrainerCallback):
        """Milliseconds from the begin of each update to its end, the device's work included; the first one's gradients.

        The trainer logs a norm in the gradients' own dtype: of bfloat16 the gate needs more than that.
        """

        def __init__(self) -> None:
            self.times_ms: list[float] = []
            self.begin_s = 0.0
            self.outcome: Outcome | None = None

        def now_s(self) -> float:
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            return time.perf_counter()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin_s = self.now_s()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            if not self.times_ms:
                self.outcome = Outcome.of(model, (torch.zeros(()), torch.zeros(1, 1)))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times_ms.append((self.now_s() - self.begin_s) * 1e3)

    clock, updates = Clock(), 1 + options.repeats
    config = trl.GRPOConfig(
        output_dir=folder, max_steps=updates, num_iterations=updates, num_generations=shape.branches,
        per_device_train_batch_size=contender.rows, gradient_accumulation_steps=contender.steps,
        max_completion_length=shape.response, gradient_checkpointing=True, bf16=False, optim="adamw_torch",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, shuffle_dataset=False, use_cpu=world.device.type == "cpu",
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model, reward, args=config, train_dataset=Dataset.from_list([{"prompt": "given"}]),
        processing_class=ByT5Tokenizer(extra_ids=0), rollout_func=rollout, callbacks=[clock],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer, clock


def table(kept: dict[str, Any]) -> str:
    """A case as text; without parity there are no times and no ratio."""
    shape, bounds = Shape(**kept["shape"]), kept["bounds"]
    headers = ["ms (spread)", "update", "peak GiB", "MFU", "tokens", "speed-up", "FLOP ceiling", "of ceiling"]
    headers += ["diff. loss", "grad norm", "gradients"]
    lines = [_line(row) for row in kept["rows"]]
    reasons = [f"{row['name']}: {row['reason']}" for row in kept["rows"] if row["reason"]]
    if any(row["passed"] is False for row in kept["rows"]):
        reasons.append(f"FAILED: a difference above {bounds}")
    head = (
        f"update stage of TRL's GRPOTrainer, Qwen3 {kept['model']}, {kept['layers']} layers, gradient "
        f"checkpointing, {shape} tokens; the loss differs by an absolute number, norm and gradients (the worst "
        "sampled matrix) by relative ones"
    )
    return "\n".join([head, tabulate(lines, headers=headers, disable_numparse=True), *reasons])


def _line(row: dict[str, Any]) -> list[str]:
    differences = [f"{value:.1e}" for value in row.get("differences", {}).values()] or ["-"] * 3
    if not row["passed"]:
        state = "parity failed" if row["passed"] is False else "not checked" if "time" in row else "did not run"
        return [row["name"], state, *[""] * 6, *differences]
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    ratios = [f"{row['speed_up']:.2f}x", f"{row['flop_ceiling']:.2f}x", f"{row['of_flop_ceiling']:.2f}"]
    return [row["name"], str(row["time"]), peak, f"{row['mfu']:.2f}", f"{row['tokens']}", *ratios, *differences]
