"""Command line of ``verify``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from augtree_fx import kernels
from augtree_fx.costs import CostModel
from augtree_fx.examples.bench import timing
from augtree_fx.examples.bench.shapes import parse_shape
from augtree_fx.verify import UsageError, batches, check, loading, passes, report
from augtree_fx.verify.batches import Batch

DTYPES = ("bfloat16", "float16", "float32", "float64")
SHAPES = ("256x4x32", "128x4x48")  # two groups; responses long enough that a prompt pays on any device
_STATUS = """exit status:
  0  exact, and something was shared
  1  differs, or the unmodified model gives nothing to compare with
  2  usage: no such file, model or option
  3  nothing was shared, or the model is refused; the reason is the last line"""


def main(arguments: Sequence[str], prog: str = "python -m augtree_fx verify") -> int:
    """Check a model on a batch.

    Returns:
        0 exact and shared, 1 differs, 3 nothing shared. A usage error ends in ``SystemExit(2)``.
    """
    parser = _parser(prog)
    given = parser.parse_args(arguments)
    try:
        return _run(given)
    except UsageError as error:
        parser.error(str(error))
    except torch.OutOfMemoryError as error:
        parser.error(
            f"out of memory: {str(error).splitlines()[0]}; --tolerance leaves the pass in more digits out, a batch of "
            "fewer rows or --device cpu needs less"
        )


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, epilog=_STATUS, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run your model on your batch, unmodified and transformed, and compare log-probs, loss and the\n"
        "gradient of every parameter. The bound is measured: at most twice the unmodified model's own\n"
        "error against itself in float32 (float64 if it is float32). The sharpest check is --dtype float32.",
    )  # fmt: skip
    _add_model(parser)
    _add_batch(parser)
    parser.add_argument(
        "--kernel", choices=kernels.NAMES, default="auto", help="of the transformed model; default auto"
    )
    parser.add_argument(
        "--strict", action=argparse.BooleanOptionalAction, default=True, help="as transform takes it; default --strict"
    )
    parser.add_argument("--share-all", action="store_true", help="share prefixes that are too short to pay, too")
    parser.add_argument(
        "--tolerance", type=_tolerance, metavar="REL",
        help="largest relative difference (2-norm) between the two passes, in place of the measured bound; the pass in "
        "more digits is left out, which saves memory",
    )  # fmt: skip
    parser.add_argument("--warm-ups", type=int, choices=range(10), default=1, metavar="N", help="default 1")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="Hub id, or folder that save_pretrained wrote")
    parser.add_argument("--config", metavar="FILE", help="config.json (or its folder) in place of MODEL, with --random")
    parser.add_argument("--random", action="store_true", help="random weights, none of them trivial")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and tokens; default 0")
    parser.add_argument(
        "--class", dest="auto_class", type=_auto_class, default=loading.CLASSES[0], metavar="CLASS",
        help=f"one of {', '.join(loading.CLASSES)}; default the first, AutoModel may be left out of ForX",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default bfloat16, on the CPU float32")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    parser.add_argument(
        "--attn", choices=["sdpa", "eager"], help="of the unmodified model; default: transformers chooses"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch", metavar="FILE",
        help="JSON: rows of token ids, or an object of input_ids, attention_mask, position_ids; or a .pt file of "
        "input_ids, or of a dict of these tensors",
    )  # fmt: skip
    parser.add_argument(
        "--shape", type=parse_shape, action="append", metavar="PxNxR",
        help="without --batch: a group of random tokens, prompt x rows x response; may be given several times; default "
        f"{' and '.join(SHAPES)}",
    )  # fmt: skip
    parser.add_argument("--padding", choices=["right", "left"], default="right", help="of rows of different length")


def _auto_class(name: str) -> str:
    full = name if name.startswith("AutoModel") else f"AutoModel{name}"
    if full not in loading.CLASSES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(loading.CLASSES)}, got {name!r}")
    return full


def _tolerance(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, such as 1e-5, got {word!r}")
    return value


def _source(given: argparse.Namespace) -> loading.Source:
    if (given.model is None) == (given.config is None):
        raise UsageError("give MODEL (a Hub id or a folder), or --config FILE --random; one of the two")
    if given.config is not None and not given.random:
        raise UsageError("--config has no weights: add --random")
    if given.batch is not None and given.shape:
        raise UsageError("--batch and --shape both say what the batch is: give one of them")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device cuda: torch {torch.__version__} finds no CUDA device; use --device cpu")
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, given.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    place = given.model if given.config is None else given.config
    return loading.Source(
        place, given.auto_class, given.random, dtype, device, given.attn, given.trust_remote_code, given.seed
    )


def _batch(given: argparse.Namespace, model: Any) -> Batch:
    config = model.config.get_text_config()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    pad_id = next((x for x in (config.pad_token_id, config.eos_token_id) if isinstance(x, int) and x >= 0), 0)
    if given.batch is None:
        shapes = given.shape or [parse_shape(shape) for shape in SHAPES]
        batch = batches.draw(shapes, vocabulary, given.padding, pad_id, given.seed)
    else:
        batch = batches.read(given.batch, given.padding, pad_id)
    batches.check_ids(batch, vocabulary)
    return batch


def _run(given: argparse.Namespace) -> int:
    source = _source(given)
    _writable(given.json)
    model = loading.load(source)
    batch = _batch(given, model)
    if _needs_pad_id(model):
        model.config.get_text_config().pad_token_id = _unused_id(batch, model)
    attention = model.config.get_text_config()._attn_implementation
    dtype = str(source.dtype).removeprefix("torch.")
    header = {
        "model": str(source), "class": type(model).__name__, "dtype": dtype, "attention": attention,
        "kernel": given.kernel, "strict": given.strict, "batch": batch.source, "padding": given.padding,
        "environment": timing.environment(source.device),
    }  # fmt: skip
    costs = CostModel.free() if given.share_all else None
    options = check.Options(given.kernel, given.strict, costs, given.tolerance, given.warm_ups)
    found = check.check(model, batch.to(source.device), options)
    found.notes[:0] = batch.notes
    scored = "log-probs of next tokens" if passes.scores_tokens(model) else "outputs"
    lines = [
        f"{type(model).__name__} ({source}), {dtype}, {attention} attention; {timing.describe(header['environment'])}",
        f"batch: {batch.source}; compared: {scored}, loss, gradients; eval(), so no dropout and no router noise",
    ]
    print(report.text(lines, found))
    if given.json:
        Path(given.json).write_text(json.dumps(report.figures(header, found), indent=1) + "\n", encoding="utf-8")
    return found.status


def _writable(name: str | None) -> None:
    if name is not None and not Path(name).resolve().parent.is_dir():
        raise UsageError(f"--json: there is no folder {Path(name).resolve().parent} to write {Path(name).name} into")


def _needs_pad_id(model: Any) -> bool:
    """A classifier of rows looks for their last token that is not padding, and refuses batches without such an id."""
    return model.config.get_text_config().pad_token_id is None and "ForSequenceClassification" in type(model).__name__


def _unused_id(batch: Batch, model: Any) -> int:
    """What is at masked slots, or an id that the batch does not have."""
    if batch.attention_mask is not None and bool((batch.attention_mask == 0).any()):
        return int(batch.input_ids[batch.attention_mask == 0][0])
    used = set(batch.input_ids.unique().tolist())
    free = [x for x in range(model.get_input_embeddings().weight.shape[0]) if x not in used]
    if not free:
        raise UsageError("the config has no pad_token_id, and the batch uses every id: set pad_token_id in the config")
    return free[0]
