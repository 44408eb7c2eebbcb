"""Tokens that are vectors: images in a shared prompt, M-RoPE, prepared masks, and what must not be shared."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from families import KeepFloat64, build, error, one_thread
from torch import Tensor, nn
from vision_models import IMAGE, MODELS, ImageBatch, image_batch, result_of
from vision_models import build as build_vision

import augtree_fx
from augtree_fx import CostModel
from augtree_fx.coverage import tiny
from augtree_fx.coverage.batch import grouped_batch
from augtree_fx.fingerprints import bits_of, equal_to_source, fingerprints
from augtree_fx.transforms import embedded, find_stack
from augtree_fx.transforms.capture import AttentionSite
from augtree_fx.transforms.layer_masks import OtherMask, padding_of

# All in float64, see test_models.py. Vision towers add up more tokens, and biases of keys have gradients that are
# rounding themselves: those are measured by the largest gradient of the model times this.
FLOAT64, FLOOR = 1e-9, 1e-6
PROMPT, BEFORE_FEATURES = 14, 4  # tokens, see image_batch
# Images of the rows. A float64 matmul on the CPU rounds the last rows of a matrix otherwise than the rest unless their
# number is a multiple of 4, and then a tower's features of one image differ in their last bits from row to row.
GROUPS = (0, 2, 0, 2)


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def shared(model: nn.Module) -> nn.Module:
    return augtree_fx.transform(model, costs=CostModel.free())


def state_of(model: nn.Module) -> object:
    return find_stack(model)._augtree_state


def count_tokens(model: nn.Module) -> list[int]:
    """Tokens that the first decoder layer sees, call by call."""
    seen: list[int] = []
    layer = find_stack(model).layers[0]
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0] * args[0].shape[1]))
    return seen


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    floor = FLOOR * max(x.abs().max().item() for name, x in expected.items() if name != "logits")
    errors = {
        name: (got[name] - x).abs().max().item() / max(x.abs().max().item(), floor) for name, x in expected.items()
    }
    assert {name: value for name, value in errors.items() if not value <= FLOAT64} == {}


def assert_exact(model: nn.Module, batch: ImageBatch) -> list[int]:
    """Compare with the unmodified model; returns the tokens that were computed."""
    plain, model = copy.deepcopy(model), shared(model)
    seen = count_tokens(model)
    with KeepFloat64():
        assert_equal(result_of(model, batch), result_of(plain, batch))
    return seen


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("name", MODELS)
def test_images_of_a_shared_prompt_are_shared(name: str, masked: bool) -> None:
    batch = image_batch(name, GROUPS, masked=masked)
    model = build_vision(name)
    assert assert_exact(model, batch) == [int(batch.tokens.sum()) - 2 * PROMPT]
    assert (state_of(model).num_shared, state_of(model).fallbacks) == (1, {})


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_the_tower_are_there(name: str) -> None:
    model = build_vision(name)
    with KeepFloat64():
        expected = result_of(model, image_batch(name, (0, 2, 0)))
    tower = [x.abs().max().item() for key, x in expected.items() if "vision" in key or "visual" in key]
    assert len(tower) > 20
    assert sorted(tower)[len(tower) // 2] > 1e-2


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_left_padding_with_positions_that_count_tokens(name: str) -> None:
    batch = image_batch(name, (0, 2, 0, 2, 0), side="left")
    assert assert_exact(build_vision(name), batch) == [int(batch.tokens.sum()) - 3 * PROMPT]


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_other_pixels_are_not_shared(name: str) -> None:
    """One text, two images: what is shared ends where the images begin."""
    batch = image_batch(name, (0, 1, 0, 1))
    expected = int(batch.tokens.sum()) - 2 * PROMPT - BEFORE_FEATURES
    assert assert_exact(build_vision(name), batch) == [expected]


@pytest.mark.parametrize("name", MODELS)
def test_text_alone(name: str) -> None:
    batch = image_batch(name, (0, 2, 0, 2))
    ids = batch.inputs["input_ids"].where(batch.inputs["input_ids"] != IMAGE, 5)
    text = ImageBatch({"input_ids": ids, "attention_mask": batch.inputs["attention_mask"]}, batch.tokens)
    assert assert_exact(build_vision(name), text) == [int(batch.tokens.sum()) - 2 * PROMPT]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_every_axis_of_positions_must_agree(axis: int) -> None:
    batch = image_batch("qwen2_5_vl", (0, 0, 0))
    ids = batch.inputs["input_ids"]
    positions = torch.arange(ids.shape[1]).expand(3, *ids.shape).clone()
    positions[axis, 1, 9:] += 1
    moved = ImageBatch({**batch.inputs, "position_ids": positions}, batch.tokens)
    expected = int(batch.tokens.sum()) - PROMPT - 9
    assert assert_exact(build_vision("qwen2_5_vl"), moved) == [expected]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_packed_rows_with_four_axes(name: str) -> None:
    """The first axis restarts with every row, the other three are M-RoPE's; there is no mask."""
    rows = [torch.tensor([5, 6, 7, 8, 9, *tail]) for tail in ([11, 12], [13], [14, 15, 16])]
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    several = torch.stack([positions, positions, positions // 2, positions + 1])[:, None]
    ids = torch.cat(rows)[None]
    plain = build_vision(name)
    with KeepFloat64(), torch.no_grad():
        text = find_stack(plain)
        expected = [
            text(input_ids=row[None], position_ids=part, use_cache=False).last_hidden_state[0]
            for row, part in zip(rows, several.split([len(row) for row in rows], dim=-1), strict=True)
        ]
        model = shared(plain)
        seen = count_tokens(model)
        got = model.base_model(input_ids=ids, position_ids=several, use_cache=False).last_hidden_state[0]
    assert error(got, torch.cat(expected)) < FLOAT64
    assert seen == [ids.shape[1] - 10]
    assert state_of(model).axes == {4: True}


# Gradients: equal values must come from equal computations.


def twins(frozen: bool) -> tuple[nn.Module, ImageBatch]:
    """A llava whose tokens 5 and 6 have one vector, and two rows that differ in that token alone at first."""
    model = build_vision("llava")
    embedding = find_stack(model).get_input_embeddings()
    with torch.no_grad():
        embedding.weight[6] = embedding.weight[5]
    embedding.weight.requires_grad_(not frozen)
    ids = torch.tensor([[7, 5, 8, 9, 11, 12], [7, 6, 8, 9, 13, 14]])
    batch = ImageBatch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.ones_like(ids).bool())
    return model, batch


@pytest.mark.parametrize("frozen, computed", [(False, 11), (True, 8)])
def test_equal_rows_of_the_table_have_their_own_gradients(frozen: bool, computed: int) -> None:
    assert assert_exact(*twins(frozen)) == [computed]


def falls_back(model: nn.Module, reason: str, **given: object) -> None:
    """The original forward runs, bit for bit, and says why."""
    plain, model = copy.deepcopy(model), shared(model)
    got, expected = model(**given, use_cache=False).logits, plain(**given, use_cache=False).logits
    assert torch.equal(got, expected)
    assert [x for x in state_of(model).fallbacks if reason in x] == list(state_of(model).fallbacks) != []
    assert state_of(model).num_shared == 0


ROWS = torch.tensor([[7, 5, 8, 9, 11, 12], [7, 5, 8, 9, 13, 14]])
BATCH = {"attention_mask": torch.ones_like(ROWS)}


def table(model: nn.Module) -> nn.Module:
    return model.get_input_embeddings()


def test_a_leaf_has_a_gradient_of_its_own() -> None:
    model = build("llama")
    leaf = table(model)(ROWS).detach().requires_grad_()
    falls_back(model, "come from a leaf that takes a gradient of its own", inputs_embeds=leaf, **BATCH)
    falls_back(model, "come from a leaf that takes a gradient of its own", inputs_embeds=leaf * 2.0, **BATCH)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda x: x.tanh(), "gradients through TanhBackward0"),
        (lambda x: x * torch.ones_like(x), "gradients through MulBackward0"),
        (lambda x: x + x, "gradients through AddBackward0"),
    ],
)
def test_an_unknown_origin_is_said(make: Callable[[Tensor], Tensor], reason: str) -> None:
    model = build("llama")
    falls_back(model, reason, inputs_embeds=make(table(model)(ROWS)), **BATCH)
    other = build("llama")
    with torch.no_grad():
        assert shared(other)(inputs_embeds=make(table(other)(ROWS)), **BATCH, use_cache=False) is not None
    assert state_of(other).num_shared == 1


def test_a_retained_gradient_is_said() -> None:
    model = build("llama")
    embeds = table(model)(ROWS)
    embeds.retain_grad()
    model = shared(model)
    model(inputs_embeds=embeds, **BATCH, use_cache=False)
    assert list(state_of(model).fallbacks) == [
        "inputs_embeds retains a gradient, which sharing would change slot by slot"
    ]


def test_ids_of_another_shape_are_said() -> None:
    model = build("llama")
    embeds = table(model)(ROWS.flatten()).view(*ROWS.shape, -1)
    falls_back(model, "are looked up by ids of shape (12,), not (2, 6)", inputs_embeds=embeds, **BATCH)


def test_features_that_say_nothing_about_their_image() -> None:
    """A projector that starts at 0 makes one vector of all images, but its own gradient needs each image's features."""
    model = build_vision("llava")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "projector" in name:
                parameter.zero_()
    batch = image_batch("llava", (0, 1, 0, 1))
    falls_back(copy.deepcopy(model), "features that repeat inside a row and take gradients", **batch.inputs)
    model.requires_grad_(False)
    find_stack(model).requires_grad_(True)
    assert assert_exact(model, batch) == [int(batch.tokens.sum()) - 3 * PROMPT]


def test_gradients_for_checkpointing_are_no_obstacle() -> None:
    """`enable_input_require_grads` makes the output of a frozen embedding a leaf; nobody reads its gradient."""
    model = build("llama", torch.float64).train()
    table(model).requires_grad_(False)
    model.enable_input_require_grads()
    plain, model = copy.deepcopy(model), shared(model)
    results = []
    for each in (plain, model):
        logits = each(inputs_embeds=table(each)(ROWS), **BATCH, use_cache=False).logits
        logits.square().sum().backward()
        results.append([logits, *(x.grad for x in each.parameters() if x.requires_grad)])
    assert all(error(a, b) < 1e-5 for a, b in zip(*results[::-1], strict=True))
    assert state_of(model).num_shared == 1
    table(model).requires_grad_(True)  # now it is a gradient that somebody wants
    model(inputs_embeds=table(model)(ROWS).detach().requires_grad_(), **BATCH, use_cache=False)
    assert len(state_of(model).fallbacks) == 1


# Exactness: bits, not fingerprints.


def test_a_collision_runs_the_original_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(tensors: object, num_slots: int) -> Tensor:
        return torch.zeros(num_slots, dtype=torch.int64)

    monkeypatch.setattr(embedded, "fingerprints", constant)
    model = build("llama")
    falls_back(model, "two different tokens have one fingerprint", inputs_embeds=table(model)(ROWS), **BATCH)


def test_a_collision_of_marked_rows_runs_the_original_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tensors behind the mask differ."""
    monkeypatch.setattr(embedded, "fingerprints", lambda x, n: torch.zeros(n, dtype=torch.int64))
    marks = ROWS == 5
    rows = [torch.arange(2.0)[:, None].expand(2, 4)]
    tokens = embedded.read_inputs(
        {"inputs_embeds": torch.ones(*ROWS.shape, 4), "deepstack_visual_embeds": rows, "visual_pos_masks": marks},
        ("inputs_embeds",),
        nn.Embedding(2, 4),
    )
    host = tokens.rows(None, None, False)
    layout = augtree_fx.TreeLayout.from_rows(host, costs=CostModel.free())
    assert layout.num_tokens == 6
    assert tokens.collides(layout)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_fingerprints_tell_bits_apart(dtype: torch.dtype) -> None:
    values = torch.zeros(130, 65, dtype=dtype)
    for row in range(65):
        values[row, row] = 1
    marks = fingerprints([values], 130)
    assert len(marks[:65].unique()) == 65
    assert (marks[65:] == marks[65]).all()
    assert torch.equal(fingerprints([values[3:, 1:]], 127), fingerprints([values[3:, 1:].clone()], 127))


def test_zeros_of_both_signs_are_different_bits() -> None:
    values = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [float("nan"), 1.0], [float("nan"), 1.0]])
    assert len(fingerprints([values], 4).unique()) == 3
    first, second = torch.tensor([0, 3]), torch.tensor([1, 2])
    assert not equal_to_source(values, first, second, 4)
    assert equal_to_source(values, first[1:], second[1:], 4)
    assert bits_of(values, 4).dtype == torch.int64


def test_an_extra_tensor_of_unknown_meaning_is_said() -> None:
    model = build("llama")
    given = {"inputs_embeds": table(model)(ROWS), "bias": torch.ones(3), **BATCH}
    falls_back(model, "extra tensors are passed to the decoder: bias", **given)
    falls_back(build("llama"), "extra tensors are passed to the decoder: bias", input_ids=ROWS, bias=[torch.ones(3)])
    given = {"inputs_embeds": table(model)(ROWS), "token_type_ids": torch.zeros_like(ROWS), **BATCH}
    falls_back(model, "extra tensors are passed to the decoder: token_type_ids", **given)


def test_packed_rows_of_three_axes_are_left_alone() -> None:
    """Their first axis need not restart where a row begins."""
    model = shared(build_vision("qwen2_5_vl"))
    positions = torch.arange(6).expand(3, 2, 6)
    given = {"position_ids": positions, "cu_seq_lens_q": torch.tensor([0, 6, 12]), "use_cache": False}
    model.base_model(input_ids=ROWS, **given)
    assert "this model's masks do not look at position_ids of several axes" in str(state_of(model).fallbacks)
    assert state_of(model).num_shared == 0


def test_an_extra_tensor_of_every_token_must_agree() -> None:
    """Qwen3-VL's marks of visual tokens are a tensor of every token; here they differ at the third."""
    model = shared(build_vision("qwen3_vl"))
    text, seen = find_stack(model), count_tokens(model)
    marks = torch.zeros_like(ROWS).bool()
    marks[1, 2] = True
    text(inputs_embeds=table(text)(ROWS), visual_pos_masks=marks, **BATCH, use_cache=False)
    assert seen == [12 - 2]


# Masks that a wrapper prepared.


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_prepared_causal_masks_are_shared(name: str, attention: str, side: str) -> None:
    batch = grouped_batch(97)
    ids, mask = batch.input_ids, batch.attention_mask
    if side == "left":  # with positions of columns, rows of one length share
        ids, mask = (torch.cat([torch.zeros_like(x[:, :3]), x[:, :24], x[:, 40:]], 1) for x in (ids, mask))
    plain = tiny.build(name, attention).double()
    model = shared(copy.deepcopy(plain))
    with KeepFloat64(), torch.no_grad():
        got, expected = (m(input_ids=ids, attention_mask=mask, use_cache=False).logits for m in (model, plain))
    assert error(got[mask.bool()], expected[mask.bool()]) < FLOAT64
    assert (state_of(model).num_shared, state_of(model).fallbacks) == (1, {})


def test_image_blocks_of_gemma_are_not_causal() -> None:
    """With `token_type_ids` the tokens of an image see one another; without marked tokens the masks stay causal."""
    types = torch.zeros_like(ROWS)
    falls_back_types = types.clone()
    falls_back_types[:, 1:4] = 1
    model = tiny.build("gemma3", "eager")
    falls_back(copy.deepcopy(model), "is not causal alone", input_ids=ROWS, token_type_ids=falls_back_types, **BATCH)
    model = shared(model)
    model(input_ids=ROWS, token_type_ids=types, **BATCH, use_cache=False)
    assert state_of(model).num_shared == 1


class Config:
    """Of two layers."""

    layer_types = ("full_attention", "sliding_attention")

    def __init__(self, implementation: str = "eager") -> None:
        self._attn_implementation = implementation


def sites(*windows: int | None) -> tuple[AttentionSite, ...]:
    fixed = {"class_name": "", "graph": None, "arguments": (), "scale": 1.0, "softcap": 0.0, "sinks": False}
    rest = {"dropout": 0.0, "separates": True, "scalars": ()}
    return tuple(AttentionSite(name=f"layers.{i}.attn", window=w, **fixed, **rest) for i, w in enumerate(windows))


def causal(size: int, window: int | None = None) -> Tensor:
    distance = torch.arange(size)[:, None] - torch.arange(size)
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return seen[None, None].repeat(2, 1, 1, 1)


def read(masks: dict[str, object], window: int = 3, implementation: str = "eager") -> Tensor:
    return padding_of(masks, sites(None, window), Config(implementation), (2, 6), torch.device("cpu"))


def both(full: object, sliding: object) -> dict[str, object]:
    return {"full_attention": full, "sliding_attention": sliding}


def test_padding_is_read_off_masks() -> None:
    tokens = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]).bool()
    full, sliding = (x & tokens[:, None, None] for x in (causal(6), causal(6, 3)))
    assert torch.equal(read(both(full, sliding)), tokens)
    additive = torch.zeros(full.shape).masked_fill(~full, torch.finfo(torch.float32).min)
    assert torch.equal(read(both(additive, sliding)), tokens)
    assert torch.equal(read(both(tokens, tokens), implementation="flash_attention_2"), tokens)
    assert read(both(None, None), window=6, implementation="sdpa").all()
    assert read(both(None, None), implementation="flash_attention_2").all()


@pytest.mark.parametrize(
    "masks, window, implementation, reason",
    [
        (both(causal(6), causal(6, 4)), 3, "eager", "sliding_attention layers is not causal alone"),
        (both(causal(6, 5), causal(6, 3)), 3, "eager", "full_attention layers is not causal alone"),
        (both(torch.ones_like(causal(6)), causal(6, 3)), 3, "eager", "full_attention layers is not causal alone"),
        (both(causal(6).float() - 1.5, causal(6, 3)), 3, "eager", "holds values between 0 and minus infinity"),
        (both(causal(6)[..., :5], causal(6, 3)), 3, "eager", "full_attention layers has shape (2, 1, 6, 5)"),
        (both("block mask", causal(6, 3)), 3, "eager", "full_attention layers is a str"),
        (both(None, causal(6, 3)), 3, "eager", "full_attention layers is None under 'eager' attention"),
        (both(None, None), 5, "sdpa", "sliding_attention layers is None under 'sdpa' attention"),
        ({"full_attention": causal(6)}, 3, "eager", "do not say which layer takes which"),
        (
            both(causal(6), causal(6, 3) & (torch.arange(6) > 0)),
            3,
            "eager",
            "sliding_attention layers has other padding than that of full_attention layers",
        ),
    ],
)
def test_other_masks_are_said(masks: dict[str, object], window: int, implementation: str, reason: str) -> None:
    with pytest.raises(OtherMask) as raised:
        read(masks, window, implementation)
    assert reason in str(raised.value)
