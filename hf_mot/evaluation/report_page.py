"""A report as one page in HTML, and with all else that people and programs read of it in a folder."""

import base64
import html
import os
from pathlib import Path
from string import Template
from typing import Any

from hf_mot.evaluation.arms import ARMS
from hf_mot.evaluation.curve_report import CURVE_PLOT, curve_table, plot_curve
from hf_mot.evaluation.files import save_report, write_whole
from hf_mot.evaluation.report import facts, plain_words, render_markdown, table
from hf_mot.evaluation.report_plot import PLOT, plot_recovery, require_matplotlib

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>
body{font:16px/1.55 system-ui,sans-serif;color:#1f2933;background:#f5f7fa;margin:0}
main{max-width:72rem;margin:0 auto;padding:2.5rem 1.25rem}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2.2rem 0 .7rem}
.sub{color:#66788a;margin:0 0 1.6rem}
.verdict{display:inline-block;padding:.25rem .8rem;border-radius:1rem;font-weight:600;margin-bottom:1rem}
.yes{background:#d9f2e3;color:#116149}.no{background:#fde3dd;color:#a12b12}
section{background:#fff;border:1px solid #e4e7eb;border-radius:.6rem;padding:.4rem 1.3rem 1.2rem;margin-bottom:1.2rem}
section h2{margin-top:1rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.88rem}
th,td{padding:.35rem .55rem;text-align:right;border-bottom:1px solid #e4e7eb;white-space:nowrap}
th{color:#52606d;font-weight:600;white-space:normal;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}tr.own td{background:#fff4ec;font-weight:600}
img{max-width:100%;height:auto}dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1.2rem;margin:0}
dt{color:#66788a}dd{margin:0;overflow-wrap:anywhere}.note{color:#66788a;font-size:.9rem}
</style></head><body><main>
<h1>$title</h1><p class="sub">How much of a context's worth survives the translation of its cache</p>
$verdict
<section><h2>In plain words</h2><ul>$words</ul></section>
<section><h2>All arms</h2>$table
<p class="note">In brackets: bootstrap 95&nbsp;% intervals over documents. Recovery: 1 as if the target had read the
context itself, 0 as if it had not.</p></section>
$plot
$curve
<section><h2>What the target reads in each arm</h2><dl>$arms</dl></section>
<section><h2>Measured with</h2><dl>$facts</dl></section>
</main></body></html>
""")


def write_report(report: dict[str, Any], folder: str | os.PathLike) -> Path:
    """
    Writes `report.json`, `report.md`, the plots (of the curve too, where there is one) and `report.html`, which holds
    the others' content in itself.

    Args:
        report (`dict`): What `evaluate` returned.
        folder (`str` or `os.PathLike`): Where to; it is made.

    Returns:
        `Path`: The page.

    Raises:
        ImportError: Without matplotlib, an extra.
    """
    require_matplotlib()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_report(report, folder / "report.json")
    plots = (
        PLOT if plot_recovery(report, folder / PLOT) else None,
        CURVE_PLOT if plot_curve(report, folder / CURVE_PLOT) else None,
    )
    write_whole(render_markdown(report, *plots), folder / "report.md")
    page = folder / "report.html"
    write_whole(render_page(report, *(folder / plot if plot else None for plot in plots)), page)
    return page


def render_page(report: dict[str, Any], plot: Path | None, curve_plot: Path | None = None) -> str:
    """The report as one HTML page that needs no other file; `plot` and `curve_plot` are the pictures to put in."""
    head, rows = table(report)
    picture = ""
    if plot is not None:
        image = _image(plot, "recovery of each arm against its FLOPs")
        picture = f"<section><h2>Recovery against cost</h2>{image}</section>"
    curve = ""
    if "curve" in report:
        curve_head, curve_rows = curve_table(report["curve"])
        image = "" if curve_plot is None else _image(curve_plot, "recovery by each plan against its FLOPs")
        own = _html_table(curve_head, curve_rows, report["replay"])
        curve = f"<section><h2>Replay plans</h2>{own}{image}</section>"
    verdict = ""
    if "gate" in report:
        passed = report["gate"]["passed"]
        verdict = f'<p class="verdict {"yes" if passed else "no"}">gate {"passed" if passed else "not passed"}</p>'
    return _PAGE.substitute(
        title=html.escape(facts(report)[0][1]),
        verdict=verdict,
        words="".join(f"<li>{html.escape(sentence)}</li>" for sentence in plain_words(report)),
        table=_html_table(head, rows, "translated"),
        plot=picture,
        curve=curve,
        arms="".join(f"<dt>{row[0]}</dt><dd>{html.escape(ARMS[row[0]].about)}</dd>" for row in rows),
        facts="".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in facts(report)),
    )


def _html_table(head: list[str], rows: list[list[str]], marked: str) -> str:
    """A table; the row that starts with `marked` stands out."""
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    body = "".join(
        f'<tr class="{"own" if row[0] == marked else ""}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _image(path: Path, text: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{text}" src="data:image/png;base64,{data}">'
