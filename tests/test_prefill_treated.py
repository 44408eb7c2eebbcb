"""`prefill` of treated models: checkpointing, adapters, autocast, bfloat16, torch.compile, copies, FSDP2."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from families import KeepFloat64, build, one_thread, rollout, without_upcasts
from ranks import Ranks
from test_parallel_wrappers import fsdp2, whole
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from wave_reference import (
    Case,
    Found,
    assert_equal,
    by_rows,
    deep_rows,
    errors,
    groups_case,
    in_waves,
    packed_case,
    padded_case,
    run_of,
    shared,
)

import augtree_fx
from augtree_fx import wave as wave_module

CASE = padded_case(deep_rows())
FLOAT32 = 1e-5  # a float64 model with float32 up-casts, see test_models.py
pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")  # transformers 5.24 renames it


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def llama() -> nn.Module:
    """In float64 throughout, also where a checkpointed layer runs again in backward."""
    return without_upcasts("llama")


@cache
def truth() -> Found:
    return by_rows(llama(), CASE)


def checkpointed(model: nn.Module, reentrant: bool = False) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


@pytest.mark.parametrize("max_tokens", [None, 12])
def test_gradient_checkpointing(max_tokens: int | None) -> None:
    model, runs = checkpointed(shared(llama())), []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    assert_equal(in_waves(model, CASE, max_tokens), truth())
    assert len(runs) % 2 == 0 and len(runs) >= 4


def test_reentrant_checkpointing_is_refused() -> None:
    model = checkpointed(shared(llama()), reentrant=True)
    model.enable_input_require_grads()
    text = r"not part of the graph; checkpoint with gradient_checkpointing_kwargs=\{'use_reentrant': False\}"
    with pytest.raises(NotImplementedError, match=text):
        in_waves(model, CASE)
    with torch.no_grad(), augtree_fx.prefill(model, CASE.layout) as tree:
        assert sum(map(len, tree.waves())) > 0


def adapted(model: nn.Module, **options: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    given = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(**given)).double()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("transform_first", [True, False], ids=["transform first", "transform last"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
        {"target_modules": ["v_proj"]},
        {"target_modules": r".*layers\.2\.mlp\.down_proj"},
    ],
    ids=["everywhere", "one layer", "values", "behind all keys"],
)
def test_adapters(options: dict[str, object], transform_first: bool) -> None:
    """Gradients of adapters alone; layers before the first adapter have K and V without any."""
    model = adapted(shared(llama()), **options) if transform_first else shared(adapted(llama(), **options))
    expected = by_rows(adapted(llama(), **options), CASE)
    assert_equal(in_waves(model, CASE, 12), expected)
    if transform_first:
        checkpointed(model).enable_input_require_grads()
        assert_equal(in_waves(model, CASE, 12), expected)
    assert all("lora" in name for name in expected.gradients)


@pytest.mark.parametrize("trained", ["lm_head", "embed_tokens", "layers.1.self_attn.k_proj", "norm"])
def test_frozen_parts(trained: str) -> None:
    def froze(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        return model

    assert_equal(in_waves(froze(shared(llama())), CASE, 12), by_rows(froze(llama()), CASE))


def root_mean_square_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


def assert_at_most_twice(got: Found, unmodified: Found, expected: Found) -> None:
    ours, theirs = (errors(found, expected, root_mean_square_error) for found in (got, unmodified))
    assert {key: (ours[key], theirs[key]) for key in ours if key != "loss" and not ours[key] <= 2 * theirs[key]} == {}


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("kind", ["autocast", "weights"])
def test_bfloat16_error_is_at_most_twice_the_unmodified_models(name: str, kind: str) -> None:
    """The loss is one number, whose error is chance; log-probs and gradients are held against float64."""
    dtype = torch.bfloat16 if kind == "weights" else torch.float32
    plain = build(name, dtype).train()
    model = shared(copy.deepcopy(plain))
    with KeepFloat64():
        expected = by_rows(copy.deepcopy(plain).double(), CASE)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        unmodified = by_rows(plain, CASE)
        for max_tokens in (None, 12):
            assert_at_most_twice(in_waves(model, CASE, max_tokens), unmodified, expected)


def test_handles_add_up_in_float32() -> None:
    """Gradients of prompts' K and V from many waves: float32 sums of a bfloat16 model, rounded once."""
    model = shared(build("llama", torch.bfloat16).train())
    case = groups_case([run_of(8, 0)], [[run_of(2, seed)] * 8 for seed in range(1)])
    with augtree_fx.prefill(model, case.layout) as tree:
        for wave in tree.waves(2):
            wave.logprobs().sum().backward()
        prompts = tree._root.prompts
        assert {x.grad.dtype for each in prompts.values() for x in each.handles} == {torch.float32}
        assert {x.untyped_storage().nbytes() for each in prompts.values() for x in each.handles} == {4}
        assert tree._root.leaf.grad.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled(checkpointing: bool) -> None:
    plain = build("llama", torch.float64, num_hidden_layers=2).train()
    model = shared(copy.deepcopy(plain))
    if checkpointing:
        checkpointed(model)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    got = in_waves(compiled, CASE, 24)
    got = Found(got.loss, got.logprobs, {name.removeprefix("_orig_mod."): x for name, x in got.gradients.items()})
    assert_equal(got, by_rows(plain, CASE), FLOAT32)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(how: str) -> None:
    model = shared(llama())
    in_waves(model, CASE, 12)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert_equal(in_waves(twin, CASE, 12), truth())
    assert all(parameter.grad is None for parameter in model.parameters())


# Two ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


def case_of(rank: int, kind: str) -> Case:
    """Another batch on each rank."""
    if kind == "branch points without a score":
        return padded_case(rollout(2, seed=rank), "right", lambda row, index: index >= 15)
    if "groups" in kind:  # three waves on each rank, or one has two
        lengths = [(9, 2, 8, 1, 9), (4, 7, 5) if kind == "unequal groups" else (4, 7, 5, 6, 5)][rank]
        return groups_case([run_of(11 + rank, rank)], [[run_of(n, 10 * rank + n + i) for i, n in enumerate(lengths)]])
    return packed_case(deep_rows()) if rank else CASE


def sharded(kind: str, checkpointing: bool, transform_first: bool, head_tokens: int) -> dict[str, float]:
    rank = distributed.get_rank()
    results = [by_rows(llama(), case_of(each, kind)) for each in range(2)]
    means = {name: (results[0].gradients[name] + results[1].gradients[name]) / 2 for name in results[0].gradients}
    model = checkpointed(llama()) if checkpointing else llama()
    model = fsdp2(shared(model)) if transform_first else shared(fsdp2(model))
    wave_module.HEAD_TOKENS = head_tokens
    for _ in range(2):
        got = in_waves(model, case_of(rank, kind), 10 if "groups" in kind else None)
    gathered = {name: whole(gradient) for name, gradient in got.gradients.items()}
    return errors(Found(got.loss, got.logprobs, gathered), Found(results[rank].loss, results[rank].logprobs, means))


OFTEN = [("unequal groups", 3, True, True), ("branch points without a score", 2048, False, False)]
SELDOM = [
    pytest.param(*kind, *how, marks=pytest.mark.slow)
    for kind in (("groups", 2048), ("deep", 2048), ("deep", 7), ("groups", 3), ("branch points without a score", 2048))
    for how in ((False, False), (False, True), (True, False), (True, True))
    if (*kind, *how) not in OFTEN
]


@pytest.mark.parametrize(("kind", "head_tokens", "checkpointing", "transform_first"), OFTEN + SELDOM)
def test_fsdp2(ranks: Ranks, kind: str, head_tokens: int, checkpointing: bool, transform_first: bool) -> None:
    for found in ranks.run(sharded, kind, checkpointing, transform_first, head_tokens):
        assert {name: value for name, value in found.items() if not value <= FLOAT32} == {}


def sharded_in_bfloat16() -> list[str]:
    rank = distributed.get_rank()
    results = [by_rows(llama(), case_of(each, "groups")) for each in range(2)]
    means = {name: (results[0].gradients[name] + results[1].gradients[name]) / 2 for name in results[0].gradients}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for run, model in ((by_rows, build("llama").train()), (in_waves, shared(build("llama").train()))):
        got = run(fsdp2(model, mp_policy=policy), case_of(rank, "groups"))
        gradients = {name: whole(x) for name, x in got.gradients.items()}
        expected = Found(results[rank].loss, results[rank].logprobs, means)
        found.append(errors(Found(got.loss, got.logprobs, gradients), expected, root_mean_square_error))
    return [name for name in means if not found[1][name] <= 2 * found[0][name]]


def test_fsdp2_in_bfloat16(ranks: Ranks) -> None:
    assert ranks.run(sharded_in_bfloat16) == [[], []]


def replicated() -> list[str]:
    said = []
    for wrap in (DistributedDataParallel, lambda model: torch.compile(DistributedDataParallel(model))):
        try:
            augtree_fx.prefill(wrap(shared(llama())), CASE.layout)
        except NotImplementedError as error:
            said.append(str(error))
    return said


def test_ddp_is_refused(ranks: Ranks) -> None:
    for said in ranks.run(replicated):
        assert len(said) == 2
        assert all("pass model.module and average the gradients after the block, or use FSDP2" in x for x in said)
