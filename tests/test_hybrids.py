"""Hybrids: layers with a recurrent or convolution state run row by row, the rest once, against the same batch."""

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import vision_models
from families import Batch, Result, errors, one_thread, padded, rollout
from tiny_models import build, result, shared, state_of, with_gradients
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.lfm2.modeling_lfm2 import Lfm2DecoderLayer, Lfm2ShortConv

import augtree_fx
from augtree_fx import CostModel, TreeLayout
from augtree_fx.coverage.overrides import OVERRIDES
from augtree_fx.coverage.precision import KeepFloat64
from augtree_fx.transforms import packing
from augtree_fx.transforms.layer_masks import OtherMask, check_recurrent
from augtree_fx.transforms.packing import make_context
from augtree_fx.transforms.path_rows import PathRows, path_rows, run_rows
from augtree_fx.transforms.recurrent import MixerSite

# Float64 throughout; measured 1e-13. The state of another row, or none of the prompt, shows at 1e-2.
TOLERANCE = 1e-10
TYPES = (
    "bailing_hybrid",  # delta attention
    "bamba",  # Mamba 2; layers return tuples
    "falcon_h1",  # Mamba 2 beside attention in every layer
    "granitemoehybrid",
    "jamba",  # Mamba 1; layers pass no keywords on to it
    "kimi_linear",
    "lara_mini",
    "lfm2",  # short convolutions
    "lfm2_moe",
    "lfm3",
    "minimax",  # lightning attention, which returns its state
    "nemotron_h",  # layers of an MLP or experts alone
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",  # gated delta net
    "recurrent_gemma",  # RG-LRU, told of positions and of no padding
    "zamba",  # attention shared by layers, Mamba in each
    "zamba2",
)
UNMASKED = "recurrent_gemma"
QUICK = ("jamba", "kimi_linear", "lfm2", "qwen3_next", UNMASKED)  # a kind of state each, and every way to be called
TYPES_QUICK_FIRST = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in TYPES]


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def relative(got: Tensor, expected: Tensor) -> float:
    """Largest difference by the largest value expected; gradients that are rounding alone are measured by 1e-6."""
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


def assert_equal(got: Result, expected: Result) -> None:
    assert {name: x for name, x in errors(got, expected, relative).items() if not x <= TOLERANCE} == {}


def assert_shared(model: nn.Module, plain: nn.Module, batch: Batch, times: int = 1) -> None:
    assert_equal(result(model, batch), result(plain, batch))
    assert (state_of(model).num_shared, state_of(model).fallbacks) == (times, {})


@pytest.mark.parametrize("style", ["right", "left", "trl"])
@pytest.mark.parametrize("model_type", TYPES_QUICK_FIRST)
def test_padding(model_type: str, style: str) -> None:
    """Depth 3, ragged, every padding; a type that is not told of padding shares only what is padded on the right."""
    batch = padded(rollout(depth=3), style)
    plain = build(model_type)
    model = shared(copy.deepcopy(plain))
    if model_type == UNMASKED and style != "right":
        assert_equal(result(model, batch), result(plain, batch))
        (reason,) = state_of(model).fallbacks
        assert reason == "padding in front of rows reaches the state of layers.0.temporal_block; pad on the right"
    else:
        assert_shared(model, plain, batch)


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("model_type", TYPES_QUICK_FIRST)
def test_checkpointing_changes_no_bit(model_type: str, reentrant: bool) -> None:
    """No mode keeps float64 where backward computes anew; equal to the last bit is more than equal to rounding."""
    batch = padded(rollout(depth=2), "trl" if model_type != UNMASKED else "right")
    model = shared(build(model_type))
    if not model.supports_gradient_checkpointing:
        pytest.skip("it has none")
    expected = with_gradients(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    got = with_gradients(model, batch)
    assert {name: x for name, x in errors(got, expected, relative).items() if x != 0} == {}
    assert (state_of(model).num_shared, state_of(model).fallbacks) == (2, {})


# What crosses a branch point, and what does not


class Sum(nn.Module):
    """A state that adds tokens up, and what each token finds."""

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = (hidden if attention_mask is None else hidden * attention_mask[..., None]).cumsum(1)
        return total, total[:, -1]


def tree() -> TreeLayout:
    """Two turns of one prompt, of unequal length, and another prompt; a row that ends inside of the first."""
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 7], [8, 9], [1, 2, 3]]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return TreeLayout.from_padded(ids, (ids > 0).long(), costs=CostModel.free())


def test_states_cross_branch_points_and_end_with_their_rows() -> None:
    layout = tree()
    hidden = torch.from_numpy(layout.input_ids).double()[None, :, None].requires_grad_()
    output, _ = run_rows(Sum(), Sum.forward, path_rows(layout), {"hidden": hidden})
    by_token = dict(zip(layout.input_ids.tolist(), output[0, :, 0].tolist(), strict=True))
    assert by_token == {1: 1, 2: 3, 3: 6, 4: 10, 5: 15, 6: 12, 7: 10, 8: 8, 9: 17}
    output.sum().backward()
    later = dict(zip(layout.input_ids.tolist(), hidden.grad[0, :, 0].tolist(), strict=True))
    # How many distinct tokens find each token in their state: itself, and those behind it in any row.
    assert later == {1: 7, 2: 6, 3: 4, 4: 2, 5: 1, 6: 1, 7: 1, 8: 2, 9: 1}


def test_one_row_for_each_leaf() -> None:
    layout = tree()
    rows = path_rows(layout)
    shown = layout.input_ids[rows.index.numpy()]
    assert sorted(tuple(row) for row in shown.tolist()) == [
        (1, 2, 3, 4, 5),
        (1, 2, 3, 6, 1),
        (1, 2, 7, 1, 1),
        (8, 9, 1, 1, 1),
    ]
    assert (rows.mask, rows.bucket) == (None, (False, False))
    np.testing.assert_array_equal(layout.input_ids, shown.flatten()[rows.source.numpy()])


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2", "jamba"])
def test_responses_do_not_see_each_other(model_type: str) -> None:
    """Another response in one row leaves every bit of the others, and the prompt's last token moves all of them."""
    model = shared(build(model_type)).eval()
    rows = [[torch.arange(5, 17), torch.arange(20 + 6 * row, 26 + 6 * row)] for row in range(3)]
    before = computed_rows(model, rows)
    rows[1][1] = torch.arange(60, 66)
    after = computed_rows(model, rows)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True]
    rows = [[torch.cat([prompt[:-1], torch.tensor([70])]), response] for prompt, response in rows]
    moved = computed_rows(model, rows)
    assert all((a[-1] - b[-1]).abs().max() > 1e-4 for a, b in zip(after, moved, strict=True))
    assert state_of(model).num_shared == 3


def computed_rows(model: nn.Module, rows: list[list[Tensor]]) -> list[Tensor]:
    batch = padded(rows, "right")
    with torch.no_grad():
        return batch.rows_of(model(**batch.inputs(), use_cache=False).logits)


def reset_at_branch(layout: TreeLayout, *, full_width: bool = False) -> PathRows:
    """Planted: a row takes its prompt from the wrong end of the tree."""
    rows = path_rows(layout)
    return replace(rows, index=rows.index.roll(1, dims=0))


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2"])
def test_a_state_of_another_row_is_found(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "path_rows", reset_at_branch)
    batch = padded(rollout(depth=2), "right")
    plain = build(model_type)
    got = errors(result(shared(copy.deepcopy(plain)), batch), result(plain, batch), relative)
    assert got["logits"] > 1e-2


# Padding


def test_rows_with_unequal_padding_share_nothing() -> None:
    rows = [[torch.arange(5, 15), torch.tensor([20, 21])], [torch.arange(5, 15), torch.tensor([22, 23, 24])]]
    model = shared(build("bamba"))
    explanation = augtree_fx.explain(model, **{**padded(rows, "left").inputs()})
    assert explanation.layout.token_ratio == 1
    assert augtree_fx.explain(model, **padded(rows, "trl").inputs()).layout.token_ratio > 1
    assert augtree_fx.explain(shared(build("llama")), **padded(rows, "left").inputs()).layout.token_ratio > 1
    model(**padded(rows, "left").inputs(), use_cache=False)
    (reason,) = augtree_fx.explain(model).fallbacks
    assert (
        "rows have different padding in front, which may reach the state of layers.0.mamba; pad on the right" in reason
    )


def test_an_explicit_layout_of_unequal_padding() -> None:
    rows = [[torch.arange(5, 15), torch.tensor([20, 21])], [torch.arange(5, 15), torch.tensor([22, 23, 24])]]
    batch = padded(rows, "left")
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, batch.position_ids, costs=CostModel.free())
    with pytest.raises(NotImplementedError, match="shared tokens stand in different columns; pad on the right"):
        augtree_fx.pack(shared(build("bamba")), layout)


@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens_q"])
def test_packed_rows_run_the_original_forward(given: str) -> None:
    """The state of the unmodified model runs through them."""
    model = shared(build("lfm2"))
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9]])
    more = {
        "position_ids": torch.arange(4).repeat(2)[None],
        "cu_seq_lens_q": torch.tensor([0, 4, 8], dtype=torch.int32),
    }
    mask = None if given == "position_ids" else torch.ones_like(ids)
    model(ids, attention_mask=mask, **{given: more[given]}, use_cache=False)
    assert list(state_of(model).fallbacks) == [
        "the state of layers.0.conv runs through packed rows: pass an attention_mask, or rows one by one"
    ]


def test_prepared_masks_with_other_padding() -> None:
    tokens = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    mixers = (MixerSite("layers.0.conv", "Conv", masked=True),)
    check_recurrent({"conv": tokens.long(), "full_attention": None}, mixers, tokens)
    check_recurrent({"conv": None}, mixers, torch.ones_like(tokens))
    check_recurrent({"conv": None}, (replace(mixers[0], masked=False),), tokens)
    for mask in (None, torch.ones_like(tokens)):
        with pytest.raises(OtherMask, match="of conv layers has other padding than that of attention layers"):
            check_recurrent({"conv": mask}, mixers, tokens)


def test_images_in_a_shared_prompt() -> None:
    """Masks come prepared for each kind of layer, and positions have three axes."""
    plain = vision_models.build(vision_models.HYBRID)
    model = shared(copy.deepcopy(plain))
    batch = vision_models.image_batch(vision_models.HYBRID, (0, 0, 2, 0, 2, 4))
    with KeepFloat64():
        expected, got = vision_models.result_of(plain, batch), vision_models.result_of(model, batch)
    assert {name: x for name in expected if not (x := relative(got[name], expected[name])) <= TOLERANCE} == {}
    assert (state_of(model).num_shared, state_of(model).fallbacks) == (1, {})


# Treated models


def lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    targets = [
        name
        for name in ("in_proj", "out_proj", "in_proj_qkvz", "q_proj")
        if any(name in x for x, _ in model.named_modules())
    ]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return adapted.double()


TREATMENTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "compile": lambda model: model.compile(backend="eager") or model,
}


@pytest.mark.parametrize(
    "model_type, treatment",
    [
        *((name, treatment) for name in ("qwen3_next", "jamba") for treatment in ("deepcopy", "pickle")),
        ("lfm2", "compile"),
    ],
)
def test_treated(model_type: str, treatment: str) -> None:
    batch = padded(rollout(depth=3), "trl")
    plain = build(model_type)
    assert_shared(TREATMENTS[treatment](shared(copy.deepcopy(plain))), plain, batch)


@pytest.mark.parametrize("transform_first", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_next", "jamba"])
def test_adapters_inside_of_modules_with_a_state(model_type: str, transform_first: bool) -> None:
    batch = padded(rollout(depth=2), "right")
    torch.manual_seed(0)
    plain = lora(build(model_type))
    torch.manual_seed(0)
    model = lora(shared(build(model_type))) if transform_first else shared(lora(build(model_type)))
    assert any("lora" in name and "attn" not in name.replace("linear_attn", "") for name, _ in model.named_parameters())
    assert_shared(model, plain, batch)


@pytest.mark.parametrize("model_type", ["qwen3_next", "recurrent_gemma"])
def test_restore_leaves_no_trace(model_type: str) -> None:
    model = build(model_type)
    before = {name: (type(x), set(vars(x))) for name, x in model.named_modules()}
    augtree_fx.restore(shared(model))
    assert {name: (type(x), set(vars(x))) for name, x in model.named_modules()} == before


def test_generation_is_untouched() -> None:
    plain = build("lfm2").eval()
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    expected = plain.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(shared(copy.deepcopy(plain)).generate(ids, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.parametrize("model_type", ["lfm2", "bamba", pytest.param("jamba", marks=pytest.mark.slow)])
def test_one_graph_with_an_explicit_layout(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = {"num_experts": 1}  # experts of the unmodified jamba break a graph
    monkeypatch.setitem(OVERRIDES, "jamba", {**OVERRIDES.get("jamba", {}), **dense})
    model = shared(build(model_type)).eval()
    layout = tree()
    packed = augtree_fx.pack(model, layout, pad_to_multiple_of=8)
    expected = packed.show(model(**packed.arguments).logits)
    got = packed.show(torch.compile(model, backend="eager", fullgraph=True)(**packed.arguments).logits)
    torch.testing.assert_close(got, expected)


def test_a_context_with_rows_moves_and_flattens() -> None:
    context = make_context(tree(), state_of(shared(build("lfm2"))))
    assert context.to("cpu") is context
    assert context.to("meta").rows.index.device.type == "meta"
    leaves, spec = pytree.tree_flatten(context)
    back = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert back.rows.leaves()[0] is context.rows.index
    assert (back.bucket, back.columns) == (context.bucket, None)
    assert context.bucket[-2:] == (False, False)


# What is told of it, and refusals


def test_explain_says_what_runs_once_a_row() -> None:
    batch = padded(rollout(depth=2), "right")
    said = str(augtree_fx.explain(shared(build("qwen3_next")), **batch.inputs()))
    assert "Qwen3NextGatedDeltaNet" in said
    assert "runs once a row" in said
    assert "plan, modules that run once a row aside" in said


def refused(model: nn.Module) -> str:
    with pytest.raises(augtree_fx.RewriteError) as error:
        shared(model)
    return str(error.value)


def test_refusals_name_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("lfm2")
    model.model.layers[0].conv.forward = lambda **_: None
    assert "layers.0.conv (Lfm2ShortConv) has a forward of its own" in refused(model)
    original = Lfm2ShortConv.forward

    def with_state(self: nn.Module, hidden_states: Tensor, weights: Tensor, **kwargs: object) -> Tensor:
        return original(self, hidden_states, **kwargs)

    def called(forward: Callable[..., Tensor], **more: object) -> None:
        monkeypatch.setattr(Lfm2ShortConv, "forward", forward)

        def layer(
            self: nn.Module, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: object
        ) -> Tensor:
            if self.is_attention_layer:
                return self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)[0]
            return self.conv(hidden_states=hidden_states, **more)

        monkeypatch.setattr(Lfm2DecoderLayer, "forward", layer)

    called(with_state, weights=torch.zeros(3, 3), augtree_context=None)
    assert "neither extra keywords nor a mask given to the model reach layers.0.conv (Lfm2ShortConv)" in refused(
        build("lfm2")
    )


def test_a_tensor_that_is_not_of_tokens() -> None:
    with pytest.raises(NotImplementedError, match=r"Sum must be given tensors of 9 tokens .*, got shape \(3, 3\)"):
        run_rows(Sum(), Sum.forward, path_rows(tree()), {"hidden": torch.zeros(1, 9, 2), "more": torch.zeros(3, 3)})


def test_a_state_of_rows_cannot_be_used() -> None:
    _, state = run_rows(Sum(), Sum.forward, path_rows(tree()), {"hidden": torch.zeros(1, 9, 2)})
    with pytest.raises(NotImplementedError, match=r"a state of single rows is used \(.shape\)"):
        state.shape  # noqa: B018


def test_layers_of_linears_alone_may_be_attention() -> None:
    """A layer without attention is trusted only if its class has it elsewhere; xlm has attention code of its own."""
    assert "attentions.0 (MultiHeadAttention): it has no attention module" in refused(build("xlm"))
