"""Shapes and models of planner tests."""

from __future__ import annotations

from hypothesis import strategies as st

from augtree_fx.planner import ModelShape, ReplayShape, model_shape

SMALL = ModelShape.from_config(
    {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000,
    },
    name="small",
)  # fmt: skip
BIG = model_shape("Qwen3-8B")


@st.composite
def forests(draw: st.DrawFn, max_tokens: int = 6000) -> ReplayShape:
    """One to eight trees of one to four levels, some of them without branches."""
    lengths = st.integers(1, max_tokens)
    parents, length = [-1] * draw(st.integers(1, 8)), []
    length = [draw(lengths) for _ in parents]
    begin = 0
    for _ in range(draw(st.integers(0, 3))):
        end = len(parents)
        for node in range(begin, end):
            for _ in range(draw(st.integers(0, 4))):
                parents.append(node)
                length.append(draw(st.integers(0, max_tokens)))
        if len(parents) == end:
            break
        begin = end
    return ReplayShape.from_nodes(parents, length)
