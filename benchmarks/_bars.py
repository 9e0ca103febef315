"""Bars as SVG, without a library: the same bytes wherever they are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

# Okabe and Ito's colors, which stay apart for color-blind readers.
_COLORS = ("#0072b2", "#d55e00", "#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#999999", "#000000")
_BAR, _GAP, _WIDTH, _HEAD, _LETTER = 11, 10, 430, 46, 6.7

Groups = Sequence[tuple[str, Mapping[str, float]]]


def bars(title: str, unit: str, groups: Groups, line: tuple[str, float] | None = None) -> str:
    """Draw horizontal bars, a group for each label, a color for each name.

    Args:
        title: Above it.
        unit: Of the numbers.
        groups: Label, and numbers >= 0 by name.
        line: Name and place of a line across all groups.
    """
    names = list(dict.fromkeys(name for _, numbers in groups for name in numbers))
    color = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}
    left = 14 + _LETTER * max(len(label) for label, _ in groups)
    ends = [number for _, numbers in groups for number in numbers.values()]
    scale = _WIDTH / max([*ends, line[1] if line else 0.0])
    body, y = [], _HEAD + 16.0
    for label, numbers in groups:
        middle = y + _BAR * len(numbers) / 2 + 4
        body.append(_text(left - 6, middle, label, anchor="end"))
        for name, number in numbers.items():
            body.append(
                f'<rect x="{left:.1f}" y="{y:.1f}" width="{number * scale:.1f}" '
                f'height="{_BAR - 1}" fill="{color[name]}"/>'
            )
            body.append(_text(left + number * scale + 4, y + _BAR - 2, f"{number:.3g}", size=9))
            y += _BAR
        y += _GAP
    if line is not None:
        x = left + line[1] * scale
        body.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD}" y2="{y:.1f}" stroke="black" '
            'stroke-dasharray="2 3"/>'
        )
        body.append(_text(x, y + 10, line[0], anchor="middle", size=9))
    head = [_text(8, 16, f"{title}, {unit}", size=13), *_legend(names, color)]
    size = f"{left + _WIDTH + 60:.0f} {y + 18:.0f}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
            'font-family="sans-serif">',
            '<rect width="100%" height="100%" fill="white"/>',
            *head,
            *body,
            "</svg>\n",
        ]
    )


def _legend(names: Sequence[str], color: Mapping[str, str]) -> list[str]:
    parts, x = [], 8.0
    for name in names:
        parts.append(f'<rect x="{x:.1f}" y="28" width="10" height="10" fill="{color[name]}"/>')
        parts.append(_text(x + 14, 37, name))
        x += 26 + _LETTER * len(name)
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(text)}</text>"
