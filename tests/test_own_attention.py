"""Attention that runs row by row in its own code (indexers, convolutions, no interface), against the same batch."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from families import Result, errors, one_thread, padded, rollout
from tiny_models import build, result, shared, state_of, with_gradients
from torch import Tensor

import augtree_fx
from augtree_fx import TreeLayout
from augtree_fx.coverage import overrides, tiny
from augtree_fx.coverage.check import EXACT, check
from augtree_fx.transforms import find_stack, is_installed
from augtree_fx.transforms.row_masks import BuiltMask

# Float64 throughout; measured 1e-13. A key too many, or one of another row, shows at 1e-3.
TOLERANCE = 1e-10
UNMASKED = ("deepseek_v4",)  # compressors are not told of padding
TYPES = (
    "axk2",
    "deepseek_v32",  # top-k of all keys
    "deepseek_v4",  # compressed keys
    "dots3_note_text",  # beside windows
    "glm_moe_dsa",  # layers that take the choice of another one
    "hy_v4",
    "inkling_text",  # convolutions of keys and values, relative positions
    "qwen4_exp_text",  # blocks of keys, beside delta nets
    "zaya",  # convolutions, masks in a dict
    # No attention interface: code of their own
    "falcon",
    "gpt_neo",  # windows by a buffer
    "gpt_neox_japanese",  # returns a bias that the layer adds
    "megatron-bert",
    "mvp",
    "rembert",
    "trocr",  # cross-attention that is not called
)
# A kind of attention each: chosen keys, pooled ones, convolutions, code of its own.
QUICK = ("deepseek_v32", "deepseek_v4", "zaya", "falcon", "gpt_neo")
TYPES_QUICK_FIRST = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in TYPES]


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def differing(got: Result, expected: Result) -> dict[str, float]:
    """By the largest value of each tensor; gradients that are rounding alone, by 1e-6 of the model's largest."""
    largest = max(x.abs().max() for x in expected.gradients.values()).item()

    def relative(a: Tensor, b: Tensor) -> float:
        return ((a - b).abs().max() / b.abs().max().clamp(min=1e-6 * largest)).item()

    return {name: x for name, x in errors(got, expected, relative).items() if not x <= TOLERANCE}


def unequal(got: Result, expected: Result) -> dict[str, float]:
    """What differs in any bit."""
    found = errors(got, expected, lambda a, b: (a - b).abs().max().item())
    return {name: x for name, x in found.items() if x != 0}


@pytest.mark.parametrize(("depth", "style"), [(2, "right"), (3, "right"), (3, "left"), (3, "trl")])
@pytest.mark.parametrize("model_type", TYPES_QUICK_FIRST)
def test_padding(model_type: str, depth: int, style: str) -> None:
    """Ragged rows, every padding; a type that is not told of padding shares only what is padded on the right."""
    batch = padded(rollout(depth=depth), style)
    if batch.position_ids is not None:
        batch = replace(batch, position_ids=batch.position_ids.clamp(min=0))  # tables of positions begin at 0
    plain = build(model_type)
    model = shared(copy.deepcopy(plain))
    assert differing(result(model, batch), result(plain, batch)) == {}
    state = state_of(model)
    if model_type in UNMASKED and style != "right":
        (reason,) = state.fallbacks
        assert reason == "padding in front of rows reaches the attention of layers.0.self_attn; pad on the right"
    else:
        assert (state.num_shared, state.fallbacks) == (1, {})


@pytest.mark.parametrize("model_type", ["deepseek_v32", "falcon", "glm_moe_dsa", "zaya"])
def test_under_sdpa(model_type: str) -> None:
    """Masks are boolean there, or none."""
    batch = padded(rollout(depth=2), "right")
    plain = build(model_type, "sdpa")
    model = shared(copy.deepcopy(plain))
    assert differing(result(model, batch), result(plain, batch)) == {}
    assert state_of(model).num_shared == 1


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "zaya", "falcon"])
def test_checkpointing_changes_no_bit(model_type: str, reentrant: bool) -> None:
    batch = padded(rollout(depth=2), "right")
    model = shared(build(model_type))
    if not model.supports_gradient_checkpointing:
        pytest.skip("it has none")
    expected = with_gradients(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    got = with_gradients(model, batch)
    assert unequal(got, expected) == {}
    assert state_of(model).num_shared == 2


@pytest.mark.parametrize("model_type", ["deepseek_v32", "zaya", "falcon", "rembert"])
def test_a_wrong_mask_shows(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault planted in the masks of rows: they are shifted by a key."""
    batch = padded(rollout(depth=2), "right")
    plain = build(model_type)
    expected = result(plain, batch)
    model = shared(copy.deepcopy(plain))
    made = BuiltMask.of_rows

    def later(self: BuiltMask, *arguments: object) -> object:
        mask = made(self, *arguments)
        if mask is None or mask.ndim != 4:
            return mask
        return mask.roll(1, -1).clone().masked_fill_(torch.eye(mask.shape[-1], dtype=torch.bool), 0)

    monkeypatch.setattr(BuiltMask, "of_rows", later)
    assert "logits" in differing(result(model, batch), expected)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "inkling_text", "zaya", "falcon", "rembert"])
def test_copies_and_restores(model_type: str) -> None:
    batch = padded(rollout(depth=2), "right")
    plain = build(model_type)
    expected = result(plain, batch)
    model = shared(copy.deepcopy(plain))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert differing(result(copied, batch), expected) == {}
        assert state_of(copied).num_shared == 1
    augtree_fx.restore(model)
    assert not any(is_installed(module) or "augtree" in str(vars(module).keys()) for module in model.modules())
    assert unequal(result(model, batch), expected) == {}


def test_generation_and_packed_rows_run_the_original_forward() -> None:
    plain = build("deepseek_v32").eval()
    model = shared(copy.deepcopy(plain))
    prompt = torch.arange(5, 17).expand(2, -1)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    torch.testing.assert_close(model.generate(prompt, **options), plain.generate(prompt, **options))
    positions = torch.arange(6).repeat(4)[None]
    model(torch.arange(5, 11).repeat(4)[None], position_ids=positions)
    assert list(state_of(model).fallbacks) == [
        "the attention of layers.0.self_attn runs through packed rows: pass an attention_mask, or rows one by one"
    ]


def test_what_is_refused() -> None:
    """Waves, and dropout of the attention that keeps its code."""
    model = shared(build("deepseek_v32"))
    prompt, response = torch.arange(5, 17), torch.arange(20, 24)
    layout = TreeLayout.from_groups([prompt], [[response, response + 1]])
    waves = "layers.0.self_attn runs once a row, in its own code, which waves are not handed"
    with pytest.raises(NotImplementedError, match=waves), augtree_fx.prefill(model, layout):
        pass
    find_stack(model).layers[1].self_attn.attention_dropout = 0.1
    batch = padded(rollout(depth=2), "right")
    with pytest.raises(
        NotImplementedError, match=r"attention dropout must be 0 in training, layers.1.self_attn has 0.1"
    ):
        model(**batch.inputs())


def test_layers_that_the_default_config_has_none_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse layers of minimax_m3, which choose blocks of keys."""
    if "minimax_m3_vl_text" not in tiny.model_types():
        pytest.skip("this transformers does not have it")
    monkeypatch.setitem(overrides.OVERRIDES, "minimax_m3_vl_text", {"layer_types": ["minimax_m3_sparse"] * 2})
    assert check("minimax_m3_vl_text").status == EXACT


def test_explain_says_once_a_row() -> None:
    said = str(augtree_fx.explain(build("dots3_note_text")))
    assert "Dots3NoteTextAttention" in said and "runs once a row" in said


def test_choices_among_equal_scores_are_those_of_rows_as_wide() -> None:
    """Scores of an indexer are often 0, and which of those a top-k takes depends on how many there are."""
    model = shared(build("deepseek_v32"))
    assert all(mixer.full_width for mixer in state_of(model).mixers)
    batch = padded(rollout(depth=2), "right")
    wide = {name: torch.nn.functional.pad(x, (0, 23)) for name, x in batch.inputs().items()}
    wide_batch = replace(batch, input_ids=wide["input_ids"], attention_mask=wide["attention_mask"])
    plain = build("deepseek_v32")
    assert differing(result(model, wide_batch), result(plain, wide_batch)) == {}
