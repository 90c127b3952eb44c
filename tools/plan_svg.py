# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Draw the memory of every node of a plan, stacked against the redline, as SVG without a library."""

from __future__ import annotations

from html import escape
from typing import Any

#: Terms from the bottom of a column to its top, with a colour that also works in grey print.
LAYERS = (
    ("rank_file", "rank file", "#22577a"),
    ("vision", "vision", "#38a3a5"),
    ("kv", "KV pool", "#57cc99"),
    ("rope", "RoPE", "#80ed99"),
    ("runtime", "runtime", "#c7b198"),
    ("growth", "growth", "#dfd3c3"),
    ("dip", "dip under load", "#f0a868"),
    ("chunk", "larger chunk", "#e07a3f"),
    ("drift", "drift", "#b5651d"),
)
WIDTH, HEIGHT, LEFT, TOP, BAR, GAP = 760, 470, 60, 40, 110, 60


def _text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(words)}</text>"


def _rect(x: float, y: float, size: tuple[float, float], colour: str, title: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{size[0]:.1f}" height="{max(size[1], 0):.2f}"'
    return f'<rect {place} fill="{colour}"><title>{escape(title)}</title></rect>'


def _line(x1: float, x2: float, y: float, colour: str, width: int = 2) -> str:
    place = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
    return f'<line {place} stroke="{colour}" stroke-width="{width}"/>'


def draw(plan: dict[str, Any]) -> str:
    """SVG text of a plan (the object that ``sparkplan --json`` prints)."""
    nodes = plan["budget"]["nodes"]
    top_gib = max(10.0, *(node["effective_available_gib"] for node in nodes)) * 1.05
    top_gib = max(top_gib, *(sum(max(0.0, v) for v in node["terms_gib"].values()) for node in nodes))
    floor = HEIGHT - 60
    scale = (floor - TOP) / top_gib
    width = max(WIDTH, LEFT + len(nodes) * (BAR + GAP) + 200)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(
            LEFT,
            22,
            f"{plan['engine']}, world {plan['world']}, context {plan['context']:,}: "
            f"{plan['budget']['verdict'].replace('_', ' ')}",
            size=15,
        ),
    ]
    step = 20 if top_gib > 50 else 5
    for mark in range(0, int(top_gib) + 1, step):
        y = floor - mark * scale
        out.append(_line(LEFT - 5, width - 190, y, "#e5e5e5", 1))
        out.append(_text(LEFT - 10, y + 4, str(mark), size=11, anchor="end"))
    out.append(_text(16, TOP - 6, "GiB", size=11))
    for number, node in enumerate(nodes):
        x = LEFT + GAP / 2 + number * (BAR + GAP)
        height = 0.0
        for key, label, colour in LAYERS:
            value = max(0.0, node["terms_gib"].get(key, 0.0))
            height += value
            title = f"{label}: {value:.2f} GiB"
            out.append(_rect(x, floor - height * scale, (BAR, value * scale), colour, title))
        line = floor - (node["effective_available_gib"] - node["redline_gib"]) * scale
        limit = floor - node["effective_available_gib"] * scale
        frame = f'x="{x:.1f}" y="{limit:.1f}" width="{BAR}" height="{floor - limit:.1f}"'
        out.append(f'<rect {frame} fill="none" stroke="#333"/>')
        out.append(_line(x - 8, x + BAR + 8, line, "#c1121f"))
        out.append(_text(x + BAR / 2, floor + 18, f"rank {node['rank']}", anchor="middle", size=13))
        out.append(
            _text(
                x + BAR / 2,
                floor + 34,
                f"{node['worst_gib']:.2f} GiB left at worst",
                anchor="middle",
                size=11,
            )
        )
        out.append(
            _text(
                x + BAR / 2,
                floor + 49,
                f"of {node['available_gib']:.1f} ({node['available_source']})",
                anchor="middle",
                size=11,
            )
        )
    legend = width - 175
    for number, (_key, label, colour) in enumerate(LAYERS):
        y = TOP + 10 + number * 20
        out.append(_rect(legend, y, (14, 14), colour, label))
        out.append(_text(legend + 20, y + 12, label))
    y = TOP + 10 + len(LAYERS) * 20
    out.append(_line(legend, legend + 14, y + 7, "#c1121f"))
    out.append(_text(legend + 20, y + 12, f"redline ({nodes[0]['redline_gib']:g} GiB left)"))
    out.append("</svg>")
    return "\n".join(out) + "\n"
