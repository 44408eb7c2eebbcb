"""What ``verify`` prints, and writes as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from augtree_fx.verify.check import DIFFERS, EXACT, Findings
from augtree_fx.verify.compare import Difference

WORST = 6
_HEADERS = ("", "largest difference", "relative", "error", "own error", "bound", "")
VERDICTS = {EXACT: "exact and shared", DIFFERS: "differs"}


def verdict(found: Findings) -> str:
    """The last line: what the exit status says, and why."""
    if found.comparison is None:
        return f"verdict: nothing was shared: {found.reason}"
    failed = found.comparison.failed
    if found.reason or not failed:
        return f"verdict: {VERDICTS[found.status]}{f': {found.reason}' if found.reason else ''}"
    names = ", ".join(item.name for item in failed[:3]) + (", ..." if len(failed) > 3 else "")
    return f"verdict: differs: {len(failed)} of {len(found.comparison.all())} over their bound, worst first: {names}"


def text(header: list[str], found: Findings) -> str:
    """The whole report."""
    parts = ["\n".join([*header, *(f"note: {note}" for note in found.notes)])]
    if found.explanation is not None:
        parts.append(str(found.explanation))
    elif found.refusals:
        parts.append("refused\n" + "\n".join(f"  {refusal}" for refusal in found.refusals))
    if found.comparison is not None:
        parts += [_differences(found), _gain(found)]
    return "\n\n".join([*parts, verdict(found)])


def _differences(found: Findings) -> str:
    assert found.comparison is not None
    shown = [found.comparison.values, found.comparison.loss, *found.comparison.worst[:WORST]]
    number = len(found.comparison.parameters)
    head = (
        f"gradients of {number} parameters, all compared, {min(number, WORST)} that come closest to their bound shown\n"
    )
    if found.truth is None:
        head += "bound: the given tolerance of the relative difference between transformed and unmodified"
    else:
        head += (
            f"error, own error: of the transformed and the unmodified model against itself in {found.truth}, relative\n"
            f"bound: {found.factor:g} times the own error, more for few elements, at least that of a typical parameter"
        )
    return head + "\n" + tabulate([_row(item) for item in shown], headers=_HEADERS, disable_numparse=True)


def _row(item: Difference) -> tuple[str, ...]:
    errors = ("-" if x is None else f"{x:.1e}" for x in (item.error, item.own_error))
    verdict = "" if item.passed else "OVER"
    return (item.name, f"{item.largest:.1e}", f"{item.relative:.1e}", *errors, f"{item.bound:.1e}", verdict)


def _gain(found: Findings) -> str:
    assert found.explanation is not None and found.explanation.layout is not None
    layout, seconds = found.explanation.layout, found.seconds
    times = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
    ratio = seconds["unmodified"] / max(seconds["transformed"], 1e-9)
    return (
        f"gain: token ratio {layout.token_ratio:.2f}, attention ratio {layout.attention_ratio:.2f}; "
        f"measured {ratio:.2f}x in one forward and backward ({times})\n"
        "memory: one copy of the model; log-probs in chunks; gradients of both passes on the host, compared parameter "
        "by parameter\n        with those of the truth where these are"
    )


def figures(header: dict[str, Any], found: Findings) -> dict[str, Any]:
    """Everything, for JSON; numbers that are not finite as text."""
    explanation = found.explanation
    layout = None if explanation is None else explanation.layout
    tree = None
    if layout is not None:
        names = (
            "num_rows",
            "num_nodes",
            "num_levels",
            "num_row_tokens",
            "num_tokens",
            "token_ratio",
            "attention_ratio",
        )
        tree = {name: getattr(layout, name) for name in names} | {"shares": layout.shares}
    result: dict[str, Any] = {
        **header,
        "status": found.status,
        "verdict": verdict(found).removeprefix("verdict: "),
        "reason": found.reason,
        "notes": found.notes,
        "refusals": [asdict(refusal) for refusal in found.refusals],
        "fallbacks": {} if explanation is None else explanation.fallbacks,
        "tree": tree,
        "truth": found.truth,
        "seconds": found.seconds,
        "differences": [],
    }
    if found.comparison is not None:
        result["failed"] = [item.name for item in found.comparison.failed]
        shown = (found.comparison.values, found.comparison.loss, *found.comparison.worst)
        result["differences"] = [{**asdict(item), "passed": item.passed} for item in shown]
    return _finite(result)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value
