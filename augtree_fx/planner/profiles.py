"""Hardware profiles that come with the package. H200 was measured; the other GPUs are its fractions of their own peaks.

`python -m augtree_fx calibrate` writes a profile of the machine at hand, which is better than any of these.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from augtree_fx.planner.hardware import Curve, Hardware, Link, Origin

_TERA, _GIGA = 1e12, 1e9
_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# FlashAttention-4 4.0.0b36, bf16, 32:8 heads, head size 128, TFLOP/s on one H200. Causal at 32k, the backward at 4k,
# and rows of 2k, 8k and 33k as measured; blocks without a mask from the tree tables less their causal calls.
_CAUSAL_FORWARD = (110, 200, 320, 440, 526, 570, 607, 630, 648)
_CAUSAL_BACKWARD = (80, 150, 230, 330, 408, 480, 542, 580, 605)
_FULL_FORWARD = (200, 320, 450, 560, 595, 620, 650, 690, 713)
_FULL_BACKWARD = (130, 220, 330, 440, 500, 560, 575, 590, 597)
# 8192 rows as measured; fewer rows read the weights (4.24 TB/s) for less work.
_MATMUL_SIZES, _MATMUL = (16, 64, 256, 1024, 4096, 8192), (50, 200, 500, 680, 750, 771)
# Dense bf16 TFLOP/s, memory bytes/s, memory bytes, NVLink bytes/s a direction: what each card promises.
_H200_PEAKS = (989.0, 4.8e12, 141 * _GIGA, 450e9)
_PEAKS = {
    "h100": ((989.0, 3.35e12, 80 * _GIGA, 450e9), "NVIDIA H100 SXM data sheet", "2023-03"),
    "a100": ((312.0, 2.039e12, 80 * _GIGA, 300e9), "NVIDIA A100 80GB SXM data sheet", "2021-06"),
    "b200": ((2250.0, 8.0e12, 180 * _GIGA, 900e9), "NVIDIA HGX B200 data sheet", "2025-01"),
}
_NODE_RANKS = 8
_NIC_BYTES_PER_S = {"h200": 50e9, "h100": 50e9, "a100": 25e9, "b200": 50e9}  # one 400 (A100: 200) Gb/s port a GPU

PROFILES = ("h200", "h100", "a100", "b200", "cpu")


def _curve(tera: tuple[float, ...], sizes: tuple[int, ...] = _SIZES, factor: float = 1.0) -> Curve:
    return Curve(sizes, tuple(rate * factor * _TERA for rate in tera))


def _network(name: str) -> tuple[Link, Origin]:
    """The network between nodes. Collectives move each byte into a node once, over all of its ports; rings use one."""
    port = 0.9 * _NIC_BYTES_PER_S[name]
    spread = 0.6 * _NODE_RANKS * port
    origin = Origin("line rate of one port a GPU, less 10% (collectives: 60% of a node's ports)", "2026-11", False)
    return Link("network", 1 << 20, 60.0, port, spread, spread, port), origin


def _h200() -> Hardware:
    attention = Origin(
        "FA4 4.0.0b36, examples/results/2026-11-29-attention-h200.md; below 1k extrapolated", "2026-11-29", True
    )
    links = Link("nvlink", _NODE_RANKS, 55.0, 344e9, 277e9, 260e9, 321e9)
    network, of_network = _network("h200")
    return Hardware(
        "h200", _curve(_CAUSAL_FORWARD), _curve(_CAUSAL_BACKWARD), _curve(_FULL_FORWARD), _curve(_FULL_BACKWARD),
        _curve(_MATMUL, _MATMUL_SIZES), 139 << 30, 4.24e12, 6.8, (links, network),
        {
            **dict.fromkeys(("causal_forward", "causal_backward", "full_forward", "full_backward"), attention),
            "matmul": Origin("8192^3 bf16 771 TFLOP/s, torch 2.11; fewer rows extrapolated", "2026-11-29", True),
            "memory_bytes": Origin("what the card reports, 139 GiB", "2026-11", True),
            "memory_bytes_per_s": Origin("copy, torch 2.11", "2026-11-29", True),
            "call_us": Origin("one launch, least of 20 runs, torch 2.11", "2026-11-30", True),
            "links.nvlink": Origin("two GPUs, NCCL, 1 GiB, latency 40 to 75 us", "2026-11-29", True),
            "links.network": of_network,
        },
    )  # fmt: skip


def _scaled(name: str) -> Hardware:
    """A card that nobody measured: the H200's measured fractions of the peaks, times this card's peaks."""
    peaks, source, date = _PEAKS[name]
    compute, memory, _, fabric = (own / theirs for own, theirs in zip(peaks, _H200_PEAKS, strict=True))
    origin = Origin(f"{source}, times the fraction of its peak that the h200 profile reaches", date, False)
    network, of_network = _network(name)
    link = Link("nvlink", _NODE_RANKS, 55.0, 344e9 * fabric, 277e9 * fabric, 260e9 * fabric, 321e9 * fabric)
    names = ("causal_forward", "causal_backward", "full_forward", "full_backward", "matmul", "memory_bytes",
             "memory_bytes_per_s", "call_us", "links.nvlink")  # fmt: skip
    return Hardware(
        name, _curve(_CAUSAL_FORWARD, factor=compute), _curve(_CAUSAL_BACKWARD, factor=compute),
        _curve(_FULL_FORWARD, factor=compute), _curve(_FULL_BACKWARD, factor=compute),
        _curve(_MATMUL, _MATMUL_SIZES, compute), int(peaks[2]), 4.24e12 * memory, 6.8, (link, network),
        {**dict.fromkeys(names, origin), "links.network": of_network},
    )  # fmt: skip


def _cpu() -> Hardware:
    rates = (0.02, 0.04, 0.06, 0.07, 0.075)
    sizes = (64, 256, 1024, 2048, 4096)
    attention = Origin("guessed fractions of the matmul rate; calibrate measures them", "2026-11", False)
    loopback = Link("loopback", 1 << 20, 200.0, 1e9, 1e9, 1e9, 1e9)
    guess = Origin("gloo over loopback, order of magnitude", "2026-11", False)
    return Hardware(
        "cpu", _curve(rates, sizes), _curve(rates, sizes), _curve(rates, sizes), _curve(rates, sizes),
        _curve((0.05, 0.1), (64, 512)), int(16 * _GIGA), 1e10, 2.4, (loopback,),
        {
            **dict.fromkeys(("causal_forward", "causal_backward", "full_forward", "full_backward"), attention),
            "matmul": Origin("float32, two AVX-512 cores, torch 2.13", "2026-11", True),
            "memory_bytes": Origin("a laptop's", "2026-11", False),
            "memory_bytes_per_s": Origin("copy, two cores, torch 2.13", "2026-11", True),
            "call_us": Origin("one call, least of 20 runs, two cores, torch 2.13", "2026-11-30", True),
            "links.loopback": guess,
        },
    )  # fmt: skip


@cache
def profile(name: str) -> Hardware:
    """A profile by name, or by the path of a JSON file that `Hardware.save` wrote.

    Raises:
        ValueError: neither a known name nor a file.
    """
    if name == "h200":
        return _h200()
    if name in _PEAKS:
        return _scaled(name)
    if name == "cpu":
        return _cpu()
    if Path(name).is_file():
        return Hardware.load(name)
    raise ValueError(
        f"hardware must be one of {', '.join(PROFILES)} or a profile's JSON file, got {name!r}; "
        "python -m augtree_fx calibrate writes one"
    )
