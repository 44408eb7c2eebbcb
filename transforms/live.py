"""What a live stack may have become since its sites were captured: other settings, dropout, noise."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from augtree_fx.transforms.capture import AttentionSite, config_scalars, plain_scalars
from augtree_fx.transforms.recurrent import MixerSite

_NOISE = re.compile("drop|jitter")  # attention dropout has a check of its own
_DROPOUT = {"attention_dropout": None}


def refuse_noise(stack: nn.Module, sites: Sequence[AttentionSite], mixers: Sequence[MixerSite]) -> None:
    """Refuse random numbers in training, which rows that share a prompt cannot draw apart.

    Raises:
        NotImplementedError: dropout of any kind, or router noise, is above 0.
    """
    known: list[AttentionSite | MixerSite] = [*sites, *(mixer for mixer in mixers if mixer.attention)]
    dropout = max((current_dropout(stack, site), site.name) for site in known)
    if dropout[0] > 0:
        raise NotImplementedError(
            f"attention dropout must be 0 in training, {dropout[1]} has {dropout[0]}; rows that share a prompt "
            "cannot draw different masks on it: set config.attention_dropout = 0.0 before building the model"
        )
    noise = current_noise(stack) or captured_noise(sites)
    if noise is not None:
        raise NotImplementedError(
            f"dropout and router noise must be 0 in training, {noise[0]} has {noise[1]}; rows that share a prompt "
            "cannot draw different values on it: set it to 0, or pass strict=False to run the original forward"
        )


def current_noise(stack: nn.Module) -> tuple[str, float] | None:
    """A module of the stack (adapters included) that draws random numbers in training, with its rate."""
    for name, module in stack.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p > 0:
                return name, module.p
            continue
        for attribute, rate in vars(module).items():
            if isinstance(rate, float) and rate > 0 and _NOISE.search(attribute) and attribute != "attention_dropout":
                return f"{name}.{attribute}".lstrip("."), rate
    return None


def captured_noise(sites: Sequence[AttentionSite]) -> tuple[str, float] | None:
    """An attention module with dropout other than that of attention, by capture, with its rate in training."""
    return next(((site.name, site.noise) for site in sites if site.noise > 0), None)


def current_dropout(stack: nn.Module, site: AttentionSite | MixerSite) -> float:
    """Attention dropout of a site now (captured value, unless the module's attribute was changed since)."""
    now = getattr(stack.get_submodule(site.name), "attention_dropout", getattr(site, "dropout", 0.0))
    return float(getattr(now, "p", now) or 0.0)


def changed_sites(stack: nn.Module, sites: Sequence[AttentionSite]) -> list[str]:
    """Sites whose plain attributes are no longer those that were captured, attention dropout aside."""
    changed = []
    for site in sites:
        module = stack.get_submodule(site.name)
        now = plain_scalars(module) + config_scalars(getattr(module, "config", None))  # an adapter may stand there
        if now != site.scalars and dict(now) | _DROPOUT != dict(site.scalars) | _DROPOUT:
            changed.append(site.name)
    return changed
