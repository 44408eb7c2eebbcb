"""Measurement for `grpo_trl.py` and `trl_long_context.py`: records of each step, how two runs are compared, printed."""

import statistics
import time
import zlib
from dataclasses import asdict, dataclass

import torch
from tabulate import tabulate
from transformers import TrainerCallback

# GRPO losses are averages of advantages of either sign, each about 1, times ratios near 1: they cancel to almost
# nothing, and rounding noise divided by that says nothing. Loss differences are relative to at least this much.
LOSS_FLOOR = 0.01


@dataclass
class StepRecord:
    """One optimizer step of one run.

    Args:
        input_tokens: tokens of the rows, padding excluded, N(P+R) for one group.
        unique_tokens: the same with each distinct prompt counted once, P+NR for one group.
        samples_checksum: CRC-32 of the padded token ids, to tell whether two runs drew the same samples.
        computed_tokens: positions that went through the decoder layers.
        update_s: seconds of forward, loss, backward and gradient norm.
    """

    input_tokens: int
    unique_tokens: int
    samples_checksum: int
    computed_tokens: int = 0
    update_s: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0

    @classmethod
    def from_batches(cls, batches):
        """Count the batches of all ranks from their rows alone, never from the library's layout.

        Args:
            batches: of each rank `input_ids` and `attention_mask`, `[rows, length]`, as the trainer padded them, and
                `labels`, `[rows, length]`, -100 where it scores nothing, that is on the prompt and on padding.
        """
        prompts, input_tokens, prompt_tokens, checksum = set(), 0, 0, 0
        for batch in batches:
            is_prompt = batch["attention_mask"].bool() & (batch["labels"] == -100)
            prompts |= {tuple(row[keep].tolist()) for row, keep in zip(batch["input_ids"], is_prompt, strict=True)}
            input_tokens += int(batch["attention_mask"].sum())
            prompt_tokens += int(is_prompt.sum())
            tokens = batch["input_ids"][batch["attention_mask"].bool()]  # ranks may pad to one width
            checksum = zlib.crc32(tokens.numpy().tobytes(), checksum)
        repeated_tokens = prompt_tokens - sum(map(len, prompts))
        return cls(input_tokens, input_tokens - repeated_tokens, checksum)


def alone(value):
    """What each rank has, in a list, where there is one."""
    return [value]


class UpdateMeter(TrainerCallback):
    """Times the update stage of each step and counts the tokens that the decoder layers see in it.

    Only public hooks, so that the trainer stays as it is: the stage begins when the model is called with gradients
    enabled (sampling and scoring old log-probabilities run without) and ends just before the optimizer steps.

    Args:
        gather: gives the values of all ranks for this rank's one; tokens are added up, times are those of the slowest.
    """

    def __init__(self, model, progress, gather=alone):
        self.records, self.first_batch, self.progress, self._gather = [], None, progress, gather
        self._running, self._begin_s, self._current = False, 0.0, None
        first_layer = model.get_decoder().layers[0]
        self._handles = [
            model.register_forward_pre_hook(self._on_model, with_kwargs=True),
            first_layer.register_forward_pre_hook(self._on_first_layer, with_kwargs=True),
            model.register_forward_hook(self._on_model_end),
        ]

    def _on_model(self, model, args, kwargs):
        if not torch.is_grad_enabled():
            return
        batch = {name: kwargs[name] for name in ("input_ids", "attention_mask")}
        self.first_batch = self.first_batch or batch
        batch = {name: kwargs[name].cpu() for name in (*batch, "labels")}
        self._running, self._current = True, StepRecord.from_batches(self._gather(batch))
        self._begin_s = self._now()

    def _on_model_end(self, model, args, output):
        self._running = False  # layers that are computed again in backward see no new tokens

    def _on_first_layer(self, layer, args, kwargs):
        if self._running:
            hidden_states = args[0] if args else kwargs["hidden_states"]
            self._current.computed_tokens += hidden_states.shape[:-1].numel()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._current.update_s = max(self._gather(self._now() - self._begin_s))
        self._current.computed_tokens = sum(self._gather(self._current.computed_tokens))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs:
            self._current.loss, self._current.grad_norm = logs["loss"], logs["grad_norm"]
            self.records.append(self._current)
            self.progress.update()

    def remove(self):
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _now():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def relative_difference(actual, expected, floor=0.0):
    """Return `|actual - expected| / max(|expected|, floor)`; 0 when equal, NaN when either is NaN."""
    difference = abs(actual - expected)
    return difference / max(abs(expected), floor) if difference else 0.0


def summarize(plain, shared, tolerance):
    """Compare two runs of the same job.

    Args:
        plain, shared: `StepRecord` lists of equal length, without and with the library.
        tolerance: largest relative difference of losses and gradient norms that passes.

    Returns:
        A dict that `json` can write: the records of both runs and the figures below the tables. Times are medians over
        steps, tokens sums. `ceiling` is the gain if time were proportional to unpadded tokens; a run can pass it, for
        the plain one also computes padding and needs a dense mask for it.
    """
    steps = list(zip(plain, shared, strict=True))
    loss_differences = [relative_difference(s.loss, p.loss, LOSS_FLOOR) for p, s in steps]
    grad_norm_differences = [relative_difference(s.grad_norm, p.grad_norm) for p, s in steps]
    same_samples = all(p.samples_checksum == s.samples_checksum for p, s in steps)
    times = [statistics.median(record.update_s for record in run) for run in (plain, shared)]
    ceiling = sum(p.input_tokens for p in plain) / sum(p.unique_tokens for p in plain)
    return {
        "plain": [asdict(record) for record in plain],
        "shared": [asdict(record) for record in shared],
        "loss_difference": max(loss_differences),
        "grad_norm_difference": max(grad_norm_differences),
        "same_samples": same_samples,
        "tolerance": tolerance,
        # One by one, because max() can lose a NaN; a comparison with NaN fails.
        "passed": same_samples and all(d <= tolerance for d in loss_differences + grad_norm_differences),
        "update_s": times,
        "computed_tokens": [sum(record.computed_tokens for record in run) for run in (plain, shared)],
        "ceiling": ceiling,
        "speed_up": times[0] / times[1],
        "share_of_ceiling": times[0] / times[1] / ceiling,
    }


def format_report(plain, shared, summary):
    """Return the report as text; without parity there is no speed to speak of, and only the differences are shown."""
    parts = [_format_parity(plain, shared), _format_verdict(summary)]
    if summary["passed"]:
        parts.insert(1, _format_cost(plain, shared, summary))
    return "\n\n".join(parts)


def _format_parity(plain, shared):
    rows = [
        (
            step,
            *(p.loss, s.loss, relative_difference(s.loss, p.loss, LOSS_FLOOR)),
            *(p.grad_norm, s.grad_norm, relative_difference(s.grad_norm, p.grad_norm)),
        )
        for step, (p, s) in enumerate(zip(plain, shared, strict=True), start=1)
    ]
    headers = ["step", "loss\nplain", "\naugtree", "\nrel diff", "grad norm\nplain", "\naugtree", "\nrel diff"]
    formats = ("", ".7f", ".7f", ".1e", ".7f", ".7f", ".1e")
    return tabulate(rows, headers, floatfmt=formats)


def _format_cost(plain, shared, summary):
    def spread(run):
        seconds = [record.update_s for record in run]
        return f"{min(seconds):.2f} .. {max(seconds):.2f}"

    tokens, times = summary["computed_tokens"], summary["update_s"]
    per_step = [f"{total / len(plain):,.0f}" for total in tokens]
    rows = [
        ["tokens computed, per step", *per_step, f"{tokens[0] / tokens[1]:.2f}x"],
        ["update, median s per step", *(f"{seconds:.2f}" for seconds in times), f"{summary['speed_up']:.2f}x"],
        ["update, fastest .. slowest s", spread(plain), spread(shared), ""],
    ]
    return tabulate(rows, ["", "plain", "augtree", "ratio"], disable_numparse=True, colalign=("left", *["right"] * 3))


def _format_verdict(summary):
    if not summary["same_samples"]:
        return "FAILED: the runs drew different samples, so nothing else can be compared"
    differences = (
        f"largest relative difference: loss {summary['loss_difference']:.1e} (of at least {LOSS_FLOOR}), "
        f"gradient norm {summary['grad_norm_difference']:.1e}; tolerance {summary['tolerance']:.0e}"
    )
    if not summary["passed"]:
        return f"{differences}\nFAILED: losses or gradient norms differ"
    share = 100 * summary["share_of_ceiling"]
    return (
        f"token ratio ceiling N(P+R)/(P+NR) of these batches: {summary['ceiling']:.2f}x\n"
        f"speed-up of the update stage: {summary['speed_up']:.2f}x, {share:.0f}% of the ceiling\n"
        f"{differences}\n"
        "PASSED: same losses and gradient norms"
    )
