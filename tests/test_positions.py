"""Stacks with tables of positions, with their layers in a child, with cross-attention: against each row alone."""

import copy
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import KeepFloat64, Result, errors, objective, one_thread, padded, rollout
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel
from transformers.models.bart import modeling_bart
from transformers.models.roberta import modeling_roberta

import augtree_fx
from augtree_fx import CostModel, TreeLayout
from augtree_fx.__main__ import main as command_line
from augtree_fx.coverage import tiny
from augtree_fx.coverage.check import check
from augtree_fx.coverage.overrides import OVERRIDES
from augtree_fx.transforms import find_stack
from augtree_fx.transforms.positions import COLUMNS, IDS, MASK, PositionRule, call_packed, position_rule

# Float64 throughout: 2.2e-16 a rounding, and 500 tokens to sum over; a bias of keys has no gradient but rounding, and
# is measured by the largest gradient (`parity`), which leaves 1e-10. Positions that are off by one show at 1e-2.
FLOAT64 = 1e-9
COUNTED = ("roberta", "opt")  # by tokens, so that left padding moves nothing
TABLES = ("bert", "electra", "bart", "marian", "whisper", "xmod")


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def built(model_type: str) -> PreTrainedModel:
    return tiny.build(model_type, "eager").double()


def shared(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    return augtree_fx.transform(model, costs=CostModel.free(), **options)


def state_of(model: nn.Module) -> Any:
    return find_stack(model)._augtree_state


def parity(got: Result, expected: Result) -> None:
    floor = 1e-6 * max(x.abs().max().item() for x in expected.gradients.values())

    def compare(a: Tensor, b: Tensor) -> float:
        return ((a - b).abs().max() / max(b.abs().max().item(), floor)).item()

    assert {name: x for name, x in errors(got, expected, compare).items() if not x <= FLOAT64} == {}


def rows_alone(model: nn.Module, batch: Any) -> Result:
    logits = [
        model(row[None], attention_mask=torch.ones(1, len(row)).long(), use_cache=False).logits[0]
        for row in batch.tokens
    ]
    return result_of_reached(model, logits, batch)


def result_of_reached(model: nn.Module, logits: list[Tensor], batch: Any) -> Result:
    """`result_of` where some parameters take no part."""
    model.zero_grad()
    objective(logits, batch.tokens).backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return Result([row.detach() for row in logits], gradients)


def in_one_forward(model: nn.Module, batch: Any, **more: Any) -> Result:
    output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **more)
    return result_of_reached(model, batch.rows_of(output.logits), batch)


@pytest.mark.parametrize(
    "model_type, style", [(name, "right") for name in (*TABLES, *COUNTED)] + [(name, "left") for name in COUNTED]
)
def test_default_positions_are_those_of_the_rows(model_type: str, style: str) -> None:
    batch = padded(rollout(3), style)
    plain = built(model_type)
    model = shared(copy.deepcopy(plain))
    with KeepFloat64():
        parity(in_one_forward(model, batch), rows_alone(plain, batch))
    assert state_of(model).num_shared == 1 and state_of(model).fallbacks == {}


@pytest.mark.parametrize("model_type", ["bart", "bert", "whisper"])
def test_columns_count_left_padding(model_type: str) -> None:
    """Rows of one prompt end at different columns; those with the same first column still share it."""
    batch = padded(rollout(2), "trl")
    plain = tiny.build(model_type, "sdpa").double()
    model = shared(copy.deepcopy(plain))
    with KeepFloat64():
        parity(in_one_forward(model, batch), in_one_forward(plain, batch))
    assert state_of(model).num_shared == 1


def test_positions_given_to_a_stack_that_counts_tokens() -> None:
    batch = padded(rollout(2), "right")
    positions = (batch.attention_mask.cumsum(1) * 2 - 1).clamp(min=0)
    plain = built("roberta")
    model = shared(copy.deepcopy(plain))
    with KeepFloat64():
        got = in_one_forward(model, batch, position_ids=positions)
        parity(got, in_one_forward(plain, batch, position_ids=positions))
    assert state_of(model).num_shared == 1


@pytest.mark.parametrize(
    "model_type, rule",
    [
        ("llama", PositionRule()),
        ("gpt2", PositionRule()),
        ("bert", PositionRule()),
        ("roberta", PositionRule(IDS, 1)),
        ("opt", PositionRule(MASK, 0)),
        ("bart", PositionRule(table="embed_positions", ndim=1)),
        ("mvp", PositionRule(table="embed_positions", ndim=1)),
        ("roformer", PositionRule(table="encoder.embed_positions", ndim=1)),
    ],
)
def test_rules(model_type: str, rule: PositionRule) -> None:
    assert position_rule(find_stack(built(model_type))) == rule


@pytest.mark.parametrize("model_type", ["bart", "mvp", "marian", "roformer"])
def test_a_table_is_told_the_positions_of_a_packed_row(model_type: str) -> None:
    """Also one that makes its own, and one in a child: every row of it that is looked up, and nothing else changes."""
    stack = find_stack(built(model_type)).eval()
    rule = position_rule(stack)
    table = stack.get_submodule(rule.table)
    found = []
    table.register_forward_hook(lambda module, args, output: found.append(output.reshape(-1, output.shape[-1])))
    ids, packed = torch.tensor([[5, 6, 7, 8, 9, 7, 8]]), torch.tensor([[0, 1, 2, 3, 4, 2, 3]])
    forward = type(stack).forward
    plain = forward(stack, ids, use_cache=False)[0]
    columns = call_packed(
        stack, rule, forward, {"input_ids": ids, "position_ids": torch.arange(7)[None], "use_cache": False}
    )[0]
    torch.testing.assert_close(columns, plain, rtol=0, atol=0)
    call_packed(stack, rule, forward, {"input_ids": ids, "position_ids": packed, "use_cache": False})
    torch.testing.assert_close(found[2], found[0][packed[0]], rtol=0, atol=0)
    assert stack.get_submodule(rule.table) is table


@pytest.mark.parametrize("counts, expected", [(COLUMNS, [3, 4, 5, 6]), (MASK, [2, 3, 4, 2]), (IDS, [3, 4, 2, 5])])
def test_what_a_rule_counts(counts: str, expected: list[int]) -> None:
    ids, mask = torch.tensor([[7, 8, 1, 9]]), torch.tensor([[0, 1, 1, 0]])
    assert PositionRule(counts, first=3, padding_id=1).of(ids, mask).tolist() == [expected]


def refusal(model: nn.Module) -> str:
    with pytest.raises(augtree_fx.RewriteError) as caught:
        augtree_fx.transform(model)
    return str(caught.value.refusals[0])


def test_an_encoder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OVERRIDES, "bert", {"is_decoder": False})
    assert refusal(built("bert")) == "encoder.layer.0 (BertLayer): its attention is bidirectional"


def test_a_pooler_is_refused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(is_decoder=True, **sizes))
    assert "its pooler reads one token of each row (pooler)" in refusal(model)


def test_positions_counted_in_another_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(input_ids: Tensor, padding_idx: int, cache_length: int = 0) -> Tensor:
        return torch.arange(input_ids.shape[1], 0, -1, device=input_ids.device).expand(input_ids.shape)

    monkeypatch.setattr(
        modeling_roberta.RobertaEmbeddings, "create_position_ids_from_input_ids", staticmethod(backwards)
    )
    assert refusal(built("roberta")) == (
        "stack (RobertaModel): embeddings.position_embeddings is asked for positions that are neither columns nor a "
        "count of tokens"
    )


def test_position_ids_that_are_changed_on_the_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_roberta.RobertaEmbeddings.forward

    def forward(
        self: nn.Module, input_ids: Any = None, token_type_ids: Any = None, position_ids: Any = None, **rest: Any
    ):
        if position_ids is not None:
            position_ids = position_ids + 1
        return original(self, input_ids=input_ids, position_ids=position_ids, **rest)

    monkeypatch.setattr(modeling_roberta.RobertaEmbeddings, "forward", forward)
    assert "is not given the stack's position_ids as they are" in refusal(built("roberta"))


def test_a_replaced_table_is_refused() -> None:
    class Other(modeling_bart.BartLearnedPositionalEmbedding):
        def forward(self, input_ids: Any, cache_length: int = 0, position_ids: Any = None) -> Tensor:
            return super().forward(input_ids, cache_length, position_ids) + 1

    model = built("bart")
    find_stack(model).embed_positions.__class__ = Other
    assert "embed_positions was replaced by Other, whose positions are not known" in refusal(model)


def test_positions_of_a_model_without_data_are_refused() -> None:
    assert "is on the meta device; transform the model when it has its weights" in refusal(built("bert").to("meta"))


def test_a_second_table_that_would_not_be_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    build, original = modeling_bart.BartDecoder.__init__, modeling_bart.BartDecoder.forward

    def init(self: nn.Module, config: Any) -> None:
        build(self, config)
        self.more = nn.Embedding(64, 64)

    def forward(self: nn.Module, input_ids: Any = None, **kwargs: Any) -> Any:
        self.more(torch.arange(input_ids.shape[1], device=input_ids.device))
        return original(self, input_ids, **kwargs)

    monkeypatch.setattr(modeling_bart.BartDecoder, "__init__", init)
    monkeypatch.setattr(modeling_bart.BartDecoder, "forward", forward)
    assert "takes no position_ids, and looks up more by them too" in refusal(built("bart"))


def test_a_stack_that_cannot_be_told_positions_is_refused() -> None:
    assert refusal(built("musicgen")) == (
        "stack (MusicgenDecoder): its input_ids are codebooks, several rows of ids for each sequence"
    )


def test_cross_attention_that_is_called_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_bart.BartDecoderLayer.forward

    def forward(self: nn.Module, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        output = original(self, hidden_states, attention_mask, *args, **kwargs)
        return output + self.encoder_attn(output, output)[0]

    monkeypatch.setattr(modeling_bart.BartDecoderLayer, "forward", forward)
    assert refusal(built("bart")).endswith("nor a mask given to the model reach its attention module")


@pytest.mark.parametrize(
    "given, said",
    [
        ({"position_ids": torch.arange(40)[None].repeat(3, 1)}, "this model takes no position_ids"),
        ({"encoder_hidden_states": torch.ones(3, 5, 64).double()}, "extra tensors are passed to the decoder"),
    ],
)
def test_what_a_table_or_cross_attention_would_need_runs_the_original(given: dict[str, Tensor], said: str) -> None:
    plain = built("bart")
    model = shared(copy.deepcopy(plain))
    ids = torch.randint(5, 97, (1, 40), generator=torch.Generator().manual_seed(1)).repeat(3, 1)
    stack, original = find_stack(model), find_stack(plain)
    torch.testing.assert_close(stack(ids, **given)[0], original(ids, **given)[0], rtol=0, atol=0)
    assert [reason for reason in state_of(model).fallbacks if reason.startswith(said)]
    assert state_of(model).num_shared == 0


def test_padding_between_tokens_says_how_positions_are_counted() -> None:
    model = shared(built("roberta"))
    ids = torch.full((2, 6), 7)
    ids[:, 3] = 0
    with pytest.raises(ValueError, match=r"not decrease.*\(this model counts positions by the token ids\)"):
        model(ids, attention_mask=torch.ones_like(ids))


def test_rows_without_a_mask_that_count_tokens() -> None:
    ids = torch.randint(5, 97, (1, 12), generator=torch.Generator().manual_seed(1)).repeat(3, 1)
    ids[1:, 8:] = ids[1:, 8:].flip(1)
    for model_type in COUNTED:
        plain = built(model_type)
        model = shared(copy.deepcopy(plain))
        with KeepFloat64():
            torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-10, atol=1e-10)
        assert state_of(model).num_shared == 1


ROWS = torch.cat([torch.arange(5, 35)[None].repeat(4, 1), torch.arange(40, 60).view(4, 5)], dim=1)


def treated() -> dict[str, Callable[[PreTrainedModel], Any]]:
    def pickled(model: PreTrainedModel) -> Any:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    def checkpointing(model: PreTrainedModel) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return {
        "pickled": pickled,
        "checkpointing": checkpointing,
        "copied": copy.deepcopy,
        "compiled": lambda model: torch.compile(model, backend="eager", dynamic=True),
    }


@pytest.mark.parametrize("treatment", treated())
@pytest.mark.parametrize("model_type", ["bart", "roberta"])
def test_treated(model_type: str, treatment: str) -> None:
    plain = built(model_type)
    model = treated()[treatment](shared(copy.deepcopy(plain)))
    batch = SimpleNamespace(tokens=list(ROWS), rows_of=list, input_ids=ROWS, attention_mask=torch.ones_like(ROWS))
    got, expected = (in_one_forward(x, batch) for x in (model, plain))
    gradients = {name.removeprefix("_orig_mod."): x for name, x in got.gradients.items()}
    worst = errors(Result(got.logits, gradients), expected, lambda a, b: (a - b).abs().max().item())
    assert max(worst.values()) < 1e-4  # as computed, float32 softmax included
    assert state_of(getattr(model, "_orig_mod", model)).num_shared >= 1


def test_the_stack_stays_as_it_was() -> None:
    """The table is replaced in a copy for one call; output-capturing hooks are put on the layers once."""
    model = shared(built("bart"))
    stack = find_stack(model)
    table, hooks = stack.embed_positions, []
    for _ in range(3):
        states = model(ROWS, output_hidden_states=True).hidden_states
        hooks.append(sum(len(x._forward_hooks) for x in stack.modules()))
        assert [tuple(x.shape) for x in states] == [(4, 35, 64)] * 3
    assert stack.embed_positions is table and len(set(hooks)) == 1
    assert state_of(model).num_shared == 3
    assert type(augtree_fx.restore(model).model.decoder).__dict__.get("_augtree_base") is None


@pytest.mark.parametrize("model_type", ["bart", "opt"])
def test_an_explicit_layout(model_type: str) -> None:
    plain = built(model_type)
    model = shared(copy.deepcopy(plain))
    packed = augtree_fx.pack(model, TreeLayout.from_padded(ROWS, costs=CostModel.free()))
    logits = packed.show(model(**packed.arguments)).logits
    torch.testing.assert_close(logits, plain(ROWS).logits, rtol=1e-5, atol=1e-5)


def test_explain_counts_as_the_stack_does() -> None:
    """Left-padded rows of unequal length share a prompt only if padding is not counted."""
    batch = padded(rollout(2), "left")
    given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    for model in (built("roberta"), shared(built("roberta"))):
        assert augtree_fx.explain(model, **given).layout.shares
    by_columns = TreeLayout.from_padded(**given, costs=CostModel.free())
    by_tokens = augtree_fx.explain(shared(built("roberta")), **given).layout
    assert by_tokens.num_tokens < by_columns.num_tokens


@pytest.mark.parametrize(
    "model_type, padding, said",
    [
        (
            "roberta",
            "right",
            "nothing was shared: position_ids must not decrease inside a row",
        ),  # it has the padding id
        ("opt", "left", "exact and shared"),
        ("bert", "left", "exact and shared"),
        ("bart", "right", "exact and shared"),
        ("bart", "left", "nothing was shared: the model takes no position_ids"),
    ],
)
def test_verify(model_type: str, padding: str, said: str, tmp_path: Path) -> None:
    tiny.tiny_config(model_type).save_pretrained(tmp_path)
    shape = ["--shape", "80x4x12", "--shape", "64x3x20", "--warm-ups", "0", "--padding", padding]
    chosen = ["--class", "AutoModelForCausalLM", "--share-all"]
    command_line(
        [
            "verify",
            "--config",
            str(tmp_path),
            "--random",
            "--device",
            "cpu",
            *chosen,
            *shape,
            "--json",
            str(tmp_path / "out"),
        ]
    )
    assert json.loads((tmp_path / "out").read_text())["verdict"].startswith(said)


def test_layers_held_by_a_child_that_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_roberta.RobertaEncoder.forward

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        shift = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None, :, None]
        return original(self, hidden_states + shift, *args, **kwargs)

    monkeypatch.setattr(modeling_roberta.RobertaEncoder, "forward", forward)
    assert refusal(built("roberta")) == "stack (RobertaModel): encoder makes position ids of its own"


def test_a_block_named_after_the_norms_that_it_holds_with_its_attention() -> None:
    assert check("dbrx").status == "exact"
