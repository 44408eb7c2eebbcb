"""Command line of ``calibrate``: measure this machine and write its hardware profile.

Alone it measures kernels, copies and memory; under ``torchrun`` the links of one axis as well. Rank 0 writes.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from tabulate import tabulate

from augtree_fx import kernels
from augtree_fx.calibrate import kernel_rates, link_rates
from augtree_fx.planner.cli import whole_number
from augtree_fx.planner.hardware import CURVES, Curve, Hardware, Link, Origin
from augtree_fx.planner.profiles import PROFILES, profile

ATTENTION_SIZES = {"cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768), "cpu": (64, 128, 256, 512, 1024)}
MATMUL_ROWS = {"cuda": (16, 64, 256, 1024, 4096, 8192), "cpu": (16, 64, 256, 1024)}


def main(arguments: Sequence[str], prog: str = "python -m augtree_fx calibrate") -> int:
    """Measure and write a profile.

    Returns:
        0. A usage error ends in ``SystemExit(2)``.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measure attention and matmul by size, copies, memory and, under torchrun, links; write a profile "
        "for plan and simulate --hardware FILE.",
    )
    parser.add_argument("output", metavar="FILE", help="JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--name", help="of the profile; default the device's")
    parser.add_argument(
        "--kernel", choices=kernels.NAMES, default="auto", help="attention kernel, as transform takes it; default auto"
    )
    parser.add_argument("--heads", type=whole_number, default=32, help="query heads; default %(default)s")
    parser.add_argument("--kv-heads", type=whole_number, default=8, help="key heads; default %(default)s")
    parser.add_argument("--head-dim", type=whole_number, default=128, help="head size; default %(default)s")
    parser.add_argument("--max-size", type=whole_number, default=1 << 20, help="skip pieces of more tokens than this")
    parser.add_argument("--repeats", type=whole_number, default=5, help="timed runs of each piece; default %(default)s")
    parser.add_argument(
        "--network", choices=PROFILES[:-1],
        help="take the links that were not measured from this profile; default h200, on the CPU none",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    output = Path(given.output)
    if output.is_dir() or not output.absolute().parent.is_dir():
        parser.error(f"the profile must be a file in a folder that exists, got {given.output!r}")
    if given.heads % given.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads, got {given.heads} and {given.kv_heads}")
    kind = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, found none; use --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device("cpu")
    machine = calibrate(given, device)
    if int(os.environ.get("RANK", 0)) == 0:
        machine.save(given.output)
        print(f"{_table(machine)}\n\nwritten to {given.output}")
    return 0


def calibrate(given: argparse.Namespace, device: torch.device) -> Hardware:
    """The profile of a device.

    Args:
        given: what `main` parsed.
        device: what to measure.
    """
    kind, date = device.type, datetime.date.today().isoformat()
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    heads = kernel_rates.Heads(given.heads, given.kv_heads, given.head_dim)
    sizes = [size for size in ATTENTION_SIZES[kind] if size <= given.max_size] or [given.max_size]
    rates = kernel_rates.attention_rates(sizes, heads, device, dtype, given.kernel, given.repeats)
    rows = [size for size in MATMUL_ROWS[kind] if size <= given.max_size] or [given.max_size]
    matmul = kernel_rates.matmul_rates(rows, device, dtype, given.repeats)
    source = f"{_device_name(device)}, torch {torch.__version__}, {str(dtype).split('.')[1]}"
    kernel = f"{source}, kernel {given.kernel}, {heads.query}:{heads.kv} heads of {heads.dim}"
    links, of_links = _links(given, device, date, source)
    origins = {name: Origin(kernel, date, True) for name in CURVES}
    origins |= {
        name: Origin(source, date, True) for name in ("matmul", "memory_bytes", "memory_bytes_per_s", "call_us")
    }
    return Hardware(
        name=given.name or _device_name(device).lower().replace(" ", "-"),
        **{name: Curve(tuple(sizes), tuple(rates[name])) for name in CURVES if name != "matmul"},
        matmul=Curve(tuple(rows), tuple(matmul)),
        memory_bytes=kernel_rates.memory_bytes(device),
        memory_bytes_per_s=kernel_rates.copy_rate(device, given.repeats),
        call_us=kernel_rates.call_us(device),
        links=links,
        origins=origins | of_links,
    )


def _links(
    given: argparse.Namespace, device: torch.device, date: str, source: str
) -> tuple[tuple[Link, ...], dict[str, Origin]]:
    """Measured between the ranks of torchrun; levels beyond them come from another profile, and say so."""
    borrowed = profile(given.network or ("h200" if device.type == "cuda" else "cpu"))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        links, measured = borrowed.links, {}
    else:
        own = link_rates.measure_links(device, given.repeats)
        links = (own, *(link for link in borrowed.links[1:] if link.num_ranks > own.num_ranks))
        measured = {f"links.{own.name}": Origin(f"{source}, {world_size} ranks", date, True)}
        if len(links) == 1:  # the last level of a machine connects any number of ranks
            return links, measured
    taken = {
        f"links.{link.name}": Origin(f"profile {borrowed.name}: {origin.source}", origin.date, False)
        for link in links
        if f"links.{link.name}" not in measured
        for origin in [borrowed.origins[f"links.{link.name}"]]
    }
    return links, measured | taken


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _table(machine: Hardware) -> str:
    rows = [
        [name, size, f"{rate / 1e12:.3g} TFLOP/s"]
        for name in CURVES
        for curve in [getattr(machine, name)]
        for size, rate in zip(curve.sizes, curve.flop_per_s, strict=True)
    ]
    rows.append(["copy", "", f"{machine.memory_bytes_per_s / 1e9:.3g} GB/s"])
    rows.append(["call", "", f"{machine.call_us:.3g} us"])
    rows.append(["memory", "", f"{machine.memory_bytes / 2**30:.1f} GiB"])
    for link in machine.links:
        seen = "" if machine.origins[f"links.{link.name}"].measured else ", not measured"
        rates = (link.ring_bytes_per_s, link.all_gather_bytes_per_s, link.reduce_scatter_bytes_per_s,
                 link.all_to_all_bytes_per_s)  # fmt: skip
        text = "/".join(f"{rate / 1e9:.3g}" for rate in rates)
        rows.append([f"link {link.name}", link.num_ranks, f"{text} GB/s, {link.latency_us:.0f} us{seen}"])
    return tabulate(rows, [machine.name, "size", "rate"], disable_numparse=True)
