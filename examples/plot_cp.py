"""Line chart of a `bench cp --json` file: milliseconds of each schedule over the ratio of response to prompt tokens.

python examples/plot_cp.py cp.json schedules.png
"""

from __future__ import annotations

import argparse
import json

import matplotlib
from matplotlib import pyplot

COLORS = {"rotate_kv": "#1b7f5c", "gather_kv": "#d9822b", "move_q": "#6b4fbb"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", help="file written by python -m augtree_fx bench cp --json")
    parser.add_argument("picture", help="PNG or SVG to write")
    args = parser.parse_args()
    matplotlib.use("Agg")
    with open(args.figures, encoding="utf-8") as file:
        figures = json.load(file)
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for schedule, color in COLORS.items():
        points = []
        for case in figures["cases"]:
            shape = case["shape"]
            ratio = shape["branches"] * shape["response"] / shape["prompt"]
            rows = [row for row in case["rows"] if row["key"] == f"augtree-{schedule}" and row["passed"]]
            points += [(ratio, row["both"]["median_ms"], row["transfer"]["median_ms"]) for row in rows]
        ratios, both, transfer = zip(*sorted(points), strict=True)
        axes.plot(ratios, both, "o-", color=color, label=schedule)
        axes.plot(ratios, transfer, "o:", color=color, label=f"{schedule}, no arithmetic")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("response tokens / prompt tokens")
    axes.set_ylabel("forward + backward, ms")
    prompt = figures["cases"][0]["shape"]["prompt"]
    device = figures["environment"]["device"]
    axes.set_title(f"{prompt:,} prompt tokens, {figures['dtype']}, {figures['ranks']} x {device}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.05)
    figure.savefig(args.picture, dpi=160, bbox_inches="tight")


if __name__ == "__main__":
    main()
