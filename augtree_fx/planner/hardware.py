"""A machine as numbers: how fast attention and matmuls of a given size run, what links carry, how much memory there is.

Every number has an origin: its source, its date, and whether somebody measured it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
CURVES = ("causal_forward", "causal_backward", "full_forward", "full_backward", "matmul")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(frozen=True)
class Origin:
    """Where a number comes from.

    Attributes:
        source: the measurement, or the publication.
        date: of that, ``YYYY-MM`` or ``YYYY-MM-DD``.
        measured: whether it was measured on that machine; otherwise it is a specification, or derived from one.
    """

    source: str
    date: str
    measured: bool


@dataclass(frozen=True)
class Curve:
    """Sustained FLOP/s by piece size, interpolated between the table's entries in log size; constant beyond its ends.

    Attributes:
        sizes: ascending; tokens of the shorter side of an attention block, or rows of a matmul.
        flop_per_s: rate at each size.
    """

    sizes: tuple[int, ...]
    flop_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(map(_is_number, (*self.sizes, *self.flop_per_s))):
            raise ValueError(f"sizes and rates of a curve must be numbers, got {self.sizes} and {self.flop_per_s}")
        if len(self.sizes) != len(self.flop_per_s) or list(self.sizes) != sorted(set(self.sizes)) or not self.sizes:
            raise ValueError(
                f"a curve needs ascending sizes and a rate for each, got {self.sizes} and {self.flop_per_s}; sort them"
            )
        if min(self.sizes) < 1 or min(self.flop_per_s) <= 0:
            raise ValueError(f"sizes and rates of a curve must be positive, got {self.sizes} and {self.flop_per_s}")

    @cached_property
    def _log_sizes(self) -> FloatArray:
        return np.log2(np.array(self.sizes, dtype=np.float64))

    @cached_property
    def _us_per_flop(self) -> FloatArray:
        return 1e6 / np.array(self.flop_per_s, dtype=np.float64)

    def us_per_flop(self, size: npt.ArrayLike) -> FloatArray:
        """Microseconds of one FLOP in pieces of the given sizes, same shape."""
        return np.interp(np.log2(np.maximum(size, 1)), self._log_sizes, self._us_per_flop)


@dataclass(frozen=True, eq=False)
class WeightedCurves:
    """Microseconds of several curves' FLOPs together, one look-up in place of one for each.

    Attributes:
        log_sizes: ascending, log2.
        us_per_flop: at each of them, weights and all.
    """

    log_sizes: FloatArray
    us_per_flop: FloatArray

    @staticmethod
    @cache
    def of(*weighted: tuple[Curve, float]) -> WeightedCurves:
        """The sum of curves times weights; linear between the same points as they are, so nothing is lost."""
        sizes = sorted({size for curve, _ in weighted for size in curve.sizes})
        total = sum(curve.us_per_flop(np.array(sizes)) * weight for curve, weight in weighted)
        return WeightedCurves(np.log2(np.array(sizes, dtype=np.float64)), np.asarray(total))

    def at(self, size: npt.ArrayLike) -> FloatArray:
        """Microseconds in pieces of the given sizes, same shape."""
        return np.interp(np.log2(np.maximum(size, 1)), self.log_sizes, self.us_per_flop)


@dataclass(frozen=True)
class Link:
    """What connects neighbours of a lane, per rank and direction.

    Attributes:
        name: for tables.
        num_ranks: ranks that one such domain connects; the last level of a machine connects any number.
        latency_us: of one step of a ring, or one collective.
        ring_bytes_per_s: send to the next rank while receiving from the previous one.
        all_gather_bytes_per_s: bytes that one rank receives a second.
        reduce_scatter_bytes_per_s: bytes that one rank sends a second.
        all_to_all_bytes_per_s: bytes that one rank sends a second.
    """

    name: str
    num_ranks: int
    latency_us: float
    ring_bytes_per_s: float
    all_gather_bytes_per_s: float
    reduce_scatter_bytes_per_s: float
    all_to_all_bytes_per_s: float

    def __post_init__(self) -> None:
        rates = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}
        wrong = {name: value for name, value in rates.items() if not _is_number(value) or value <= 0}
        if wrong:
            raise ValueError(f"numbers of a link must be above 0, link {self.name!r} has {wrong}")


@dataclass(frozen=True)
class Hardware:
    """A machine.

    Attributes:
        name: of the profile.
        causal_forward: causal attention of a node with itself, by node length.
        causal_backward: its backward.
        full_forward: attention without a mask, by the shorter of queries and keys.
        full_backward: its backward.
        matmul: by rows.
        memory_bytes: of one rank.
        memory_bytes_per_s: copy, read and write counted.
        call_us: of the host, to launch one kernel, however small; what else it does is counted in launches.
        links: from the innermost level outward.
        origins: by name of the fields above; links as ``links.NAME``.
    """

    name: str
    causal_forward: Curve
    causal_backward: Curve
    full_forward: Curve
    full_backward: Curve
    matmul: Curve
    memory_bytes: int
    memory_bytes_per_s: float
    call_us: float
    links: tuple[Link, ...]
    origins: Mapping[str, Origin]

    def __post_init__(self) -> None:
        missing = [name for name in self.quantities() if name not in self.origins]
        if missing:
            raise ValueError(f"every number of a profile needs its origin, {self.name!r} has none for {missing}")
        numbers = {"memory_bytes": self.memory_bytes, "memory_bytes_per_s": self.memory_bytes_per_s}
        wrong = {name: value for name, value in numbers.items() if not _is_number(value) or value <= 0}
        if not _is_number(self.call_us) or self.call_us < 0:
            wrong["call_us"] = self.call_us
        if wrong or not self.links:
            raise ValueError(
                f"a profile needs numbers above 0 and at least one link, {self.name!r} has {wrong or 'no link'}"
            )

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.links, self.matmul))

    def quantities(self) -> list[str]:
        """Names under which origins are kept."""
        own = [field.name for field in fields(self) if field.name not in ("name", "links", "origins")]
        return own + [f"links.{link.name}" for link in self.links]

    def unmeasured(self) -> list[str]:
        """Names of the numbers that nobody measured on this machine."""
        return [name for name in self.quantities() if not self.origins[name].measured]

    def link(self, num_ranks: int) -> Link:
        """The link that a lane of so many neighbouring ranks is bound by."""
        for link in self.links[:-1]:
            if num_ranks <= link.num_ranks:
                return link
        return self.links[-1]

    def to_json(self) -> dict[str, Any]:
        """A mapping for `json.dump`."""
        return asdict(self) | {"origins": {name: asdict(origin) for name, origin in self.origins.items()}}

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Hardware:
        """The inverse of `to_json`.

        Raises:
            ValueError: a field is missing, or one is unknown.
        """
        names = [field.name for field in fields(Hardware)]
        if set(values) != set(names):
            raise ValueError(
                f"a profile must have exactly the fields {names}, got {sorted(values)}; "
                "write one with python -m augtree_fx calibrate"
            )
        try:
            curves = {name: Curve(**{key: tuple(row) for key, row in values[name].items()}) for name in CURVES}
            links = tuple(Link(**link) for link in values["links"])
            origins = {name: Origin(**origin) for name, origin in values["origins"].items()}
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"a profile must have curves of sizes and flop_per_s, links and origins, got other fields ({error}); "
                "write one with python -m augtree_fx calibrate"
            ) from error
        return Hardware(**{**values, **curves, "links": links, "origins": origins})

    @staticmethod
    def load(path: str | Path) -> Hardware:
        """A profile that `save` wrote.

        Raises:
            ValueError: it is not JSON, or not that of a profile.
            OSError: it cannot be read.
        """
        try:
            return Hardware.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:  # JSON's and UTF-8's are too
            raise ValueError(f"{str(path)!r} holds no hardware profile: {error}") from error
