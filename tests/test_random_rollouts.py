"""Random rollouts through models that compute in float64: logits and every gradient equal the rows' one by one."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from families import without_upcasts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_reference import Batch, packed, padded_batches, rollouts
from torch import Tensor
from transformers import PreTrainedModel

import augtree_fx
from augtree_fx import CostModel

NAMES = ("llama", "mistral")  # attention over whole rows, and over the last 8 tokens
# Sums of at most a few hundred float64 terms in another order: about 1e-14; 1e-10 is the design's bound.
EXACT = 1e-10
# Gradients that are 0 in exact arithmetic (of queries that see one key) are rounding noise of the others' size.
NOISE = 1e-14


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def models(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The unmodified model and a transformed one with the same weights."""
    plain, model = without_upcasts(name), without_upcasts(name)
    model.load_state_dict(plain.state_dict())
    return plain, augtree_fx.transform(model, costs=CostModel.free())


@st.composite
def packed_batches(draw: st.DrawFn) -> Batch:
    """Rows one after another without padding."""
    return packed(draw(rollouts(min_tokens=1)))


def loss_of(row_logits: list[Tensor]) -> Tensor:
    """A weighted sum of all logits; weights depend on the row, so that no two rows' gradients are alike."""
    weights = (torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(row_logits))
    return sum(((x * w).sum() for x, w in zip(row_logits, weights, strict=True)), torch.zeros((), dtype=torch.float64))


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    """Gradient of every parameter."""
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def check(name: str, batch: Batch) -> None:
    if not any(batch.rows):
        return
    plain, model = models(name)
    given_ = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
    logits = model(**given_, use_cache=False).logits.flatten(0, 1)
    ours = [logits[slots] for slots in batch.slots if slots]
    theirs = []
    for row in filter(None, batch.rows):
        ids, positions = (torch.tensor([list(column)]) for column in zip(*row, strict=True))
        mask = torch.ones_like(ids)
        theirs.append(plain(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[0])
    for got, expected in zip(ours, theirs, strict=True):
        assert (got - expected).abs().max() <= EXACT * expected.abs().max()
    truth = gradients(plain, loss_of(theirs))
    largest = max(x.abs().max() for x in truth.values())
    for parameter, got in gradients(model, loss_of(ours)).items():
        bound = EXACT * truth[parameter].abs().max() + NOISE * largest
        assert (got - truth[parameter]).abs().max() <= bound, parameter


def run(num_examples: int, name: str) -> None:
    """Check that many random batches."""

    @settings(max_examples=num_examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.one_of(padded_batches(), padded_batches(), packed_batches()))
    def check_one(batch: Batch) -> None:
        nonlocal checked
        checked += 1
        check(name, batch)

    checked = 0
    state = models(name)[1].base_model._augtree_state
    shared = state.num_shared
    check_one()
    assert checked >= num_examples and state.num_shared - shared > num_examples / 3  # some share nothing by chance


@pytest.mark.parametrize("name", NAMES)
def test_some_random_rollouts(name: str) -> None:
    run(100, name)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_two_thousand_random_rollouts(name: str) -> None:
    run(1000, name)
