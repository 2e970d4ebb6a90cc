"""The report of tools.clean_corpus: what each stage and rule dropped, in numbers, bars and examples.

In:  the counts that the tasks left in WORK/tallies, and the clusters of similar documents.
Out: report.json for machines and report.html for people, the same numbers; nothing in it needs a network.
"""

from __future__ import annotations

import html
import json
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from tools.corpus_dedup import caught, choose_bands
from tools.corpus_stages import BYTES_PER_TOKEN, EXAMPLES, read_tallies

STAGES = {  # in the order in which a document meets them
    "extraction": "no main text in the HTML, or an error",
    "repeated_lines": "nothing but lines of the site (menus, notices, footers)",
    "language": "another language, or none that is sure",
    "gopher_quality": "Gopher's rules on words",
    "letters_and_sentences": "letters and sentences",
    "fineweb_lines": "FineWeb's rules on lines",
    "gopher_repetition": "Gopher's rules on repetition",
    "duplicates": "equal or similar to an earlier document",
    "paragraphs": "nothing but paragraphs of earlier documents",
}
USUAL = (0.40, 0.60)  # of raw web text is dropped, roughly: FineWeb (arXiv 2406.17557) and RefinedWeb (2306.01116)
STYLE = """:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;overflow-wrap:anywhere}
.wide{overflow-x:auto;margin:.5em 0 1.5em}table{border-collapse:collapse;width:100%}
td,th{padding:.15em .6em;text-align:right;white-space:nowrap}th{border-bottom:1px solid #888}
td:first-child,th:first-child{text-align:left}td:last-child{text-align:left}
.bar{display:inline-block;height:.8em;background:#c8501e}.kept{background:#3b82c4}
blockquote{margin:.2em 0 .6em 1em;opacity:.75;font-size:13px}code{background:#8883;padding:.1em .3em}"""


def write_report(work: Path, results: Path, settings: dict[str, Any], seconds: dict[str, float]) -> None:
    """Writes both files into `results`."""
    results.mkdir(parents=True, exist_ok=True)
    report = collect(work, settings, seconds)
    for name, text in (
        ("report.html", to_html(report)),
        ("report.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n"),
    ):
        partial = results / f"{name}.tmp"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, results / name)


def collect(work: Path, settings: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """The report as one dict."""
    tallies = work / "tallies"
    sums = {name: add_up(tallies, name) for name in ("input", "text", "filtered", "unique", "kept")}
    stages, languages = [], Counter(sums["kept"]["languages"])
    for name, about in STAGES.items():
        rules: dict[str, Counter[str]] = {}
        examples: dict[str, list[str]] = {}
        for tally in read_tallies(tallies, f"dropped_{name}"):
            languages.update(tally["languages"])
            for rule, counts in tally["rules"].items():
                rules.setdefault(rule, Counter()).update(counts)
                shown = examples.setdefault(rule, [])
                shown += tally["examples"][rule][: EXAMPLES - len(shown)]
        dropped = sum(rules.values(), Counter())
        ordered = sorted(rules, key=lambda rule: (-rules[rule]["documents"], rule))
        entries = [{"rule": rule, **sizes(rules[rule]), "examples": examples[rule]} for rule in ordered]
        stages.append({"stage": name, "about": about, "dropped": sizes(dropped), "rules": entries})
    clusters = work / "similar" / "clusters.json"
    report = {
        "settings": settings,
        "seconds": seconds,
        "input": sizes(sums["input"]["totals"]),
        "extracted": sizes(sums["text"]["totals"]),
        "kept": sizes(sums["kept"]["totals"]),
        "cut": {key: sums["kept"]["cut"][key] for key in ("removed_lines", "removed_paragraphs")},
        "stages": stages,
        "languages": dict(languages.most_common()),
        "lengths": {name: dict(sorted(sums[name]["lengths"].items())) for name in ("input", "kept")},
        "clusters": json.loads(clusters.read_text(encoding="utf-8")) if clusters.exists() else {},
        "caught": caught_table(settings),
    }
    return report | {"summary": summary(report, work.parent)}


def add_up(tallies: Path, name: str) -> dict[str, Counter[Any]]:
    """The counts of one stage over all tasks."""
    total: dict[str, Counter[Any]] = {key: Counter() for key in ("totals", "languages", "lengths", "cut")}
    for tally in read_tallies(tallies, name):
        for key in ("totals", "languages", "cut"):
            total[key].update(tally[key])
        total["lengths"].update({int(bits): count for bits, count in tally["lengths"].items()})
    return total


def sizes(counts: Counter[str]) -> dict[str, int]:
    """Documents, characters and estimated tokens."""
    tokens = counts["bytes"] // BYTES_PER_TOKEN
    return {"documents": counts["documents"], "characters": counts["characters"], "tokens": tokens}


def caught_table(settings: dict[str, Any]) -> dict[str, float]:
    """Similarity of a pair: the probability that MinHash finds it."""
    if settings["dedup"] != "minhash":
        return {}
    bands, rows = choose_bands(settings["dedup_similarity"])
    return {str(s): round(caught(s, bands, rows), 3) for s in (0.95, 0.9, 0.8, 0.72, 0.6, 0.5, 0.4, 0.3)}


def share(part: dict[str, int], whole: dict[str, int], what: str = "documents") -> float:
    """A part of a whole, 0 where there is none."""
    return part[what] / max(1, whole[what])


def summary(report: dict[str, Any], out: Path) -> list[str]:
    """The report in a few lines, the last of them the next step."""
    lines = []
    given, kept = report["input"], report["kept"]
    for stage in report["stages"]:
        if stage["dropped"]["documents"]:
            worst = ", ".join(f"{rule['rule']} {rule['documents']:,}" for rule in stage["rules"][:3])
            lines.append(f"{stage['stage']:22} {stage['dropped']['documents']:>10,} documents dropped: {worst}")
    dropped = 1 - share(kept, given)
    low, high = USUAL
    usual = "less than" if dropped < low else "more than" if dropped > high else "as much as"
    lines.append(
        f"{kept['documents']:,} of {given['documents']:,} documents kept, about {kept['tokens']:,} tokens; {dropped:.0%} "
        f"dropped, {usual} the {low:.0%} to {high:.0%} that raw web text usually loses"
    )
    if not kept["documents"]:
        lines.append(f"nothing is left: see which rule dropped it in {out}/report.html")
        return lines
    lines.append(f"report: {out}/report.html, what was dropped: {out}/dropped/")
    flags = [f"--input={out}/corpus", f"--out={out}/tokenizer.json"]
    lines.append(f"next: python -m tools.train_tokenizer {shlex.join(flags)}")
    return lines


# --- the page --------------------------------------------------------------------------------------------------------


def to_html(report: dict[str, Any]) -> str:
    """The report as a page."""
    given = report["input"]
    told = sum(stage["dropped"]["documents"] > 0 for stage in report["stages"])  # lines that the table repeats
    body = ["<h1>What was kept, what was dropped</h1>"]
    body += [f"<p>{html.escape(line)}</p>" for line in report["summary"][told:]]
    rows = [(name, report[name], "kept") for name in ("input", "extracted", "kept")]
    rows += [(f"dropped by {stage['stage']}", stage["dropped"], "") for stage in report["stages"]]
    body.append(table("stage", [(name, part, share(part, given), kind) for name, part, kind in rows]))
    cut = report["cut"]
    body.append(
        f"<p>Out of kept documents {cut['removed_lines']:,} characters of repeated lines were taken, and "
        f"{cut['removed_paragraphs']:,} of repeated paragraphs.</p>"
    )
    body.append("<h2>Rules and their victims</h2>")
    for stage in report["stages"]:
        if stage["rules"]:
            body.append(f"<h3>{html.escape(stage['stage'])}: {html.escape(stage['about'])}</h3>")
            body.append(table("rule", [(rule["rule"], rule, share(rule, given), "") for rule in stage["rules"]]))
            for rule in stage["rules"]:
                shown = "".join(f"<blockquote>{html.escape(text)}</blockquote>" for text in rule["examples"])
                body.append(f"<p><code>{html.escape(rule['rule'])}</code></p>{shown}")
    body += ["<h2>Languages, in characters</h2>", bars(report["languages"])]
    for name, lengths in report["lengths"].items():
        named = {f"{1 << int(bits) >> 1:,} to {(1 << int(bits)) - 1:,}": n for bits, n in lengths.items()}
        body += [f"<h2>Characters of a document, {name}</h2>", bars(named)]
    if report["caught"]:
        body.append("<h2>Similar documents</h2><p>A pair of this similarity is found with this probability:</p>")
        body.append(bars(report["caught"]))
        body.append("<p>Clusters by the documents in them:</p>" + bars(report["clusters"]))
    page = "\n".join(body)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Corpus</title>'
    return f'<!doctype html><html lang="en">{head}<style>{STYLE}</style>{page}</html>\n'


def table(first: str, rows: list[tuple[str, dict[str, int], float, str]]) -> str:
    """A table of documents, characters and tokens with a bar for the share of documents."""
    cells = [f"<tr><th>{first}<th>documents<th>characters<th>tokens, about<th>share<th></tr>"]
    for name, part, of_all, kind in rows:
        numbers = "".join(f"<td>{part[what]:,}" for what in ("documents", "characters", "tokens"))
        bar = f'<span class="bar {kind}" style="width:{min(1, of_all) * 12:.2f}em"></span>'
        cells.append(f"<tr><td>{html.escape(name)}{numbers}<td>{of_all:.1%}<td>{bar}</tr>")
    return f'<div class="wide"><table>{"".join(cells)}</table></div>'


def bars(numbers: dict[str, float]) -> str:
    """Numbers with bars."""
    most = max(numbers.values(), default=1) or 1
    rows = (
        f"<tr><td>{html.escape(str(name)) or 'not asked'}<td>{value:,}<td>"
        f'<span class="bar kept" style="width:{14 * value / most:.2f}em"></span></tr>'
        for name, value in numbers.items()
    )
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'
