"""Rewrite: the attention call of a captured graph becomes attention over the tree; match and replacement in pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from augtree_fx.dtensor_ops.attention import Latents
from augtree_fx.dtensor_ops.site import attend
from augtree_fx.tables import Chunks
from augtree_fx.transforms.tracer import attention_leaf

if TYPE_CHECKING:
    from augtree_fx.transforms.capture import AttentionSite
    from augtree_fx.transforms.context import SiteContext


def matched(node: fx.Node) -> bool:
    """The attention-interface call: ``(query, key, value)``, each ``[1, heads, tokens, head size]``."""
    return node.op == "call_function" and node.target is attention_leaf


def _timed(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention of one site, timed inside of `augtree_fx.measure`."""

    @functools.wraps(attend)
    def run(query: Tensor, key: Tensor, value: Tensor, site: SiteContext, **options: Any) -> Tensor:
        recorder = site.shared.recorder
        if recorder is None or torch.compiler.is_compiling():
            return attend(query, key, value, site, **options)
        return recorder.attention(lambda q, k, v: attend(q, k, v, site, **options), query, key, value)

    return run


@_timed
def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    site: SiteContext,
    *,
    scale: float,
    window: int | None,
    softcap: float,
    chunk: int | None = None,
    call: int = 0,
    s_aux: Tensor | None = None,
    latents: tuple[Tensor, ...] = (),
) -> Tensor:
    """What replaces it: every token attends to its node, causally, and to all of its ancestors.

    Args:
        query: ``[1, H, T, D]``; key: ``[1, K, T, D]``; value: ``[1, K, T, E]``, T packed tokens.
        site: tables of the batch's tree, and whose attention this is.
        scale, window, softcap, chunk: as captured from the call and its mask.
        call: number of the call in the module's forward.
        s_aux: ``[H]`` sink logits.
        latents: what key and value follow from, see `Cut`, where the site has any.

    Returns:
        ``[1, T, H, E]``, as attention interfaces return it.
    """
    context, place = site.shared, (site.site, call)
    query, key, value = _autocast(query, key, value)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    moving = _moving(site, latents, k, v)
    own = (k, v) if moving is None else (k, v, moving.rows)
    if context.kept is not None:
        context.kept.setdefault(place, own)  # what a checkpointed layer computes again is not kept again
    span = window if chunk is None else Chunks(chunk)
    if context.lane is not None:
        if context.prompts is not None:
            above = context.prompts[place]
            pairs = zip(above.tensors, above.handles, own, strict=False)  # latents where both have them
            own = tuple(torch.ops.augtree.join_keys(*each) for each in pairs)
        k, v, *rows = own
        moving = replace(moving, rows=rows[0]) if moving is not None and rows else None
        out, _ = attend(q, k, v, context.lane, span, s_aux, scale, softcap, context.kernel, moving)
        return out[None]
    tables = context.tables[span]
    spec = (scale, (window or 0) if tables.kv_index is not None else 0, softcap, context.kernel)
    if context.prompts is not None:
        above = context.prompts[place]
        out, _ = torch.ops.augtree.wave_attention(
            q, k, v, *above.tensors, *above.handles, tables.segments, tables.cu_seqlens, tables.kv_index, s_aux, *spec
        )
    elif tables.kv_index is None and context.one_level:
        out, _ = torch.ops.augtree.prefill_attention(q, k, v, tables.segments, tables.cu_seqlens, s_aux, *spec)
    else:
        out, _ = torch.ops.augtree.replay_attention(
            q, k, v, tables.segments, tables.cu_seqlens, tables.kv_index, s_aux, *spec
        )
    return out[None]


def _moving(site: SiteContext, given: tuple[Tensor, ...], k: Tensor, v: Tensor) -> Latents | None:
    """What ranks send one another in place of keys and values, where all of them do."""
    lane = site.shared.lane
    if not given or site.expansion is None or lane is None or not lane.latents:
        return None
    assert site.module is not None, "a site with an expansion is one of a module"
    return site.expansion.latents(site.module, given, k, v)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast attention runs in the autocast dtype, as torch's own does; else the dtypes must agree."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind) and tensors[0].dtype != torch.float64:
        return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
    if len({x.dtype for x in tensors}) > 1:
        raise TypeError(f"query, key and value must have one dtype, got {', '.join(str(x.dtype) for x in tensors)}")
    return tensors


def token_columns(site: SiteContext) -> Tensor:
    """What replaces ``torch.arange(number of tokens)``: each packed token's column in the rows that the caller gave.

    Returns:
        ``[T]`` int64.
    """
    assert site.shared.columns is not None, "a site that counts tokens must have columns"
    return site.shared.columns


def rewrite_attention(graph: fx.Graph, site: AttentionSite, *, with_latents: bool = False) -> int:
    """Replace the attention call of a captured graph in place.

    Args:
        graph: a captured graph; its first placeholder is the context.
        site: what was read off the call.
        with_latents: hand over what keys and values follow from, where that is smaller.

    Returns:
        The number of calls replaced.
    """
    context = next(iter(graph.nodes))
    found = [node for node in graph.nodes if matched(node)]
    options: dict[str, Any] = {"scale": site.scale, "window": site.window, "softcap": site.softcap}
    if site.chunk is not None:
        options["chunk"] = site.chunk
    if with_latents and site.cut is not None:
        by_name = {node.name: node for node in graph.nodes}
        options["latents"] = tuple(by_name[name] for name in site.cut.names)
    for number, node in enumerate(found):
        numbered = options | {"call": number} if number else options
        with graph.inserting_before(node):
            new = graph.call_function(tree_attention, (*node.args, context), {**numbered, **node.kwargs})
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    graph.lint()
    return len(found)
