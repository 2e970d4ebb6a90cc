"""What a run tells: console lines, the progress bar, metrics.jsonl, Weights & Biases, and the plot.

In:  events from the training loop, each a name and numbers.
Out: metrics.jsonl, one JSON object a line, for machines; the rest for people. Nobody has to parse the console.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from configurator import UserError


def progress_bar(label: str, unit: str, total: int | None = None, initial: int = 0, enabled: bool = True) -> Any:
    """A tqdm bar; silent where nobody watches (no terminal)."""
    from tqdm import tqdm

    silent = not (enabled and sys.stderr.isatty())
    return tqdm(
        desc=label, total=total, initial=initial, unit=unit, unit_scale=unit == "B", disable=silent, dynamic_ncols=True
    )


def format_duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `2 d 5 h`."""
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if minutes < 1:
        return f"{int(seconds)} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def perplexity(loss: float) -> float:
    """e to the loss; inf where that is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def evaluation_line(train: float, val: float) -> str:
    """Losses and perplexity, for people."""
    beyond = " (beyond what a number can hold: the loss is very high)" if perplexity(val) == math.inf else ""
    return f"train loss {train:.4f}, val loss {val:.4f}, val perplexity {perplexity(val):,.2f}{beyond}"


class RunLog:
    """Takes the events of one run. Does nothing but pass time on ranks other than the first (`enabled=False`)."""

    def __init__(self, folder: Path, enabled: bool, resumed_at: int | None = None) -> None:
        self.folder, self.enabled, self.wandb, self.bar = Path(folder), enabled, None, None
        self.path = self.folder / "metrics.jsonl"
        self.history: list[dict[str, Any]] = []
        if not enabled:
            return
        if resumed_at is not None and self.path.exists():  # what came after the checkpoint will come again
            self.history = [event for event in read_metrics(self.path) if event["iter"] <= resumed_at]
        partial = self.path.with_name("metrics.jsonl.tmp")
        partial.write_text("".join(map(to_json_line, self.history)), encoding="utf-8")
        os.replace(partial, self.path)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115, closed by close()

    def start_wandb(self, project: str, name: str | None, config: dict[str, Any], run_id: str | None) -> str | None:
        """Opens a Weights & Biases run and returns its id, with which a resumed run goes on in the same place."""
        if not self.enabled:
            return run_id
        wandb = import_wandb()
        settings = {"project": project, "name": name, "config": config, "id": run_id, "dir": str(self.folder)}
        try:
            self.wandb = wandb.init(**settings, resume="allow")
        except Exception as error:  # of its own kinds: no key, no network
            said = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(
                f"wandb_log=true, but Weights & Biases says: {said} (wandb login, WANDB_MODE=offline keeps the numbers "
                "here, --wandb_log=false does without)"
            ) from error
        return self.wandb.id

    def start_bar(self, total: int, initial: int) -> None:
        """Opens the progress bar."""
        self.bar = progress_bar("training", " steps", total, initial, self.enabled)

    def say(self, line: str) -> None:
        """Prints a line for people, above the bar."""
        if self.enabled and self.bar is not None and not self.bar.disable:
            self.bar.write(line, file=sys.stdout)
        elif self.enabled:
            print(line, flush=True)

    def event(self, event: str, iteration: int, **fields: Any) -> None:
        """Appends one line to metrics.jsonl; numbers go to Weights & Biases too."""
        if not self.enabled:
            return
        record = {"event": event, "iter": iteration} | fields
        self.history.append(record)
        self.file.write(to_json_line(record))
        self.file.flush()
        numbers = {f"{event}/{key}": value for key, value in fields.items() if isinstance(value, (int, float))}
        if self.wandb is not None and event in ("train", "eval"):
            self.wandb.log(numbers, step=iteration)

    def show(self, before: str, numbers: str, after: str) -> None:
        """Puts the newest numbers behind the bar; where there is none, prints them as a line."""
        if self.bar.disable:
            self.say(before + numbers + after)
        else:
            self.bar.set_postfix_str(numbers, refresh=False)

    def plot(self) -> None:
        """Draws loss.png from the history: training loss, validation loss, learning rate."""
        if self.enabled:
            plot_history(self.history, self.folder / "loss.png")

    def close(self, exit_code: int = 0) -> None:
        """Closes what is open."""
        if self.bar is not None:
            self.bar.close()
        if self.enabled:
            self.file.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=exit_code)


def to_json_line(record: dict[str, Any]) -> str:
    """One line of metrics.jsonl; JSON has no word for inf and nan, so they are written as text."""
    strange = {k: str(v) for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    return json.dumps(record | strange, ensure_ascii=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events of a metrics.jsonl; lines that are none, such as a last one cut by a kill, are left out."""
    events = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or not {"event", "iter"} <= event.keys():
            continue
        strange = {k: float(v) for k, v in event.items() if v in ("inf", "-inf", "nan")}
        events.append(event | strange)
    return events


def import_wandb() -> Any:
    """The wandb package. Raises UserError where it is missing, before anything was trained."""
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "wandb_log=true, but wandb is not installed: pip install wandb, or --wandb_log=false"
        ) from error
    return wandb


def plot_history(history: list[dict[str, Any]], path: Path) -> None:
    """Writes the plot of a run: training loss, validation loss with its minimum, and below them the learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    train = [event for event in history if event["event"] == "train"]
    evals = [event for event in history if event["event"] == "eval"]
    figure, (top, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=(3, 1), constrained_layout=True
    )
    top.plot([e["iter"] for e in train], [e["loss"] for e in train], color="#9ab", linewidth=1, label="training step")
    for key, label, colour in (("train_loss", "training", "#1f5fa8"), ("val_loss", "validation", "#c8501e")):
        top.plot([e["iter"] for e in evals], [e[key] for e in evals], ".-", color=colour, label=f"{label}, evaluated")
    mark_best(top, evals)
    mark_warnings(top, history)
    top.set_ylabel("loss, nats per token")
    top.legend(frameon=False)
    top.grid(alpha=0.25)
    below.plot([e["iter"] for e in train], [e["lr"] for e in train], color="#555", linewidth=1)
    below.set_ylabel("learning rate")
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    below.set_xlabel("step")
    below.grid(alpha=0.25)
    partial = path.with_name(path.name + ".tmp")
    figure.savefig(partial, format="png", dpi=110)
    pyplot.close(figure)
    os.replace(partial, path)


def mark_best(axes: Any, evals: list[dict[str, Any]]) -> None:
    """Names the lowest validation loss."""
    finite = [e for e in evals if math.isfinite(e["val_loss"])]
    if finite:
        best = min(finite, key=lambda e: e["val_loss"])
        axes.annotate(
            f"best {best['val_loss']:.3f} (perplexity {perplexity(best['val_loss']):,.1f})",
            (best["iter"], best["val_loss"]),
            xytext=(0, 34),
            textcoords="offset points",
            ha="right" if best["iter"] > 0.6 * evals[-1]["iter"] else "left",
            arrowprops={"arrowstyle": "-", "color": "#888"},
        )


def mark_warnings(axes: Any, history: list[dict[str, Any]]) -> None:
    """Draws a line where each warning was told."""
    marks = axes.get_xaxis_transform()  # x in steps, y from 0 to 1 over the height
    for warning in (event for event in history if event["event"] == "warning"):
        axes.axvline(warning["iter"], color="#b00", linewidth=0.8, linestyle=":")
        label = warning["kind"].replace("_", " ")
        axes.text(warning["iter"], 0.98, f" {label}", color="#b00", fontsize=8, rotation=90, va="top", transform=marks)
