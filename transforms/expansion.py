"""A module's own way from latents to keys and values, as attention of several ranks runs it on what arrives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from augtree_fx.dtensor_ops.attention import Latents


@dataclass(frozen=True)
class Expansion:
    """How an attention module makes keys and values out of latents.

    Attributes:
        function: of the module and its latents, as `Cut.graph` has it.
        dims: dim of each latent that counts tokens.
        modules: names of the modules and parameters that it uses.
    """

    function: Callable[..., tuple[Tensor, Tensor]]
    dims: tuple[int, ...]
    modules: tuple[str, ...]

    @torch.compiler.disable(reason="latents are expanded by modules of the model, which no op of a graph holds")
    def latents(self, module: nn.Module, given: Sequence[Tensor], k: Tensor, v: Tensor) -> Latents | None:
        """What travels in place of keys and values; ``None`` where these have fewer bytes, or gradients would be lost.

        Args:
            module: the attention module.
            given: latents of some tokens.
            k: ``[T, K, D]``; v: ``[T, K, E]``, of the same tokens, as attention takes them.
        """
        by_token = [x.movedim(dim, 0) for x, dim in zip(given, self.dims, strict=True)]
        rows = torch.cat([x.flatten(1) for x in by_token], 1)  # of several dtypes: in the wider one
        expand = functools.partial(
            self._expand,
            module,
            [(x.shape[1:], x.dtype) for x in by_token],
            _autocast(k.device.type),
            (k.dtype, v.dtype),
        )
        found = Latents(rows, expand, self._parameters(module))
        if found.bytes_per_key >= sum(x.shape[1] * x.shape[2] * x.itemsize for x in (k, v)):
            return None
        if any(isinstance(each, FSDPModule) for part in self._parts(module) for each in part.modules()):
            return None  # its parameters are leaves of the graph at one time, and others at another
        return None if found.unknown_leaves(k, v, rows=given) else found

    def _expand(
        self,
        module: nn.Module,
        like: Sequence[tuple[torch.Size, torch.dtype]],
        autocast: torch.autocast,
        dtypes: tuple[torch.dtype, torch.dtype],
        rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """K and V of tokens by their rows, in the dtypes that attention takes."""
        parts = rows.split([shape.numel() for shape, _ in like], 1)
        latents = [
            part.to(dtype).reshape(-1, *shape).movedim(0, dim).contiguous()
            for part, (shape, dtype), dim in zip(parts, like, self.dims, strict=True)
        ]
        with autocast:
            found = self.function(module, *latents)
        k, v = (x[0].transpose(0, 1).to(dtype) for x, dtype in zip(found, dtypes, strict=True))
        assert len(k) == len(v) == len(rows), "every row of latents must give one key and one value"
        return k, v

    def _parts(self, module: nn.Module) -> list[nn.Module]:
        found = [functools.reduce(getattr, name.split("."), module) for name in self.modules]
        return [each for each in found if isinstance(each, nn.Module)]

    def _parameters(self, module: nn.Module) -> tuple[Tensor, ...]:
        found: dict[int, Tensor] = {}
        for name in self.modules:
            part = functools.reduce(getattr, name.split("."), module)
            for each in part.parameters() if isinstance(part, nn.Module) else (part,):
                if isinstance(each, Tensor) and each.requires_grad:
                    found[id(each)] = each
        return tuple(found.values())


def _autocast(kind: str) -> torch.autocast:
    """The autocast that is on now, to be entered again in backward."""
    return torch.autocast(
        kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
    )
