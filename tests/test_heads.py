"""Heads other than a causal LM's: the bare model, sequence classification (rewards), token classification (values).

They call the decoder stack with ids, or with vectors; what they pool is compared with the rows one by one.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
from families import Batch, KeepFloat64, build, error, one_thread, padded, rollout
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

import augtree_fx
from augtree_fx import CostModel

FLOAT64 = 1e-12  # see test_models.py
HEADS = {
    "model": AutoModel,
    "sequence classification": AutoModelForSequenceClassification,
    "token classification": AutoModelForTokenClassification,
}


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def output_of(model: nn.Module, **given: Tensor) -> Tensor:
    output = model(**given, use_cache=False)
    return output["logits"] if "logits" in output else output.last_hidden_state


def by_row(model: nn.Module, batch: Batch, pooled: bool) -> Tensor:
    """What the unmodified model computes for each row alone, without padding."""
    rows = []
    for tokens, first in zip(batch.tokens, batch.position, strict=True):
        positions = torch.arange(first, first + len(tokens))[None]
        mask = torch.ones_like(positions)
        rows.append(output_of(model, input_ids=tokens[None], attention_mask=mask, position_ids=positions))
    return torch.cat(rows) if pooled else torch.cat([row[0] for row in rows])


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """Of a random combination of everything that comes out."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (output * weights).sum().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("tokens", ["input_ids", "inputs_embeds"])
@pytest.mark.parametrize("style", ["right", "left", "trl"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_heads_equal_the_rows(name: str, head: str, style: str, tokens: str) -> None:
    batch = padded(rollout(3), style)
    options = (
        {} if head == "model" else {"num_labels": 3, "classifier_dropout": 0.0}
    )  # 0.1 by default, behind the stack
    plain = build(name, torch.float64, auto_class=HEADS[head], **options).train()
    model = augtree_fx.transform(copy.deepcopy(plain), costs=CostModel.free())
    pooled = head == "sequence classification"
    given = batch.inputs()
    if tokens == "inputs_embeds":
        if pooled:
            pytest.skip("without ids it pools the last column, padding or not")
        given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids"))
    with KeepFloat64():
        expected = by_row(plain, batch, pooled)
        output = output_of(model, **given)
        got = output if pooled else torch.cat(batch.rows_of(output))
        assert error(got, expected) < FLOAT64
        wanted, have = gradients(plain, expected), gradients(model, got)
    assert have.keys() == wanted.keys()
    assert {key: e for key, x in wanted.items() if not (e := error(have[key], x)) < FLOAT64} == {}
    explained = augtree_fx.explain(model)
    assert (explained.num_shared, explained.fallbacks) == (1, {})
