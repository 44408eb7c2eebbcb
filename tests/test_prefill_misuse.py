"""Misuse of `prefill`: each error says what to do, and leaves gradients as they were."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from families import build, one_thread
from torch import nn
from transformers import AutoModelForSequenceClassification
from wave_reference import backward_of, by_rows, deep_rows, padded_case, shared

import augtree_fx
from augtree_fx import Tree, TreeLayout
from augtree_fx.coverage import tiny

CASE = padded_case(deep_rows())
WEIGHT = CASE.weight.float()


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return shared(build("llama", num_hidden_layers=2).train())


@pytest.fixture
def model(trained: nn.Module) -> Iterator[nn.Module]:
    """A model with gradients on some parameters, which are the same objects with the same values after the test."""
    before = {}
    for number, parameter in enumerate(trained.parameters()):
        gradient = torch.randn_like(parameter) if number % 2 else None
        parameter.grad = gradient
        before[parameter] = gradient, None if gradient is None else gradient.clone()
    yield trained
    for parameter, (gradient, values) in before.items():
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, values)
    assert not trained.model._augtree_state.in_waves


def prefill(model: nn.Module, max_wave_tokens: int | None = 12, **options: object) -> Tree:
    return augtree_fx.prefill(model, CASE.layout, scored=CASE.scored, max_wave_tokens=max_wave_tokens, **options)


def raises(error: type[Exception], text: str) -> pytest.RaisesExc:
    return pytest.raises(error, match=re.escape(text))


def use_all(tree: Tree) -> None:
    for wave in tree.waves():
        backward_of(wave, WEIGHT)


def test_two_nested_blocks(model: nn.Module) -> None:
    with raises(RuntimeError, "another augtree_fx.prefill of this model is open; leave its block first, or put both"):
        with prefill(model):
            with prefill(model):
                pass


def test_a_block_after_a_refused_one(model: nn.Module) -> None:
    held = [parameter.grad for parameter in model.parameters()]
    copies = [None if x is None else x.clone() for x in held]
    with prefill(model) as tree:
        inner = prefill(model)
        with raises(RuntimeError, "another augtree_fx.prefill"):
            inner.__enter__()
        use_all(tree)
    with inner:
        use_all(inner)
    for parameter, gradient, values in zip(model.parameters(), held, copies, strict=True):
        assert gradient is None or parameter.grad is gradient
        parameter.grad = gradient if gradient is None else gradient.copy_(values)


def test_entered_twice(model: nn.Module) -> None:
    tree = prefill(model, on_unused="skip")
    text = "a tree is entered once; call augtree_fx.prefill again for another forward"
    with raises(RuntimeError, text), tree:
        tree.__enter__()
    with raises(RuntimeError, text):
        tree.__enter__()


def test_waves_outside_of_the_block(model: nn.Module) -> None:
    text = "waves are taken once, inside the block: `with augtree_fx.prefill(model, layout) as tree`"
    tree = prefill(model, on_unused="skip")
    with raises(RuntimeError, text):
        tree.waves()
    with tree:
        pass
    with raises(RuntimeError, text):
        tree.waves()


@pytest.mark.parametrize("finished", [False, True])
def test_waves_twice(finished: bool, model: nn.Module) -> None:
    with raises(RuntimeError, "waves of one tree are taken once"), prefill(model) as tree:
        waves = tree.waves()
        for wave in waves if finished else ():
            backward_of(wave, WEIGHT)
        tree.waves()


def test_waves_that_are_taken_after_the_block(model: nn.Module) -> None:
    with prefill(model, on_unused="skip") as tree:
        waves = tree.waves()
        next(waves)
    with raises(RuntimeError, "the block of these waves was left; take all of tree.waves() inside of it"):
        next(waves)


USED_UP = "this wave is used up: its backward has run, or the next wave was asked for; sum all losses of a wave"


@pytest.mark.parametrize("output", ["hidden_states", "logits", "logprobs", "logprobs_and_entropies"])
def test_a_wave_after_its_backward(output: str, model: nn.Module) -> None:
    with raises(RuntimeError, USED_UP), prefill(model) as tree:
        for wave in tree.waves():
            backward_of(wave, WEIGHT)
            getattr(wave, output)()


def test_a_wave_after_the_next_or_the_block(model: nn.Module) -> None:
    with prefill(model, on_unused="skip") as tree:
        waves = tree.waves()
        first, second = next(waves), next(waves)
        with raises(RuntimeError, USED_UP):
            first.logprobs()
        second.logprobs()
    with raises(RuntimeError, USED_UP):
        second.logprobs()
    assert re.fullmatch(r"Wave\(\d+ scored tokens of \d+ rows, \d+ tokens computed\)", repr(second))


NO_BACKWARD = "a wave had no backward: call loss.backward() inside the loop over tree.waves(), or pass on_unused='skip'"


@pytest.mark.parametrize("last", [False, True])
def test_backward_that_is_never_called(last: bool, model: nn.Module) -> None:
    with raises(RuntimeError, NO_BACKWARD), prefill(model, None if last else 12) as tree:
        for wave in tree.waves():
            wave.logprobs()


def test_waves_that_are_left_over(model: nn.Module) -> None:
    text = "waves are left over: take all of tree.waves(), or pass on_unused='skip' for branches without a loss"
    with raises(RuntimeError, text), prefill(model):
        pass
    with raises(RuntimeError, text), prefill(model) as tree:
        for wave in tree.waves():
            backward_of(wave, WEIGHT)
            break
    with raises(RuntimeError, NO_BACKWARD), prefill(model) as tree:
        for _ in tree.waves():
            break


@pytest.mark.parametrize("leave_early", [False, True])
def test_skipped_waves_have_no_loss(leave_early: bool) -> None:
    """What is left out has weight 0."""
    plain = build("llama", torch.float64, num_hidden_layers=2).train()
    model, used = shared(copy.deepcopy(plain)), torch.zeros(len(WEIGHT), dtype=torch.bool)
    with prefill(model, on_unused="skip") as tree:
        for number, wave in enumerate(tree.waves()):
            if number % 2:
                used[wave.slot] = True
                backward_of(wave, CASE.weight)
            elif leave_early and number == 4:
                break
    by_rows(plain, CASE)
    plain.zero_grad()
    for tokens, slots, weights in zip(CASE.tokens, CASE.slots, CASE.weights, strict=True):
        logits = plain(tokens[None], use_cache=False).logits[0, :-1]
        picked = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        (-(weights * used[slots])[1:] * picked).sum().backward()
    assert used.any()
    for name, parameter in plain.named_parameters():
        got = model.get_parameter(name).grad
        assert (got - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max(), name  # float32 up-casts


CHANGED = "parameters changed since prefill; step the optimizer after the block, not between waves"


@pytest.mark.parametrize("when", ["between waves", "after the last", "before the first"])
def test_parameters_that_change(when: str, model: nn.Module) -> None:
    def change() -> None:
        with torch.no_grad():
            model.lm_head.weight.add_(0)

    with raises(RuntimeError, f"1 {CHANGED}"), prefill(model) as tree:
        if when == "before the first":
            change()
        for wave in tree.waves():
            backward_of(wave, WEIGHT)
            if when == "between waves":
                change()
        change()


def test_an_optimizer_in_a_gradient_hook(model: nn.Module) -> None:
    parameter = model.lm_head.weight

    def step(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=0.0)

    handle = parameter.register_post_accumulate_grad_hook(step)
    with raises(RuntimeError, CHANGED), prefill(model) as tree:
        use_all(tree)
    handle.remove()


def test_wrong_arguments(model: nn.Module) -> None:
    text = "max_wave_tokens must be at least 1, a whole number, got 0"
    with raises(ValueError, text):
        prefill(model, 0)
    with raises(ValueError, text.replace("max_wave_tokens", "max_tokens")), prefill(model) as tree:
        tree.waves(0)
    with raises(ValueError, "on_unused must be one of error, skip, got 'ignore'"):
        prefill(model, on_unused="ignore")
    shape = tuple(CASE.layout.shape)
    with raises(ValueError, f"scored must have the batch's shape, {shape}, got ({shape[0]}, {shape[1] - 1})"):
        augtree_fx.prefill(model, CASE.layout, scored=CASE.scored[:, 1:])
    with prefill(model, on_unused="skip") as tree:
        wave = next(tree.waves())
        for output in (wave.logprobs, wave.logprobs_and_entropies):
            with raises(ValueError, "temperature must be above 0, got 0"):
                output(0)


def test_models_that_are_refused() -> None:
    plain = build("llama")
    with raises(ValueError, "LlamaForCausalLM is not transformed; augtree_fx.transform(model) does that"):
        prefill(plain)
    with pytest.raises(TypeError, match="expected a transformers model, got Linear"):
        prefill(nn.Linear(2, 2))


def test_a_layout_on_another_device(model: nn.Module) -> None:
    layout = TreeLayout.from_groups([[3, 4]], [[[5], [6]]], device="meta")
    with raises(ValueError, "the layout is on meta, the model's embedding is on cpu"):
        augtree_fx.prefill(model, layout).__enter__()


def test_dropout_is_refused_in_training_alone() -> None:
    model = shared(build("llama", attention_dropout=0.1))
    with prefill(model) as tree:
        use_all(tree)
    with raises(NotImplementedError, "attention dropout must be 0 in training"):
        prefill(model.train()).__enter__()
    with torch.no_grad(), raises(NotImplementedError, "attention dropout must be 0 in training"):
        prefill(model).__enter__()


def test_rope_that_is_scaled_by_length() -> None:
    model = shared(
        build(
            "llama",
            max_position_embeddings=16,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        )
    )
    with raises(NotImplementedError, "RoPE of kind dynamic is scaled by the longest position of each forward"):
        prefill(model).__enter__()


def test_layers_that_run_several_times() -> None:
    if "hrm_text" not in tiny.model_types():
        pytest.skip("this transformers does not have it")
    with raises(NotImplementedError, "runs more than once in a forward, each time with other keys"):
        prefill(shared(tiny.build("hrm_text", "eager"))).__enter__()


def test_columns_that_differ() -> None:
    model = shared(tiny.build("llama4_text", "eager"))
    layout = TreeLayout.from_groups([[5, 6, 7]], [[[8], [9]]])
    with raises(NotImplementedError, "a layer counts the columns of tokens, and shared tokens stand in different ones"):
        augtree_fx.prefill(model, layout).__enter__()


def test_a_model_without_logits_of_tokens() -> None:
    model = shared(build("llama").model)
    with augtree_fx.prefill(model, CASE.layout, on_unused="skip") as tree:
        wave = next(tree.waves())
        text = "LlamaModel gives no logits of tokens; use wave.hidden_states() and your own head"
        with raises(NotImplementedError, text):
            wave.logits()
        with raises(NotImplementedError, text):
            wave.logprobs()
        wave.hidden_states().sum().backward()


def test_a_reward_model() -> None:
    model = shared(build("llama", auto_class=AutoModelForSequenceClassification))
    with raises(NotImplementedError, "LlamaForSequenceClassification reads one token of each row; pass its decoder"):
        prefill(model)
    with augtree_fx.prefill(model.base_model, CASE.layout, on_unused="skip") as tree:
        model.score(next(tree.waves()).hidden_states()).sum().backward()
    assert model.score.weight.grad is not None


@pytest.mark.parametrize("where", ["first wave", "a later wave", "in a forward", "in the last backward"])
def test_an_exception_leaves_no_gradient(where: str, model: nn.Module) -> None:
    layer, calls = model.model.layers[1], []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == (3 if where == "in a forward" else 1) or where == "in the last backward":
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"), prefill(model) as tree:
        handle = layer.register_forward_pre_hook(fail) if where == "in a forward" else None
        for number, wave in enumerate(tree.waves()):
            backward_of(wave, WEIGHT)
            if where == "first wave" or (where == "a later wave" and number == 3):
                raise KeyError("stop")
        tree._root.hidden.register_hook(fail)
    if handle is not None:
        handle.remove()


def test_gradients_asked_for_by_name_miss_the_prompts(model: nn.Module) -> None:
    """`torch.autograd.grad` goes to what it is told, and so never to the prompts."""
    text = "a wave's gradient did not reach the prompts: call loss.backward() without inputs, not torch.autograd.grad"
    for by_backward in (False, True):
        with raises(RuntimeError, text), prefill(model, on_unused="skip") as tree:
            for number, wave in enumerate(tree.waves()):
                loss = wave.logprobs().sum()
                if not number:
                    loss.backward()
                elif by_backward:
                    loss.backward(inputs=[model.lm_head.weight, model.model.norm.weight])
                else:
                    torch.autograd.grad(loss, [model.lm_head.weight, model.model.norm.weight])


def test_failing_forward_of_the_prompts(model: nn.Module) -> None:
    def fail(*_: object) -> None:
        raise KeyError("stop")

    handle = model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="stop"), prefill(model):
        pass
    handle.remove()


def test_a_copy_made_inside_of_the_block(model: nn.Module) -> None:
    with prefill(model, on_unused="skip"):
        twin = copy.deepcopy(model)
    with prefill(twin, on_unused="skip"):
        pass


def clear(model: nn.Module) -> None:
    model.zero_grad()


def clear_in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@pytest.mark.parametrize("touch", [clear, clear_in_place, clip])
@pytest.mark.parametrize("when", ["before backward", "between waves", "after the last"])
def test_gradients_that_are_touched(touch: Callable[[nn.Module], None], when: str, model: nn.Module) -> None:
    with raises(RuntimeError, "gradients were cleared or changed between waves"), prefill(model) as tree:
        for number, wave in enumerate(tree.waves()):
            if number == 1 and when == "before backward":
                touch(model)
            backward_of(wave, WEIGHT)
            if number == 1 and when == "between waves":
                touch(model)
        if when == "after the last":
            touch(model)


@pytest.mark.parametrize("left", [False, True])
def test_backward_of_a_wave_that_is_over(left: bool, model: nn.Module) -> None:
    kept: list[torch.Tensor] = []
    with raises(RuntimeError, "this wave is over: the next one was asked for, or the block was left"):
        with prefill(model, on_unused="skip") as tree:
            for wave in tree.waves():
                if kept and not left:
                    kept[0].backward()
                kept.append(wave.logprobs().sum())
        kept[0].backward()


def test_waves_without_gradients_in_a_block_with_them(model: nn.Module) -> None:
    with raises(RuntimeError, "a wave was asked for under torch.no_grad()"), prefill(model) as tree:
        with torch.no_grad():
            for wave in tree.waves():
                wave.logprobs()


def test_parameters_that_are_replaced(model: nn.Module) -> None:
    original = copy.deepcopy(model)
    with raises(RuntimeError, "parameters changed since prefill"), prefill(original) as tree:
        for wave in tree.waves():
            backward_of(wave, WEIGHT)
            original.load_state_dict({name: x.clone() for name, x in original.state_dict().items()}, assign=True)


def test_what_is_no_layout_or_tensor(model: nn.Module) -> None:
    with raises(TypeError, "layout must be a TreeLayout, got Tensor; TreeLayout.from_padded makes one"):
        augtree_fx.prefill(model, torch.ones(2, 3))
    with raises(TypeError, "scored must be a tensor of the batch's shape, got list"):
        augtree_fx.prefill(model, CASE.layout, scored=[1])


def test_a_declared_group_without_responses_scores_nothing(model: nn.Module) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    prompts = [torch.arange(3, 9), torch.arange(20, 29)]
    layout = TreeLayout.from_groups(prompts, [[torch.tensor([5, 6]), torch.tensor([7, 8])], [empty, empty]])
    with torch.no_grad(), augtree_fx.prefill(model, layout) as tree:
        rows = torch.cat([wave.row for wave in tree.waves()])
    assert sorted(set(rows.tolist())) == [0, 1]
