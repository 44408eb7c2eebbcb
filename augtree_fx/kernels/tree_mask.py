"""The tree's elementwise mask for FlashAttention-4, in its own language. Imported only where that is installed."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from flash_attn.cute.utils import scalar_to_ssa


@cute.jit
def tree_mask(batch: Any, head: Any, query: Any, key: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    """Whether a query sees a key; see `augtree_fx.blocks.TreeBlocks`."""
    first, last = aux_tensors[0], aux_tensors[1]
    place = scalar_to_ssa(first[query[0]], cutlass.Int32)
    begin = scalar_to_ssa(first[key[0]], cutlass.Int32)
    end = scalar_to_ssa(last[key[0]], cutlass.Int32)
    return (key <= query) & (begin <= place) & (place < end)
