"""Command line of the benchmarks. Each benchmark's module is imported only when it is chosen."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from augtree_fx import kernels
from augtree_fx.examples.bench import timing
from augtree_fx.examples.bench.shapes import Heads, Shape, parse_shape
from augtree_fx.planner.profiles import profile

DTYPES = ("bfloat16", "float16", "float32", "float64")
# Shapes by device type: long prompt; longer prompt, short responses; long responses; short prompt, many responses.
ATTENTION_SHAPES = {
    "cuda": ["32768x16x1024", "65536x8x256", "4096x16x4096", "1024x64x1024"],
    "cpu": ["96x3x32"],
}
# Long prompt; shorter prompt; long responses; 1k prompts, 8k responses; short prompt, many responses.
STEP_SHAPES = {
    "cuda": ["32768x16x1024", "8192x8x1024", "4096x8x4096", "1024x16x8192", "1024x64x1024"],
    "cpu": ["96x4x16"],
}
# Under context parallelism: long prompts, then long responses; on the CPU, rows that up to 8 ranks divide.
CP_SHAPES = {
    "attention": {"cuda": ["65536x16x1024", "32768x16x1024", "4096x8x8192"], "cpu": ["96x3x32"]},
    "step": {"cuda": ["32768x16x1024", "4096x8x8192"], "cpu": ["96x4x16"]},
}
TRL_SHAPES = {"cuda": ["16384x16x1024"], "cpu": ["96x4x16"]}
MODELS = {"cuda": ["0.6B", "1.7B", "4B", "8B"], "cpu": ["tiny"]}
SKIPPABLE = ("rows", "copied", "prefix-grouper", "flex", "sdpa")
_NOTE = "On the CPU it runs the same comparison on small shapes, to see that everything works; its times mean little."


def main(arguments: Sequence[str], prog: str = "python -m augtree_fx bench") -> int:
    """Run one benchmark.

    Returns:
        0; 1 when the parity gate failed. A usage error ends in ``SystemExit(2)``.
    """
    parser = argparse.ArgumentParser(prog=prog, description="Measure against what else there is, behind a parity gate.")
    commands = parser.add_subparsers(required=True, metavar="attention | step | trl | cp | planner", dest="bench")
    add_attention(commands)
    add_step(commands)
    add_trl(commands)
    add_cp(commands)
    add_planner(commands)
    given = parser.parse_args(arguments)
    return given.run(given, given.parser)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _writable(text: str) -> str:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    return text


def _add_heads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=_number, help="query heads; default 32, on the CPU 4")
    parser.add_argument("--kv-heads", type=_number, help="key heads; default 8, on the CPU 2")
    parser.add_argument("--head-dim", type=_number, help="head size; default 128, on the CPU 16")


def _add_common(parser: argparse.ArgumentParser, repeats: int) -> None:
    parser.add_argument("--device", choices=timing.CEILING_SIZE, help="default: cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, on the CPU float32")
    parser.add_argument(
        "--repeats", type=_number, default=repeats, help="timed runs, after the warm-ups; default %(default)s"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=_writable, help="also write all figures to FILE, after every row"
    )
    parser.add_argument(
        "--shape", metavar="PxNxR", type=parse_shape, action="append",
        help="prompt x branches x response in tokens; may be given several times",
    )  # fmt: skip


def add_attention(commands: argparse._SubParsersAction) -> None:
    """Declare ``bench attention``."""
    parser = commands.add_parser(
        "attention", help="attention of one group, forward and backward",
        description=f"Attention of one group, forward and backward, against its rivals in one run. {_NOTE}",
    )  # fmt: skip
    _add_common(parser, repeats=10)
    for name, what in (("prompt", "tokens of the prompt"), ("branches", "responses"), ("response", "tokens of each")):
        parser.add_argument(f"--{name}", type=_number, help=f"{what}; with the other two, one more shape")
    _add_heads(parser)
    parser.add_argument(
        "--kernel", choices=kernels.NAMES[1:], action="append", default=[],
        help="also run our op with this kernel alone; may be given several times",
    )  # fmt: skip
    parser.add_argument("--skip", nargs="+", choices=SKIPPABLE, default=[], help="rivals to leave out")
    parser.set_defaults(run=_attention, parser=parser)


def add_step(commands: argparse._SubParsersAction) -> None:
    """Declare ``bench step``."""
    parser = commands.add_parser(
        "step", help="an update step of Qwen3: forward, log-probs, GRPO loss, backward",
        description="An update step of Qwen3 with random weights (forward, log-probs, GRPO loss, backward, without the "
        f"optimizer), transformed and without reuse. {_NOTE}",
    )  # fmt: skip
    _add_common(parser, repeats=3)
    parser.add_argument(
        "--model", choices=["tiny", *MODELS["cuda"]], action="append",
        help="size of the model; may be given several times; default all, on the CPU tiny",
    )  # fmt: skip
    parser.add_argument(
        "--checkpointing", nargs="+", choices=["on", "off"], default=["on", "off"],
        help="gradient checkpointing of layers; default: on off",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=_number, help="decoder layers instead of the model's own number; the table says so"
    )
    parser.add_argument(
        "--kernel", choices=kernels.NAMES, default="auto", help="of the transformed model; default auto"
    )
    parser.add_argument(
        "--wave-tokens", type=_number, metavar="T",
        help="also run the transformed model in waves of T packed tokens, and say what its peak of memory is made of",
    )  # fmt: skip
    parser.add_argument(
        "--baseline-kernel", choices=["sdpa", *kernels.KERNELS], action="append",
        help="of the unmodified model; may be given several times, the first one counts for the share of the ceiling; "
        "default: the fastest one that is installed for variable-length rows, and sdpa",
    )  # fmt: skip
    parser.add_argument(
        "--time-rows", type=_number, metavar="K",
        help="micro-batch 1 and the unmodified model's side of the parity gate run the first K rows alone, at least 2; "
        "all rows are equally long, and the time is multiplied, as the table says",
    )  # fmt: skip
    parser.add_argument(
        "--skip", nargs="+", choices=["one-forward", "micro-batch"], default=[], help="what to leave out"
    )
    parser.set_defaults(run=_step, parser=parser)


def add_trl(commands: argparse._SubParsersAction) -> None:
    """Declare ``bench trl``."""
    parser = commands.add_parser(
        "trl", help="the update stage of TRL's GRPOTrainer; by torchrun also with pooled rows",
        description="The update stage of TRL's GRPOTrainer (forward, loss, backward, optimizer) on completions that "
        "are given: Qwen3 with random weights and gradient checkpointing, plain and with shared prompts. "
        f"torchrun --nproc-per-node 2 -m augtree_fx bench trl spreads a group over ranks. {_NOTE}",
    )  # fmt: skip
    _add_common(parser, repeats=2)
    parser.add_argument("--model", choices=["tiny", *MODELS["cuda"]], help="size; default 1.7B, on the CPU tiny")
    parser.add_argument("--layers", type=_number, help="decoder layers instead of the model's own number")
    parser.add_argument(
        "--rows", type=_number, default=1, metavar="K", help="of the plain trainer's micro-batch; default %(default)s"
    )
    parser.add_argument("--kernel", choices=kernels.NAMES, default="auto", help="of ours; default auto")
    parser.add_argument(
        "--baseline-kernel", choices=["sdpa", *kernels.KERNELS],
        help="of the plain trainer; default: the fastest one that is installed for variable-length rows",
    )  # fmt: skip
    parser.add_argument("--skip", nargs="+", choices=["augtree", "pooled"], default=[], help="contenders to leave out")
    parser.add_argument(
        "--seconds", type=_number, default=300, help="a collective that a rank does not join for as long ends the run"
    )
    parser.set_defaults(run=_trl, parser=parser)


def add_cp(commands: argparse._SubParsersAction) -> None:
    """Declare ``bench cp``."""
    parser = commands.add_parser(
        "cp", help="attention, or an update step, under context parallelism; run it by torchrun",
        description="Attention of one group, or an update step of Qwen3, under every kind of context parallelism there "
        "is, one process for each rank: torchrun --nproc-per-node 2 -m augtree_fx bench cp. "
        "Parity is checked against rows in a single process, times are those of the slowest rank. " + _NOTE,
    )  # fmt: skip
    _add_common(parser, repeats=5)
    _add_heads(parser)
    parser.add_argument("--kernel", choices=kernels.NAMES, default="auto", help="of attention pieces; default auto")
    parser.add_argument("--only", nargs="+", metavar="KEY", help="contenders that take part; default all")
    parser.add_argument("--skip", nargs="+", metavar="KEY", default=[], help="contenders to leave out")
    parser.add_argument("--step", action="store_true", help="an update step of a model instead of attention alone")
    parser.add_argument("--model", choices=["tiny", *MODELS["cuda"]], help="of the step; default 8B, on the CPU tiny")
    parser.add_argument("--layers", type=_number, help="decoder layers instead of the model's own number")
    parser.add_argument("--checkpointing", choices=["on", "off"], default="on", help="of layers; default on")
    parser.add_argument(
        "--rows", nargs="+", type=_number, default=[], metavar="K",
        help="of a step without reuse: rows of one forward, one run of each; default all",
    )  # fmt: skip
    parser.add_argument(
        "--check-rows", type=_number, metavar="K",
        help="of a step: only the first K rows have a loss in the parity gate, which runs them one by one",
    )  # fmt: skip
    parser.add_argument("--groups", type=_number, default=1, help="of a step: groups of the shape; default 1")
    parser.add_argument(
        "--common", type=_number, default=0, metavar="TOKENS", help="of a step: tokens that all prompts begin with"
    )
    parser.add_argument(
        "--turns", action="store_true",
        help="of a step: all ranks on one device; checked with transfers through the host, timed one after another "
        "without any: what each has to compute, for any number of ranks",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=_number, default=300, help="a collective that a rank does not join for as long ends the run"
    )
    parser.set_defaults(run=_cp, parser=parser)


def add_planner(commands: argparse._SubParsersAction) -> None:
    """Declare ``bench planner``."""
    parser = commands.add_parser(
        "planner", help="host time of planning; with --steps predicted steps against measured ones",
        description="Host time of planning on one core, of a new batch and of one whose plan is cached. With --steps: "
        "update steps of Qwen3 with few layers under every plan that a planner can choose from, beside what it "
        "predicts; on one device, or under torchrun --nproc-per-node 2 -m augtree_fx bench planner --steps. " + _NOTE,
    )  # fmt: skip
    parser.add_argument("--repeats", type=_number, help="timed runs; default 20, of steps 3")
    parser.add_argument(
        "--profile", type=int, choices=range(51), metavar="N",
        help="show the N slowest functions of a new plan; default 12, 0 for none",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=_writable, help="also write all figures to FILE")
    steps = parser.add_argument_group("with --steps")
    steps.add_argument("--steps", action="store_true", help="measure steps instead")
    steps.add_argument(
        "--again", metavar="FILE", help="take the times of an earlier --steps --json, and predict them anew"
    )
    steps.add_argument("--device", choices=timing.CEILING_SIZE, help="default: cuda")
    steps.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, on the CPU float32")
    steps.add_argument(
        "--hardware",
        help="profile, or the JSON that calibrate wrote; default h200, on the CPU cpu, with --again that of the run",
    )  # fmt: skip
    steps.add_argument("--kernel", choices=kernels.NAMES, default="auto", help="of attention; default auto")
    steps.add_argument("--checkpointing", choices=["on", "off"], default="on", help="of layers; default on")
    steps.add_argument(
        "--model", choices=["tiny", *MODELS["cuda"]], action="append",
        help="only batches of this model; of --shape, the models; default all, on the CPU tiny",
    )  # fmt: skip
    steps.add_argument("--layers", type=_number, help="decoder layers instead of those of each batch")
    steps.add_argument(
        "--shape", metavar="PxNxR", type=parse_shape, action="append",
        help="prompt x branches x response in tokens instead of the batches built in; may be given several times",
    )  # fmt: skip
    steps.add_argument(
        "--turns", action="store_true", help="all ranks on one device, one after another, without transfers"
    )
    steps.add_argument("--seconds", type=_number, default=300, help="begin no batch after so many; default %(default)s")
    parser.set_defaults(run=_planner, parser=parser)


def _planner(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if given.steps or given.again:
        if given.profile:
            parser.error("--profile is of planning's host time, got --steps or --again too; drop one")
        return _planned_steps(given, parser)
    from augtree_fx.examples.bench import planner

    return planner.run(given.repeats or 20, 12 if given.profile is None else given.profile, given.json)


def _planned_steps(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from augtree_fx.examples.bench import plan_cases, plan_steps
    from augtree_fx.examples.bench.cp import world

    device = torch.device("cpu") if given.again else _device(given, parser)
    cases = plan_cases.CUDA_CASES if device.type == "cuda" else plan_cases.CPU_CASES
    names = given.model or MODELS[device.type]
    if given.shape:
        cases = [plan_cases.of_shape(name, 2, shape) for name in names for shape in given.shape]
    options = plan_steps.Options(
        cases=[replace(case, layers=given.layers or case.layers) for case in cases if case.model in names],
        hardware=given.hardware or ("" if given.again else "h200" if device.type == "cuda" else "cpu"),
        dtype=_dtype(given, device), repeats=given.repeats or 3, kernel=given.kernel,
        checkpointing=given.checkpointing == "on", seconds=given.seconds, json=given.json,
    )  # fmt: skip
    if not options.cases:
        parser.error(f"no batch is of model {', '.join(names)}; name another one, or give --shape")
    try:
        if given.again:
            return plan_steps.again(given.again, options)
        profile(options.hardware)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    with world.joined(device.type, 600, alone=True, turns=given.turns) as ranks:
        return plan_steps.run(ranks, options)


def _device(given: argparse.Namespace, parser: argparse.ArgumentParser) -> torch.device:
    try:
        return timing.pick_device(given.device)
    except ValueError as error:
        parser.error(str(error))


def _dtype(given: argparse.Namespace, device: torch.device) -> torch.dtype:
    return getattr(torch, given.dtype or ("bfloat16" if device.type == "cuda" else "float32"))


def _heads(given: argparse.Namespace, device: torch.device, parser: argparse.ArgumentParser) -> Heads:
    heads, kv_heads, head_dim = (32, 8, 128) if device.type == "cuda" else (4, 2, 16)
    sizes = Heads(given.heads or heads, given.kv_heads or kv_heads, given.head_dim or head_dim)
    if sizes.heads % sizes.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads, got {sizes.heads} and {sizes.kv_heads}")
    return sizes


def _attention(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    device = _device(given, parser)
    sizes = _heads(given, device, parser)
    shapes = list(given.shape or [])
    one = (given.prompt, given.branches, given.response)
    if any(one):
        if not all(one):
            parser.error("--prompt, --branches and --response make one shape: give all three")
        shapes.append(Shape(*one))
    from augtree_fx.examples.bench import attention

    options = attention.Options(
        shapes=shapes or [parse_shape(text) for text in ATTENTION_SHAPES[device.type]],
        heads=sizes, dtype=_dtype(given, device), device=device, repeats=given.repeats,
        kernels=given.kernel, skip=given.skip, json=given.json,
    )  # fmt: skip
    return attention.run(options)


def _step(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    device = _device(given, parser)
    if given.time_rows == 1:
        parser.error(
            "--time-rows must be at least 2, got 1: one row shares nothing, and the parity gate would be empty"
        )
    if {"one-forward", "micro-batch"} <= set(given.skip):
        parser.error("--skip one-forward micro-batch leaves nothing to compare with")
    shapes = given.shape or [parse_shape(text) for text in STEP_SHAPES[device.type]]
    alone = [str(shape) for shape in shapes if shape.branches < 2]
    if alone:
        parser.error(f"a group must have at least 2 branches to share a prompt, got {', '.join(alone)}")
    from augtree_fx.examples.bench import contenders, step, varlen

    dtype = _dtype(given, device)
    example = torch.empty(2, 2, 128, dtype=dtype, device=device)
    best = varlen.best_kernel(example, example[:, :1])
    options = contenders.Options(
        models=given.model or MODELS[device.type],
        checkpointing=[word == "on" for word in given.checkpointing],
        shapes=shapes,
        layers=given.layers, dtype=dtype, device=device, repeats=given.repeats, kernel=given.kernel,
        wave_tokens=given.wave_tokens,
        baseline_kernels=given.baseline_kernel or [best, "sdpa"],
        time_rows=given.time_rows, skip=given.skip, json=given.json,
    )  # fmt: skip
    return step.run(options)


def _trl(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    device = _device(given, parser)
    from augtree_fx.examples.bench import trl, varlen
    from augtree_fx.examples.bench.cp import world

    dtype = _dtype(given, device)
    example = torch.empty(2, 2, 128, dtype=dtype, device=device)
    options = trl.Options(
        model=given.model or ("tiny" if device.type == "cpu" else "1.7B"), layers=given.layers,
        shapes=given.shape or [parse_shape(text) for text in TRL_SHAPES[device.type]], dtype=dtype,
        repeats=given.repeats, rows=given.rows, kernel=given.kernel,
        baseline_kernel=given.baseline_kernel or varlen.best_kernel(example, example[:, :1]),
        skip=given.skip, json=given.json,
    )  # fmt: skip
    here = distributed.is_initialized() or "RANK" in os.environ
    with world.joined(device.type, given.seconds) if here else nullcontext(world.Alone(device)) as ranks:
        try:
            for shape in options.shapes:
                trl.contenders(options, shape, ranks.size)
        except ValueError as error:
            parser.error(str(error))
        return trl.run(ranks, options)


def _cp(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    device = _device(given, parser)
    from augtree_fx.examples.bench.cp import contenders, race, world

    unknown = [key for key in [*(given.only or []), *given.skip] if key not in contenders.KEYS]
    if unknown:
        parser.error(f"contenders are {', '.join(contenders.KEYS)}, got {', '.join(unknown)}")
    level = "step" if given.step else "attention"
    shapes = given.shape or [parse_shape(text) for text in CP_SHAPES[level][device.type]]
    if not given.step and (given.groups > 1 or given.common or given.turns):
        parser.error("--groups, --common and --turns are of a step; attention is that of one group, on all ranks")
    if given.common > min(shape.prompt for shape in shapes):
        parser.error(
            f"--common is a part of every prompt, got {given.common} tokens and shapes {', '.join(map(str, shapes))}"
        )
    options = race.Options(
        shapes=[replace(shape, groups=given.groups, common=given.common) for shape in shapes],
        keys=[key for key in given.only or contenders.KEYS if key not in given.skip],
        heads=_heads(given, device, parser), dtype=_dtype(given, device), repeats=given.repeats, kernel=given.kernel,
        json=given.json, model=(given.model or MODELS[device.type][-1]) if given.step else None, layers=given.layers,
        checkpointing=given.checkpointing == "on", rows=given.rows or [0], check_rows=given.check_rows,
    )  # fmt: skip
    try:
        with world.joined(device.type, given.seconds, turns=given.turns) as ranks:
            return race.run(ranks, options)
    except world.NoRanks as error:
        parser.error(str(error))
