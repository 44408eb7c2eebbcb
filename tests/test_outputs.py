"""What a transformed model returns: losses, hidden states, router logits, tuples, other heads, packed rows, hooks."""

from collections.abc import Iterator

import pytest
import torch
from families import Batch, Result, build, error, errors, one_thread, padded, reference, result_of, rollout
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import augtree_fx
from augtree_fx import CostModel

# Tiny float64 models whose norms, RoPE and softmax up-cast to float32: 6e-8 a rounding; measured at most 1.2e-6.
FLOAT32 = 1e-5


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def shared(model: nn.Module) -> nn.Module:
    return augtree_fx.transform(model, costs=CostModel.free())


def num_shared(model: nn.Module) -> int:
    state = model.get_decoder()._augtree_state
    assert state.fallbacks == {}
    return state.num_shared


def assert_equal(got: Result, expected: Result, tolerance: float = FLOAT32) -> None:
    assert {name: value for name, value in errors(got, expected).items() if not value <= tolerance} == {}


@pytest.fixture
def batch() -> Batch:
    return padded(rollout(3), "right")


def test_hidden_states_and_router_logits_have_the_callers_shape(batch: Batch) -> None:
    model = build("qwen3_moe", torch.float64)
    options = {"output_hidden_states": True, "output_router_logits": True, "use_cache": False}
    rows = [model(tokens[None], **options) for tokens in batch.tokens]
    out = shared(model)(**batch.inputs(), **options)
    assert num_shared(model) == 1
    assert len(out.hidden_states) == 4
    for layer, hidden in enumerate(out.hidden_states):
        assert hidden.shape == (*batch.input_ids.shape, 64)
        expected = torch.cat([row.hidden_states[layer][0] for row in rows])
        assert error(torch.cat(batch.rows_of(hidden)), expected) < FLOAT32
    assert len(out.router_logits) == 3
    for layer, router in enumerate(out.router_logits):
        assert router.shape == (batch.input_ids.numel(), 4)
        expected = torch.cat([row.router_logits[layer] for row in rows])
        assert error(torch.cat(batch.rows_of(router.view(*batch.input_ids.shape, 4))), expected) < FLOAT32


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_auxiliary_loss_is_that_of_the_unmodified_model(name: str, batch: Batch) -> None:
    """The load-balancing loss counts every row's tokens, not every distinct token, and leaves padding out."""
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    found = []
    for transform in (nn.Module.train, shared):
        model = transform(build(name, torch.float64))
        out = model(**batch.inputs(), labels=labels, output_router_logits=True, use_cache=False)
        out.aux_loss.backward()
        routers = {key: p.grad for key, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        found.append((out.loss, out.aux_loss, routers))
    (loss, aux_loss, gradients), (got_loss, got_aux_loss, got_gradients) = found
    assert error(got_loss, loss) < FLOAT32
    assert error(got_aux_loss, aux_loss) < FLOAT32
    assert got_gradients.keys() == gradients.keys()
    assert all(error(got_gradients[key], value) < FLOAT32 for key, value in gradients.items())
    assert num_shared(model) == 1


def test_outputs_as_a_tuple(batch: Batch) -> None:
    """With right padding every padding slot sees a key, so the unmodified padded forward is finite in float64."""
    options = {"labels": batch.input_ids, "output_hidden_states": True, "return_dict": False, "use_cache": False}
    expected = build("llama", torch.float64)(**batch.inputs(), **options)
    model = shared(build("llama", torch.float64))
    got = model(**batch.inputs(), **options)
    assert isinstance(got, tuple)
    assert [type(item) for item in got] == [type(item) for item in expected]
    assert error(torch.cat(batch.rows_of(got[1])), torch.cat(batch.rows_of(expected[1]))) < FLOAT32
    assert [hidden.shape for hidden in got[2]] == [hidden.shape for hidden in expected[2]]
    assert num_shared(model) == 1


@pytest.mark.parametrize("scale", [None, "int", "tensor"])
def test_labels_give_the_loss_of_the_unmodified_model(scale: str | None, batch: Batch) -> None:
    """`num_items_in_batch`, a tensor without dimensions, is how the Trainer of transformers scales the loss."""
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    options = {None: {}, "int": {"num_items_in_batch": 50}, "tensor": {"num_items_in_batch": torch.tensor(50)}}[scale]
    model = build("llama", torch.float64)
    expected = model(**batch.inputs(), labels=labels, use_cache=False, **options).loss
    got = shared(model)(**batch.inputs(), labels=labels, use_cache=False, **options).loss
    assert error(got, expected) < FLOAT32
    assert num_shared(model) == 1


def test_logits_to_keep(batch: Batch) -> None:
    model = build("llama", torch.float64)
    options = {"logits_to_keep": 5, "use_cache": False}
    valid = batch.attention_mask[:, -5:].bool()
    expected = model(**batch.inputs(), **options).logits[valid]
    assert error(shared(model)(**batch.inputs(), **options).logits[valid], expected) < FLOAT32
    assert num_shared(model) == 1


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # attention gets its input by keyword
def test_hooks_fire_on_layers_and_attention(batch: Batch) -> None:
    model = shared(build("llama", torch.float64))
    layout = augtree_fx.explain(model, **batch.inputs()).layout
    seen = []
    for layer in model.model.layers:
        for module in (layer, layer.self_attn):
            module.register_forward_pre_hook(lambda _, args, kwargs: seen.append("pre"), with_kwargs=True)
            module.register_forward_hook(
                lambda _, args, out: seen.append(tuple((out if isinstance(out, Tensor) else out[0]).shape))
            )
            module.register_full_backward_hook(lambda *_: seen.append("backward"))
    model(**batch.inputs(), use_cache=False).logits.sum().backward()
    assert sorted(seen, key=str) == [(1, layout.num_tokens, 64)] * 6 + ["backward"] * 6 + ["pre"] * 6


def test_decoder_outputs_as_a_tuple(batch: Batch) -> None:
    expected = build("llama", torch.float64).model(**batch.inputs(), return_dict=False, use_cache=False)
    model = shared(build("llama", torch.float64))
    model.config.return_dict = False
    got = model.model(**batch.inputs(), use_cache=False)
    assert len(got) == len(expected)
    assert error(torch.cat(batch.rows_of(got[0])), torch.cat(batch.rows_of(expected[0]))) < FLOAT32
    assert num_shared(model) == 1


@pytest.mark.parametrize("kind", ["sequence classification", "decoder"])
def test_other_heads(kind: str, batch: Batch) -> None:
    auto_class = AutoModelForSequenceClassification if kind == "sequence classification" else AutoModelForCausalLM
    found = []
    for transform in (nn.Module.train, shared):
        model = transform(build("llama", torch.float64, auto_class=auto_class))
        if kind == "decoder":
            hidden = model.model(**batch.inputs(), use_cache=False).last_hidden_state
            out = torch.cat(batch.rows_of(hidden))
        else:
            out = model(**batch.inputs(), use_cache=False).logits
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        found.append([out, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    assert max(error(got, expected) for expected, got in zip(*found, strict=True)) < FLOAT32
    assert num_shared(model) == 1


def test_a_bare_decoder_can_be_transformed(batch: Batch) -> None:
    model = build("llama", torch.float64)
    expected = [model.model(tokens[None], use_cache=False).last_hidden_state[0] for tokens in batch.tokens]
    decoder = shared(model.model)
    got = batch.rows_of(decoder(batch.input_ids, batch.attention_mask, use_cache=False)[0])
    assert error(torch.cat(got), torch.cat(expected)) < FLOAT32
    assert num_shared(decoder) == 1


def lined_up(batch: Batch, order: list[int]) -> tuple[Tensor, Tensor]:
    """Token ids and positions of rows, one after another."""
    rows = [batch.tokens[row] for row in order]
    return torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_rows(name: str, batch: Batch) -> None:
    """Padding-free rows as trainers pass them; the boundaries are for flash attention, which does not run."""
    expected = reference(build(name, torch.float64), batch)
    lengths = [len(row) for row in batch.tokens]
    ids, positions = lined_up(batch, list(range(len(lengths))))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    boundaries = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": max(lengths)}
    model = shared(build(name, torch.float64))
    logits = model(ids[None], position_ids=positions[None], use_cache=False, **boundaries).logits[0]
    assert_equal(result_of(model, list(logits.split(lengths)), batch), expected)
    assert num_shared(model) == 1


def test_two_packed_sequences(batch: Batch) -> None:
    """The same rows in two orders: every row of the second sequence is a row of the first."""
    expected = reference(build("llama", torch.float64), batch).logits
    forward = list(range(len(expected)))
    orders = [forward, forward[::-1]]
    ids, positions = (torch.stack(pair) for pair in zip(*(lined_up(batch, order) for order in orders), strict=True))
    model = shared(build("llama", torch.float64))
    logits = model(ids, position_ids=positions, use_cache=False).logits
    for order, got in zip(orders, logits, strict=True):
        assert error(got, torch.cat([expected[row] for row in order])) < FLOAT32
    assert augtree_fx.explain(model, ids, position_ids=positions).layout.token_ratio > 2 * 1.3
    assert num_shared(model) == 1
