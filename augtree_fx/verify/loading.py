"""The model of ``verify``: from the Hub or a folder, or with random weights from a config alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from augtree_fx.verify import UsageError

CLASSES = (
    "AutoModelForCausalLM",
    "AutoModel",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
)


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        place: Hub id, folder, or config file.
        auto_class: one of `CLASSES`.
        random: take the config alone, with random weights.
        dtype: of the weights.
        device: where to put it.
        attention: ``attn_implementation``, or ``None`` for what transformers chooses.
        trust_remote_code: run the model's own code.
        seed: of random weights.
    """

    place: str
    auto_class: str
    random: bool
    dtype: torch.dtype
    device: torch.device
    attention: str | None
    trust_remote_code: bool
    seed: int

    def __str__(self) -> str:
        return f"{self.place}{', random weights' if self.random else ''}"


def load(source: Source) -> Any:
    """The model in evaluation mode.

    Raises:
        UsageError: there is none, it cannot be reached, or transformers does not build it.
    """
    _check_place(source)
    try:
        model = _from_config(source) if source.random else _from_pretrained(source)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise UsageError(_reason(source, error)) from error
    if source.dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped kernels take float32 at most
    return model.to(source.device).eval()


def _check_place(source: Source) -> None:
    path = Path(source.place).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{source.place} has no config.json; give a folder that save_pretrained wrote")
        return
    if path.is_file() and not source.random:
        raise UsageError(
            f"{source.place} is a file; for random weights from a config: --config {source.place} --random"
        )
    looks_local = path.is_absolute() or source.place.startswith((".", "~")) or path.suffix == ".json"
    if not path.exists() and (looks_local or source.place.count("/") > 1):
        raise UsageError(
            f"there is no {source.place}; give a folder with config.json, or a Hub id such as Qwen/Qwen3-0.6B"
        )


def _options(source: Source) -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": source.dtype, "trust_remote_code": source.trust_remote_code}
    return options if source.attention is None else {**options, "attn_implementation": source.attention}


def _auto(source: Source) -> Any:
    return getattr(transformers, source.auto_class)


def _from_pretrained(source: Source) -> Any:
    return _auto(source).from_pretrained(os.path.expanduser(source.place), **_options(source))


def _from_config(source: Source) -> Any:
    config = transformers.AutoConfig.from_pretrained(
        os.path.expanduser(source.place), trust_remote_code=source.trust_remote_code
    )
    torch.manual_seed(source.seed)
    with source.device:
        model = _auto(source).from_config(config, **_options(source))
    randomise(model, source)
    return model


@torch.no_grad()
def randomise(model: nn.Module, source: Source) -> None:
    """Weights that keep activations at their size and leave no gradient trivially 0, as zeros and small ones do."""
    generator = torch.Generator(source.device).manual_seed(source.seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=source.device)
        if parameter.ndim < 2:
            parameter.add_(0.3 * noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)


def _reason(source: Source, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = (lines or [type(error).__name__])[0][:300]
    if "Unrecognized configuration class" in first:
        config = first.split("<class '")[-1].split("'")[0].rpartition(".")[2]
        return f"{source.auto_class} has no model for {config} ({source.place}); choose another --class"
    if isinstance(error, OSError) and not Path(source.place).expanduser().exists():
        return (
            f"{source.place} is no folder here, and cannot be had from the Hub: {first} Without a network "
            "give a folder that save_pretrained wrote, or --config FILE --random"
        )
    if "trust_remote_code" in str(error):
        return f"{source.place} has code of its own, which runs only with --trust-remote-code"
    return f"{source.place} cannot be loaded as {source.auto_class}: {first}"
