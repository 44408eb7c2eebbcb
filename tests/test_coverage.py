"""`python -m augtree_fx models`: single types, planted faults, workers that crash or hang, output; slow: all types."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from families import one_thread
from packaging.version import Version
from torch import nn

import augtree_fx
from augtree_fx import face
from augtree_fx.__main__ import main as command_line
from augtree_fx.coverage import check as checks
from augtree_fx.coverage import cli, tiny, walk
from augtree_fx.coverage.batch import grouped_batch
from augtree_fx.coverage.check import ERROR, EXACT, ORIGINAL, SKIPPED, Outcome, check
from augtree_fx.coverage.overrides import OVERRIDES
from augtree_fx.transforms import AttentionSite, Refusal, capture_stack

# Found by the walk, to be mended in the pass; each goes from here with its fault.
KNOWN_ERRORS: tuple[str, ...] = ()
# Exact types by the version of transformers that they were found with.
EXACT_FILE = Path(__file__).parent / "data" / "exact_model_types.json"


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(
    "model_type, kinds",
    [
        ("llama", {"full"}),
        ("gemma2", {"window", "full", "soft-cap"}),
        ("gpt_oss", {"window", "full", "sink"}),
        ("deepseek_v3", {"full", "MLA"}),
        ("qwen3", {"window", "full", "QK-norm"}),
        ("laguna", {"window", "full", "gated", "QK-norm"}),
        ("gemma3", {"window", "full", "QK-norm"}),
    ],
)
def test_exact_types(model_type: str, kinds: set[str]) -> None:
    outcome = check(model_type)
    assert (outcome.status, outcome.reason) == (EXACT, "")
    assert set(outcome.attention) == kinds
    assert outcome.error <= checks.FLOAT64


@pytest.mark.parametrize(
    "model_type, said",
    [
        ("musicgen", "stack (MusicgenDecoder): its input_ids are codebooks"),
        ("doge", "layers.0 (DogeDecoderLayer): it makes a mask of its own inside its attention module"),
        ("mamba", "layers.0 (MambaBlock): mixer (MambaMixer) has a recurrent state, and no layer has attention"),
        ("bloom", "h.0 (BloomBlock): its attention has ALiBi biases"),
        ("prophetnet", "layers.0.self_attn (ProphetNetNgramSelfAttention): its attention predicts in n-gram streams"),
        ("xlnet", "layer.0.rel_attn (XLNetRelativeAttention): its attention has two streams"),
        ("xlstm", "blocks.0 (xLSTMBlock): mlstm_layer (xLSTMLayer) has a recurrent state"),
        ("gemma4_assistant", "it drafts for another model"),
    ],
)
def test_original_types_say_why(model_type: str, said: str) -> None:
    outcome = check(model_type)
    assert outcome.status == ORIGINAL
    assert outcome.reason.startswith(said)


def test_a_missing_package_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> nn.Module:
        raise ImportError("it needs\nkernels")

    monkeypatch.setattr(tiny, "build", build)
    assert check("mamba") == Outcome("mamba", "MambaForCausalLM", SKIPPED, "it needs kernels")


def scaled_gradient(factor: float, name: str) -> Callable[..., nn.Module]:
    """A `transform` whose model has one wrong gradient."""

    def transform(model: nn.Module, **options: object) -> nn.Module:
        model.get_parameter(name).register_hook(lambda gradient: gradient * factor)
        return augtree_fx.transform(model, **options)

    return transform


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_wrong_gradient_is_an_error(name: str) -> None:
    outcome = check("llama", scaled_gradient(1 + 1e-6, name))
    assert outcome.status == ERROR
    assert outcome.reason == f"{name} differs by 1.0e-06 of its largest value, tolerance 1e-09 (float64, eager)"


def test_a_lost_gradient_is_an_error() -> None:
    def transform(model: nn.Module, **options: object) -> nn.Module:
        model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
        return augtree_fx.transform(model, **options)

    assert check("llama", transform).reason.startswith("model.layers.1.mlp.up_proj.weight differs by 1.0e+00")


def test_nan_is_an_error() -> None:
    outcome = check("llama", scaled_gradient(float("nan"), "model.norm.weight"))
    assert outcome.status == ERROR
    assert outcome.reason.startswith("model.norm.weight differs by nan")


def test_wrong_logits_are_an_error() -> None:
    def transform(model: nn.Module, **options: object) -> nn.Module:
        augtree_fx.transform(model, **options)
        model.lm_head.register_forward_hook(lambda module, args, output: output + 1e-6)
        return model

    assert check("llama", transform).status == ERROR


def test_a_window_off_by_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(stack: nn.Module) -> tuple[list[AttentionSite], list[Refusal]]:
        sites, refusals = capture_stack(stack)
        return [replace(site, window=site.window and site.window + 1) for site in sites], refusals

    monkeypatch.setattr(face, "capture_stack", capture)
    outcome = check("gemma3_text")
    assert outcome.status == ERROR
    assert outcome.error > 1e-3


def test_exact_needs_sharing() -> None:
    """A model that shares nothing has equal numbers and is not exact."""

    def transform(model: nn.Module, **_: object) -> nn.Module:
        return augtree_fx.transform(model)  # by default a tiny model does not find its prompts worth an attention piece

    outcome = check("llama", transform)
    assert (outcome.status, outcome.reason) == (ORIGINAL, "nothing was shared")


def test_an_exception_is_an_error_with_its_place() -> None:
    def transform(model: nn.Module, **_: object) -> nn.Module:
        raise KeyError("planted")

    outcome = check("llama", transform)
    assert outcome.status == ERROR
    assert outcome.reason.startswith("KeyError: 'planted' (test_coverage.py, line ")


def test_a_model_that_does_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OVERRIDES, "xmod", {})  # it has no default language
    outcome = check("xmod")
    assert outcome.status == ERROR
    assert (
        "the unmodified tiny model does not run: float64, eager: ValueError: Input language unknown" in outcome.reason
    )


def test_batch_goes_beyond_windows() -> None:
    batch = grouped_batch(97)
    width = batch.input_ids.shape[1]
    assert width % 8 == 0
    assert max(map(len, batch.rows)) < width
    assert all(len(row) > 2 * 8 for row in batch.rows)
    for row, mask, ids in zip(batch.rows, batch.attention_mask, batch.input_ids, strict=True):
        assert mask.tolist() == [1] * len(row) + [0] * (width - len(row))
        assert torch.equal(ids[: len(row)], row)
    assert torch.equal(batch.rows[0][:21], batch.rows[2][:21])
    assert not torch.equal(batch.rows[0][:17], batch.rows[1][:17])


MAX_PARAMETERS = 4_000_000  # the largest have fixed image or audio parts


@pytest.mark.parametrize("model_type", tiny.model_types())
def test_tiny_models_are_tiny(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "randomise", lambda *_: None)
    try:
        with torch.device("meta"):
            model = tiny.build(model_type, "eager")
    except ImportError:
        pytest.skip("it needs a package that is not installed")
    assert sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())) < MAX_PARAMETERS
    assert tiny.class_name(model_type) == type(model).__name__
    rates = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert rates <= {0.0}


def ends_badly(model_type: str) -> Outcome:
    """What workers of the tests below run."""
    if model_type == "mamba":
        os._exit(7)
    if model_type == "bert":
        time.sleep(600)
    return Outcome(model_type, "Fine", EXACT)


@pytest.mark.parametrize("jobs", [1, 2])
def test_crashes_and_hangs_end_one_type_only(jobs: int) -> None:
    types = ["llama", "mamba", "gpt2", "bert", "qwen3"]
    found = {x.model_type: x for x in walk.walk(types, jobs=jobs, timeout_s=1.0, function=ends_badly)}
    assert set(found) == set(types)
    assert {name for name, outcome in found.items() if outcome.status == EXACT} == {"llama", "gpt2", "qwen3"}
    assert (found["mamba"].status, found["mamba"].reason) == (ERROR, "its process ended with exit code 7")
    assert (found["bert"].status, found["bert"].reason) == (ERROR, "it took more than 1 s")


def fake_walk(outcomes: dict[str, Outcome]) -> Callable[..., Iterator[Outcome]]:
    def walk(model_types: list[str], **_: object) -> Iterator[Outcome]:
        return iter([outcomes[name] for name in reversed(model_types)])

    return walk


LLAMA = Outcome("llama", "LlamaForCausalLM", EXACT, "", ("full",), 1e-15)
MAMBA = Outcome("mamba", "MambaForCausalLM", ORIGINAL, "a long reason " * 20, ("recurrent",))
BERT = Outcome("bert", "BertLMHeadModel", ERROR, "wrong", ("full",), 0.5)
ARGUMENTS = ["models", "--model-type", "mamba", "--model-type", "llama"]


def test_table_and_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "walk", fake_walk({x.model_type: x for x in (LLAMA, MAMBA, BERT)}))
    assert command_line(ARGUMENTS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "type", "class", "attention", "status", "reason"]
    assert [line.split()[0] for line in lines[2:4]] == ["mamba", "llama"]
    assert lines[2].endswith("...")
    assert lines[4].startswith("2 types: 1 exact, 1 original, 0 error, 0 skipped (transformers ")
    assert command_line([*ARGUMENTS, "--model-type", "bert"]) == 1


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "walk", fake_walk({x.model_type: x for x in (LLAMA, MAMBA, BERT)}))
    assert command_line([*ARGUMENTS, "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed[1] == {
        "model_type": "llama",
        "class": "LlamaForCausalLM",
        "status": "exact",
        "reason": "",
        "attention": ["full"],
        "error": 1e-15,
    }
    assert printed[0]["reason"] == MAMBA.reason
    assert command_line([*ARGUMENTS, "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == printed
    assert "1 exact" in capsys.readouterr().out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["models", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == tiny.model_types()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model-type", "lama"], "transformers has no causal-LM type 'lama'; --list shows its "),
        (["--jobs", "0"], "must be a whole number of at least 1, got '0'"),
        (["--timeout", "soon"], "must be a whole number of at least 1, got 'soon'"),
    ],
)
def test_usage_errors(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line(["models", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_one_type_through_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["models", "--model-type", "gpt2", "--jobs", "3"]) == 0
    assert "1 types: 1 exact" in capsys.readouterr().out


def known_exact_types() -> set[str]:
    """Of the newest version listed that is not newer than the one installed."""
    listed = {Version(name): types for name, types in json.loads(EXACT_FILE.read_text()).items()}
    installed = Version(transformers.__version__)
    return set(listed[max(version for version in listed if version <= installed)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_types() -> None:
    """No type is wrong, and none that was exact once stops being so."""
    outcomes = {x.model_type: x for x in walk.walk(tiny.model_types(), jobs=2, timeout_s=120)}
    assert {name: x.reason for name, x in outcomes.items() if x.status == ERROR and name not in KNOWN_ERRORS} == {}
    assert [name for name in KNOWN_ERRORS if outcomes[name].status != ERROR] == []
    known = known_exact_types()
    assert {name: x.reason for name, x in outcomes.items() if name in known and x.status != EXACT} == {}
    assert [name for name, x in outcomes.items() if x.status == EXACT and name not in known] == [], (
        "add them to the list"
    )
