"""Batches that cannot be shared exactly: an error by default; the original forward, said once, where that is right."""

import logging
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from families import build, error, one_thread, padded, rollout
from torch import Tensor, nn
from transformers import DynamicCache

import augtree_fx
from augtree_fx import CostModel

BATCH = padded(rollout(2), "right")
IDS, MASK = BATCH.input_ids, BATCH.attention_mask
LONGEST = max(len(row) for row in BATCH.tokens)
Log = pytest.LogCaptureFixture
FLOAT32 = 1e-5  # float32 models: 6e-8 a rounding, through three layers and back


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def shared(model: nn.Module, **options: object) -> nn.Module:
    return augtree_fx.transform(model, costs=CostModel.free(), **options)


def state_of(model: nn.Module) -> object:
    return model.get_decoder()._augtree_state


def look(model: nn.Module) -> list[tuple[type, list[str]]]:
    return [(type(module), list(vars(module))) for module in model.modules()]


def with_hole() -> Tensor:
    mask = MASK.clone()
    mask[3, 4] = 0
    return mask


def with_step_back() -> Tensor:
    positions = torch.arange(IDS.shape[1]).repeat(len(IDS), 1)
    positions[2, 6] = 3
    return positions


REJECTED: dict[str, tuple[type[Exception], str, Callable[[], dict[str, object]]]] = {
    "hole": (
        ValueError,
        "attention_mask must be one run of ones in each row, row 3 has a hole at column 4",
        lambda: {"input_ids": IDS, "attention_mask": with_hole()},
    ),
    "decreasing positions": (
        ValueError,
        "position_ids must not decrease inside a row, row 2 goes from 5 to 3 at token 6",
        lambda: {"input_ids": IDS, "attention_mask": MASK, "position_ids": with_step_back()},
    ),
    "negative positions": (
        ValueError,
        "position_ids must not be negative, got -1",
        lambda: {"input_ids": IDS, "attention_mask": MASK, "position_ids": torch.arange(IDS.shape[1])[None] - 1},
    ),
    "no rows": (ValueError, r"the batch is empty: input_ids has shape \(0, 7\)", lambda: {"input_ids": IDS[:0, :7]}),
    "no columns": (ValueError, r"the batch is empty: input_ids has shape \(9, 0\)", lambda: {"input_ids": IDS[:9, :0]}),
    "mask of another shape": (
        ValueError,
        "attention_mask must have the shape of input_ids",
        lambda: {"input_ids": IDS, "attention_mask": MASK[:, 1:]},
    ),
    "mask elsewhere": (
        ValueError,
        "all inputs must be on one device, got input_ids on cpu, attention_mask on meta",
        lambda: {"input_ids": IDS, "attention_mask": MASK.to("meta")},
    ),
    "ids elsewhere": (
        ValueError,
        "input_ids are on meta, the model's embedding is on cpu; move them with",
        lambda: {"input_ids": IDS.to("meta"), "attention_mask": MASK},
    ),
    "attention weights": (
        NotImplementedError,
        "output_attentions=True needs attention weights",
        lambda: {"input_ids": IDS, "attention_mask": MASK, "output_attentions": True},
    ),
    "prompt in a cache": (
        NotImplementedError,
        "a forward with gradients got a KV cache of 4 tokens and 3 new tokens",
        lambda: {"input_ids": IDS[:, 4:7], "past_key_values": cache_of(IDS[:, :4])},
    ),
}


def cache_of(ids: Tensor) -> DynamicCache:
    return build("llama")(ids, use_cache=True).past_key_values


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # 5.17 has no other name
@pytest.mark.parametrize("which", REJECTED)
def test_batches_that_are_rejected(which: str) -> None:
    kind, text, make = REJECTED[which]
    model = shared(build("llama").train())
    before, expected = look(model), model(IDS, attention_mask=MASK, use_cache=False).logits
    with pytest.raises(kind, match=text):
        model(**{"use_cache": False, **make()})
    assert look(model) == before
    assert torch.equal(model(IDS, attention_mask=MASK, use_cache=False).logits, expected)
    assert state_of(model).num_shared == 2


def assert_falls_back(
    model: nn.Module,
    make: Callable[[], dict[str, object]],
    expected: Tensor,
    text: str,
    caplog: Log,
) -> None:
    """Two batches run the original forward, bit for bit; the reason is logged once and shown by `explain`."""
    with caplog.at_level(logging.WARNING, logger="augtree_fx"):
        for _ in range(2):
            assert torch.equal(model(**{"use_cache": False, **make()}).logits, expected)
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("augtree_fx")]
    ((reason, times),) = state_of(model).fallbacks.items()
    assert re.search(text, reason) and times == 2
    assert "the original forward runs" in message and reason in message
    assert f"original forward, 2 times: {reason}" in str(augtree_fx.explain(model))
    assert state_of(model).num_shared == 0


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("which", ["hole", "attention weights", "prompt in a cache"])
def test_rejected_batches_run_the_original_forward_if_not_strict(which: str, caplog: Log) -> None:
    _, text, make = REJECTED[which]
    expected = build("llama")(**{"use_cache": False, **make()}).logits
    assert_falls_back(shared(build("llama"), strict=False), make, expected, text, caplog)


def causal_mask() -> Tensor:
    size = IDS.shape[1]
    return torch.full((size, size), torch.finfo(torch.float32).min).triu(1)[None, None].repeat(len(IDS), 1, 1, 1)


UNSHARED: dict[str, tuple[str, Callable[[nn.Module], dict[str, object]]]] = {
    "embeddings": (
        "inputs_embeds take gradients through TanhBackward0",
        lambda m: {"inputs_embeds": m.get_input_embeddings()(IDS).tanh()},
    ),
    "4-D mask": ("attention_mask is not a", lambda m: {"input_ids": IDS, "attention_mask": causal_mask()}),
    "extra tensor": (
        "extra tensors are passed to the decoder: bias",
        lambda m: {"input_ids": IDS, "bias": torch.ones(3)},
    ),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("which", UNSHARED)
def test_custom_inputs_run_the_original_forward(which: str, strict: bool, caplog: Log) -> None:
    text, make = UNSHARED[which]
    plain, model = build("llama"), shared(build("llama"), strict=strict)
    expected = plain(use_cache=False, **make(plain)).logits
    assert_falls_back(model, lambda: make(model), expected, text, caplog)


ROPE = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}


def with_rope(kind: str, limit: int) -> nn.Module:
    """A model whose RoPE changes for sequences longer than `limit`."""
    longest = limit if kind == "dynamic" else 4 * LONGEST
    rope = {**ROPE[kind], **({"original_max_position_embeddings": limit} if kind == "longrope" else {})}
    return build("llama", max_position_embeddings=longest, rope_parameters=rope)


@pytest.mark.parametrize("kind", ROPE)
def test_rope_scaled_by_padding_runs_the_original_forward(kind: str, caplog: Log) -> None:
    """The one column of padding makes the batch longer than any row, and that is what the unmodified model sees."""
    assert IDS.shape[1] == LONGEST + 1
    given = {"input_ids": IDS, "attention_mask": MASK}
    expected = with_rope(kind, LONGEST)(**given, use_cache=False).logits
    model = shared(with_rope(kind, LONGEST))
    assert_falls_back(model, lambda: given, expected, "RoPE is scaled by the padded length", caplog)


@pytest.mark.parametrize("kind", ROPE)
def test_rope_scaled_by_the_longest_row_is_shared(kind: str) -> None:
    """Dynamic RoPE keeps what the longest batch so far made of it, so both models see the same batches."""
    plain, model = with_rope(kind, LONGEST - 2), shared(with_rope(kind, LONGEST - 2))
    for width in (LONGEST, LONGEST + 1, LONGEST):
        given = {"input_ids": IDS[:, :width], "attention_mask": MASK[:, :width], "use_cache": False}
        got, expected = (torch.cat(BATCH.rows_of(m(**given).logits)) for m in (model, plain))
        assert error(got, expected) < FLOAT32
    assert state_of(model).num_shared == (2 if kind == "dynamic" else 3)


# Attention dropout.


@pytest.mark.parametrize("when", ["in the config", "set later"])
def test_attention_dropout_in_training(when: str) -> None:
    """Rows that share a prompt cannot draw different masks on it; evaluation draws none."""
    model = build("llama", attention_dropout=0.1 if when == "in the config" else 0.0)
    shared(model)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    before = look(model)
    text = r"attention dropout must be 0 in training, layers\.\d\.self_attn has 0.1"
    with pytest.raises(NotImplementedError, match=text):
        model.train()(IDS, attention_mask=MASK, use_cache=False)
    assert look(model) == before
    expected = build("llama")(IDS, attention_mask=MASK, use_cache=False).logits
    got = model.eval()(IDS, attention_mask=MASK, use_cache=False).logits
    assert error(torch.cat(BATCH.rows_of(got)), torch.cat(BATCH.rows_of(expected))) < FLOAT32
    assert state_of(model).num_shared == 1


def test_attention_dropout_that_was_switched_off() -> None:
    model = shared(build("llama", attention_dropout=0.1)).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    model(IDS, attention_mask=MASK, use_cache=False)
    assert state_of(model).num_shared == 1


def test_settings_that_changed_after_transform() -> None:
    model = shared(build("llama"))
    model.model.layers[1].self_attn.scaling *= 2
    with pytest.raises(RuntimeError, match=r"settings changed since transform at layers\.1\.self_attn; call"):
        model(IDS, attention_mask=MASK, use_cache=False)
    shared(model)(IDS, attention_mask=MASK, use_cache=False)
    assert state_of(model).num_shared == 1


def test_soft_cap_that_the_unmodified_model_leaves_out() -> None:
    """transformers before 5.24 runs gemma2 under sdpa without its soft-cap, and says nothing."""
    model = shared(build("gemma2", torch.float32))
    model.config._attn_implementation = "sdpa"
    with pytest.raises(NotImplementedError, match=r"leaves out the soft-cap of layers\.0\.self_attn under sdpa"):
        model(input_ids=IDS, attention_mask=MASK, use_cache=False)
