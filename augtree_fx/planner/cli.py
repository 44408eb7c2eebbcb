"""Command line of ``plan``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from augtree_fx.planner.execution import Execution
from augtree_fx.planner.known_models import CONFIGS, model_shape
from augtree_fx.planner.planner import Planner
from augtree_fx.planner.profiles import PROFILES
from augtree_fx.planner.replay_shape import ReplayShape
from augtree_fx.planner.workloads import read_groups, shape_of

TABLES = ("candidates", "lanes", "groups", "ranks")


def main(arguments: Sequence[str], prog: str = "python -m augtree_fx plan") -> int:
    """Plan a batch and print it.

    Returns:
        0. A usage error, an unknown model or a batch that does not fit in memory ends in ``SystemExit(2)``.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description="Plan a batch: lanes, schedules, predicted time, and what others would take."
    )
    add_machine(parser)
    parser.add_argument("--world", type=whole_number, required=True, help="ranks that the batch is spread over")
    parser.add_argument("--prompt", type=whole_number, action="append", help="tokens of a prompt; once for each group")
    parser.add_argument(
        "--responses", type=responses, action="append", metavar="NxR[,NxR...]",
        help="responses of a group, N of R tokens each: 16x1024, or 8x512,8x4096; once, or once for each group",
    )  # fmt: skip
    parser.add_argument("--groups", type=whole_number, help="copies of the groups given; default 1")
    parser.add_argument("--workload", metavar="FILE", help="groups from a workload file in place of --prompt")
    parser.add_argument("--limit", type=whole_number, help="only the first groups of --workload")
    parser.add_argument("--forward-only", action="store_true", help="a pass without backward: old log-probs")
    parser.add_argument("--exact", action="store_true", help="plan the lengths themselves, not those of their bucket")
    parser.add_argument("--table", choices=TABLES, action="append", help="print these tables alone")
    parser.add_argument("--json", metavar="FILE", help="also write the plan to FILE")
    parser.add_argument("--figure", metavar="FILE", help="also draw its timeline, as .svg or .png (needs matplotlib)")
    given = parser.parse_args(arguments)
    try:
        planner = Planner(given.hardware, execution=execution_of(given), bucketed=not given.exact)
        plan = planner.plan(
            _shape(given), model_shape(given.model), world_size=given.world, forward_only=given.forward_only
        )
        print("\n\n".join(plan.table(name) for name in given.table) if given.table else plan)
        if given.json:
            Path(given.json).write_text(json.dumps(plan.to_json(), indent=1) + "\n", encoding="utf-8")
        if given.figure:
            plan.figure().savefig(given.figure, dpi=160)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    return 0


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Declare the options of model, machine and execution that `plan` and `simulate` share."""
    parser.add_argument(
        "--model", default="Qwen/Qwen3-8B",
        help=f"config.json, its folder, a Hub id, or one of {', '.join(CONFIGS)}; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--hardware", default="h200",
        help=f"{', '.join(PROFILES)}, or a file that calibrate wrote; default %(default)s",
    )  # fmt: skip
    parser.add_argument("--no-checkpointing", action="store_true", help="layers keep their activations")
    parser.add_argument("--no-sharding", action="store_true", help="every rank has all weights: no FSDP")
    parser.add_argument(
        "--state-bytes", type=float, default=14.0, metavar="B",
        help="bytes of gradient and optimizer for each weight; default 14 (bf16 gradient, AdamW in float32)",
    )  # fmt: skip


def execution_of(given: argparse.Namespace) -> Execution:
    """The execution that the options of `add_machine` describe."""
    return Execution(
        checkpointing=not given.no_checkpointing,
        shard_weights=not given.no_sharding,
        state_bytes_per_weight=given.state_bytes,
    )


def whole_number(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def responses(text: str) -> list[int]:
    """``8x512,8x4096`` as lengths."""
    lengths = []
    for item in text.split(","):
        number, _, tokens = item.partition("x")
        if not (number.isdecimal() and tokens.isdecimal()):
            raise argparse.ArgumentTypeError(f"responses must be NxR, or several separated by commas, got {text!r}")
        lengths += [int(tokens)] * int(number)
    return lengths


def _shape(given: argparse.Namespace) -> ReplayShape:
    if given.workload:
        given_too = [f"--{name}" for name in ("prompt", "responses", "groups") if getattr(given, name)]
        if given_too:
            raise ValueError(f"--workload has all groups already, got {' and '.join(given_too)} too; drop one")
        return shape_of(read_groups(given.workload)[: given.limit])
    if given.limit:
        raise ValueError(f"--limit is of the groups of --workload, got {given.limit} without one; drop it")
    if not given.prompt or not given.responses:
        raise ValueError(
            "a batch needs --prompt and --responses, or --workload, got neither: --prompt 32768 --responses 16x1024"
        )
    lengths = given.responses * len(given.prompt) if len(given.responses) == 1 else given.responses
    if len(lengths) != len(given.prompt):
        raise ValueError(
            f"--responses must be given once, or once for each --prompt, got {len(given.responses)} for "
            f"{len(given.prompt)} prompts"
        )
    copies = given.groups or 1
    return ReplayShape.from_groups(given.prompt * copies, lengths * copies)
