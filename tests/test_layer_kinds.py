"""Models whose attention is ordinary and whose layers or calls are not: how the tree reaches it, what is captured."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import one_thread
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from transformers import AutoModelForCausalLM
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashDecoderLayer
from transformers.models.nemotron.modeling_nemotron import NemotronDecoderLayer

import augtree_fx
from augtree_fx import CostModel, TreeLayout, face
from augtree_fx.coverage import check as checks
from augtree_fx.coverage import overrides, tiny
from augtree_fx.coverage.batch import Batch, grouped_batch
from augtree_fx.coverage.check import ERROR, EXACT, FLOAT64, ORIGINAL, PRECISIONS, check
from augtree_fx.tables import Chunks, build_tables, decode_calls
from augtree_fx.transforms import AttentionSite, Refusal, capture_stack, find_stack, live, packing, requests
from augtree_fx.transforms.capture import _common_call
from augtree_fx.transforms.carrier import ContextMask
from augtree_fx.transforms.context import ReplayContext
from augtree_fx.transforms.install import STATE
from augtree_fx.transforms.tracer import AttentionTracer, CaptureError, attention_leaf

BY_MASK = ("stablelm", "nemotron")
IN_FLOAT64 = PRECISIONS[0]


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def build(model_type: str) -> nn.Module:
    return tiny.build(model_type, "eager").double()


def shared(model: nn.Module, **options: object) -> nn.Module:
    return augtree_fx.transform(model, costs=CostModel.free(), **options)


def state_of(model: nn.Module) -> object:
    return getattr(find_stack(model), STATE)


def reasons(model: nn.Module) -> list[str]:
    return [str(refusal) for refusal in capture_stack(find_stack(model))[1]]


@pytest.mark.parametrize(
    "model_type",
    [
        *BY_MASK,  # layers pass no keywords on
        "starcoder2",  # functional dropout
        "ministral3",  # position_ids as a keyword of the attention call
        "modernbert-decoder",  # get_decoder gives the head
        "llama4_text",  # chunks, and queries scaled by their column
        "longcat_flash",  # two attention modules in a layer
        "diffllama",  # two attention calls in a module
        "jetmoe",  # a router inside the attention module
        "gemma3n_text",  # keys and values of an earlier layer
        "hrm_text",  # two stacks, run in turn
        "dbrx",  # attention inside a module called a norm
    ],
)
def test_exact(model_type: str) -> None:
    if model_type not in tiny.model_types():
        pytest.skip("this transformers does not have it")
    outcome = check(model_type)
    assert (outcome.status, outcome.reason) == (EXACT, "")
    assert outcome.error <= FLOAT64


# The context in a mask


def treated(treat: Callable[[nn.Module], object]) -> Callable[..., nn.Module]:
    """A `transform` that treats the model afterwards, in place."""

    def transform(model: nn.Module, **options: object) -> nn.Module:
        augtree_fx.transform(model, **options)
        treat(model)
        return model

    return transform


def checkpoint(reentrant: bool) -> Callable[[nn.Module], None]:
    def treat(model: nn.Module) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()

    return treat


def hook_every_module(model: nn.Module) -> None:
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args, kwargs: (args, dict(kwargs)), with_kwargs=True)
        module.register_forward_hook(lambda module, args, output: output)


TREATMENTS = {
    "checkpointing": checkpoint(False),
    "reentrant checkpointing": checkpoint(True),
    "hooks": hook_every_module,
    "compile": lambda model: model.compile(backend="eager"),
}


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("model_type", BY_MASK)
def test_a_context_in_a_mask_survives(model_type: str, treatment: str) -> None:
    outcome = check(model_type, treated(TREATMENTS[treatment]))
    assert (outcome.status, outcome.reason) == (EXACT, "")


@pytest.mark.parametrize("model_type", BY_MASK)
def test_carrier_and_copies(model_type: str) -> None:
    plain = build(model_type)
    batch = grouped_batch(97)
    expected = checks.run(copy.deepcopy(plain), batch, IN_FLOAT64)
    model = copy.deepcopy(shared(plain))
    assert {site.carrier for site in state_of(model).sites} == {"mask"}
    assert checks.worst(checks.run(model, batch, IN_FLOAT64), expected)[1] <= FLOAT64
    assert state_of(model).num_shared == 1


def test_other_layers_take_the_keyword() -> None:
    assert {site.carrier for site in state_of(shared(build("llama"))).sites} == {"keyword"}


def test_one_graph_with_a_context_in_a_mask() -> None:
    model = shared(build("nemotron")).eval()
    batch = grouped_batch(97)
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, costs=CostModel.free())
    packed = augtree_fx.pack(model, layout)
    expected = packed.show(model(**packed.arguments).logits)
    got = packed.show(torch.compile(model, backend="eager", fullgraph=True)(**packed.arguments).logits)
    torch.testing.assert_close(got, expected)


def test_a_mask_that_a_layer_changes_is_no_carrier(monkeypatch: pytest.MonkeyPatch) -> None:
    original = NemotronDecoderLayer.forward

    def forward(self: nn.Module, *args: object, attention_mask: Tensor | None = None, **kwargs: object) -> Tensor:
        mask = None if attention_mask is None else attention_mask[..., :]
        return original(self, *args, attention_mask=mask, **kwargs)

    monkeypatch.setattr(NemotronDecoderLayer, "forward", forward)
    assert (
        "stack (NemotronModel): its forward cannot be followed to the attention modules"
        in reasons(build("nemotron"))[0]
    )


def test_a_mask_that_a_layer_drops_is_no_carrier(monkeypatch: pytest.MonkeyPatch) -> None:
    original = NemotronDecoderLayer.forward

    def forward(self: nn.Module, *args: object, attention_mask: Tensor | None = None, **kwargs: object) -> Tensor:
        return original(self, *args, **kwargs)

    monkeypatch.setattr(NemotronDecoderLayer, "forward", forward)
    assert reasons(build("nemotron"))[0] == (
        "layers.0 (NemotronDecoderLayer): "
        "neither extra keywords nor a mask given to the model reach its attention module"
    )


def test_a_context_mask_moves_and_flattens() -> None:
    tables = TreeLayout.from_groups(prompts=[[1, 2, 3]], responses=[[[4], [5]]]).tables(Chunks(2))
    context = ReplayContext({Chunks(2): tables}, False, "auto", torch.arange(5))
    mask = ContextMask(context)
    assert mask.to("cpu") is mask
    moved = mask.to("meta")
    assert moved.context.columns.device.type == moved.context.tables[Chunks(2)].kv_index.device.type == "meta"
    leaves, spec = pytree.tree_flatten(mask)
    assert len(leaves) == 4
    back = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec))).context
    assert back.tables.keys() == {Chunks(2)}
    assert back.columns is context.columns
    assert "ContextMask" in repr(mask)


# Functional dropout


@pytest.mark.parametrize(
    "model_type, field, where",
    [
        ("starcoder2", "residual_dropout", "layers.0.self_attn.residual_dropout"),
        ("starcoder2", "embedding_dropout", "embedding_dropout"),
        ("seed_oss", "residual_dropout", "layers.0.self_attn.residual_dropout"),
    ],
)
def test_functional_dropout_is_refused_in_training_only(model_type: str, field: str, where: str) -> None:
    config = tiny.tiny_config(model_type)
    setattr(config, field, 0.1)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    batch = grouped_batch(97)
    expected = checks.run(copy.deepcopy(plain), batch, IN_FLOAT64)
    model = shared(plain)
    assert checks.worst(checks.run(model, batch, IN_FLOAT64), expected)[1] <= FLOAT64
    assert state_of(model).num_shared == 1
    with pytest.raises(NotImplementedError, match=f"dropout and router noise must be 0 in training, .*{where} has 0.1"):
        model.train()(input_ids=batch.input_ids, attention_mask=batch.attention_mask)


def test_a_dropout_rate_is_found_by_capture_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.tiny_config("seed_oss")
    config.residual_dropout = 0.1
    model = shared(AutoModelForCausalLM.from_config(config, attn_implementation="eager").train())
    monkeypatch.setattr(live, "current_noise", lambda stack: None)
    batch = grouped_batch(97)
    with pytest.raises(NotImplementedError, match="layers.0.self_attn has 0.1"):
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)


# Several calls, several modules


def two_leaves(*keywords: dict[str, object], sizes: tuple[int, int] = (4, 4)) -> tuple[AttentionTracer, list[fx.Node]]:
    tracer, graph = AttentionTracer({}), fx.Graph()
    tracer.leaf_kwargs = list(keywords)
    queries = [graph.placeholder(f"query_{index}") for index in range(2)]
    for query, size in zip(queries, sizes, strict=True):
        query.meta["example"] = torch.empty(1, 1, 3, size, device="meta")
    return tracer, [graph.call_function(attention_leaf, (query, query, query)) for query in queries]


def test_attention_calls_of_a_module_must_agree() -> None:
    assert _common_call(*two_leaves({"scaling": 1.0}, {"scaling": 1.0})) == ({"scaling": 1.0}, 4)
    with pytest.raises(CaptureError, match="calls attention 2 times, not always with the same keywords"):
        _common_call(*two_leaves({"scaling": 1.0}, {"scaling": 2.0}))
    with pytest.raises(CaptureError, match="not always with the same keywords and head size"):
        _common_call(*two_leaves({}, {}, sizes=(4, 8)))
    with pytest.raises(CaptureError, match="it does not call attention"):
        _common_call(AttentionTracer({}), [])


def test_every_attention_module_of_a_layer_is_a_site() -> None:
    names = [site.name for site in state_of(shared(build("longcat_flash"))).sites]
    assert names == [f"layers.{layer}.self_attn.{number}" for layer in range(2) for number in range(2)]


def test_an_attention_module_that_a_layer_calls_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LongcatFlashDecoderLayer.forward

    def forward(self: nn.Module, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        self.self_attn[0](hidden_states, *args, **kwargs)
        return original(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LongcatFlashDecoderLayer, "forward", forward)
    assert reasons(build("longcat_flash")) == [
        "stack (LongcatFlashModel): layers.0.self_attn.0 is called twice by its layer"
    ]


def test_an_attention_module_that_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Module, hidden_states: Tensor, **kwargs: object) -> Tensor:
        return self.self_attn[0](hidden_states=hidden_states, **kwargs)[0]

    monkeypatch.setattr(LongcatFlashDecoderLayer, "forward", forward)
    assert reasons(build("longcat_flash"))[0].endswith("does not call its attention module layers.0.self_attn.1")


def test_stacks_that_run_in_turn_have_all_their_layers() -> None:
    if "hrm_text" not in tiny.model_types():
        pytest.skip("this transformers does not have it")
    names = {site.name.split(".layers")[0] for site in state_of(shared(build("hrm_text"))).sites}
    assert names == {"L_module", "H_module"}


@pytest.mark.parametrize("model_type", ["modernbert-decoder", "llama4_text"])
def test_stack_is_found_where_get_decoder_gives_something_else(model_type: str) -> None:
    model = build(model_type)
    assert model.get_decoder() is not model.model
    assert find_stack(model) is model.model


# Values inside attention modules


class Branches(nn.Module):
    """A router reads values; ``tell`` decides what the forward does with them."""

    def __init__(self, tell: bool, size: int = 4) -> None:
        super().__init__()
        self.tell, self.router = tell, Counting(size)

    def forward(self, hidden: Tensor) -> Tensor:
        counts = self.router(hidden)
        return hidden * 2 if self.tell and counts[0] > 1 else hidden * counts[0]


class Counting(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, hidden: Tensor) -> list[int]:
        return (hidden > 0).sum(0).tolist()


def trace(module: nn.Module) -> fx.Graph:
    tracer = AttentionTracer({"hidden": torch.empty(3, 4, device="meta")})
    return tracer.trace(module.to("meta"))


def test_values_of_a_router_may_pass_through() -> None:
    assert [node.name for node in trace(Branches(False)).nodes] == ["hidden", "router", "getitem", "mul", "output"]


def test_values_of_a_router_may_not_decide() -> None:
    with pytest.raises(CaptureError, match="its forward branches on what its inputs hold"):
        trace(Branches(True))


def test_a_large_module_is_not_run_for_an_example() -> None:
    with torch.device("meta"):
        module = Branches(False, size=1 << 25)
    with pytest.raises(CaptureError, match="router reads values of its inputs, and is too large"):
        trace(module)


class Assigns(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden[0] = 1
        return hidden


def test_assignment_to_a_part_of_a_tensor() -> None:
    with pytest.raises(CaptureError, match="it assigns to a part of a tensor"):
        trace(Assigns())


@pytest.mark.parametrize(
    "model_type, fields, reason",
    [
        ("doge", {}, "it makes a mask of its own inside its attention module"),
    ],
)
def test_masks_made_from_the_content_are_refused(
    model_type: str, fields: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model_type not in tiny.model_types():
        pytest.skip("this transformers does not have it")
    monkeypatch.setitem(overrides.OVERRIDES, model_type, fields)
    outcome = check(model_type)
    assert outcome.status == ORIGINAL
    assert reason in outcome.reason


# Chunks and columns


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 100])
def test_chunk_tables_give_every_query_its_chunk(size: int) -> None:
    """Against the definition, over the rows: a token sees those of its row in the same chunk, up to itself."""
    layout = TreeLayout.from_groups(
        prompts=[list(range(7)), list(range(20, 32))],
        responses=[[[1, 2], [3], [], [4] * 9], [[5] * 5, [6]]],
    )
    tables = layout.tables(Chunks(size))
    seen: dict[int, set[int]] = {}
    for call in decode_calls(tables.segments, tables.cu_seqlens):
        for segment in call.segments:
            for row, query in enumerate(range(segment.q_begin, segment.q_end)):
                last = row + segment.num_keys - segment.num_queries if call.causal else segment.num_keys - 1
                keys = range(segment.k_begin, segment.k_begin + last + 1)
                found = [key if tables.kv_index is None else int(tables.kv_index[key]) for key in keys]
                assert not seen.setdefault(query, set()) & set(found)
                seen[query] |= set(found)
    index = layout.packed_index
    for begin, length in zip(layout.row_begin, layout.row_length, strict=True):
        tokens = index[begin : begin + length].tolist()
        for place, token in enumerate(tokens):
            assert seen[token] == set(tokens[place - place % size : place + 1])
    assert set(seen) == set(np.unique(index).tolist())


def test_chunks_of_nothing() -> None:
    layout = TreeLayout.from_groups(prompts=[[1]], responses=[[[2]]])
    with pytest.raises(ValueError, match="chunks must have at least 1 token, got 0"):
        build_tables(layout, Chunks(0))


def test_explain_shows_chunks() -> None:
    batch = grouped_batch(97)
    model = shared(build("llama4_text"))
    said = str(augtree_fx.explain(model, input_ids=batch.input_ids, attention_mask=batch.attention_mask))
    assert said.count("chunks of 8") >= 2


def left_padded(batch: Batch) -> tuple[Tensor, Tensor]:
    """Rows of one length, so that equal prefixes stand in equal columns, after 3 columns of padding."""
    length = min(map(len, batch.rows))
    ids = torch.stack([torch.cat([torch.zeros(3, dtype=torch.int64), row[:length]]) for row in batch.rows])
    return ids, (torch.arange(ids.shape[1]) >= 3).long().expand_as(ids)


def test_chunks_of_left_padded_rows() -> None:
    """Chunks count from the first token, columns from the padding; eager attention turns padding into NaN, sdpa not."""
    plain = tiny.build("llama4_text", "sdpa").double()
    ids, mask = left_padded(grouped_batch(97))
    model = shared(copy.deepcopy(plain))
    expected, got = (m(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 3:] for m in (plain, model))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)  # norms and scales up-cast to float32
    assert state_of(model).num_shared == 1


def test_columns_that_differ_run_the_original_forward() -> None:
    """Rows padded on the left to different columns share positions, and not columns."""
    plain = build("llama4_text")
    row = grouped_batch(97).rows[0]
    ids, mask = torch.zeros(2, len(row) + 2, dtype=torch.int64), torch.zeros(2, len(row) + 2, dtype=torch.int64)
    for index in range(2):
        ids[index, index : index + len(row)], mask[index, index : index + len(row)] = row, 1
    model = shared(copy.deepcopy(plain))
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    assert torch.equal(
        model(**given, use_cache=False).logits[mask.bool()], plain(**given, use_cache=False).logits[mask.bool()]
    )
    assert list(state_of(model).fallbacks) == [
        "layers.1.self_attn counts the columns of tokens, and equal tokens stand in different ones; pad on the right"
    ]


def test_chunks_of_packed_rows_run_the_original_forward() -> None:
    model = shared(build("llama4_text"))
    row = grouped_batch(97).rows[0]
    positions = torch.arange(len(row)).repeat(2)[None]
    model(input_ids=row.repeat(2)[None], position_ids=positions, use_cache=False)
    assert list(state_of(model).fallbacks) == [
        "layers.0.self_attn attends in chunks of the packed row; pad the rows, with an attention_mask"
    ]


def test_an_explicit_layout_needs_columns() -> None:
    model = shared(build("llama4_text"))
    layout = TreeLayout.from_groups(prompts=[[5, 6, 7]], responses=[[[8], [9]]])
    with pytest.raises(NotImplementedError, match="a layer counts the columns of tokens"):
        augtree_fx.pack(model, layout)


def test_one_graph_of_chunks_and_columns() -> None:
    model = shared(build("llama4_text")).eval()
    batch = grouped_batch(97)
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, costs=CostModel.free())
    packed = augtree_fx.pack(model.model, layout)
    attention = model.model.layers[0].self_attn
    hidden = torch.randn(1, layout.num_tokens, 64, dtype=torch.float64)
    frequencies = torch.polar(torch.ones(1, layout.num_tokens, 8), torch.rand(1, layout.num_tokens, 8))
    context = packed.arguments["augtree_context"]

    def run(hidden: Tensor) -> Tensor:
        return attention(hidden, frequencies, None, augtree_context=context)[0]

    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(hidden), run(hidden))


def test_a_changed_chunk_size_means_capturing_anew() -> None:
    model = shared(build("llama4_text"))
    model.config.attention_chunk_size = 4
    batch = grouped_batch(97)
    with pytest.raises((RuntimeError, NotImplementedError, ValueError), match="transform again"):
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)


@pytest.mark.parametrize("changes", [{"chunk": None}, {"chunk": 7}])
def test_other_chunks_are_an_error(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny chunk bites: with whole paths, or one token less, the same model differs."""

    def capture(stack: nn.Module) -> tuple[list[AttentionSite], list[Refusal]]:
        sites, refusals = capture_stack(stack)
        return [replace(site, **changes) if site.chunk else site for site in sites], refusals

    monkeypatch.setattr(face, "capture_stack", capture)
    outcome = check("llama4_text")
    assert outcome.status == ERROR
    assert outcome.error > 1e-3


def test_packed_places_for_columns_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "columns_agree", lambda layout: True)
    monkeypatch.setattr(packing, "columns", lambda layout: np.arange(layout.num_tokens))
    outcome = check("llama4_text")
    assert outcome.status == ERROR
    assert outcome.error > 1e-3


def test_keys_of_an_earlier_layer_under_checkpointing() -> None:
    """Not reentrant: with reentrant checkpointing the unmodified model loses the gradient of those keys."""
    plain, batch = tiny.build("gemma3n_text", "sdpa").double(), grouped_batch(97)
    precision = checks.Precision(torch.float64, False, "sdpa", 1e-5)  # up-casts round to float32
    expected = checks.run(copy.deepcopy(plain), batch, precision)
    model = shared(plain)
    checkpoint(False)(model)
    assert checks.worst(checks.run(model, batch, precision), expected)[1] <= precision.tolerance
    assert state_of(model).num_shared == 1
