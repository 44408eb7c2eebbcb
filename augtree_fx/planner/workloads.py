"""Workload files: one JSON line a group of lengths, deeper trees where the file has them.

{"prompt_tokens": P, "response_tokens": [...]}                       a group
... "static_prompt_tokens": S                                        its first S tokens are the same in all groups
{"doc_tokens": D, "instructions": [{"prompt_tokens": ..., ...}]}     one document under several prompts
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from augtree_fx.planner.replay_shape import ReplayShape


@dataclass(frozen=True)
class Group:
    """One prompt with its responses below a path of shared prefixes.

    Attributes:
        path: ``(name, tokens)`` of what it shares with other groups; groups with equal names share it.
        prompt_tokens: tokens of its own prompt after that.
        response_tokens: of its responses.
    """

    path: tuple[tuple[str, int], ...]
    prompt_tokens: int
    response_tokens: tuple[int, ...]


def read_groups(path: str | Path) -> list[Group]:
    """Groups of a workload file, in its order.

    Raises:
        ValueError: a line is no JSON object, lacks its lengths, or has lengths that are not whole numbers or cannot be.
        OSError: the file cannot be read.
    """
    groups: list[Group] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"a workload must be JSON lines, {str(path)!r} is no text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                groups += map(_checked, _groups_of(json.loads(line), str(number)))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise ValueError(
                    f"line {number} of {str(path)!r} must have prompt_tokens and response_tokens, or instructions that "
                    f'do, got {line[:60]!r} ({error}); as in {{"prompt_tokens": 100, "response_tokens": [20, 30]}}'
                ) from error
    if not groups:
        raise ValueError(f"a workload must have at least one group, got none in {str(path)!r}")
    return groups


def _groups_of(line: dict[str, Any], number: str) -> Iterator[Group]:
    if "instructions" in line:
        prompts = [_length(one["prompt_tokens"]) for one in line["instructions"]]
        shared = min(_length(line.get("lcp_tokens", line.get("doc_tokens", 0))), min(prompts))
        for prompt, one in zip(prompts, line["instructions"], strict=True):
            yield Group((("document " + number, shared),), prompt - shared, _lengths(one["response_tokens"]))
        return
    prompt, responses = _length(line["prompt_tokens"]), _lengths(line["response_tokens"])
    static = _length(line.get("static_prompt_tokens", 0))
    yield Group((("static", static),) if static else (), prompt - static, responses)


def _length(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"lengths must be whole numbers, got {value!r}")
    return value


def _lengths(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"response_tokens must be a list of lengths, got {values!r}")
    return tuple(map(_length, values))


def _checked(group: Group) -> Group:
    """A group whose lengths can be."""
    lengths = (*(tokens for _, tokens in group.path), *group.response_tokens)
    if (
        group.prompt_tokens < 0
        or min(lengths, default=0) < 0
        or group.prompt_tokens + sum(t for _, t in group.path) < 1
    ):
        raise ValueError(
            "prompts must have at least 1 token, responses none below 0, and shared prefixes no more than the prompt"
        )
    return group


def shape_of(groups: Sequence[Group]) -> ReplayShape:
    """The prefix trees of a batch of groups."""
    paths = sorted({group.path for group in groups})
    shared = {path: index for index, path in enumerate(path for path in paths if path)}
    order = sorted(range(len(groups)), key=lambda index: shared.get(groups[index].path, len(shared)))
    roots = [path[0][1] for path in shared]
    under = [index for index in order if groups[index].path]
    alone = [index for index in order if not groups[index].path]
    # Level 0: shared prefixes, then prompts that share none. Level 1: prompts under prefixes, responses of the others.
    parent = [-1] * (len(roots) + len(alone))
    length = roots + [groups[index].prompt_tokens for index in alone]
    scored = [0] * len(length)
    node = {index: len(roots) + place for place, index in enumerate(alone)}
    for index in under:
        node[index] = len(parent)
        parent.append(shared[groups[index].path])
        length.append(groups[index].prompt_tokens)
        scored.append(0)
    for index in alone + under:
        responses = groups[index].response_tokens
        parent += [node[index]] * len(responses)
        length += responses
        scored += responses
    return ReplayShape.from_nodes(parent, length, scored_tokens=scored)


def batches(groups: Sequence[Group], groups_per_step: int) -> list[ReplayShape]:
    """Consecutive steps over a workload; the last one may be smaller.

    Raises:
        ValueError: `groups_per_step` is below 1.
    """
    if groups_per_step < 1:
        raise ValueError(f"a step must have at least 1 group, got {groups_per_step}")
    starts = range(0, len(groups), groups_per_step)
    return [shape_of(groups[start : start + groups_per_step]) for start in starts]
