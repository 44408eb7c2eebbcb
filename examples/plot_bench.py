"""Bar chart of a `bench_tree_attention.py --json` file: milliseconds of each way to run the same group.

python examples/plot_bench.py bench.json bench.png
"""

from __future__ import annotations

import argparse
import json

import matplotlib
from matplotlib import pyplot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", help="file written by bench_tree_attention.py --json")
    parser.add_argument("picture", help="PNG or SVG to write")
    args = parser.parse_args()
    matplotlib.use("Agg")
    with open(args.figures, encoding="utf-8") as file:
        figures = json.load(file)
    shape = figures["shape"]
    rows = sorted(figures["rows"], key=lambda row: row[1])
    figure, axes = pyplot.subplots(figsize=(8, 2.4))
    bars = axes.barh([row[0] for row in rows], [row[1] for row in rows], color=["#1b7f5c"] + ["#9aa5b1"] * 8)
    axes.bar_label(bars, labels=[f"{row[1]:.0f} ms" for row in rows], padding=4)
    axes.invert_yaxis()
    axes.set_xlabel("forward + backward, ms")
    axes.set_title(
        f"{shape['prompt']:,} prompt tokens, {shape['branches']} x {shape['response']:,} response tokens, "
        f"{shape['heads']}:{shape['kv_heads']} heads, bf16, {figures['device']}",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.savefig(args.picture, dpi=160, bbox_inches="tight")


if __name__ == "__main__":
    main()
