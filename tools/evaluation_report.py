"""report.html: a run, or several side by side, in one file that opens anywhere without a network.

In:  `RunRecord`s, that is metrics, samples, settings and evaluations.
Out: a page without scripts and outside files: curves, tables, samples, settings, data, machine and warning signs.
"""

from __future__ import annotations

import dataclasses
import html
import math
import re
from pathlib import Path
from typing import Any

from configurator import UserError
from dataset import write_atomically
from diagnostics import series
from progress import format_duration, perplexity
from tools.evaluation_tables import MISSING, Table, make_tables
from tools.report_charts import Mark, Series, chart
from tools.run_record import RunRecord

MADE_BY = "<!-- made by tools.evaluate_model: it may be replaced -->"
FLAG = re.compile(r"(--\w+(?:=[\w./]*\w)?)")  # not to be broken at its hyphens
SAMPLES = 12  # of a run that are shown, evenly over its course
STYLE = Path(__file__).with_name("report.css")


def write_report(run: RunRecord, path: str | None, overwrite: bool) -> Path:
    """Writes the report of a run and returns its path. Raises UserError where another file has its name."""
    target = Path(path) if path else run.folder / "report.html"
    tables = [table_html(table) for table in make_tables([run.results], [run.name])]
    parts = [
        warnings_html([run]),
        section("curves", "Course of training", curves(run)),
        section("evaluation", "Evaluation", "".join(tables)),
        section("written", "Samples for prompts", prompted_html(run)),
        section("samples", "Samples over the course of training", samples_html(run)),
        section("settings", "Settings", pairs_html("settings", "Settings of train.py", run.settings)),
        section("data", "Data", pairs_html("data", "", about(run).get("data") or {})),
        section("machine", "Machine", pairs_html("machine", "", machine_of(run))),
    ]
    return write_page(target, f"{run.name}: report", [head_html(run, parts), *parts], overwrite)


def write_comparison(runs: list[RunRecord], path: str | None, overwrite: bool) -> Path:
    """Writes the report of several runs side by side and returns its path."""
    target = Path(path) if path else runs[0].folder.parent / "comparison.html"
    names = [run.name for run in runs]
    tables = [table_html(table) for table in make_tables([run.results for run in runs], names)]
    last = "".join(f"<h3>{escape(run.name)}</h3>{sample_html(*run.samples[-1])}" for run in runs if run.samples)
    keys = sorted({key for run in runs for key in run.settings})
    rows = [[key, *(shown(run.settings.get(key, MISSING)) for run in runs)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    differing = (
        table_html(Table("", ["setting", *names], rows, [], "settings")) if rows else "<p>All settings are equal.</p>"
    )
    parts = [
        f"<h1>{escape(' · '.join(names))}</h1>",
        section("runs", "Runs", table_html(summary_table(runs))),
        warnings_html(runs),
        section("curves", "Course of training", compared_curves(runs)),
        section("evaluation", "Evaluation", "".join(tables)),
        section("samples", "What each wrote last", last),
        section("settings", "Settings that differ", differing),
    ]
    return write_page(target, "comparison of " + ", ".join(names), parts, overwrite)


def check_target(target: Path, overwrite: bool) -> None:
    """Raises UserError where a report may not be written: over a folder, or unasked over a file that is none."""
    if target.is_dir():
        raise UserError(f"--report={target} is a folder: name a file, {target / 'report.html'} perhaps")
    if target.exists() and not overwrite and MADE_BY not in target.read_text(encoding="utf-8", errors="replace")[:4000]:
        raise UserError(
            f"{target} is no report of this tool: --overwrite=true replaces it, --report= names another file"
        )


def write_page(target: Path, title: str, parts: list[str], overwrite: bool) -> Path:
    """Writes the page; an older report is replaced, another file of that name only when asked to."""
    check_target(target, overwrite)
    policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    head = f'<meta charset="utf-8">{policy}<meta name="viewport" content="width=device-width,initial-scale=1">'
    style = STYLE.read_text(encoding="utf-8")
    body = "".join(part for part in parts if part)
    page = (
        f'<!doctype html>\n{MADE_BY}\n<html lang="en"><head>{head}<title>{escape(title)}</title><style>{style}</style>'
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, f"{page}</head><body><main>{body}</main></body></html>\n".encode())
    return target


# --- parts of a page ------------------------------------------------------------------------------------------------


def escape(text: Any) -> str:
    """Text for HTML."""
    return html.escape(str(text))


def with_flags(message: str) -> str:
    """A message for HTML whose flags are not broken at their hyphens."""
    return FLAG.sub(r"<code>\1</code>", escape(message))


def section(name: str, title: str, content: str) -> str:
    """A section with its heading; nothing where it has no content."""
    return f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>\n' if content else ""


def table_html(table: Table) -> str:
    """A table with its notes; the rules of a measurement in smaller letters."""
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows, look = "", "" if any(table.head) else ' class="pairs"'
    for row in table.rows:
        rule = row[0].startswith("rule: ")
        cells = "".join(
            f'<td class="text">{escape(cell)}</td>' if len(cell) > 24 else f"<td>{escape(cell)}</td>" for cell in row
        )
        rows += f"<tr{' class=rule' if rule else ''}>{cells}</tr>"
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    return (
        f'<div class="scroll"><table id="table-{table.name}"{look}>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{notes}\n"
    )


def pairs_html(name: str, title: str, pairs: dict[str, Any]) -> str:
    """A table of names and values."""
    rows = [[key, shown(value)] for key, value in pairs.items()]
    return table_html(Table(title, ["", ""], rows, [], name)) if rows else ""


def shown(value: Any) -> str:
    """A value for people."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def about(run: RunRecord) -> dict[str, Any]:
    """What was evaluated, where and when."""
    return run.results.get("about") or {}


def machine_of(run: RunRecord) -> dict[str, Any]:
    """The machine and programs of the evaluation, and the speed of training."""
    found = {key: about(run)[key] for key in ("device", "machine", "software", "time") if key in about(run)}
    rates = [rate for _, rate in series(run.history, "train", "tokens_per_second")]
    mfu = [share for _, share in series(run.history, "train", "mfu")]
    if rates:
        found["training, tokens per second (median)"] = f"{sorted(rates)[len(rates) // 2]:,.0f}"
    if mfu:
        found["training, share of the peak (median mfu)"] = f"{sorted(mfu)[len(mfu) // 2]:.1%}"
    return found


def summary(run: RunRecord) -> dict[str, str]:
    """The run in a few numbers."""
    evals, train = series(run.history, "eval", "val_loss"), run.events("train")
    found = {}
    if evals:
        step, loss = min(evals, key=lambda e: e[1])
        found |= {"best validation loss": f"{loss:.4f}", "its perplexity": f"{perplexity(loss):,.2f}"}
        found |= {"at step": f"{step:,}"}
    if train:
        found |= {"steps": f"{train[-1]['iter']:,}", "tokens read": compact(train[-1].get("tokens") or 0)}
        found |= {"time": format_duration(train[-1].get("elapsed_seconds") or 0)}
    if "parameters" in about(run):
        found |= {"parameters": compact(about(run)["parameters"])}
    return found


def compact(count: int) -> str:
    """A count, from a million on in millions or billions."""
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:,.3g} {name}"
    return f"{count:,}"


def summary_table(runs: list[RunRecord]) -> Table:
    """The few numbers of several runs."""
    columns = [summary(run) for run in runs]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [[key, *(column.get(key, MISSING) for column in columns)] for key in keys]
    return Table("", ["", *(run.name for run in runs)], rows, [], "runs")


def head_html(run: RunRecord, parts: list[str]) -> str:
    """Title, what was evaluated, the few numbers, and links to the sections that there are."""
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(key)}</span></div>'
        for key, value in summary(run).items()
    )
    facts = about(run)
    line = f"{facts['checkpoint']}, step {facts['step']:,}, {facts['time']}" if "time" in facts else "not evaluated yet"
    end = next((event.get("reason") for event in reversed(run.events("end"))), None)
    ended = {"finished": "finished", None: "has not ended"}.get(end, f"ended by {end}")
    state = f"; the run {ended}" if run.history else ""
    names = re.findall(r'<section id="(\w+)">', "".join(parts))
    links = "".join(f'<a href="#{name}">{name}</a>' for name in names)
    return f'<h1>{escape(run.name)}</h1><p class="soft">{escape(line + state)}</p><nav>{links}</nav><div class="tiles">{tiles}</div>'


def warnings_html(runs: list[RunRecord]) -> str:
    """The warning signs of finished runs, and those that were told in training."""
    found = []
    for run in runs:
        name = f"{run.name}: " if len(runs) > 1 else ""
        for sign in run.signs():
            found.append((f"{name}{sign.kind.replace('_', ' ')}", sign.message))
        for event in run.events("warning"):
            kind = str(event.get("kind", "")).replace("_", " ")
            found.append((f"{name}{kind}, told at step {event['iter']:,}", event.get("message", "")))
    boxes = "".join(
        f'<div class="warning"><b>{escape(kind)}</b><br>{with_flags(message)}</div>' for kind, message in found
    )
    return section("warnings", "Warning signs", boxes or "<p>None.</p>")


def curves(run: RunRecord) -> str:
    """Loss with checkpoints and warnings marked, learning rate, and gradient norm."""
    evals = series(run.history, "eval", "val_loss")
    lines = [
        Series("training step", series(run.history, "train", "loss"), "s0"),
        Series("training, evaluated", series(run.history, "eval", "train_loss"), "s1", dots=True),
        Series("validation", evals, "s2", dots=True),
    ]
    marks = [Mark("tick", event["iter"], "checkpoint") for event in run.events("checkpoint")]
    warned = [Mark("line", e["iter"], str(e.get("kind", "")).replace("_", " ")) for e in run.events("warning")]
    if evals:
        step, loss = min(evals, key=lambda e: e[1])
        marks.append(Mark("ring", step, f"best {loss:.3f}", loss))
    return (
        chart("loss, nats per token", lines, marks + warned)
        + chart("loss, without the first tenth of the run", late(lines), marks + warned)
        + chart("learning rate", [Series("learning rate", series(run.history, "train", "lr"), "s3")], warned)
        + chart(
            "gradient norm", [Series("gradient norm", series(run.history, "train", "grad_norm"), "s4")], warned, True
        )
    )


def late(lines: list[Series]) -> list[Series]:
    """Lines without the first tenth of the steps of the longest, whose steep start makes the rest small."""
    start = max((step for line in lines for step, _ in line.points), default=0) / 10
    return [dataclasses.replace(line, points=[p for p in line.points if p[0] >= start]) for line in lines]


def compared_curves(runs: list[RunRecord]) -> str:
    """Validation loss, training loss, learning rate and gradient norm of several runs, each in one chart."""
    drawn = ""
    for title, event, key, dots in (
        ("validation loss, nats per token", "eval", "val_loss", True),
        ("training loss, nats per token", "train", "loss", False),
        ("learning rate", "train", "lr", False),
        ("gradient norm", "train", "grad_norm", False),
    ):
        lines = [Series(run.name, series(run.history, event, key), f"s{1 + i % 7}", dots) for i, run in enumerate(runs)]
        drawn += chart(title, lines, log=key == "grad_norm")
        if "loss" in key:
            drawn += chart(f"{title}, without the first tenth", late(lines))
    return drawn


def prompted_html(run: RunRecord) -> str:
    """The samples that were written for prompts."""
    found = run.results.get("samples") or []
    parts = [
        f"<pre><i>{escape(one['prompt'])}</i>{escape(one['text'])}<i>{' ■' if one['ended'] else ' …'}</i></pre>"
        for one in found[:SAMPLES]
    ]
    if found:
        parts.insert(0, '<p class="note">■ the text ended by itself, … it was cut at max_new_tokens</p>')
    if len(found) > SAMPLES:
        parts.append(f'<p class="note">{SAMPLES} of {len(found)}; all are in evaluation.json.</p>')
    return "".join(parts)


def samples_html(run: RunRecord) -> str:
    """Samples of training, evenly over its course, the first and the last among them."""
    count = len(run.samples)
    places = sorted({math.ceil(i * (count - 1) / (SAMPLES - 1)) for i in range(SAMPLES)}) if count else []
    parts = "".join(sample_html(*run.samples[i]) for i in places)
    left = f'<p class="note">{len(places)} of {count}; all are in samples.txt.</p>' if len(places) < count else ""
    return parts + left


def sample_html(step: int, loss: str, text: str) -> str:
    """One sample of training."""
    return f'<p class="note">step {step:,}, validation loss {escape(loss)}</p><pre>{escape(text) or " "}</pre>'
