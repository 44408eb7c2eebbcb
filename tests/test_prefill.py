"""`prefill`: loss, log-probs and every gradient equal those of the unmodified model, whatever the waves are."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from families import KeepFloat64, build, one_thread, rollout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_reference import rollouts
from torch import Tensor, nn
from wave_reference import (
    Case,
    Found,
    assert_equal,
    backward_of,
    by_rows,
    deep_rows,
    errors,
    gradients_of,
    groups_case,
    in_waves,
    packed_case,
    padded_case,
    run_of,
    shared,
)

import augtree_fx
from augtree_fx import TreeLayout, replay
from augtree_fx import wave as wave_module
from augtree_fx.coverage import tiny
from augtree_fx.waves import Stage

BUDGETS = [None, 1, 24]
OFTEN = ("depth 3, left", "depth 4", "groups", "nothing shared")  # under every budget
FAMILIES = ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "cohere2", "granite", "qwen3_moe"]


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def cases() -> dict[str, Case]:
    """Batches of every kind."""
    prompts, lengths = [run_of(9, 1), run_of(4, 2), run_of(1, 3), run_of(5, 4)], [(6, 0, 3), (2,), (4, 1), (5, 5)]
    responses = [
        [run_of(length, 10 * group + place) for place, length in enumerate(each)] for group, each in enumerate(lengths)
    ]
    responses[3][1] = responses[3][0]
    lonely = [[run_of(length, length)] for length in (5, 9, 2, 1)]
    return {
        "depth 2": padded_case(rollout(2)),
        "depth 3, left": padded_case(rollout(3), "left"),
        "depth 3, prompts left": padded_case(rollout(3), "trl"),
        "depth 4": padded_case(deep_rows()),
        "depth 4, packed": packed_case(deep_rows()),
        "groups": groups_case(prompts, responses),
        "nothing shared": packed_case(lonely),
        "one row's prefixes": packed_case([[run_of(12, 5)[:length]] for length in (4, 12, 1, 12)]),
        "some scored": padded_case(rollout(3), "right", lambda row, index: (row + index) % 3 == 0),
        "no branch point scored": padded_case(rollout(2), "right", lambda row, index: index not in (10, 13)),
        "rows without a score": padded_case(rollout(3), "right", lambda row, index: row % 2 == 0),
        "prompts alone": padded_case(rollout(2), "right", lambda row, index: index < 8),
    }


@cache
def models(name: str, **changes: object) -> tuple[nn.Module, nn.Module]:
    """The unmodified model and a transformed one with the same weights, in float64."""
    plain = build(name, torch.float64, **changes).train()
    return plain, shared(copy.deepcopy(plain))


CASES = cases()


@cache
def truth(case: str, name: str = "llama", **changes: object) -> Found:
    with KeepFloat64():
        return by_rows(models(name, **changes)[0], CASES[case])


@pytest.mark.parametrize(("case", "max_tokens"), [(x, y) for x in CASES for y in BUDGETS if y or x in OFTEN])
def test_any_batch(case: str, max_tokens: int | None) -> None:
    with KeepFloat64():
        model = models("llama", num_hidden_layers=2)[1]
        assert_equal(in_waves(model, CASES[case], max_tokens), truth(case, num_hidden_layers=2))


@pytest.mark.parametrize("max_tokens", [None, 12])
@pytest.mark.parametrize("name", FAMILIES[1:])
def test_any_family(name: str, max_tokens: int | None) -> None:
    """Windows, soft-caps of attention and of logits, sinks, MLA, scaled logits, routed experts."""
    case = "depth 3, left" if max_tokens is None else "depth 4"
    with KeepFloat64():
        assert_equal(in_waves(models(name)[1], CASES[case], max_tokens), truth(case, name))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_one_pass_gives_the_same(name: str) -> None:
    case, model = CASES["depth 4"], models(name)[1]
    with KeepFloat64():
        model.zero_grad()
        picked = model(**case.inputs, use_cache=False).logits.log_softmax(-1).flatten(0, 1)
        logprobs = picked[torch.arange(len(picked)) - 1].gather(1, case.inputs["input_ids"].view(-1, 1))[:, 0]
        loss = -(case.weight * logprobs).sum()
        loss.backward()
        one_pass = Found(loss.detach(), torch.where(case.weight != 0, logprobs.detach(), 0.0), gradients_of(model))
        assert_equal(in_waves(model, case, 12), one_pass)


@pytest.mark.parametrize("max_tokens", [None, 1, 12])
def test_chunked_attention(max_tokens: int | None) -> None:
    """llama4 attends in chunks, and scales queries by their column."""
    plain = tiny.build("llama4_text", "eager").double()
    model = shared(copy.deepcopy(plain))
    with KeepFloat64():
        assert_equal(in_waves(model, CASES["depth 4"], max_tokens), by_rows(plain, CASES["depth 4"]))


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "phi", "bloom", "starcoder2", "ministral3"])
def test_other_carriers_and_positions(model_type: str) -> None:
    """Layers that take no keywords, tables of positions."""
    plain = tiny.build(model_type, "eager").double()
    try:
        model = shared(copy.deepcopy(plain))
    except NotImplementedError:
        pytest.skip("it cannot be transformed")
    with KeepFloat64():
        assert_equal(in_waves(model, CASES["depth 4"], 12), by_rows(plain, CASES["depth 4"]))


def random_plan(layout: TreeLayout, draw: np.random.Generator) -> Stage:
    """Any cut of a tree into stages and waves, in any order."""
    children = {node: np.flatnonzero(layout.parent == node).tolist() for node in range(-1, layout.num_nodes)}

    def below(node: int) -> list[int]:
        return [node, *(other for child in children[node] for other in below(child))]

    def stage(nodes: list[int], units: list[int]) -> Stage:
        inner = [unit for unit in units if children[unit] and draw.random() < 0.6]
        rest = draw.permutation([unit for unit in units if unit not in inner]).astype(int).tolist()
        cuts = np.flatnonzero(draw.random(max(len(rest) - 1, 0)) < 0.5) + 1
        waves = [sorted(node for unit in part for node in below(int(unit))) for part in np.split(rest, cuts)]
        return Stage(
            np.array(nodes, dtype=np.int64),
            [np.array(wave, dtype=np.int64) for wave in waves if wave],
            [stage([unit], children[unit]) for unit in draw.permutation(inner).astype(int).tolist()],
        )

    prompts = [node for node in children[-1] if children[node]]
    return stage(
        prompts, [c for node in prompts for c in children[node]] + [x for x in children[-1] if x not in prompts]
    )


def check_plan(case: Case, expected: Found, plan: Stage, name: str) -> None:
    model = models(name, num_hidden_layers=2)[1]
    weight, logprobs = case.weight, torch.zeros_like(case.weight)
    total = torch.zeros((), dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch, KeepFloat64():
        tree = augtree_fx.prefill(model, case.layout, scored=case.scored)
        patch.setattr(replay, "plan_waves", lambda layout, limit, kept=None: plan)
        with tree:
            for wave in tree.waves():
                total += backward_of(wave, weight, logprobs)
    assert_equal(Found(total, logprobs, gradients_of(model)), expected)


def check_plans(num_examples: int, name: str, names: list[str]) -> None:
    @settings(max_examples=num_examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(names), st.integers(0, 2**32))
    def check_one(case: str, seed: int) -> None:
        plan = random_plan(CASES[case].layout, np.random.default_rng(seed))
        check_plan(CASES[case], truth(case, name, num_hidden_layers=2), plan, name)

    check_one()


PLANNED = ["depth 2", "depth 3, left", "depth 4", "groups"]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_any_partition_in_any_order(name: str) -> None:
    check_plans(12, name, PLANNED[2:] if name == "llama" else ["depth 4"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_many_partitions_in_any_order(name: str) -> None:
    check_plans(200, name, PLANNED)


def check_random_rows(rows: list[list[int]], max_tokens: int | None) -> None:
    case = packed_case([[torch.tensor(row)] for row in rows])
    if not any(weights.any() for weights in case.weights):
        return
    plain, model = models("llama", num_hidden_layers=2)
    expected = by_rows(plain, case)
    largest = max(x.abs().max() for x in expected.gradients.values())
    for name, gradient in in_waves(model, case, max_tokens).gradients.items():
        truth = expected.gradients[name]  # 1e-14: rounding of gradients that are 0 in exact arithmetic
        assert (gradient - truth).abs().max() <= 1e-10 * truth.abs().max() + 1e-14 * largest, name


ROWS = st.tuples(rollouts(min_tokens=1), st.sampled_from([None, 1, 2, 3, 5, 8]))


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(ROWS)
def test_some_random_rows(drawn: tuple[list[list[int]], int | None]) -> None:
    with KeepFloat64():
        check_random_rows(*drawn)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(ROWS)
def test_a_thousand_random_rows(drawn: tuple[list[list[int]], int | None]) -> None:
    with KeepFloat64():
        check_random_rows(*drawn)


# What a wave gives


def logits_of_rows(model: nn.Module, case: Case) -> Tensor:
    """``[batch * sequence, vocabulary]`` logits that predict each slot, row by row through an unmodified model."""
    found = torch.zeros(len(case.weight), model.config.vocab_size, dtype=torch.float64)
    for tokens, first, slots in zip(case.tokens, case.position, case.slots, strict=True):
        positions = torch.arange(first, first + len(tokens))[None]
        given = {"attention_mask": torch.ones_like(positions), "position_ids": positions, "use_cache": False}
        found[slots[1:]] = model(tokens[None], **given).logits[0, :-1].detach()
    return found


@pytest.mark.parametrize("chunk", [5, 2048])
@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama", {}), ("gemma2", {"final_logit_softcapping": 2.0}), ("cohere2", {"logit_scale": 0.3}), ("granite", {})],
)
def test_outputs(name: str, changes: dict[str, object], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs, entropies and logits come out through the model's own head, soft-caps and scales included."""
    monkeypatch.setattr(wave_module, "HEAD_TOKENS", chunk)
    case, changes = CASES["depth 4"], {"logits_scaling": 3.0} if name == "granite" else changes
    plain, model = models(name, **changes)
    with KeepFloat64(), torch.no_grad():
        expected, seen = logits_of_rows(plain, case), []
        with augtree_fx.prefill(model, case.layout, scored=case.scored) as tree:
            for wave in tree.waves(12):
                truth = expected[wave.slot]
                torch.testing.assert_close(wave.logits(), truth, rtol=1e-10, atol=1e-10)
                for temperature in (1.0, 0.7):
                    rows = (truth / temperature).log_softmax(-1)
                    labels = case.inputs["input_ids"].flatten()[wave.slot]
                    assert torch.equal(labels, wave.labels)
                    picked = rows.gather(1, labels[:, None])[:, 0]
                    logprobs, entropies = wave.logprobs_and_entropies(temperature)
                    assert torch.equal(logprobs, wave.logprobs(temperature))
                    torch.testing.assert_close(logprobs, picked, rtol=1e-10, atol=1e-10)
                    torch.testing.assert_close(entropies, -(rows.exp() * rows).sum(-1), rtol=1e-10, atol=1e-10)
                assert torch.equal(wave.row, wave.slot // case.layout.shape[1])
                assert torch.equal(wave.index, wave.slot % case.layout.shape[1])
                seen.append(wave.slot)
    assert torch.equal(torch.cat(seen).sort().values, torch.nonzero(case.weight)[:, 0])


def test_gradients_of_logits_hidden_states_and_entropies() -> None:
    case = CASES["depth 3, left"]
    plain, model = models("llama")

    def loss_of(logits: Tensor, slot: Tensor) -> Tensor:
        weight, rows = case.weight[slot], logits.log_softmax(-1)
        return -(weight * (rows.exp() * rows).sum(-1)).sum() + (weight[:, None] * logits.square()).mean(1).sum()

    with KeepFloat64():
        model.zero_grad()
        with augtree_fx.prefill(model, case.layout, scored=case.scored) as tree:
            for wave in tree.waves(20):
                weight, (_, entropies) = case.weight[wave.slot], wave.logprobs_and_entropies()
                logits = model.lm_head(wave.hidden_states())
                torch.testing.assert_close(logits, wave.logits(), rtol=1e-12, atol=1e-12)
                ((weight * entropies).sum() + (weight[:, None] * logits.square()).mean(1).sum()).backward()
        got = gradients_of(model)
        for tokens, first, slots in zip(case.tokens, case.position, case.slots, strict=True):
            positions = torch.arange(first, first + len(tokens))[None]
            logits = plain(tokens[None], position_ids=positions, use_cache=False).logits[0, :-1]
            loss_of(logits, slots[1:]).backward()
        expected = gradients_of(plain)
    zero = torch.zeros(())
    assert_equal(Found(zero + 1, zero[None] + 1, got), Found(zero + 1, zero[None] + 1, expected))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_scoring_without_gradients(mode: type) -> None:
    model = models("llama")[1]
    case = CASES["depth 4"]
    logprobs = torch.zeros_like(case.weight)
    with mode(), KeepFloat64(), augtree_fx.prefill(model, case.layout, scored=case.scored) as tree:
        for wave in tree.waves(12):
            logprobs[wave.slot] = wave.logprobs()
    torch.testing.assert_close(logprobs, truth("depth 4").logprobs, rtol=1e-10, atol=1e-10)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_add_to_those_that_are_there() -> None:
    model = shared(copy.deepcopy(models("llama")[0]))
    parameters = dict(model.named_parameters())
    before = {name: torch.randn_like(p) for name, p in parameters.items() if "layers.1" not in name}
    held = {}
    for name, gradient in before.items():
        parameters[name].grad = held[name] = gradient.clone()
    case = CASES["depth 3, left"]
    with KeepFloat64():
        with augtree_fx.prefill(model, case.layout, scored=case.scored) as tree:
            for wave in tree.waves(20):
                backward_of(wave, case.weight)
    assert all(parameters[name].grad is gradient for name, gradient in held.items())
    summed = {name: p.grad - before.get(name, 0) for name, p in parameters.items()}
    expected = truth("depth 3, left")
    assert_equal(Found(expected.loss, expected.logprobs, summed), expected)


def test_ordinary_forwards_inside_the_block() -> None:
    """A reference pass, and an auxiliary loss with a backward of its own, between waves."""
    plain, model = models("llama")
    case, ids = CASES["depth 3, left"], run_of(6, 5)[None]
    with KeepFloat64():
        with augtree_fx.prefill(model, case.layout, scored=case.scored) as tree:
            for number, wave in enumerate(tree.waves(20)):
                if number == 1:
                    model(ids, labels=ids, use_cache=False).loss.backward()
                backward_of(wave, case.weight)
        got = gradients_of(model)
        plain(ids, labels=ids, use_cache=False).loss.backward()
        extra, expected = gradients_of(plain), truth("depth 3, left")
    assert_equal(Found(expected.loss, expected.logprobs, {k: x - extra[k] for k, x in got.items()}), expected)


# Memory


def live_bytes() -> int:
    """Bytes of distinct storages of all live tensors that Python knows, saved ones excluded."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Saved:
    """Bytes that graphs hold for their backward: now, and at most."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Held:
        return Held(self, tensor)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda held: held.tensor)


class Held:
    """A saved tensor, counted while it is held."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        self.bytes = tensor.numel() * tensor.element_size()
        saved.now += self.bytes
        saved.peak = max(saved.peak, saved.now)

    def __del__(self) -> None:
        self.saved.now -= self.bytes


def peaks(num_branches: int) -> tuple[int, int]:
    """Largest number of saved bytes, and of live bytes between waves, for a group of equal responses."""
    model = shared(build("llama", vocab_size=31, num_hidden_layers=1).train())
    case = groups_case([run_of(24, 0) % 31], [[run_of(8, seed) % 31 for seed in range(num_branches)]])
    saved, live = Saved(), 0  # 4 responses a wave
    gc.collect()
    floor = live_bytes()
    with saved.hooks(), augtree_fx.prefill(model, case.layout, max_wave_tokens=32) as tree:
        weight = case.weight.float()
        for number, wave in enumerate(tree.waves()):
            if 4 * (number + 1) == num_branches:  # the last
                live = live_bytes() - floor
            backward_of(wave, weight)
            del wave
    assert saved.now == 0
    return saved.peak, live


def test_memory_does_not_grow_with_the_number_of_branches() -> None:
    (saved_4, live_4), (saved_16, live_16), (saved_64, live_64) = (peaks(number) for number in (4, 16, 64))
    assert saved_4 <= saved_16 <= saved_64 * 1.001 and saved_64 <= 1.001 * saved_4
    # parameters' gradients come with the first backward; per branch its tables and indices, some 64 bytes a token
    assert live_64 <= live_16 + 48 * 8 * 64
    assert live_4 > 0


@pytest.mark.parametrize("fail", [False, True])
def test_nothing_is_held_after_the_block(fail: bool) -> None:
    model, case = shared(build("llama").train()), CASES["depth 4"]
    gc.collect()
    before = {id(x) for x in gc.get_objects() if type(x) is Tensor}
    weight = case.weight.float()
    tree = augtree_fx.prefill(model, case.layout, scored=case.scored, max_wave_tokens=12)
    waves = []
    try:
        with tree:
            iterator = tree.waves()
            for wave in iterator:
                waves.append(wave)
                backward_of(wave, weight)
                if fail and len(waves) == 3:
                    raise KeyError("stop")
    except KeyError:
        hidden = [x for x in gc.get_objects() if type(x) is Tensor and id(x) not in before and x.is_floating_point()]
    else:
        model.zero_grad()
        hidden = [x for x in gc.get_objects() if type(x) is Tensor and id(x) not in before and x.is_floating_point()]
    left = [tuple(x.shape) for x in hidden if x is not weight and not any(x is p.grad for p in model.parameters())]
    left = [shape for shape in left if 64 in shape or 16 in shape]
    assert left == [] and tree is not None and iterator is not None and len(waves) >= 3


@pytest.mark.parametrize("fault", ["keys", "values", "branch points", "siblings", "stage above"])
def test_planted_faults_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would see a gradient that is dropped, and a token that leaks into its siblings."""
    from augtree_fx import computed_stage, stages

    if fault == "siblings":
        real = stages.part_of

        def leaking(layout: TreeLayout, nodes: np.ndarray) -> TreeLayout:
            """The last two branches of one node become one branch."""
            part = real(layout, nodes)
            if len(nodes) < 2 or part.parent[-1] != part.parent[-2] or part.parent[-1] < 0:
                return part
            length = np.append(part.length[:-2], part.length[-2:].sum())
            kept = {name: getattr(part, name)[:-1] for name in ("parent", "level", "path_start")}
            return dataclasses.replace(part, length=length, **kept)

        monkeypatch.setattr(stages, "part_of", leaking)
    elif fault == "stage above":
        monkeypatch.setattr(computed_stage, "_add_to", lambda leaf, gradient: None)
    else:
        real_leaves, real_backward = stages.leaves_of, computed_stage.ComputedStage.backward
        if fault == "branch points":

            def without_leaf(self: computed_stage.ComputedStage) -> None:
                self.leaf.grad = None
                real_backward(self)

            monkeypatch.setattr(computed_stage.ComputedStage, "backward", without_leaf)
        else:
            number = {"keys": 0, "values": 1}[fault]

            def without_handle(*args: object, **options: object) -> object:
                found = real_leaves(*args, **options)
                handles = [x.detach() if place == number else x for place, x in enumerate(found.handles)]
                return found._replace(handles=tuple(handles))

            monkeypatch.setattr(stages, "leaves_of", without_handle)
    with KeepFloat64():
        found = errors(in_waves(models("llama")[1], CASES["depth 4"], 12), truth("depth 4"))
    wrong = {name for name, value in found.items() if value > 1e-6}
    assert any("layers.0" in name for name in wrong)
    assert ("logprobs" in wrong) == (fault == "siblings")
