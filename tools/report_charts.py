"""Line charts as inline SVG: no script, no file beside the page, colours from the page's style sheet.

In:  series of (step, value), marks, and a size.
Out: the text of an <svg>. Each chart is drawn twice, wide and narrow, so that letters keep their size on a phone.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

POINTS = 700  # of a series at most: beyond, each bucket keeps its lowest and highest, so that no spike is lost
SIZES = {"wide": (900, 300), "narrow": (360, 250)}
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 34  # margins, in pixels
LETTER = 6.6  # width of a letter of 11 pixels

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Series:
    """A line. `style` is a class of the style sheet, s0 … s7; `dots` marks each point with its numbers on hover."""

    label: str
    points: Sequence[Point]
    style: str = "s0"
    dots: bool = False


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something at a step: a `line` over the height with its label, a `tick` at the foot, or a `ring` around a value."""

    kind: str
    step: float
    label: str
    value: float = 0.0


def chart(title: str, series: Sequence[Series], marks: Sequence[Mark] = (), log: bool = False) -> str:
    """A figure with its legend; empty text where there is nothing to draw."""
    series = [dataclasses.replace(s, points=[p for p in s.points if math.isfinite(p[1])]) for s in series]
    series = [s for s in series if s.points]
    if not series:
        return ""
    legend = "".join(f'<span class="key {s.style}">{html.escape(s.label)}</span>' for s in series)
    ticks = [mark for mark in marks if mark.kind == "tick"]
    legend += f'<span class="key tickkey">{html.escape(ticks[0].label)}</span>' if ticks else ""
    drawn = "".join(
        f'<div class="{name}">{Plot(series, marks, size, log).svg(title)}</div>' for name, size in SIZES.items()
    )
    return f'<figure><figcaption>{html.escape(title)}</figcaption><p class="legend">{legend}</p>{drawn}</figure>\n'


class Plot:
    """One drawing: scales, axes, lines and marks."""

    def __init__(self, series: Sequence[Series], marks: Sequence[Mark], size: tuple[int, int], log: bool) -> None:
        self.series, self.marks, (self.width, self.height) = series, marks, size
        values = [y for s in series for _, y in s.points]
        self.log = log and min(values) > 0
        steps = [x for s in series for x, _ in s.points]
        self.x0, self.x1 = min(steps), max(max(steps), min(steps) + 1)
        low, high = min(values), max(values)
        if self.log:
            low, high = math.log10(low), math.log10(high)
        spare = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        self.y0, self.y1 = low - spare, high + spare

    def x(self, step: float) -> float:
        """Pixels from the left."""
        return LEFT + (step - self.x0) / (self.x1 - self.x0) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        value = math.log10(value) if self.log else value
        return TOP + (self.y1 - value) / (self.y1 - self.y0) * (self.height - TOP - BOTTOM)

    def svg(self, title: str) -> str:
        """The drawing."""
        parts = [*self._grid(), *map(self._line, self.series), *self._marks()]
        head = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{html.escape(title)}">'
        return head + "".join(parts) + "</svg>"

    def _grid(self) -> list[str]:
        parts, foot = [], self.height - BOTTOM
        for value in self._y_ticks():
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
        for step in nice_ticks(self.x0, self.x1, 8 if self.width > 500 else 5):
            x = self.x(step)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{foot}" y2="{foot + 4}"/>')
            parts.append(f'<text x="{x:.1f}" y="{foot + 17}" text-anchor="middle">{short(step)}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{foot}" y2="{foot}"/>')
        parts.append(f'<text x="{self.width - RIGHT}" y="{self.height - 3}" text-anchor="end">step</text>')
        return parts

    def _y_ticks(self) -> list[float]:
        if not self.log:
            return nice_ticks(self.y0, self.y1, 6)
        decades = range(math.floor(self.y0), math.ceil(self.y1) + 1)
        span = self.y1 - self.y0
        steps = (1, 1.5, 2, 3, 4, 5, 7) if span < 1.2 else (1, 2, 5) if span < 3 else (1,)
        values = [m * 10.0**d for d in decades for m in steps]
        return [v for v in values if self.y0 <= math.log10(v) <= self.y1]

    def _line(self, series: Series) -> str:
        points = thin_out(series.points)
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        drawn = f'<polyline class="{series.style}" points="{path}"/>'
        if series.dots:
            for x, y in points:
                tip = f"{html.escape(series.label)}: {y:.4g} at step {x:,.0f}"
                circle = f'<circle class="{series.style}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="2.6">'
                drawn += f"{circle}<title>{tip}</title></circle>"
        return drawn

    def _marks(self) -> list[str]:
        parts, foot, taken = [], self.height - BOTTOM, 0
        for mark in sorted(self.marks, key=lambda mark: mark.step):
            if not self.x0 <= mark.step <= self.x1:
                continue
            x, label = self.x(mark.step), html.escape(mark.label)
            tip = f"<title>{label}, step {mark.step:,.0f}</title>"
            if mark.kind == "tick":
                parts.append(f'<path class="tick" d="M{x:.1f} {foot}l-3.5 -7h7z">{tip}</path>')
            elif mark.kind == "line":
                parts.append(f'<line class="warn" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{foot}">{tip}</line>')
                parts.append(self._label(label, x, TOP + 10 + 13 * (taken % 6), "warn", 4))
                taken += 1
            else:
                y = self.y(mark.value)
                parts.append(f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="6">{tip}</circle>')
                parts.append(self._label(label, x, max(TOP + 10, y - 12), "best", 0))
        return parts

    def _label(self, label: str, x: float, y: float, style: str, gap: float) -> str:
        """Text beside a place, on the side where there is room, and shifted in where there is on none."""
        wide = LETTER * len(label)
        if x + gap + wide < self.width - RIGHT:
            return f'<text class="{style}" x="{x + gap:.1f}" y="{y:.1f}">{label}</text>'
        x = max(x - gap, LEFT + wide)
        return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="end">{label}</text>'


def thin_out(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """At most so many points, the lowest and the highest of each bucket in their order."""
    if len(points) <= most:
        return list(points)
    kept: list[Point] = []
    buckets = most // 2
    for i in range(buckets):
        part = points[len(points) * i // buckets : len(points) * (i + 1) // buckets]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high."""
    rough = (high - low) / max(1, count)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough)
    if (high - low) / step < count / 2:
        step /= 2
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def short(value: float) -> str:
    """A number for an axis."""
    if value and (abs(value) < 0.0001 or abs(value) >= 1e7):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
