"""What a planner is told: lengths of a batch, sizes of a model, rates of a machine, files of workloads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planner_shapes import forests
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3TextConfig, Qwen3Config, Qwen3MoeConfig

from augtree_fx import TreeLayout
from augtree_fx.costs import CostModel
from augtree_fx.planner import Hardware, ModelShape, ReplayShape, model_shape
from augtree_fx.planner.hardware import Curve, WeightedCurves
from augtree_fx.planner.known_models import CONFIGS
from augtree_fx.planner.profiles import PROFILES, profile
from augtree_fx.planner.replay_shape import bucket_edges
from augtree_fx.planner.workloads import batches, read_groups, shape_of

WORKLOADS = Path(__file__).resolve().parents[2] / "shared" / "workloads"


def test_shape_of_groups() -> None:
    shape = ReplayShape.from_groups([10, 20], [[3, 4, 0], []])
    assert (shape.num_trees, shape.num_levels, shape.num_tokens) == (2, 2, 37)
    assert shape.num_row_tokens == 13 + 14 + 10 + 20
    assert shape.flat().length.tolist() == [20, 13, 14, 10]
    assert shape.scored_tokens.tolist() == [0, 0, 3, 4, 0]


def test_shape_of_a_layout_is_that_of_its_trees() -> None:
    rows = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [9, 9, 9, 9], [9, 9, 9, 9]])
    layout = TreeLayout.from_padded(rows, costs=CostModel.free())
    shape = ReplayShape.from_layout(layout)
    assert shape.num_levels == 3 and shape.num_tokens == layout.num_tokens
    assert shape.num_row_tokens == layout.num_row_tokens == rows.numel()
    assert sorted(shape.flat().length.tolist()) == [4] * 5


@given(forests())
def test_rows_of_a_shape_have_its_row_tokens(shape: ReplayShape) -> None:
    rows = shape.flat()
    assert int(rows.length.sum()) == shape.num_row_tokens and rows.num_levels == 1
    assert int(rows.num_rows.sum()) == int(shape.num_rows.sum())


@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=30))
def test_bucket_edges(lengths: list[int]) -> None:
    """Rounded up by at most an eighth of an octave and a token, and buckets are what `bucketed` does."""
    shape = ReplayShape.from_groups([1], [lengths])
    rounded = shape.bucketed()
    assert (rounded.length >= shape.length).all()
    assert (rounded.length <= np.ceil(shape.length * 2**0.125)).all()
    assert rounded.bucketed() == rounded and rounded.bucket_key == shape.bucket_key
    assert hash(rounded) == hash(rounded.bucketed())


def test_bucket_edges_are_geometric_and_hold_powers_of_two() -> None:
    edges = bucket_edges(8)
    assert {1 << power for power in range(40)} <= set(edges.tolist())
    assert (np.diff(edges) > 0).all()
    assert np.allclose(edges[-9:-1] / edges[-10:-2], 2**0.125)


@pytest.mark.parametrize(
    ("parent", "length", "message"),
    [
        ([], [], "at least one node"),
        ([-1, 0], [5], "one parent and one length a node"),
        ([-1, 0, -1], [5, 5, 5], r"level-major, .* got parents \[-1, 0, -1\]"),
        ([0, -1], [5, 5], "roots first"),
        ([-1, 1], [5, 5], "level-major"),
        ([-1, 0], [0, 5], "a root must have at least 1 token .* got 0 at node 0"),
        ([-1, 0], [1, -5], "other nodes at least 0, got -5 at node 1"),
        ([-1, 0], [1, (1 << 40) + 1], "at most 1099511627776 tokens, got 1099511627777 at node 1"),
        ([-1, 0], [1, 1 << 64], "at most 1099511627776 tokens, got more than 64 bits hold"),
    ],
)
def test_bad_nodes(parent: list[int], length: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayShape.from_nodes(parent, length)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_rows": [1, 0, 0]}, r"num_rows must be one number a node, .* got \[1, 0, 0\] for 2 nodes"),
        ({"num_rows": [2, -1]}, "none below 0"),
        ({"num_rows": [0, 0]}, "at least one above"),
        ({"scored_tokens": [3]}, "scored_tokens must be one number a node"),
        ({"scored_tokens": [0, 4]}, r"from 0 to its length, got \[0, 4\] for lengths \[5, 3\]"),
        ({"scored_tokens": [-1, 0]}, "from 0 to its length"),
    ],
)
def test_bad_counts(counts: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayShape.from_nodes([-1, 0], [5, 3], **counts)  # type: ignore[arg-type]


def test_a_shape_leaves_arrays_to_their_owner() -> None:
    parent, length = np.array([-1, 0]), np.array([5, 3])
    shape = ReplayShape.from_nodes(parent, length, num_rows=length, scored_tokens=length)
    length[0] = 9
    assert shape.length.tolist() == shape.num_rows.tolist() == shape.scored_tokens.tolist() == [5, 3]


def test_the_longest_nodes_have_a_bucket() -> None:
    longest = ReplayShape.from_groups([1 << 40], [[1 << 40]])
    assert longest.bucketed() == longest


def test_bad_groups() -> None:
    with pytest.raises(ValueError, match=r"got 2 prompts and 1 lists; pass \[\]"):
        ReplayShape.from_groups([1, 2], [[3]])


SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96,
}  # fmt: skip
MODELS = {
    "dense": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "untied": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
    "latent": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
        n_group=1, topk_group=1,
    ),
    "windows": Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 6}, sliding_window=32),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_weights_of_a_config_are_those_of_its_model(kind: str) -> None:
    """Up to norms and biases, which are left out: 3% of these tiny models."""
    config = MODELS[kind]
    model = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert ModelShape.from_config(config).total_weights == pytest.approx(counted, rel=0.03)
    live = ModelShape.from_model(model)
    assert live.total_weights == counted and live.dtype_bytes == 4


def test_windows_and_latents() -> None:
    assert ModelShape.from_config(MODELS["windows"]).windows == ((None, 1), (32, 5))
    latent = ModelShape.from_config(MODELS["latent"])
    assert (latent.kv_values_per_token, latent.head_dim, latent.value_head_dim) == (16 + 8, 24, 16)
    experts = ModelShape.from_config(MODELS["experts"])
    assert (experts.num_experts, experts.experts_per_token) == (8, 2)
    assert experts.expert_weights == 3 * 64 * 32 * 2


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-0.6B", 0.6), ("Qwen3-8B", 8.2), ("Qwen3-32B", 32.8), ("Qwen3-30B-A3B", 30.5),
     ("Qwen3-235B-A22B", 235), ("Llama-3.1-8B", 8.03), ("Llama-3.1-70B", 70.6), ("Llama-3.2-3B", 3.2)],
)  # fmt: skip
def test_well_known_models_have_as_many_weights_as_published(name: str, billions: float) -> None:
    shape = model_shape(name)
    assert shape.total_weights / 1e9 == pytest.approx(billions, rel=0.02)
    assert shape.name in CONFIGS


def test_model_from_a_config_file(tmp_path: Path) -> None:
    MODELS["dense"].save_pretrained(tmp_path)
    assert model_shape(str(tmp_path)).num_heads == 4
    assert ModelShape.from_config(tmp_path / "config.json").vocab_size == 96
    with pytest.raises(FileNotFoundError, match="config must be a config.json or its folder, found no file '/nowhere'"):
        ModelShape.from_config("/nowhere")


def test_a_config_file_may_leave_out_what_is_a_default(tmp_path: Path) -> None:
    """As gemma's on the Hub do: windows by layer, and most sizes of the text model of a vision-language one."""
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**sizes, "model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 32}))
    assert ModelShape.from_config(file).windows == ((None, 2), (32, 2))
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6, "sliding_window": 32}
    shape = ModelShape.from_config({"model_type": "gemma3", "text_config": text})
    default = Gemma3TextConfig()
    assert (shape.num_heads, shape.vocab_size) == (default.num_attention_heads, default.vocab_size)
    assert shape.windows == ((None, 1), (32, 5))


def test_experts_and_layers_by_other_names() -> None:
    experts = ModelShape.from_config({**SIZES, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32})
    assert (experts.num_experts, experts.experts_per_token) == (8, 2)
    each = ModelShape.from_config({**SIZES, "intermediate_size": [128, 128, 128]})
    assert each == ModelShape.from_config(SIZES)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="num_hidden_layers of a config must be at least 1, got 0"):
        ModelShape.from_config({**SIZES, "num_hidden_layers": 0})
    with pytest.raises(ValueError, match="multiple of key heads, got 4 and two"):
        ModelShape.from_config({**SIZES, "num_key_value_heads": "two"})


def test_unknown_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # its environment was read at import
    with pytest.raises(ValueError, match="got 'nobody/nothing' .* built in are Qwen/Qwen3-0.6B"):
        model_shape("nobody/nothing")
    with pytest.raises(ValueError, match="a config must have num_hidden_layers, found"):
        ModelShape.from_config({"hidden_size": 8})
    with pytest.raises(ValueError, match="multiple of key heads, got 4 and 3"):
        ModelShape.from_config({**MODELS["dense"].to_dict(), "num_key_value_heads": 3})


@pytest.mark.parametrize("name", PROFILES)
def test_profiles(name: str, tmp_path: Path) -> None:
    """Every number has a source and a date, and a profile survives its file."""
    machine = profile(name)
    assert set(machine.origins) == set(machine.quantities())
    assert all(origin.source and origin.date[:2] == "20" for origin in machine.origins.values())
    machine.save(tmp_path / "machine.json")
    assert Hardware.load(tmp_path / "machine.json") == machine == profile(str(tmp_path / "machine.json"))
    assert bool(machine.unmeasured())
    assert ("causal_forward" in machine.unmeasured()) == (name != "h200")


def test_curves() -> None:
    curve = Curve((100, 400), (1e12, 2e12))
    assert curve.us_per_flop([50, 100, 200, 400, 9000]).tolist() == pytest.approx([1e-6, 1e-6, 7.5e-7, 5e-7, 5e-7])
    with pytest.raises(ValueError, match="ascending sizes and a rate for each, got"):
        Curve((400, 100), (1e12, 2e12))
    with pytest.raises(ValueError, match="must be positive"):
        Curve((100,), (0.0,))


def test_curves_of_both_directions_are_looked_up_together() -> None:
    """Points of both curves are kept, also where they have different ones."""
    forward, backward = Curve((100, 400, 1000), (1e12, 2e12, 3e12)), Curve((50, 400, 800), (4e11, 1e12, 2e12))
    sizes = np.array([1, 50, 77, 100, 333, 400, 799, 900, 5000])
    apart = 2 * forward.us_per_flop(sizes) + 2.5 * backward.us_per_flop(sizes)
    assert WeightedCurves.of((forward, 2), (backward, 2.5)).at(sizes) == pytest.approx(apart, rel=1e-12)


def test_keys_compare_everything_and_hash_lengths() -> None:
    """Same lengths, other trees: one hash, two keys."""
    wide, deep = ReplayShape.from_nodes([-1, 0, 0], [5, 3, 3]), ReplayShape.from_nodes([-1, 0, 1], [5, 3, 3])
    assert hash(wide) == hash(deep) and wide != deep and wide.bucket_key != deep.bucket_key
    scored = ReplayShape.from_nodes([-1, 0, 0], [5, 3, 3], scored_tokens=[0, 3, 2])
    assert scored.bucket_key != wide.bucket_key and len({wide, deep, scored}) == 3
    same = ReplayShape.from_nodes([-1, 0, 0], [5, 3, 3])
    assert same == wide and same.bucket_key == wide.bucket_key and same.bucket_key is not wide.bucket_key


def test_bad_profiles(tmp_path: Path) -> None:
    values = profile("h200").to_json()
    with pytest.raises(ValueError, match="a profile must have exactly the fields"):
        Hardware.from_json({"name": "x"})
    del values["origins"]["matmul"]
    with pytest.raises(
        ValueError, match=r"every number of a profile needs its origin, 'h200' has none for \['matmul'\]"
    ):
        Hardware.from_json(values)


def test_workload_files_with_deeper_trees(tmp_path: Path) -> None:
    lines = [
        {"prompt_tokens": 100, "response_tokens": [10, 20], "static_prompt_tokens": 90},
        {"prompt_tokens": 95, "response_tokens": [5], "static_prompt_tokens": 90},
        {"prompt_tokens": 50, "response_tokens": [7, 8]},
        {"doc_tokens": 40, "instructions": [{"prompt_tokens": 44, "response_tokens": [1, 2]},
                                            {"prompt_tokens": 60, "response_tokens": [3]}]},
    ]  # fmt: skip
    file = tmp_path / "work.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    groups = read_groups(file)
    shape = shape_of(groups)
    assert shape.num_tokens == 90 + 10 + 30 + 5 + 5 + 50 + 15 + 40 + 4 + 3 + 20 + 3
    assert shape.num_row_tokens == 110 + 120 + 100 + 57 + 58 + 45 + 46 + 63
    assert int(shape.scored_tokens.sum()) == 56
    assert [step.num_row_tokens for step in batches(groups, 3)] == [110 + 120 + 100 + 57 + 58, 45 + 46 + 63]


def test_bad_workloads(tmp_path: Path) -> None:
    file = tmp_path / "work.jsonl"
    file.write_text('{"prompt_tokens": 3}\n')
    with pytest.raises(ValueError, match="line 1 of .* must have prompt_tokens and response_tokens"):
        read_groups(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="a workload must have at least one group"):
        read_groups(file)
    with pytest.raises(ValueError, match="a step must have at least 1 group, got 0"):
        batches([], 0)


@pytest.mark.skipif(not WORKLOADS.is_dir(), reason="the full workload files are not beside this checkout")
def test_real_workloads_have_their_published_ratios() -> None:
    agents = shape_of(read_groups(WORKLOADS / "w2b_tau_airline_4trials.jsonl"))
    assert agents.num_row_tokens / agents.num_tokens == pytest.approx(2.404, rel=0.01)
    documents = shape_of(read_groups(WORKLOADS / "w3_leval_doc_tree.jsonl"))
    # Published: 26.554, with what responses and instructions begin with in common, which lengths do not say.
    assert 0.98 < documents.num_row_tokens / documents.num_tokens / 26.554 <= 1
