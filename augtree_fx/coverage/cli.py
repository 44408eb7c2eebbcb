"""Command line of the walk: ``python -m augtree_fx models``."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence

from tabulate import tabulate

from augtree_fx.coverage import tiny
from augtree_fx.coverage.check import ERROR, STATUSES, Outcome
from augtree_fx.coverage.walk import walk

_DESCRIPTION = """\
Walk every causal-LM type of the installed transformers: build a tiny random model, transform a copy, run a grouped
batch through both, compare logits and every gradient.

  exact     prompts were shared, and everything agrees
  original  refused by transform, or the original forward ran, for the reason given
  error     anything else
  skipped   transformers cannot build the type here, for the reason given
"""
_REASON_WIDTH = 110  # characters of a reason that the table shows; JSON has all of it


def main(arguments: Sequence[str], prog: str = "python -m augtree_fx models") -> int:
    """Run the walk.

    Returns:
        1 if any type ended in an error, else 0. A usage error ends in ``SystemExit(2)``.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model-type", action="append", metavar="TYPE", help="only this one; may be given several times"
    )
    parser.add_argument("--list", action="store_true", help="print the types, run nothing")
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=min(os.cpu_count() or 1, 8),
        metavar="N",
        help="processes; default %(default)s",
    )
    parser.add_argument(
        "--timeout", type=_positive, default=60, metavar="SECONDS", help="limit for one type; default %(default)s"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the outcomes to FILE; - prints them, and no table")
    given = parser.parse_args(arguments)
    known = tiny.model_types()
    chosen = given.model_type or known
    unknown = [name for name in chosen if name not in known]
    if unknown:
        parser.error(f"transformers has no causal-LM type {unknown[0]!r}; --list shows its {len(known)} types")
    if given.list:
        print("\n".join(chosen))
        return 0
    order = list(dict.fromkeys(chosen))
    outcomes = sorted(walk(order, jobs=given.jobs, timeout_s=given.timeout), key=lambda x: order.index(x.model_type))
    text = json.dumps([outcome.record() for outcome in outcomes], indent=1)
    if given.json == "-":
        print(text)
    else:
        print(table(outcomes))
        if given.json:
            with open(given.json, "w", encoding="utf-8") as file:
                file.write(text + "\n")
    print(summary(outcomes), file=sys.stderr if given.json == "-" else sys.stdout)
    return int(any(outcome.status == ERROR for outcome in outcomes))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each type."""
    rows = [
        (item.model_type, item.class_name, ", ".join(item.attention), item.status, _short(item.reason))
        for item in outcomes
    ]
    return tabulate(rows, headers=("model type", "class", "attention", "status", "reason"))


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _REASON_WIDTH else line[: _REASON_WIDTH - 3] + "..."


def summary(outcomes: Sequence[Outcome]) -> str:
    """Numbers of types by status, and the versions that they hold for."""
    counted = Counter(item.status for item in outcomes)
    numbers = ", ".join(f"{counted[status]} {status}" for status in STATUSES)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "torch"))
    return f"{len(outcomes)} types: {numbers} ({versions})"
