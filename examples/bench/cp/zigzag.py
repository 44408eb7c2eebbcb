"""Zigzag shards of sequences of any lengths, and what a rank computes while another rank's keys visit it.

Each sequence is cut into 2C chunks; rank r of C holds chunk r ("low") and chunk 2C-1-r ("high"), so that all have the
same work under a causal mask. A rank's tokens are all low chunks, then all high ones:

    two sequences, rank r     low 1 | low 2 | high 1 | high 2

Every piece of attention is then a slice of queries against a slice of keys, in one variable-length call:

    keys of rank r itself     low x low causal, high x low, high x high causal
    of a rank s < r           low x low, high x low               (their high chunks lie behind ours)
    of a rank s > r           high x low, high x high             (our low chunks lie before theirs)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from augtree_fx.tables import AttentionCall, Segment

Family = list[Segment]  # one segment a sequence, all causal or all unmasked


@dataclass(frozen=True)
class Zigzag:
    """Sequences sharded over ranks.

    Attributes:
        lengths: of the sequences, in tokens.
        num_ranks: C; a single rank holds whole sequences.
    """

    lengths: tuple[int, ...]
    num_ranks: int

    def bounds(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """``[sequences, 2]`` begin and end of a rank's low chunks inside the sequences, and of its high chunks."""
        chunks = 2 * self.num_ranks if self.num_ranks > 1 else 1
        return self._chunk(rank, chunks), self._chunk(chunks - 1 - rank, chunks, empty=chunks == 1)

    def _chunk(self, number: int, chunks: int, empty: bool = False) -> np.ndarray:
        lengths = np.asarray(self.lengths, dtype=np.int64)
        cuts = np.stack([lengths * number // chunks, lengths * (number + 1) // chunks], axis=1)
        return cuts[:, [1, 1]] if empty else cuts

    def num_tokens(self, rank: int) -> int:
        """Tokens that a rank holds."""
        return sum(int(np.diff(part).sum()) for part in self.bounds(rank))

    def places(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """``[sequences + 1]`` where each low chunk begins among a rank's tokens, and each high chunk."""
        low, high = (np.concatenate([[0], np.cumsum(np.diff(part))]) for part in self.bounds(rank))
        return low, low[-1] + high

    def tokens(self, rank: int, starts: Sequence[int]) -> np.ndarray:
        """``[tokens]`` numbers of a rank's tokens, given those of the sequences' first tokens."""
        parts = [
            np.arange(start + begin, start + end)
            for part in self.bounds(rank)
            for start, (begin, end) in zip(starts, part.tolist(), strict=True)
        ]
        return np.concatenate([np.arange(0), *parts])

    def families(self, rank: int, source: int) -> tuple[list[Family], list[Family]]:
        """Causal and unmasked pieces of a rank's queries with the keys of rank ``source``."""
        q_low, q_high = self.places(rank)
        k_low, k_high = self.places(source)
        if source == rank:
            if len(self.lengths) == 1:  # low and high are neighbours, in order
                return [[Segment(0, int(q_high[1]), 0, int(k_high[1]))]], []
            return [pieces(q_low, k_low), pieces(q_high, k_high)], [pieces(q_high, k_low)]
        if source < rank:
            return [], [pieces(q_low, k_low), pieces(q_high, k_low)]
        return [], [pieces(q_high, k_low), pieces(q_high, k_high)]


def pieces(q_places: np.ndarray, k_places: np.ndarray) -> Family:
    """Segments of queries and keys that begin at these places; the last place is the end."""
    q, k = q_places.tolist(), k_places.tolist()
    return [Segment(*bounds) for bounds in zip(q[:-1], q[1:], k[:-1], k[1:], strict=True)]


def shifted(family: Family, q: int, k: int) -> Family:
    """The same segments with ``q`` queries and ``k`` keys in front of them."""
    return [Segment(s.q_begin + q, s.q_end + q, s.k_begin + k, s.k_end + k) for s in family]


def unmasked_calls(families: Iterable[Family], device: torch.device) -> list[AttentionCall]:
    """Calls of unmasked pieces; neighbours that make one rectangle, as those of a single sequence, are joined."""
    found = list(families)
    joined = True
    while joined:
        joined = False
        for number in range(len(found) - 1):
            both = _join(found[number], found[number + 1])
            if both is not None:
                found[number : number + 2] = [both]
                joined = True
                break
    return [call for family in found for call in make_calls(family, False, device)]


def _join(first: Family, second: Family) -> Family | None:
    """One family that covers both, if each pair of segments is a rectangle."""
    both: Family = []
    for a, b in zip(first, second, strict=True):
        if (a.k_begin, a.k_end, a.q_end) == (b.k_begin, b.k_end, b.q_begin):
            both.append(Segment(a.q_begin, b.q_end, a.k_begin, a.k_end))
        elif (a.q_begin, a.q_end, a.k_end) == (b.q_begin, b.q_end, b.k_begin):
            both.append(Segment(a.q_begin, a.q_end, a.k_begin, b.k_end))
        else:
            return None
    return both


def make_calls(family: Family, causal: bool, device: torch.device) -> list[AttentionCall]:
    """Variable-length calls: empty segments are left out, and a gap in queries or keys starts a new call."""
    runs: list[Family] = []
    for segment in family:
        if not segment.num_queries or not segment.num_keys:
            continue
        last = runs[-1][-1] if runs else None
        if last is not None and (last.q_end, last.k_end) == (segment.q_begin, segment.k_begin):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return [_call(run, causal, device) for run in runs]


def _call(run: Family, causal: bool, device: torch.device) -> AttentionCall:
    q = [0] + [segment.q_end - run[0].q_begin for segment in run]
    k = [0] + [segment.k_end - run[0].k_begin for segment in run]
    lengths = torch.tensor([q, k], dtype=torch.int32).to(device)
    return AttentionCall(tuple(run), causal, lengths[0], lengths[1])
