"""Optional kernel packages: imported when a kernel first asks, checked against the signatures that an adapter calls.

The functions that give and take the log-sum-exp are private in all of them and change between releases. A package that
is absent, broken or changed is a reason to pass a kernel over, never an error at import.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True)
class Package:
    """An optional package.

    Attributes:
        distribution: name under which it is installed, as in ``pip install``.
        module: full name of the module with the functions that an adapter calls.
        written_for: version that the adapter was written for.
    """

    distribution: str
    module: str
    written_for: str

    @property
    def named(self) -> str:
        """Distribution and installed version, for messages."""
        try:
            return f"{self.distribution} {importlib.metadata.version(self.distribution)}"
        except importlib.metadata.PackageNotFoundError:  # importable all the same, say from a checkout
            return f"{self.distribution} (version unknown)"


@functools.cache
def _load(package: Package) -> ModuleType | str:
    """The imported module, or why there is none. A failing import searches the whole path: hence the cache."""
    try:
        return importlib.import_module(package.module)
    except ModuleNotFoundError as error:
        if error.name and f"{package.module}.".startswith(f"{error.name}."):
            return f"{package.distribution} is not installed"
        return f"{package.named} cannot be imported: {error}"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # what builds for another torch or CUDA raise
        return f"{package.named} cannot be imported: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def constant(package: Package, name: str) -> Any:
    """A constant of a package, or ``None`` where the package or the constant is absent."""
    module = _load(package)
    return None if isinstance(module, str) else getattr(module, name, None)


def function(package: Package, name: str) -> Callable[..., Any]:
    """A function of a package for which `missing_or_changed` has no complaint."""
    module = _load(package)
    assert isinstance(module, ModuleType), module
    return getattr(module, name)


@functools.cache
def missing_or_changed(package: Package, name: str, passed: tuple[str, ...]) -> str | None:
    """Why an adapter cannot call a function, or ``None``.

    Args:
        package: where the function is.
        name: its name in ``package.module``.
        passed: parameters that the adapter passes, by name.

    Returns:
        That the package is absent or cannot be imported; that the function is gone; that it lacks a parameter that is
        passed; or that it requires one that is not.
    """
    module = _load(package)
    if isinstance(module, str):
        return module
    written = f"this adapter was written for {package.written_for}"
    found = getattr(module, name, None)
    if found is None:
        return f"{package.named} has no {name}; {written}"
    known = parameters(found)
    for parameter in passed:
        if parameter not in known:
            return f"{package.named}'s {name} has no parameter {parameter!r}; {written}"
    for parameter, required in known.items():
        if required and parameter not in passed:
            return f"{package.named}'s {name} requires a parameter {parameter!r}; {written}"
    return None


def first_complaint(package: Package, calls: Mapping[str, tuple[str, ...]]) -> str | None:
    """The first complaint of `missing_or_changed` about functions and what is passed to them, or ``None``."""
    reasons = (missing_or_changed(package, name, passed) for name, passed in calls.items())
    return next(filter(None, reasons), None)


def parameters(callee: Callable[..., Any]) -> dict[str, bool]:
    """Names of a function's parameters, and whether each has to be passed; also of an op made by `torch.library`."""
    if isinstance(callee, torch.library.CustomOpDef):
        # Its Python signature is (*args, **kwargs); torch has no public way to its schema (2.13).
        return {argument.name: not argument.has_default_value() for argument in callee._opoverload._schema.arguments}
    return {
        name: parameter.default is inspect.Parameter.empty
        for name, parameter in inspect.signature(callee).parameters.items()
        if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }


def forget() -> None:
    """Look again at the next call, for tests that put modules in place and take them away."""
    _load.cache_clear()
    missing_or_changed.cache_clear()
