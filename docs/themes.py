"""Makes pictures transparent and readable on light and dark pages.

An SVG in a page follows the colour scheme of the element that holds it (``prefers-color-scheme``), on the site and
where the repository is read. A style sheet in the picture replaces inks and colours of lines.
"""

from __future__ import annotations

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#1e2129"
INK = ("#222222", "#e6e6e6")
COLOURS = {
    "#000000": INK,
    "#222222": INK,
    "#666666": ("#666666", "#a8acb8"),
    "#999999": ("#868686", "#8f93a0"),
    "#d9d9d9": ("#d9d9d9", "#474b57"),
    "#b3382c": ("#b3382c", "#ef7d70"),
    "#33658a": ("#33658a", "#6fb1e0"),
    "#1f6f54": ("#1f6f54", "#4cc39a"),
    "#f2a541": ("#c47c12", "#f2a541"),
    "#6a4c93": ("#6a4c93", "#b796e6"),
    "#2ca6a4": ("#1f8f8d", "#45c4c2"),
    "#a23b72": ("#a23b72", "#e083b4"),
    "#5b4b2a": ("#5b4b2a", "#c7ad7d"),
    "#8a8a8a": ("#767676", "#9a9a9a"),
}
"""What is drawn: what it is on light and on dark pages."""


def themed(svg: str) -> str:
    """Return a picture without background whose colours are those of ``COLOURS`` on light and on dark pages."""
    svg = svg.replace('style="fill: #ffffff"', 'style="fill: none"')
    start = svg.index(">", svg.index("<svg ")) + 1
    light, dark = (_rules(svg, scheme) for scheme in (0, 1))
    style = f"<style>{light}@media (prefers-color-scheme: dark){{{dark}}}</style>"
    return f"{svg[:start]}{style}{svg[start:]}"


def _rules(svg: str, scheme: int) -> str:
    rules = [f"svg{{fill:{INK[scheme]}}}"]
    for drawn, shown in COLOURS.items():
        for name in ("fill", "stroke"):
            selectors = [f'[style*="{name}: {drawn}"]'] * (f"{name}: {drawn}" in svg)
            selectors += [f'[{name}="{drawn}"]'] * (f'{name}="{drawn}"' in svg)
            if selectors:
                rules.append(f"{','.join(selectors)}{{{name}:{shown[scheme]}!important}}")
    return "".join(rules)
