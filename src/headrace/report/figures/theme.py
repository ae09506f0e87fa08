"""The look of the figures: palette, canvas in pixels, and the way from matplotlib to inline SVG.

Every colour is a role, drawn as a placeholder that becomes a CSS variable on export, so one
SVG serves the light and the dark page and print. Text stays text. Ids are prefixed, so
figures on one page never share one. Nothing here knows what is drawn.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

WIDE, NARROW = 760, 340
"""Widths in pixels at which every figure is laid out: a desktop column and a phone."""

INK = "#0a0001"  # text and the observed value's label
MUTED = "#0a0002"  # secondary text, axes
GRID = "#0a0003"  # hairlines
NULL = "#0a0004"  # shifted-date distributions
ACCENT = "#0a0005"  # the model audited
FUTURE = "#0a0006"  # what lies after a cutoff
PAPER = "#0a0007"  # the page behind the figure
SERIES = ("#0a0011", "#0a0012", "#0a0013", "#0a0014", "#0a0015", "#0a0016")  # one a run or model

_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    NULL: "--null",
    ACCENT: "--accent",
    FUTURE: "--future",
    PAPER: "--paper",
    **{colour: f"--series-{index + 1}" for index, colour in enumerate(SERIES)},
}
_FONT_SIZE = 12.0


def series_colour(index: int) -> str:
    """Colour role of the ``index``-th run or model; repeats after six."""
    return SERIES[index % len(SERIES)]


class Canvas:
    """A figure laid out in pixels from the top left, exported as SVG that follows the page."""

    def __init__(self, width: int, height: int) -> None:
        """``width`` and ``height`` in pixels; one SVG unit is one pixel at full size."""
        from matplotlib.figure import Figure  # noqa: PLC0415 (a second; records are read without)

        self.width, self.height = width, height
        self._figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        self._figure.patch.set_alpha(0)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Bare axes whose data area is the given rectangle, in pixels from the top left."""
        rectangle = (
            left / self.width,
            1 - (top + height) / self.height,
            width / self.width,
            height / self.height,
        )
        axes = self._figure.add_axes(rectangle)
        axes.patch.set_alpha(0)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(length=0, pad=5, labelsize=_FONT_SIZE - 0.5, labelcolor=MUTED, color=GRID)
        axes.set_xticks([])
        axes.set_yticks([])
        return axes

    def text(self, left: float, top: float, text: str, **style: Any) -> None:
        """Text with its baseline at ``top`` pixels; ``style`` as for matplotlib's text."""
        style.setdefault("fontsize", _FONT_SIZE)
        style.setdefault("color", INK)
        style.setdefault("va", "baseline")
        self._figure.text(left / self.width, 1 - top / self.height, escape_math(text), **style)

    def svg(self, identity: str, label: str) -> str:
        """Inline SVG; ``identity`` prefixes its ids, ``label`` is read to those who cannot see."""
        import matplotlib as mpl  # noqa: PLC0415 (loaded with the first canvas)

        settings = {
            "svg.fonttype": "none",
            "svg.hashsalt": identity,
            "font.family": "sans-serif",
            "axes.unicode_minus": True,
        }
        buffer = io.StringIO()
        with mpl.rc_context(settings), warnings.catch_warnings():
            # The reader's fonts draw the text; glyphs that this machine lacks do not matter.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            self._figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return _adapt(buffer.getvalue(), identity, label, self.width, self.height)


def _adapt(svg: str, identity: str, label: str, width: int, height: int) -> str:
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # Inside HTML the parser knows the namespaces; without them the file names no address at all.
    body = re.sub(r"\s+xmlns(:\w+)?=\"[^\"]*\"", "", body).replace("xlink:href", "href")
    body = re.sub(
        r"<svg[^>]*>",
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{_escape(label)}">',
        body,
        count=1,
    )
    body = re.sub(r" font-family: [^;\"]*;", "", body)  # the page's font, whatever it is
    body = re.sub(r'\bid="', f'id="{identity}-', body)
    body = re.sub(r'href="#', f'href="#{identity}-', body)
    body = re.sub(r"url\(#", f"url(#{identity}-", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    return re.sub(r"\n\s*", "\n", body).strip()


def _escape(text: str) -> str:
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(character, entity)
    return text


def escape_math(text: str) -> str:
    """Text as it is: a dollar sign in a model's name starts no formula."""
    return text.replace("$", r"\$")


def baseline(axes: Axes, y: float = 0.0, colour: str = GRID) -> None:
    """A hairline at ``y`` across the axes, under everything else."""
    axes.axhline(y, color=colour, linewidth=1, zorder=0)


def grid(axes: Axes, values: Sequence[float], *, vertical: bool = False) -> None:
    """Hairlines at the given values."""
    draw = axes.axvline if vertical else axes.axhline
    for value in values:
        draw(value, color=GRID, linewidth=0.7, zorder=0)


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most ``most`` round values within ``[low, high]``, zero among them when it lies inside."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    exponent = math.floor(math.log10(span / max(most, 1)))
    for factor in (1, 2, 2.5, 5, 10, 20, 25, 50, 100):
        step = factor * 10.0**exponent
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [round(index * step, 12) + 0.0 for index in range(first, last + 1)]
    return [0.0] if low <= 0 <= high else [low]


def fitted_ticks(low: float, high: float, pixels: float) -> list[float]:
    """As many round values within ``[low, high]`` as their labels have room for, at most 5."""
    for most in (5, 4, 3, 2):
        marks = ticks(low, high, most)
        widest = 7.0 * max(map(len, tick_labels(marks)), default=0) + 12
        step = (marks[1] - marks[0]) / (high - low) * pixels if len(marks) > 1 else pixels
        if widest <= step:
            return marks
    return [0.0] if low <= 0 <= high else ticks(low, high, 1)


def tick_labels(values: Sequence[float]) -> list[str]:
    """One number of decimals for all, a true minus sign, and 0 as "0"."""
    decimals = 0
    for value in values:
        text = f"{value:.6f}".rstrip("0")
        decimals = max(decimals, len(text.split(".")[1]))
    large = max((abs(value) for value in values), default=0) >= 10_000
    written = [f"{value:,.0f}" if large else f"{value:.{decimals}f}" for value in values]
    return [
        "0" if float(text.replace(",", "")) == 0 else text.replace("-", "\N{MINUS SIGN}")
        for text in written
    ]
