"""The report of tools.estimate_budget for people.

In:  the report as plain values. Out: lines of text; no number in them that is not in the report.
"""

from __future__ import annotations

from typing import Any

from budget import in_gib
from progress import format_duration


def report_lines(report: dict[str, Any]) -> list[str]:
    """Every section."""
    head = [*model_lines(report["model"]), *memory_lines(report["memory"]), *time_lines(report)]
    return [*head, *data_lines(report["data"]), *advice_lines(report["advice"])]


def count(number: float) -> str:
    """A large number in a few letters: 118 M, 2.4 G."""
    for size, letter in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:,.0f}"


def model_lines(model: dict[str, Any]) -> list[str]:
    """Parameters and operations."""
    shape, head = model["shape"], model["head_size"]
    return [
        "",
        f"MODEL    {shape['n_layer']} layers, {shape['n_head']} heads of {head}, width {shape['n_embd']}, feed-forward "
        f"{model['feed_forward_width']}, context {shape['block_size']}, {shape['vocab_size']:,} rows of vocabulary",
        f"  parameters  {model['parameters']:,}: {model['parameters_embedding']:,} in embeddings (the head is the same "
        f"matrix), {model['parameters_per_layer']:,} a layer",
        f"  work        {count(model['flops_per_token'])}FLOP a token, {count(model['flops_per_step'])}FLOP a step of "
        f"{model['tokens_per_step']:,} tokens",
    ]


def memory_lines(memory: dict[str, Any]) -> list[str]:
    """Items, verdict and table."""
    where = memory["card"] or ("this memory" if memory["room_bytes"] else "")
    room = f" of {in_gib(memory['room_bytes'])} usable on {where}: {memory['verdict']}" if memory["room_bytes"] else ""
    each = " on each of the GPUs" if memory["gpus"] > 1 else ""
    lines = ["", f"MEMORY   {in_gib(memory['peak_bytes'])} GiB{each}{room}"]
    lines.append(f"  at batch_size={memory['batch_size']}, at the fullest moment of a step: {memory['moment']}")
    items = sorted(memory["items"].items(), key=lambda item: -item[1])
    lines += [f"  {in_gib(size):>6}  {name}" for name, size in items]
    lines.append("  batch_size  gradient_accumulation_steps    GiB                 GiB with gradient_checkpointing")
    for row in memory["batch_sizes"]:
        cells = [f"{in_gib(row[key]['bytes']):>6} {row[key]['verdict'] or '':<12}" for key in ("plain", "checkpointed")]
        lines.append(
            f"  {row['batch_size']:>10}  {row['gradient_accumulation_steps']:>27}  {cells[0]} {cells[1]}".rstrip()
        )
    if memory["room_bytes"]:
        found = [
            " ".join(f"--{key}={value}" for key, value in memory["largest"][name].items())
            if memory["largest"][name]
            else "none"
            for name in ("plain", "checkpointed")
        ]
        lines.append(f"  largest batch_size that fits: {found[0]}")
        lines.append(f"  with gradient_checkpointing:  {found[1]}")
    return lines


def time_lines(report: dict[str, Any]) -> list[str]:
    """Hours and money."""
    time = report["time"]
    lines = ["", f"TIME     {time['steps']:,} steps, {time['flops']:.1e} FLOP"]
    if "unknown" in time:
        return [*lines, f"  {time['unknown']}"]
    for run in time["runs"]:
        line = (
            f"  {run['card'] or 'measured':<14} {long_time(run['hours'])} at {run['tokens_per_second']:,.0f} tokens/s"
        )
        if "hours_at_peak" in run:
            line += f", {time['utilisation']:.0%} of its peak; {long_time(run['hours_at_peak'])} at 100 %, which "
            line += "nothing reaches"
        line += "".join(f", {key} {run[key]:,.2f}" for key in ("rent", "electricity") if key in run)
        lines.append(line + (f", {run['kwh']:,.3g} kWh" if "kwh" in run else ""))
    extra = {key: value for key, value in time["runs"][0]["seconds"].items() if key != "training" and value}
    whole = sum(time["runs"][0]["seconds"].values())
    shares = ", ".join(f"{key} {value / whole:.1%}" for key, value in extra.items())
    lines += [f"  of it: {shares}"] if shares else []
    return lines + [f"  {note}" for note in time["notes"]]


def long_time(hours: float) -> str:
    """Hours as people say them, from two days on in hours as well."""
    return format_duration(hours * 3600) + (f" ({hours:,.0f} h)" if hours >= 48 else "")


def data_lines(data: dict[str, Any]) -> list[str]:
    """The corpus and what it is good for."""
    lines = [""]
    if "missing" in data:
        lines.append(f"DATA     {data['missing']}")
    if data["tokens"]:
        lines.append(
            f"{'DATA    ' if len(lines) == 1 else '        '} {data['tokens']:,} training tokens ({data['source']}): "
            f"{data['epochs']:,.3g} epochs in this run"
        )
        if data["from_scratch"]:
            lines += corpus_lines(data)
    text, disk = data["wanted_text_bytes"], data["wanted_bin_bytes"]
    if data["from_scratch"]:
        lines.append(
            f"  this model wants {count(data['wanted_tokens'][0])} to {count(data['wanted_tokens'][1])} tokens read (20 to "
            f"100 a parameter), {text[0] / 1e9:.3g} to {text[1] / 1e9:.3g} GB of text, {disk[0] / 1e9:.3g} to "
            f"{disk[1] / 1e9:.3g} GB of .bin; a quarter of that, read 4 times, is nearly as good"
        )
    sizes = ", ".join(f"{name} {size / 1e9:.2g} GB" for name, size in data["checkpoint_bytes"].items())
    return [*lines, f"  disk for the run: {sizes}, and once more the largest while it is written"]


def corpus_lines(data: dict[str, Any]) -> list[str]:
    """What the corpus could teach."""
    shape = "×".join(str(value) for value in data["feeds_shape"].values())
    return [
        f"  the corpus feeds a model of {count(data['feeds_parameters'])} parameters (n_layer×n_head×n_embd {shape} has "
        f"{count(data['feeds_shape_parameters'])} with this vocabulary)",
        f"  {data['tokens_per_parameter']:.2g} tokens a parameter in it, {data['run_tokens_per_parameter']:.3g} read; a "
        f"sensible run has {data['sensible_steps']:,} steps ({data['sensible_epochs']:.2g} epochs)",
    ]


def advice_lines(advice: list[dict[str, str]]) -> list[str]:
    """The list at the end."""
    lines = ["", "ADVICE   " + ("the most important first" if advice else "none: go ahead")]
    for number, item in enumerate(advice, 1):
        lines.append(f"  {number}. {item['text']}" + (f":\n     {item['flags']}" if item["flags"] else ""))
    return lines
