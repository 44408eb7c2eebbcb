"""Bar chart of a `bench attention --json` file: milliseconds of each way to run the same group.

python examples/plot_bench.py bench.json bench.png
"""

from __future__ import annotations

import argparse
import json

import matplotlib
from matplotlib import pyplot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", help="file written by python -m augtree_fx bench attention --json")
    parser.add_argument("picture", help="PNG or SVG to write")
    parser.add_argument("--case", type=int, default=0, help="which of the file's shapes, from 0; default the first")
    args = parser.parse_args()
    matplotlib.use("Agg")
    with open(args.figures, encoding="utf-8") as file:
        figures = json.load(file)
    case = figures["cases"][args.case]
    shape = case["shape"]
    timed = [(row["name"], row["both"]["median_ms"]) for row in case["rows"] if row["passed"]]
    names, times = zip(*sorted(timed, key=lambda item: item[1]), strict=True)
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.4 * len(names)))
    colors = ["#1b7f5c" if name.startswith("tree") else "#9aa5b1" for name in names]
    bars = axes.barh(names, times, color=colors)
    axes.bar_label(bars, labels=[f"{time:.0f} ms" if time >= 10 else f"{time:.1f} ms" for time in times], padding=4)
    axes.invert_yaxis()
    axes.set_xlabel("forward + backward, ms")
    axes.set_title(
        f"{shape['prompt']:,} prompt tokens, {shape['branches']} x {shape['response']:,} response tokens, "
        f"{shape['heads']}:{shape['kv_heads']} heads, {figures['dtype']}, {figures['environment']['device']}",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.savefig(args.picture, dpi=160, bbox_inches="tight")


if __name__ == "__main__":
    main()
