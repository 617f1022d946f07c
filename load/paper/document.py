"""Pages written by the command: sections of sentences, tables and plots, each replaceable.

A section stands between two comments that name its part. So one part can be repeated, and the
results of the others stay as they are, with the options used then.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from io import BytesIO
from textwrap import fill
from typing import TYPE_CHECKING, Any

from PIL import Image  # comes with matplotlib

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from common.spot.experiments.results import RunsSummary

# Mark in a cell that is empty for a reason.
NONE = "\N{EN DASH}"
README, RESULTS = "README.md", "results.json"
_DPI, _COLOURS, _WIDTH = 100, 256, 120
_SECTION = re.compile(r"<!-- part: (\w+) -->\n(.*?)<!-- end: \1 -->\n", re.DOTALL)


@dataclass(slots=True)
class Section:
    """Results of one part."""

    title: str
    data: dict[str, Any] = field(default_factory=dict)  # content of the JSON file
    figures: dict[str, Figure] = field(default_factory=dict)  # keyed by file name
    blocks: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)  # missed requirements

    def judge(self, reached: bool, what: str) -> str:  # noqa: FBT001 -- a verdict, said first
        """Record a missed requirement. Returns the word for a sentence."""
        if not reached:
            self.missed.append(what)
        return "reached" if reached else "NOT REACHED"

    def say(self, *sentences: str) -> None:
        """Add a paragraph."""
        self.blocks.append(_wrapped(" ".join(each for each in sentences if each)))

    def point(self, *points: str) -> None:
        """Add a list."""
        self.blocks.append("\n".join(_wrapped(f"- {each}", "  ") for each in points if each))

    def table(self, head: str, rows: Iterable[str]) -> None:
        """Add a table. ` | ` separates cells. The first cell holds words, the others numbers."""
        ruler = " | ".join(["---", *["---:"] * head.count(" | ")])
        self.blocks.append("\n".join(f"| {line} |" for line in (head, ruler, *rows)))

    def head(self, words: str) -> None:
        """Begin a subsection."""
        self.blocks.append(f"### {words}")

    def draw(self, name: str, figure: Figure, caption: str) -> None:
        """Add a plot."""
        self.figures[name] = figure
        self.blocks.append(f"![{caption}]({name})")

    @property
    def text(self) -> str:
        """The section in Markdown."""
        return "\n\n".join([f"## {self.title}", *self.blocks]) + "\n"


def write(folder: Path, parts: Mapping[str, Section], order: Sequence[str], head: str) -> None:
    """Write sections into the pages of a folder, and keep its other sections.

    Args:
        folder: Target folder. Created if missing.
        parts: New sections, by part.
        order: Order of all parts.
        head: Text above the sections.
    """
    folder.mkdir(parents=True, exist_ok=True)
    readme, results = folder / README, folder / RESULTS
    texts = dict(_SECTION.findall(readme.read_text())) if readme.exists() else {}
    data: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    for name, section in parts.items():
        texts[name], data[name] = section.text, section.data
        for file, figure in section.figures.items():
            _save(figure, folder / file)
    there = [name for name in order if name in texts]
    body = "\n".join(f"<!-- part: {one} -->\n{texts[one]}<!-- end: {one} -->\n" for one in there)
    readme.write_text(f"{head}\n{body}")
    kept = {name: data[name] for name in order if name in data}
    results.write_text(_as_json(kept))


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write the results of one part into a file of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def _as_json(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Write a line for each experiment, with six significant digits."""
    between = ",\n"
    written = []
    for name, data in parts.items():
        lines = between.join(f"  {json.dumps(key)}: {_short(one)}" for key, one in data.items())
        written.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    return f"{{\n{between.join(written)}\n}}\n"


def _short(value: object) -> str:
    digits = json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}"))
    return json.dumps(digits)


def _save(figure: Figure, path: Path) -> None:
    """Write a plot with few colours: a third of the size, and it looks the same."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    whole, way = Image.open(drawn).convert("RGB"), Image.Quantize.MAXCOVERAGE
    few = whole.quantize(_COLOURS, way, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def _wrapped(words: str, indent: str = "") -> str:
    return fill(
        words, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def percent(share: float | None, digits: int = 1) -> str:
    """Format a share, or a dash for None."""
    return NONE if share is None else f"{100 * share:.{digits}f} %"


def interval(low: float | None, high: float | None, digits: int = 1) -> str:
    """Format an interval of shares."""
    if low is None or high is None:
        return ""
    return f"[{100 * low:.{digits}f}, {100 * high:.{digits}f}]"


def met(summary: RunsSummary) -> str:
    """Format the share of deadlines met, with Wilson's interval."""
    return f"{percent(summary.met)} {interval(summary.met_low, summary.met_high, 0)}"


def cost(summary: RunsSummary) -> str:
    """Format the mean cost share, with the interval of the mean."""
    ratio = summary.cost_ratio
    return f"{percent(ratio.mean)} {interval(ratio.low, ratio.high)}".strip()


def listed(words: Sequence[str]) -> str:
    """Join words with commas and an "and"."""
    *most, last = words or [""]
    return f"{', '.join(most)} and {last}" if most else last
