"""15 families of models, transformed, against each row alone in the unmodified model: logits and every gradient."""

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
from families import (
    FAMILIES,
    STYLES,
    Batch,
    KeepFloat64,
    Result,
    build,
    computed,
    error,
    errors,
    one_thread,
    padded,
    reference,
    result_of,
    rollout,
    without_upcasts,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

import augtree_fx
from augtree_fx import CostModel

# The up-casts of a model (norms, RoPE, softmax, routers) round to float32, 6e-8 relative, at a few dozen places on the
# way through three layers and back; packing only changes the order of sums between them. Measured: at most 1.2e-6.
FLOAT32 = 1e-5
# All in float64: 2.2e-16 a rounding, and 500 tokens to sum over. Measured: at most 1e-14.
FLOAT64 = 1e-12
BY_DTYPE = {"float32 up-casts": FLOAT32, "float64": FLOAT64}


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def state_of(model: nn.Module) -> object:
    return model.get_decoder()._augtree_state


def shared(model: PreTrainedModel) -> PreTrainedModel:
    """Transform, sharing whatever can be shared: tiny models would not find small nodes worth an attention piece."""
    return augtree_fx.transform(model, costs=CostModel.free())


def assert_equal(got: Result, expected: Result, tolerance: float) -> None:
    worst = {name: value for name, value in errors(got, expected).items() if not value <= tolerance}
    assert worst == {}, f"errors over {tolerance}: {worst}"


def assert_was_shared(model: PreTrainedModel, batch: Batch, levels: int) -> None:
    layout = augtree_fx.explain(model, **batch.inputs()).layout
    assert layout.token_ratio > 1.3
    assert layout.num_levels == levels
    assert state_of(model).num_shared == 1
    assert state_of(model).fallbacks == {}


@functools.lru_cache(maxsize=8)
def row_reference(name: str, depth: int, from_zero: bool, keep: bool) -> Result:
    """Reference of a family; right- and left-padded rows have the same positions, hence the same one."""
    batch = padded(rollout(depth), "right" if from_zero else "trl")
    model = build(name, torch.float64).train()
    with KeepFloat64() if keep else torch.enable_grad():
        return reference(model, batch)


@pytest.mark.parametrize("dtypes", BY_DTYPE)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_all_gradients_equal_the_rows(name: str, depth: int, style: str, dtypes: str) -> None:
    batch = padded(rollout(depth), style)
    keep = dtypes == "float64"
    model = shared(build(name, torch.float64).train())
    with KeepFloat64() if keep else torch.enable_grad():
        got = computed(model, batch)
    assert_equal(got, row_reference(name, depth, style != "trl", keep), BY_DTYPE[dtypes])
    assert_was_shared(model, batch, depth)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_reference_gradient_is_trivial(name: str) -> None:
    """A gradient that is 0, or lost in another one's rounding, would hide an error."""
    largest = {key: value.abs().max().item() for key, value in row_reference(name, 2, True, True).gradients.items()}
    assert {key for key, value in largest.items() if value < 1e-3 * max(largest.values())} == set()


def test_sinks_matter() -> None:
    batch = padded(rollout(2), "right")
    logits = row_reference("gpt_oss", 2, True, True).logits
    model = shared(build("gpt_oss", torch.float64).train())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks += 1
        got = batch.rows_of(model(**batch.inputs(), use_cache=False).logits)
    assert error(torch.cat(got), torch.cat(logits)) > 1e-2


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("depth", [2, 3])
def test_model_without_upcasts_is_exact(depth: int, style: str) -> None:
    batch = padded(rollout(depth, seed=1), style)
    model = without_upcasts("llama")
    expected = reference(copy.deepcopy(model), batch)
    assert_equal(computed(shared(model), batch), expected, FLOAT64)
    assert_was_shared(model, batch, depth)


def test_explicit_reference_kernel_is_exact() -> None:
    batch = padded(rollout(3), "left")
    model = augtree_fx.transform(without_upcasts("llama"), kernel="reference", costs=CostModel.free())
    assert_equal(computed(model, batch), reference(without_upcasts("llama"), batch), FLOAT64)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_rows_that_contain_each_other_need_one_node(name: str) -> None:
    """Prefixes and repetitions of one row are a tree of one level."""
    longest = rollout(2)[0][0].repeat(2)
    lengths = [5, len(longest), 1, 5, len(longest)]
    batch = padded([[longest[:length]] for length in lengths], "right")
    plain, model = build(name, torch.float64), shared(build(name, torch.float64))
    with KeepFloat64():
        assert_equal(computed(model, batch), reference(plain, batch), FLOAT64)
    assert_was_shared(model, batch, 1)


@pytest.mark.parametrize("style", STYLES)
def test_a_row_of_padding_is_left_alone(style: str) -> None:
    batch = padded(rollout(3), style)
    expected = reference(without_upcasts("llama"), batch)
    given = {name: torch.cat([value, torch.zeros_like(value[:1])]) for name, value in batch.inputs().items()}
    model = shared(without_upcasts("llama"))
    logits = model(**given, use_cache=False).logits
    assert_equal(result_of(model, batch.rows_of(logits), batch), expected, FLOAT64)
    assert logits[-1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_and_ids_of_any_dtype(dtype: torch.dtype) -> None:
    batch = padded(rollout(3), "right")
    model = shared(without_upcasts("llama")).eval()
    given = {"attention_mask": batch.attention_mask.to(dtype), "input_ids": batch.input_ids.int()}
    assert torch.equal(model(**given, use_cache=False).logits, model(**batch.inputs(), use_cache=False).logits)
    assert state_of(model).num_shared == 2


def root_mean_square_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


# Models whose routers do not flip in bfloat16: a token that takes another expert is wrong by far more than rounding.
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gemma3_text", "olmo2", "phi3"])
def test_bfloat16_error_is_at_most_twice_the_unmodified_models(name: str, style: str) -> None:
    """Per tensor, root mean square: single elements of two equally good roundings differ by more than a factor of 2."""
    batch = padded(rollout(2), style)
    model = build(name, torch.bfloat16).train()
    with KeepFloat64():
        truth = reference(copy.deepcopy(model).double(), batch)
    unmodified = errors(computed(model, batch), truth, root_mean_square_error)
    got = errors(computed(shared(model), batch), truth, root_mean_square_error)
    assert {key: (got[key], unmodified[key]) for key in got if not got[key] <= 2 * unmodified[key]} == {}
    assert_was_shared(model, batch, 2)


def equal(row: list[Tensor], other: list[Tensor]) -> bool:
    return torch.equal(torch.cat(row), torch.cat(other))


def with_other_token(rows: list[list[Tensor]], part: int) -> list[list[Tensor]]:
    """Replace the second token of a turn (part 1) or response (part 2), that of the row that is there twice."""
    old = next(row for index, row in enumerate(rows) if any(equal(row, other) for other in rows[:index]))[part]
    new = torch.cat([old[:1], (old[1:2] - 2) % 94 + 3, old[2:]])
    return [[new if torch.equal(piece, old) else piece for piece in row] for row in rows]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("part", [1, 2], ids=["turn", "response"])
def test_changing_a_branch_changes_no_sibling(name: str, part: int) -> None:
    """A token is seen by what follows it in its rows, by nothing before it and by no other row."""
    rows = rollout(3)
    changed = with_other_token(rows, part)
    model = shared(build(name, torch.float64).train())
    with KeepFloat64(), torch.no_grad():
        before, after = (
            batch.rows_of(model(**batch.inputs(), use_cache=False).logits)
            for batch in (padded(rows, "trl"), padded(changed, "trl"))
        )
    num_changed = 0
    for was, now, old, new in zip(before, after, rows, changed, strict=True):
        same = (torch.cat(old) == torch.cat(new)).long().cumprod(0).bool()
        difference = (was - now).abs().amax(-1)
        # Matmuls may block their rows otherwise when neighbours in the packing change: equal up to rounding.
        assert (difference[same] < FLOAT64).all()
        assert (difference[~same] > 1e-6).all()
        num_changed += int(not same.all())
    assert num_changed == {1: 5, 2: 2}[part]


def no_sharing_batches() -> dict[str, dict[str, Tensor]]:
    ids = torch.arange(3, 63).reshape(5, 12)
    mask = (torch.arange(12) < torch.tensor([12, 7, 9, 1, 12])[:, None]).long()
    packed = torch.cat([torch.arange(7), torch.arange(20), torch.arange(33)])[None]
    return {
        "padded": {"input_ids": ids, "attention_mask": mask},
        "no mask": {"input_ids": ids},
        "one row": {"input_ids": ids[:1]},
        "packed": {"input_ids": ids.reshape(1, -1), "position_ids": packed},
        "same tokens at other positions": {
            "input_ids": ids[:1].repeat(2, 1),
            "attention_mask": torch.ones(2, 12),
            "position_ids": torch.arange(24).reshape(2, 12),
        },
    }


@pytest.mark.parametrize("which", no_sharing_batches())
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_batch_without_sharing_is_bitwise_the_unmodified_model(name: str, which: str) -> None:
    given = no_sharing_batches()[which]
    results = []
    for model in (build(name).train(), shared(build(name).train())):
        logits = model(**given, use_cache=False).logits
        logits.square().sum().backward()
        results.append([logits, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert state_of(model).num_shared == 0
    # Masks of gpt_oss do not look at position_ids: its packed rows are never shared, and that is said.
    said = {reason.split(":")[0] for reason in state_of(model).fallbacks}
    blind = (name, which) == ("gpt_oss", "packed")
    assert said == ({"this model's masks do not look at position_ids"} if blind else set())
