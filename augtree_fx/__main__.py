"""Command line: ``python -m augtree_fx COMMAND``. A command's module is imported only when it is chosen."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command: the module whose ``main(arguments, prog)`` returns the exit status, and what it does."""

    module: str
    help: str


COMMANDS = {
    "bench": Command(
        "augtree_fx.examples.bench.cli", "measure attention, or an update step, against what else there is"
    ),
    "calibrate": Command("augtree_fx.calibrate.cli", "measure this machine and write its hardware profile"),
    "models": Command("augtree_fx.coverage.cli", "check every causal-LM type of the installed transformers"),
    "plan": Command("augtree_fx.planner.cli", "plan a batch over many ranks; compare with what others do"),
    "simulate": Command("augtree_fx.planner.simulate_cli", "run steps of a workload event by event, ours and theirs"),
    "verify": Command("augtree_fx.verify.cli", "check your own model and batch: transformed against unmodified"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what follows the program's name; by default that of this process.

    Returns:
        The exit status: 0, or what the command says; a usage error ends in ``SystemExit(2)``.
    """
    prog = "python -m augtree_fx"
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog=prog,
        description="What rows of a batch share is computed once, differentiably.",
        epilog="commands:\n" + "\n".join(f"  {name:{width}}  {item.help}" for name, item in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below; each has --help")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the command takes")
    given = parser.parse_args(arguments)
    try:
        module = importlib.import_module(COMMANDS[given.command].module)
    except ModuleNotFoundError as error:
        parser.error(
            f"{given.command} cannot be imported: {error}; install the whole package, or run from its checkout"
        )
    return module.main(given.arguments, f"{prog} {given.command}")


if __name__ == "__main__":
    sys.exit(main())
