"""The figures as horizontal bars, in an SVG that needs no library.

A bar is the median of the rounds; the line on it goes from the lowest to the highest.
"""

from html import escape

from bench.figures import Figure
from bench.results import Row, spread, values

_WIDTH, _LEFT, _BAR, _GAP, _COLUMN = 1180, 130, 18, 26, 590
_OURS = ("springtide", "springtide+ids", "shim", "router+shim", "router+shim (no link)")


def draw(figures: list[Figure], rows: dict[str, list[Row]]) -> str:
    """The drawing; figures without a number are left out."""
    panels = [(f, bars) for f in figures if (bars := _bars(f, rows[f.key]))]
    parts, tops = [], [20, 20]
    for figure, bars in panels:
        side = 0 if tops[0] <= tops[1] else 1
        parts.append(_panel(figure, bars, side * _COLUMN + 10, tops[side]))
        tops[side] += 44 + len(bars) * _GAP + 24
    height = max(tops) + 10
    style = (
        "text{font:12px sans-serif;fill:#24292f}.t{font-weight:bold;font-size:12.5px}.u{fill:#57606a}"
        ".o{fill:#0f766e}.s{fill:#5eaaa8}.p{fill:#a8b1bb}line{stroke:#24292f;stroke-width:1.2}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>' + "".join(parts) + "</svg>\n"
    )


def _bars(figure: Figure, measured: list[Row]) -> list[tuple[str, float, float, float]]:
    found = []
    for target in figure.targets:
        s = spread(list(values(measured, target, figure.value).values()))
        if s is not None and target != "direct":
            found.append((target, s.mid, s.low, s.high))
    return found


def _panel(figure: Figure, bars: list[tuple[str, float, float, float]], x: int, y: int) -> str:
    widest = max(high for *_, high in bars) or 1.0
    # One bar that dwarfs the others (a first token 40 ms late) is cut, and its number says so.
    ordered = sorted(mid for _, mid, _, _ in bars)
    top = widest if len(ordered) < 2 or ordered[-1] < 6 * ordered[-2] else 1.6 * ordered[-2]
    scale = (_COLUMN - _LEFT - 150) / top
    title = figure.title if len(figure.title) <= 88 else figure.title[:86] + "…"
    out = [f'<text class="t" x="{x}" y="{y}">{escape(title)}</text>']
    out.append(f'<text class="u" x="{x}" y="{y + 17}">{escape(figure.unit)}</text>')
    at = y + 28
    digits = 1 if widest < 1000 else 0
    for name, mid, low, high in bars:
        kind = "o" if name in ("springtide", "router+shim") else "s" if name in _OURS else "p"
        length = max(1.0, min(max(0.0, mid), top) * scale)
        left, middle = x + _LEFT, at + _BAR / 2
        out.append(f'<text x="{left - 8}" y="{at + 13}" text-anchor="end">{escape(name)}</text>')
        out.append(f'<rect class="{kind}" x="{left}" y="{at}" width="{length:.1f}" height="{_BAR}" rx="2"/>')
        end = left + min(max(0.0, high), top) * scale
        if high > low:
            start = left + min(max(0.0, low), top) * scale
            out.append(f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{middle}" y2="{middle}"/>')
        cut = " (cut)" if mid > top else ""
        out.append(f'<text x="{max(end, left + length) + 6:.1f}" y="{at + 13}">{mid:,.{digits}f}{cut}</text>')
        at += _GAP
    return "".join(out)
