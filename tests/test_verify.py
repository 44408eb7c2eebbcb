"""`python -m augtree_fx verify` on tiny models with random weights: every exit status, every error text.

The tests of exactness look for false alarms; planted faults (a key without gradient, a prompt read wrongly) look for
the opposite.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import VOCABULARY, build, config_of, one_thread
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, T5Config
from transformers.utils import logging as transformers_logging

import augtree_fx
from augtree_fx.__main__ import main
from augtree_fx.transforms import rewrite
from augtree_fx.verify import passes
from augtree_fx.verify.batches import Piece, draw, pad
from augtree_fx.verify.compare import Difference

PROMPT = list(range(3, 83))
ROWS = [PROMPT + [5] * 3 + [7], PROMPT + [6, 5], [9] + PROMPT, PROMPT + [8] * 9, [9] + PROMPT + [4] * 6]
SHAPE = ["--shape", "80x4x12", "--shape", "64x3x20"]
ONCE = ["--warm-ups", "0"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers_logging.set_verbosity_error()
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models, as save_pretrained writes them."""
    root = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen3_moe", "gpt_oss", "gemma2"):
        build(name).save_pretrained(root / name)
    BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)).save_pretrained(root / "bloom")
    T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4).save_pretrained(root / "t5")
    return root


def written(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def verify(*arguments: object) -> int:
    return main(["verify", "--device", "cpu", *map(str, arguments), *ONCE])  # by default it takes a CUDA device


def figures(tmp_path: Path, *arguments: object) -> tuple[int, dict]:
    status = verify(*arguments, "--json", tmp_path / "out.json")
    return status, json.loads((tmp_path / "out.json").read_text())


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        verify(*arguments)
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_saved_models_are_exact(saved: Path, tmp_path: Path, name: str, dtype: str, padding: str) -> None:
    more = ["--attn", "eager"] if name == "llama" and dtype == "float32" else []
    status, found = figures(tmp_path, saved / name, "--dtype", dtype, "--padding", padding, *SHAPE, *more)
    assert (status, found["verdict"], found["failed"]) == (0, "exact and shared", [])
    assert found["tree"]["num_tokens"] < found["tree"]["num_row_tokens"] and found["tree"]["token_ratio"] > 1.5
    wide = "float64" if dtype in ("float32", "float64") else "float32"
    assert found["truth"] == f"{wide}, each row alone" and set(found["seconds"]) == {"unmodified", "transformed", wide}
    names = {item["name"] for item in found["differences"]}
    assert names == {"log-probs", "loss", *dict(build(name).named_parameters())}
    errors = [item["own_error"] for item in found["differences"]]
    assert max(errors) > 0  # compared with something else than itself
    assert max(errors) < (1e-4 if wide == "float64" else 0.5)


@pytest.mark.parametrize("auto_class", ["AutoModel", "ForSequenceClassification", "AutoModelForTokenClassification"])
def test_other_heads(tmp_path: Path, auto_class: str) -> None:
    """A classifier of rows refuses batches without an id of padding: one that no row has is chosen."""
    config_of("llama", pad_token_id=None).save_pretrained(tmp_path)
    for batch in (["--shape", "80x4x12"], SHAPE, [*SHAPE, "--padding", "left"]):
        status, found = figures(tmp_path, "--config", tmp_path, "--random", "--class", auto_class, *batch)
        assert status == 0 and found["differences"][0]["name"] == "outputs"


def test_report(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(saved / "llama", "--batch", written(saved / "rows.json", ROWS), "--padding", "left") == 0
    printed = capsys.readouterr().out
    for text in (
        "note: rows padded on the left, position_ids count each row's tokens from 0",
        "LlamaForCausalLM: transformed, 3 attention sites captured, 0 refused",
        "tree: 5 rows in 2 groups",
        "gradients of 30 parameters, all compared, 6 that come closest",
        "itself in float64, each row alone",
        "gain: token ratio ",
        "memory: one copy of the model",
        "eval(), so no dropout",
    ):
        assert text in printed
    assert printed.endswith("verdict: exact and shared\n")


def forms(folder: Path) -> dict[str, str]:
    """One batch in every form that a file may have."""
    batch = pad(ROWS, "right", 0, "")
    lists = {name: value.tolist() for name, value in batch.inputs().items()}
    torch.save(batch.inputs(), folder / "dict.pt")
    torch.save(batch.input_ids, folder / "tensor.pt")
    packed = torch.tensor([sum(ROWS, [])])
    positions = torch.tensor([[column for row in ROWS for column in range(len(row))]])
    torch.save({"input_ids": packed, "position_ids": positions, "labels": packed}, folder / "packed.pt")
    return {
        "rows": written(folder / "rows.json", ROWS),
        "ragged dict": written(folder / "ragged.json", {"input_ids": ROWS}),
        "dict": written(folder / "dict.json", lists),
        "dict.pt": str(folder / "dict.pt"),
        "tensor.pt": str(folder / "tensor.pt"),
        "packed.pt": str(folder / "packed.pt"),
    }


def test_forms_of_a_batch(saved: Path, tmp_path: Path) -> None:
    for form, name in forms(tmp_path).items():
        status, found = figures(tmp_path, saved / "llama", "--batch", name)
        assert status == 0, form
        rows = sum(map(len, ROWS)) if form != "tensor.pt" else len(ROWS) * max(map(len, ROWS))
        assert found["tree"]["num_row_tokens"] == rows and found["tree"]["num_rows"] == len(ROWS), form
        assert [note for note in found["notes"] if "labels left out" in note] or form != "packed.pt"


def test_a_gradient_that_stops_at_keys_is_named(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = rewrite.tree_attention

    def wrong(query: Tensor, key: Tensor, value: Tensor, context: object, **options: object) -> Tensor:
        return right(query, key.detach(), value, context, **options)

    monkeypatch.setattr(rewrite, "tree_attention", wrong)
    for name, dtype in (("llama", "float32"), ("llama", "bfloat16"), ("qwen3_moe", "bfloat16")):
        status, found = figures(tmp_path, saved / name, "--dtype", dtype, *SHAPE)
        assert status == 1 and found["failed"][0].endswith("k_proj.weight")
        worst = next(item for item in found["differences"] if item["name"] == found["failed"][0])
        assert worst["relative"] == 1.0 and not worst["passed"]
        assert "log-probs" not in found["failed"]  # the forward is right
        printed = capsys.readouterr().out
        assert "over their bound, worst first: model.layers." in printed and "OVER" in printed
    assert verify(saved / "llama", *SHAPE, "--tolerance", "1e-3") == 1


def test_a_small_fault_of_the_forward_is_found(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part in ten thousand: a bound chosen for comfort would let it through."""
    right = rewrite.tree_attention
    monkeypatch.setattr(rewrite, "tree_attention", lambda *args, **options: right(*args, **options) * 1.0001)
    status, found = figures(tmp_path, saved / "llama", *SHAPE)
    assert status == 1 and {"log-probs", "lm_head.weight"} <= set(found["failed"])


def test_a_given_tolerance_leaves_the_truth_out(saved: Path, tmp_path: Path) -> None:
    status, found = figures(tmp_path, saved / "llama", *SHAPE, "--tolerance", "1e-4")
    assert status == 0 and found["truth"] is None and set(found["seconds"]) == {"unmodified", "transformed"}
    assert {item["bound"] for item in found["differences"]} == {1e-4}
    status, found = figures(tmp_path, saved / "llama", *SHAPE, "--tolerance", "1e-12")
    assert status == 1 and "log-probs" in found["failed"]


def test_nothing_finite_to_compare_with(saved: Path, tmp_path: Path) -> None:
    """Eager float64 attention at padding outside of a window: NaN in the unmodified model, not in ours."""
    options = ["--attn", "eager", "--dtype", "float64", "--padding", "left", *SHAPE]
    status, found = figures(tmp_path, saved / "gemma2", *options)
    assert status == 1 and "values that are not finite, so there is nothing to compare with" in found["verdict"]


@pytest.mark.parametrize("strict", ["--strict", "--no-strict"])
def test_a_refused_model(saved: Path, tmp_path: Path, strict: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = figures(tmp_path, saved / "bloom", strict, *SHAPE)
    assert status == 3 and found["verdict"].startswith("nothing was shared: the model is refused")
    (refusal,) = found["refusals"]
    assert refusal["class_name"] == "BloomBlock" and "ALiBi" in refusal["reason"]
    assert "ALiBi" in capsys.readouterr().out


def test_an_encoder_decoder_model_is_refused(saved: Path, tmp_path: Path) -> None:
    status, found = figures(tmp_path, "--config", saved / "t5", "--random", "--class", "AutoModel", *SHAPE)
    assert status == 3 and "is an encoder-decoder model" in found["reason"]


def test_batches_that_share_nothing(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    different = written(tmp_path / "a.json", [[row + 3] * 9 for row in range(4)])
    status, found = figures(tmp_path, saved / "llama", "--batch", different)
    assert status == 3 and found["reason"] == "the batch shares nothing: no row shares a prefix"
    assert found["differences"] == [] and found["tree"]["shares"] is False
    short = written(tmp_path / "b.json", [[3, 4, 5, 6 + row] for row in range(4)])
    assert verify(saved / "llama", "--batch", short) == 3
    assert "in runs too short to pay; --share-all shares these too" in capsys.readouterr().out
    assert verify(saved / "llama", "--batch", short, "--share-all") == 0


def test_a_batch_that_strict_refuses_shares_nothing(saved: Path, tmp_path: Path) -> None:
    batch = pad(ROWS, "right", 0, "")
    mask = batch.attention_mask.clone()
    mask[1, 4] = 0
    torch.save({"input_ids": batch.input_ids, "attention_mask": mask}, tmp_path / "holes.pt")
    for strict in ("--strict", "--no-strict"):
        status, found = figures(tmp_path, saved / "llama", "--batch", tmp_path / "holes.pt", strict)
        assert status == 3 and "row 1 has a hole at column 4" in found["reason"]


def test_the_original_forward_counts_as_not_shared(saved: Path, tmp_path: Path) -> None:
    """gpt_oss does not separate packed rows."""
    status, found = figures(tmp_path, saved / "gpt_oss", "--batch", forms(tmp_path)["packed.pt"])
    assert status == 3 and "do not look at position_ids" in found["reason"] and found["fallbacks"]


def test_a_kernel_that_cannot_run_counts_as_not_shared(saved: Path, tmp_path: Path) -> None:
    status, found = figures(tmp_path, saved / "llama", "--kernel", "cudnn", *SHAPE)
    assert status == 3 and "kernel 'cudnn' cannot run this attention" in found["reason"]


def test_dropout_of_training_is_noted(tmp_path: Path) -> None:
    config_of("llama", attention_dropout=0.1).save_pretrained(tmp_path)
    status, found = figures(tmp_path, "--config", tmp_path, "--random", *SHAPE)
    assert status == 0
    assert [note for note in found["notes"] if "self_attn.attention_dropout is 0.1, which is not shared" in note]


def test_log_probs_in_chunks_are_those_of_the_models_own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft-capped logits, a scaled head: whatever the model's forward does to them. float64: 1e-15 a rounding."""
    monkeypatch.setattr(passes, "HEAD_TOKENS", 7)
    batch = pad([row[:40] for row in ROWS], "right", 0, "")
    length = batch.input_ids.shape[1]
    piece = Piece(batch.inputs(), tuple((row, row * length, length) for row in range(len(ROWS))))
    model = build("gemma2", torch.float64, final_logit_softcapping=3.0)
    with passes.WideCasts():
        values, loss, _ = passes.run(model, [piece], piece.inputs["input_ids"].numel(), 1.0)
        found = passes.harvest(model)
        logits = model(**batch.inputs()).logits.log_softmax(-1)[:, :-1]
    logps = logits.gather(-1, batch.input_ids[:, 1:, None])[..., 0].flatten()
    weights = torch.cat([passes._weights(row, (length - 1,)) for row in range(len(ROWS))])
    expected = -(weights * logps).sum() / batch.input_ids.numel()
    expected.backward()
    torch.testing.assert_close(values, logps.detach(), rtol=1e-10, atol=1e-10)
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_a_model_is_left_as_it_was(saved: Path) -> None:
    from augtree_fx.verify.check import Options, check

    model = AutoModelForCausalLM.from_pretrained(saved / "llama").eval()
    before = [(type(module), list(vars(module))) for module in model.modules()]
    values = [parameter.detach().clone() for parameter in model.parameters()]
    assert check(model, pad(ROWS, "right", 0, ""), Options()).status == 0
    assert [(type(module), list(vars(module))) for module in model.modules()] == before
    assert all(torch.equal(a, b.float()) for a, b in zip(values, model.parameters(), strict=True))
    assert not augtree_fx.explain(model).transformed


def test_what_is_not_a_number_never_passes() -> None:
    nan = float("nan")
    assert not Difference("x", nan, nan, nan, nan, nan).passed
    assert Difference("x", nan, nan, nan, nan, nan).excess == float("inf")
    assert Difference("x", 0.0, 0.0, 0.0, 0.0, 0.0).passed and Difference("x", 0.0, 0.0, 0.0, 0.0, 0.0).excess == 0.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give MODEL (a Hub id or a folder), or --config FILE --random; one of the two"),
        (["a/b", "--config", "c.json", "--random"], "give MODEL (a Hub id or a folder), or --config FILE --random"),
        (["--config", "c.json"], "--config has no weights: add --random"),
        (["--config", "none.json", "--random"], "there is no none.json; give a folder with config.json, or a Hub id"),
        (["./none"], "there is no ./none; give a folder with config.json, or a Hub id such as Qwen/Qwen3-0.6B"),
        (["a/b", "--class", "ForImages"], "must be one of AutoModelForCausalLM, AutoModel, AutoModelForSequenceClass"),
        (["a/b", "--class", "AutoModelForImages"], "got 'AutoModelForImages'"),
        (["a/b", "--tolerance", "tight"], "must be a number of at least 0, such as 1e-5, got 'tight'"),
        (["a/b", "--tolerance", "nan"], "must be a number of at least 0, such as 1e-5, got 'nan'"),
        (["a/b", "--batch", "x.json", "--shape", "8x2x2"], "--batch and --shape both say what the batch is"),
        (["a/b", "--shape", "8x2"], "a shape is PROMPTxBRANCHESxRESPONSE in tokens"),
        (["a/b", "--json", "/nowhere/x.json"], "--json: there is no folder /nowhere to write x.json into"),
    ],
)
def test_what_a_wrong_command_line_says(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert text in usage_error(capsys, *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what to do without CUDA")
def test_without_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert "finds no CUDA device; use --device cpu" in usage_error(capsys, "a/b", "--device", "cuda")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[[1, 2", "is not JSON: Expecting ',' delimiter: line 1 column 7 (char 6); it must be a JSON list of rows"),
        ("[]", "the list of rows is empty"),
        ([[], []], "every row is empty"),
        ([1, 2], "row 0 must be a list of token ids, got 1"),
        ([[1, 2], [3, "x"]], "token ids are whole numbers, row 1 has 'x' at 1"),
        ([[1, True]], "token ids are whole numbers, row 0 has True at 1"),
        ([[1, 2], [3, 97]], "from 0 to 96, the model's vocabulary, row 1 has 97 at column 1; is it a batch of another"),
        ([[1, -100]], "row 0 has -100 at column 1"),
        ([[5], [5]], "no row has two tokens, so there is no next token to score"),
        ({"ids": [[1]]}, "holds a dict of ids; it must be a JSON list of rows of token ids, a JSON object or a .pt"),
        (3, "holds 3; it must be"),
        ({"input_ids": 3}, "input_ids must be a list of rows or a tensor, got int"),
        ({"input_ids": [[1, 2], [3]], "attention_mask": [[1, 1]]}, "rows of input_ids differ in length; pad them"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1], [1]]}, "rows of attention_mask differ in length"),
        (
            {"input_ids": [[1, 2]], "attention_mask": [[1]]},
            "attention_mask must have the shape of input_ids (1, 2), got",
        ),
    ],
)
def test_what_a_wrong_json_batch_says(
    saved: Path, tmp_path: Path, content: object, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = written(tmp_path / "batch.json", content)
    said = usage_error(capsys, saved / "llama", "--batch", batch, "--share-all")
    assert text in said and "--batch" in said


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (torch.ones(2, 3), "input_ids must be whole numbers, got torch.float32"),
        (torch.ones(2, 3, 4).long(), "input_ids must be [batch, sequence], got shape (2, 3, 4)"),
        (torch.ones(0, 3).long(), "input_ids is empty, its shape is (0, 3)"),
        ({"tokens": torch.ones(2, 3)}, "holds a dict of tokens; it must be"),
        (Path("x"), "cannot be read: "),
    ],
)
def test_what_a_wrong_tensor_batch_says(
    saved: Path, tmp_path: Path, content: object, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "batch.pt")
    assert text in usage_error(capsys, saved / "llama", "--batch", tmp_path / "batch.pt")


def test_what_missing_and_broken_files_say(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no file none.json; it is a JSON list" in usage_error(
        capsys, saved / "llama", "--batch", "none.json"
    )
    broken = written(tmp_path / "broken.pt", "not a pickle")
    assert "cannot be read: " in usage_error(capsys, saved / "llama", "--batch", broken)
    assert "has no config.json; give a folder that save_pretrained wrote" in usage_error(capsys, tmp_path)
    config = written(tmp_path / "c.json", "{")
    assert "cannot be loaded as AutoModelForCausalLM: " in usage_error(capsys, "--config", config, "--random")
    assert "is a file; for random weights from a config: --config" in usage_error(capsys, config)
    unknown = written(tmp_path / "d.json", {"model_type": "none_such"})
    assert "none_such" in usage_error(capsys, "--config", unknown, "--random")
    wrong = usage_error(capsys, "--config", saved / "t5", "--random")
    assert "AutoModelForCausalLM has no model for T5Config" in wrong and "choose another --class" in wrong


def test_a_hub_id_without_a_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your connection.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", offline)
    said = usage_error(capsys, "nobody/nothing")
    assert "nobody/nothing is no folder here, and cannot be had from the Hub: We couldn't connect to" in said
    assert "Without a network give a folder that save_pretrained wrote, or --config FILE --random" in said


def test_random_batches_stay_in_the_vocabulary() -> None:
    from augtree_fx.examples.bench.shapes import Shape

    batch = draw([Shape(9, 3, 4), Shape(5, 2, 2)], VOCABULARY, "left", 0, 0)
    assert int(batch.input_ids.max()) < VOCABULARY and batch.input_ids.shape == (5, 13)
    assert batch.attention_mask[3].tolist() == [0] * 6 + [1] * 7
    assert batch.position_ids[3].tolist() == [0] * 6 + list(range(7))
