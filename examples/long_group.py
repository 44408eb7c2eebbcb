"""A group that does not fit: waves finish under a memory budget in which the unmodified model and one forward run out.

python examples/long_group.py                      a GPU of 80 GB: Qwen3-0.6B, 16 responses of 4k on a prompt of 16k
python examples/long_group.py --device cpu         a small model, to see that it works
python examples/long_group.py --picture memory.png memory over time of the three, one process each
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

import augtree_fx
from augtree_fx import TreeLayout

FORMS = {
    "unmodified": "unmodified model, all rows",
    "once": "one forward, prompt shared",
    "waves": "waves, prompt shared",
}
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "cpu": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4},
}
# Prompt, branches, response, tokens of a wave, and GiB beyond the weights that a process may take.
DEFAULTS = {"cuda": (16_384, 16, 4096, 8192, 72.0), "cpu": (512, 16, 256, 256, 0.35)}
SECONDS_BETWEEN_SAMPLES = 0.01


@dataclass(frozen=True)
class Group:
    """One prompt, its responses, and an advantage for each."""

    prompt: Tensor
    responses: Tensor
    advantages: Tensor

    @staticmethod
    def draw(given: argparse.Namespace) -> Group:
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(1000, (given.prompt,), generator=generator)
        responses = torch.randint(1000, (given.branches, given.response), generator=generator)
        advantages = torch.randn(given.branches, generator=generator)
        return Group(*(x.to(given.device) for x in (prompt, responses, advantages)))

    def rows(self) -> Tensor:
        return torch.cat([self.prompt.expand(len(self.responses), -1), self.responses], dim=1)


def policy_loss(logprobs: Tensor, row: Tensor, group: Group) -> Tensor:
    """A mean over all response tokens of the batch; sums over waves are the batch's."""
    return -(group.advantages[row] * logprobs).sum() / group.responses.numel()


def step_on_rows(model: Any, group: Group) -> float:
    """What trainers do: all rows in one forward, log-probs of the responses, one backward."""
    rows, first = group.rows(), len(group.prompt)
    logits = model(
        rows, attention_mask=torch.ones_like(rows), use_cache=False, logits_to_keep=rows.shape[1] - first + 1
    )
    logprobs = logits.logits[:, :-1].float().log_softmax(-1).gather(-1, rows[:, first:, None])[..., 0]
    row = torch.arange(len(rows), device=rows.device)[:, None].expand_as(logprobs)
    loss = policy_loss(logprobs, row, group)
    loss.backward()
    return loss.item()


def step_in_waves(model: Any, group: Group, max_tokens: int) -> float:
    """The same loss and gradients, one wave at a time."""
    layout = TreeLayout.from_groups([group.prompt], [list(group.responses)], device=group.prompt.device)
    total = 0.0
    with (
        augtree_fx.prefill(model, layout, max_wave_tokens=max_tokens) as tree,
        tqdm(total=group.responses.numel(), unit="token", desc="waves") as progress,
    ):
        for wave in tree.waves():
            loss = policy_loss(wave.logprobs(), wave.row, group)
            loss.backward()
            total += loss.item()
            progress.update(len(wave))
    return total


class MemoryTrace(threading.Thread):
    """Samples of ``(seconds, GiB)`` of this process beyond where it started, until `stop`."""

    def __init__(self, device: str) -> None:
        super().__init__(daemon=True)
        self._device, self._over = device, threading.Event()
        self._start, self._base = time.perf_counter(), self._used()
        self.samples: list[tuple[float, float]] = []

    def _used(self) -> int:
        if self._device == "cuda":
            return torch.cuda.memory_allocated()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def run(self) -> None:
        while not self._over.wait(SECONDS_BETWEEN_SAMPLES):
            self.samples.append((time.perf_counter() - self._start, (self._used() - self._base) / 2**30))

    def stop(self) -> None:
        self._over.set()
        self.join()


def limit_memory(device: str, gib: float) -> None:
    """Let allocations fail that take this process beyond ``gib`` more than it has now."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_allocated() + gib * 2**30) / total))
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + int(gib * 2**30), resource.RLIM_INFINITY))


def run_one(given: argparse.Namespace) -> dict[str, Any]:
    """Run one form in this process, under the budget."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **SIZES[given.device], num_key_value_heads=SIZES[given.device]["num_attention_heads"] // 2,
        head_dim=128 if given.device == "cuda" else 64, vocab_size=1000, max_position_embeddings=131_072,
    )  # fmt: skip
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    with torch.device(given.device):
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype).train()
    if given.form != "unmodified":
        augtree_fx.transform(model)
    group = Group.draw(given)
    # What kernels and libraries take at their first use is no part of the step; they are other ones for short pieces.
    small = Group(group.prompt[: given.prompt // 4], group.responses[:2, : given.response // 4], group.advantages[:2])
    step_in_waves(model, small, given.wave) if given.form == "waves" else step_on_rows(model, small)
    model.zero_grad()
    if given.device == "cuda":
        torch.cuda.empty_cache()
    limit_memory(given.device, given.budget)
    trace = MemoryTrace(given.device)
    trace.start()
    found: dict[str, Any] = {"form": given.form, "loss": None, "grad_norm": None}
    try:
        waves = given.form == "waves"
        found["loss"] = step_in_waves(model, group, given.wave) if waves else step_on_rows(model, group)
        found["grad_norm"] = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm().item()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
    trace.stop()
    return found | {"samples": trace.samples}


def run_all(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Each form in a process of its own."""
    results = []
    for form in FORMS:
        done = subprocess.run(
            [sys.executable, *sys.argv, "--form", form], stdout=subprocess.PIPE, check=True, text=True
        )
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def report(results: list[dict[str, Any]], given: argparse.Namespace) -> str:
    lines = []
    for found in results:
        peak, seconds = max(gib for _, gib in found["samples"]), found["samples"][-1][0]
        outcome = (
            ["out of memory", "", ""]
            if found["loss"] is None
            else [f"{seconds:.1f} s", found["loss"], found["grad_norm"]]
        )
        lines.append([FORMS[found["form"]], f"{peak:.2f}", *outcome])
    sizes = f"{given.branches} x {given.response} on {given.prompt} tokens"
    title = f"{sizes}, {given.budget:g} GiB beyond the weights, {given.device}"
    return f"{title}\n{tabulate(lines, headers=['', 'peak GiB', 'step', 'loss', 'gradient norm'], floatfmt='.6f')}"


def draw(results: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """Memory over time of the three."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    for found, color in zip(results, ("#9aa5b1", "#d9822b", "#1b7f5c"), strict=True):
        seconds, gib = zip(*found["samples"], strict=True)
        axes.plot(seconds, gib, color=color, label=FORMS[found["form"]])
        if found["loss"] is None:
            axes.plot(seconds[-1], gib[-1], "x", color=color, markersize=10, markeredgewidth=2)
            axes.annotate("out of memory", (seconds[-1], gib[-1]), textcoords="offset points", xytext=(8, -3))
    axes.axhline(given.budget, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB beyond the weights")
    axes.set_title(f"{given.branches} x {given.response:,} tokens on a prompt of {given.prompt:,}", fontsize=10)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(FORMS))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(given.picture, dpi=160, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DEFAULTS), default="cuda" if torch.cuda.is_available() else "cpu")
    for name, kind in (("prompt", int), ("branches", int), ("response", int), ("wave", int), ("budget", float)):
        parser.add_argument(f"--{name}", type=kind, help="tokens, responses, or GiB; default for the device")
    parser.add_argument("--picture", help="PNG or SVG to write")
    parser.add_argument("--form", choices=list(FORMS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = ("prompt", "branches", "response", "wave", "budget")
    for name, value in zip(names, DEFAULTS[given.device], strict=True):
        if getattr(given, name) is None:
            setattr(given, name, value)
    if given.form:
        print(json.dumps(run_one(given)))
        return
    results = run_all(given)
    print(report(results, given))
    if given.picture:
        draw(results, given)


if __name__ == "__main__":
    main()
