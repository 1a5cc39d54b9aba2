"""Report of the planner as one HTML file, which loads nothing from elsewhere."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from prfaas.solve.report.plots import draw_all, to_svg
from prfaas.solve.report.screen import Section, sections
from prfaas.solve.study import Study

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; background: #fff }
table { border-collapse: collapse; font-size: 14px } .wide { overflow-x: auto }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; vertical-align: top; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left } td { font-variant-numeric: tabular-nums }
dl { display: grid; grid-template-columns: 6rem 1fr; gap: .3rem } dt { color: #555 } dd { margin: 0 }
svg { max-width: 100%; height: auto } figure { margin: 1rem 0 }
"""


def to_html(study: Study, answer: Iterable[tuple[str, str]]) -> str:
    """Return the page: the answer, the plots, and all that is behind the plan."""
    parts = [f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in answer]
    figures = [f"<figure>{_inline(to_svg(figure, name))}</figure>" for name, figure in draw_all(study).items()]
    title = f"Plan for {escape(study.main.deployment.model.name)}"
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>',
            f"<body><h1>{title}</h1><dl>{''.join(parts)}</dl>",
            *figures,
            *(line for section in sections(study) for line in _section(section)),
            "</body></html>\n",
        ]
    )


def _inline(svg: str) -> str:
    """Return the SVG element without the declarations that only a file of its own may have."""
    return svg[svg.index("<svg") :]


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{escape(section.title)}</h2>"
    yield from (f"<p>{escape(line.strip())}</p>" for line in section.lines)
    if section.rows:
        head, *body = section.rows
        yield f'<div class="wide"><table>{_row(head, "th")}{"".join(_row(row, "td") for row in body)}</table></div>'
    yield from (f"<p>{escape(line.strip())}</p>" for line in section.below)


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
