"""report.html in a real browser: what stands in it, at two widths, light and dark; and the warning signs of a run.

The page is opened from a file with the network cut off. Screenshots stay in the folder of the test for a look.
"""

from __future__ import annotations

import html
import json
import math
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from configurator import UserError
from tools.evaluation_report import MADE_BY, late, write_comparison, write_report
from tools.evaluation_tables import make_tables
from tools.generation import PEOPLE
from tools.report_charts import Series, chart, nice_ticks, thin_out
from tools.run_record import ADVICE, RunRecord, add_results, read_run, split_samples

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium (apt-get install chromium)")
EVIL = "</pre><script>document.title='broken'</script> & <b>bold</b>"


def evaluation(loss: float = 3.2, **more: object) -> dict:
    """Results as the tool writes them."""
    perplexity = {
        "source": "data/mine/val.bin",
        "tokens": 251048,
        "documents": 60,
        "words": 241859,
        "characters": 1288000,
        "bytes": 1290590,
        "unknown": 0,
        "loss": loss,
        "token_perplexity": math.exp(loss),
        "word_perplexity": math.exp(loss * 1.04),
        "tokens_per_word": 1.04,
        "characters_per_word": 5.3,
        "byte_perplexity": 1.8,
        "bits_per_byte": 0.9017,
        "tokens_per_second": 15321.0,
        "rules": {"context": "1,024 tokens", "stride": "512: a window every 512 tokens", "documents": "each by itself"},
    }
    figures = dict.fromkeys(("repeated_2", "repeated_3", "distinct_1", "distinct_2", "copied_8"), 0.123)
    figures |= {"repeated_4": 0.0123, "longest_copy": 14, "longest_copy_text": "the town of", "odd_words": 0.01}
    corpus = {
        "split": "val",
        "documents": 60,
        "train_documents": 28475,
        "exact_duplicates": 0,
        "near_duplicates": 0,
        "duplicate_tokens": 0.0,
        "examples": [],
        "vocabulary_divergence": 0.0312,
        "lengths": {"train": {"p10": 700, "p50": 3000, "p90": 9000}, "val": {"p10": 800, "p50": 3100, "p90": 9100}},
    }
    return {
        "about": {
            "checkpoint": "out/my_own_llm.pt",
            "step": 5400,
            "parameters": 354823168,
            "tokenizer": {"kind": "gpt2", "name": "gpt2"},
            "data": {"folder": "data/mine", "train": {"documents": 28475, "tokens": 117920140, "sha256": "0a" * 32}},
            "device": "cuda: NVIDIA A100, 40.0 GiB, bfloat16",
            "machine": "Linux x86_64, 16 CPU cores",
            "software": "Python 3.11, PyTorch 2.13",
            "time": "2026-05-01 10:00 UTC",
        },
        "perplexity": [perplexity],
        "tasks": [
            {
                "task": "hellaswag",
                "metric": "acc_norm",
                "value": 0.3123,
                "stderr": 0.0046,
                "few_shot": 0,
                "questions": 10042,
            }
        ],
        "generation": [{"table": {"samples": figures, PEOPLE: figures}, "rules": {"seed": 42}}],
        "samples": [{"prompt": "The town ", "text": EVIL, "ended": True}],
        "corpus": [corpus],
    } | more


def make_run(folder: Path, rise: float = 0.0, first: float = 10.8) -> Path:
    """A run folder of 9,000 steps with everything that a run may tell."""
    folder.mkdir(parents=True)
    noise = random.Random(1)
    events = [{"event": "start", "iter": 0, "settings": {}}]
    for step in range(0, 9001, 10):
        loss = 3.1 + (first - 3.1) * math.exp(-step / 600) + noise.gauss(0, 0.05)
        train = {
            "loss": loss,
            "lr": 6e-4 * min(1, step / 700),
            "grad_norm": 0.5 + noise.random(),
            "tokens": step * 131072,
        }
        events.append(
            {"event": "train", "iter": step or 1, "tokens_per_second": 15e4, "elapsed_seconds": step * 0.9, **train}
        )
        if step % 300 == 0:
            val = 3.2 + (first - 3.2) * math.exp(-step / 600) + rise * max(0, step - 5400) / 3600
            events.append({"event": "eval", "iter": step, "train_loss": val - 0.1, "val_loss": val, "repetition": 0.02})
        if step and step % 1500 == 0:
            events.append({"event": "checkpoint", "iter": step, "path": "last.pt"})
    events.append(
        {"event": "warning", "iter": 4110, "kind": "loss_spike", "message": "the loss jumped. Try --grad_clip=0.5"}
    )
    events.append(
        {"event": "warning", "iter": 8900, "kind": "gradient_vanishing", "message": "the norm is nearly nothing"}
    )
    events.append({"event": "end", "iter": 9000, "reason": "finished"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    samples = "".join(
        f"=== step {s:,}, validation loss 3.21 ===\nText of step {s}.\n\n{EVIL}\n\n" for s in range(0, 9001, 300)
    )
    (folder / "samples.txt").write_text(samples, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"dataset": "mine", "learning_rate": 6e-4 + rise, "n_layer": 24}))
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """A folder with two runs, their reports, and the two side by side."""
    folder = tmp_path_factory.mktemp("report")
    for name, rise, loss in (("a", 0.35, 3.2), ("b", 0.0, 3.3)):
        add_results(make_run(folder / "out" / name, rise), evaluation(loss))
        write_report(read_run(folder / "out" / name), None, False)
    runs = [read_run(folder / "out" / name) for name in "ab"]
    assert write_comparison(runs, None, False) == folder / "out" / "comparison.html"
    return folder / "out"


class Page(HTMLParser):
    """What a browser made of a page: tables as lists of cells, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.ids: set[str] = set()
        self.cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        """Notes a start tag."""
        self.tags.append(tag)
        self.ids.add(dict(attrs).get("id") or "")
        if tag == "table":
            self.rows = self.tables[dict(attrs)["id"]] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        self.cell = tag in ("td", "th")

    def handle_endtag(self, tag: str) -> None:
        """Notes an end tag."""
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        """Notes text."""
        self.text.append(data)
        if self.cell:
            self.rows[-1][-1] += data


def browse(folder: Path, *arguments: str) -> str:
    """Runs Chromium without a window and without a network; returns what it prints."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
    flags += ["--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}", "--proxy-server=127.0.0.1:9"]
    finished = subprocess.run([BROWSER, *flags, *arguments], capture_output=True, text=True, timeout=240, cwd=folder)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@in_browser
@pytest.mark.parametrize("name", ["a/report.html", "comparison.html"])
def test_tables_in_the_browser_hold_the_numbers(pages, tmp_path, name: str) -> None:
    page = Page(browse(tmp_path, "--dump-dom", f"file://{pages / name}"))
    runs = [read_run(pages / "a"), read_run(pages / "b")][: 1 if "/" in name else 2]
    wanted = make_tables([run.results for run in runs], [run.name for run in runs])
    assert [table.name for table in wanted] == ["perplexity", "tasks", "generation", "corpus"]
    for table in wanted:
        assert page.tables[f"table-{table.name}"] == [table.head, *table.rows]
    cells = {row[0]: row[1:] for rows in page.tables.values() for row in rows}
    assert cells["perplexity per token"][0] == "24.53" and cells["tokens scored"][0] == "251,048"
    assert cells["hellaswag"][1] == "0.3123 ± 0.0046" and cells["repeated 4-grams"][0] == "1.23%"
    assert cells["rule: stride"][0] == "512: a window every 512 tokens"
    assert cells["training documents"][0] == "28,475"
    if len(runs) == 2:
        assert cells["perplexity per token"] == ["24.53", "27.11"]
        assert cells["learning_rate"] == ["0.3506", "0.0006"] and "n_layer" not in cells
        assert cells["best validation loss"] == ["3.2009", "3.2000"]
    else:
        assert cells["learning_rate"] == ["0.3506"] and cells["n_layer"] == ["24"]
        assert cells["folder"] == ["data/mine"] and "117,920,140" in cells["train"][0]
        assert cells["device"][0].startswith("cuda: NVIDIA A100")
        assert re.findall(r"href=.#(\w+)", (pages / name).read_text(encoding="utf-8")) == [
            *("warnings", "curves", "evaluation", "written", "samples", "settings", "data", "machine")
        ], "links to all sections"
        assert {"curves", "evaluation", "written", "samples", "settings", "data", "machine", "warnings"} <= page.ids
    assert page.tags.count("script") == 0 and page.tags.count("title") > 1 and "broken" not in page.text[0]
    assert EVIL in "".join(page.text), "text of samples is text"


MEASURE = """<body style="margin:0"><iframe src="{page}" style="width:{width}px;height:{height}px;border:0"></iframe>
<p id="found"></p><script>onload=()=>{{const d=document.querySelector("iframe").contentDocument,w={width};
const seen=e=>e.getClientRects().length>0,scrolls=e=>e.closest(".scroll,pre,svg");
const wide=[...d.querySelectorAll("body *")].filter(e=>seen(e)&&!scrolls(e)&&e.getBoundingClientRect().right>w+1);
const texts=[...d.querySelectorAll("svg text")].filter(seen),out=texts.filter(t=>{{const a=t.getBoundingClientRect(),
b=t.closest("svg").getBoundingClientRect();return a.left<b.left-1||a.right>b.right+1||a.top<b.top-1||a.bottom>b.bottom+1}});
const s=getComputedStyle(d.body);document.querySelector("#found").textContent=JSON.stringify({{wide:wide.map(e=>e.outerHTML
.slice(0,80)),scroll:d.documentElement.scrollWidth,texts:texts.length,out:out.map(t=>t.textContent),pairs:
[...d.querySelectorAll(".pairs td")].filter(e=>e.getBoundingClientRect().right>w+1).map(e=>e.textContent),samples:
[...d.querySelectorAll("pre")].filter(e=>e.scrollWidth>e.clientWidth+1).map(e=>e.textContent),ink:s.color,
tables:[...d.querySelectorAll(".scroll")].filter(e=>e.scrollWidth>e.clientWidth+1).map(e=>e.firstChild.id),
page:s.backgroundColor,drawn:[...d.querySelectorAll("svg")].filter(seen).length,tall:d.documentElement.scrollHeight,
letters:texts.map(t=>t.getBoundingClientRect().height),lines:[...d.querySelectorAll("polyline")].filter(seen).length,
marks:[...d.querySelectorAll("line.warn,path.tick,circle.best")].filter(seen).length}})}}</script>"""


def luminance(colour: str) -> float:
    """Relative luminance of an rgb() colour (WCAG 2.1)."""
    parts = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@in_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1100])
@pytest.mark.parametrize("name", ["a/report.html", "comparison.html"])
def test_pages_fit_their_width_and_can_be_read(pages, tmp_path, name: str, width: int, dark: bool) -> None:
    frame = tmp_path / "frame.html"  # a window of Chromium is 500 pixels wide at least, a frame is not
    frame.write_text(MEASURE.format(page=f"file://{pages / name}", width=width, height=4600))
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    shot = tmp_path / f"{name.replace('/', '_')}_{width}_{'dark' if dark else 'light'}.png"
    dom = browse(tmp_path, *theme, "--virtual-time-budget=4000", "--dump-dom", f"file://{frame}")
    found = json.loads(html.unescape(re.search(r'<p id="found">(.*?)</p>', dom, re.S)[1]))
    size = f"--window-size={max(width, 500)},4600"
    browse(tmp_path, *theme, size, f"--screenshot={shot}", f"file://{frame}")
    assert found["wide"] == [] and found["scroll"] <= width, "nothing sticks out to the right"
    assert found["samples"] == [], "lines of samples are wrapped"
    assert found["pairs"] == [], "settings, data and machine need no scrolling"
    assert "report" not in name or found["tables"] == [], "no table of a single run needs scrolling"
    assert found["out"] == [] and found["texts"] > 20, "no letter of a chart is cut"
    assert found["drawn"] == (4 if "report" in name else 6), "one of the two drawings of each chart"
    assert found["lines"] >= 8 and (found["marks"] > 15 or "report" not in name)
    assert min(found["letters"]) > 9 and max(found["letters"]) < 20, "letters keep their size at every width"
    ink, page = luminance(found["ink"]), luminance(found["page"])
    assert (page < 0.05 < 0.5 < ink) if dark else (ink < 0.05 < 0.9 < page)
    assert (max(ink, page) + 0.05) / (min(ink, page) + 0.05) > 7
    assert shot.stat().st_size > 20_000


def test_a_page_asks_for_nothing_outside_and_runs_nothing(pages) -> None:
    for path in pages.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert MADE_BY in text and "default-src 'none'" in text
        assert not re.search(r"<script|<link|<img|@import|url\(|https?:|src=", text), path


# --- files ----------------------------------------------------------------------------------------------------------


def test_only_reports_are_replaced_unasked(tmp_path) -> None:
    run = read_run(make_run(tmp_path / "out"))
    path = write_report(run, None, False)
    assert write_report(run, None, False) == path == tmp_path / "out" / "report.html"
    path.write_text("my own page", encoding="utf-8")
    with pytest.raises(UserError, match="is no report of this tool: --overwrite=true"):
        write_report(run, None, False)
    assert path.read_text(encoding="utf-8") == "my own page"
    write_report(run, None, True)
    assert MADE_BY in path.read_text(encoding="utf-8")
    with pytest.raises(UserError, match="is a folder"):
        write_report(run, str(tmp_path), True)


def test_a_run_without_evaluation_or_metrics_has_a_report_as_well(tmp_path) -> None:
    folder = make_run(tmp_path / "out")
    text = write_report(read_run(folder), None, False).read_text(encoding="utf-8")
    assert "not evaluated yet" in text and "table-perplexity" not in text and "<polyline" in text
    assert "the run finished" in text and '<a href="#evaluation">' not in text, "no link leads nowhere"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:40]) + "\n" + lines[40][:20])  # stopped while it wrote
    (folder / "samples.txt").unlink()
    cut = write_report(read_run(folder), None, False).read_text(encoding="utf-8")
    assert "the run has not ended" in cut and "<polyline" in cut and 'id="samples"' not in cut
    bare = tmp_path / "bare"
    bare.mkdir()
    add_results(bare, evaluation())
    assert "table-perplexity" in write_report(read_run(bare), None, False).read_text(encoding="utf-8")
    with pytest.raises(UserError, match="no run folder"):
        read_run(tmp_path)


def test_results_are_collected_and_those_of_other_weights_go(tmp_path) -> None:
    add_results(tmp_path, evaluation(math.inf) | {"tasks": []})
    other = evaluation()
    other["perplexity"][0]["rules"] = {"stride": "16"}
    add_results(tmp_path, {"about": other["about"], "perplexity": other["perplexity"]})
    found = read_run(tmp_path).results
    assert [entry["loss"] for entry in found["perplexity"]] == [math.inf, 3.2] and "generation" in found
    assert "NaN" not in (text := (tmp_path / "evaluation.json").read_text()) and "Infinity" not in text
    newer = {"about": other["about"] | {"step": 6000}, "perplexity": other["perplexity"]}
    before = (tmp_path / "evaluation.json").read_text()
    assert "out/my_own_llm.pt, step 5,400, are in" in add_results(tmp_path, newer)
    assert (tmp_path / "evaluation.my_own_llm-5400.json").read_text() == before, "hours of tasks are not lost"
    assert len(read_run(tmp_path).results["perplexity"]) == 1 and "generation" not in read_run(tmp_path).results
    (tmp_path / "evaluation.json").write_text('{"format_version": 1')
    with pytest.raises(UserError, match=r"evaluation.json is damaged"):
        read_run(tmp_path)


def test_different_rules_are_told_in_a_comparison() -> None:
    one, two = evaluation(), evaluation(3.3)
    notes = next(table for table in make_tables([one, two], ["a", "b"]) if table.name == "perplexity").notes
    assert notes == []
    two["perplexity"][0]["rules"] = one["perplexity"][0]["rules"] | {"stride": "1,024"}
    notes = next(table for table in make_tables([one, two], ["a", "b"]) if table.name == "perplexity").notes
    assert notes == ["The rules differ (stride): these numbers do not compare."]


def test_samples_of_training_are_read_back() -> None:
    text = "=== step 0, validation loss 10.8 ===\nab\n\ncd\n\n=== step 1,200, validation loss inf ===\n\n\n"
    assert split_samples(text) == [(0, "10.8", "ab\n\ncd"), (1200, "inf", "")]


# --- charts ---------------------------------------------------------------------------------------------------------


def test_spikes_survive_thinning_out() -> None:
    points = [(float(i), 1.0 + (9.0 if i == 4321 else 0.0) - (0.5 if i == 777 else 0)) for i in range(10_000)]
    kept = thin_out(points, 700)
    assert len(kept) <= 700 and (4321.0, 10.0) in kept and (777.0, 0.5) in kept
    assert kept == sorted(kept)


def test_a_short_run_beside_a_long_one_does_not_bring_the_steep_start_back() -> None:
    long, short = (
        Series(name, [(float(i), 10.0 - i / 100) for i in range(0, end, 10)]) for name, end in (("a", 900), ("b", 60))
    )
    kept = late([long, short])
    assert kept[0].points[0][0] == 90 and kept[1].points == []


def test_axes_have_a_few_round_numbers() -> None:
    for low, high in ((0, 9000), (3.05, 10.9), (0, 6e-4), (-1, 1), (5, 5.001), (0, 1)):
        ticks = nice_ticks(low, high, 6)
        assert 3 <= len(ticks) <= 9 and all(low <= tick <= high for tick in ticks)


def test_charts_of_little_or_odd_data() -> None:
    assert chart("a", [Series("x", [])]) == "" and chart("a", [Series("x", [(1, math.nan), (2, math.inf)])]) == ""
    for points in ([(5, 2.0)], [(0, 0.0), (10, 0.0)], [(0, -1.0), (1, 2.0)], [(0, 1e-9), (10, 1e9)]):
        for log in (False, True):
            drawn = chart("<a>", [Series("x & y", points, dots=True)], log=log)
            assert "nan" not in drawn and "inf" not in drawn and "&lt;a&gt;" in drawn and "x &amp; y" in drawn


# --- warning signs of a finished run --------------------------------------------------------------------------------


def run_with(tmp_path: Path, rise: float = 0.0, first: float = 10.8, **results: object) -> RunRecord:
    """The record of a made-up run with some results changed."""
    folder = make_run(tmp_path / "out", rise, first)
    add_results(folder, evaluation(**results))
    return read_run(folder)


def figures(share: float, odd: float, people: float = 0.01) -> list:
    """Figures of generated text."""
    samples, usual = {"repeated_4": share, "odd_words": odd}, {"repeated_4": people, "odd_words": 0.03}
    return [{"table": {"samples": samples, PEOPLE: usual}, "rules": {}}]


def with_corpus(exact: int, near: int) -> list:
    """A comparison with training that found duplicates."""
    return [evaluation()["corpus"][0] | {"exact_duplicates": exact, "near_duplicates": near}]


def with_words(tokens: float, characters: float = 5.3, unknown: int = 0, words: int = 241859) -> list:
    """A perplexity with so many tokens and characters for a word."""
    more = {"tokens_per_word": tokens, "characters_per_word": characters, "unknown": unknown, "words": words}
    return [evaluation()["perplexity"][0] | more]


SIGNS = {
    "healthy": ({}, {}, set()),
    "rose": ({"rise": 0.35}, {}, {"perplexity_rose"}),
    "rose a little": ({"rise": 0.03}, {}, set()),
    "loops": ({}, {"generation": figures(0.5, 0.03)}, {"repetition"}),
    "a corpus of lists repeats": ({}, {"generation": figures(0.5, 0.03, people=0.2)}, set()),
    "words of nobody": ({}, {"generation": figures(0.02, 0.4)}, {"incoherent"}),
    "words of nobody, loss never fell": ({"first": 3.3}, {"generation": figures(0.02, 0.4)}, set()),
    "loops and duplicates": (
        {},
        {"generation": figures(0.5, 0.03), "corpus": with_corpus(3, 1)},
        {"incoherent", "repetition", "leak"},
    ),
    "leak": ({}, {"corpus": with_corpus(2, 0)}, {"leak"}),
    "near leak": ({}, {"corpus": with_corpus(0, 1)}, {"leak"}),
    "foreign tokenizer": ({}, {"perplexity": with_words(1.9)}, {"tokens_per_word"}),
    "two words say nothing": ({}, {"perplexity": with_words(4.0, words=2)}, set()),
    "at the limit": ({}, {"perplexity": with_words(1.4)}, set()),
    "no spaces": ({}, {"perplexity": with_words(25.0, 38.0)}, set()),  # H68: Chinese
    "unknown characters": ({}, {"perplexity": with_words(1.1, unknown=7)}, {"unknown_tokens"}),
}


@pytest.mark.parametrize("case", SIGNS)
def test_signs_of_a_finished_run(tmp_path, case: str) -> None:
    run, results, kinds = SIGNS[case]
    record = run_with(tmp_path, **run, **results)
    signs = record.signs()
    assert {sign.kind for sign in signs} == kinds
    text = write_report(record, None, False).read_text(encoding="utf-8")
    for sign in signs:
        assert "Usual cause" in sign.message or "Remove" in sign.message
        assert sign.message.endswith(ADVICE[sign.kind]) and f"<b>{sign.kind.replace('_', ' ')}</b>" in text


def test_signs_of_a_run_that_was_never_evaluated(tmp_path) -> None:
    record = read_run(make_run(tmp_path / "out", rise=0.5))
    assert [sign.kind for sign in record.signs()] == ["perplexity_rose"]
    assert re.search(r"was 24\.5\d at step 5,400 and 40\.\d+ at the end, step 9,000", record.signs()[0].message)
