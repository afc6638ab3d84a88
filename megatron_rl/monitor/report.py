"""Builds RUN/report.html: one page that needs no network and no server. Reading, choosing and drawing are elsewhere.

`report_data` reads the run, `report_charts` and `report_samples` turn it into data, `report_facts` into words, and the
template lays it out. Responses are untrusted text: everything is escaped, the page carries its data as JSON that only
`textContent` ever shows, and a content security policy allows no script but the two that are built in, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from megatron_rl import __version__
from megatron_rl.files import write_atomic

from .report_charts import build_charts
from .report_data import ReportError, read_run
from .report_facts import headline, health_lines, metric_rows, run_facts
from .report_samples import collect_samples

__all__ = ["ReportError", "build_report"]

REPORT_FILE = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"


def build_report(run_dir: str | Path, *, max_steps: int = 12, samples_per_step: int = 16) -> Path:
    """Write `report.html` into a run directory (atomically) and return its path.

    Works on a run in progress as on a finished one; missing parts are left out and named on the page. At most
    `max_steps` training steps and as many evaluations with `samples_per_step` samples each are embedded.
    Raises ReportError when `run_dir` is not the directory of a run, OSError when the page cannot be written.
    """
    data = read_run(run_dir)
    charts, missing = build_charts(data)
    samples = {
        "train": collect_samples(data.rollouts, max_steps, samples_per_step, data.notes),
        "eval": collect_samples(data.evaluations, max_steps, samples_per_step, data.notes),
    }
    context = {
        "facts": run_facts(data),
        "headline": headline(data),
        "health": health_lines(data),
        "charts": charts,
        "sections": list(dict.fromkeys(chart["section"] for chart in charts)),
        "missing": missing,
        "samples": samples,
        "metrics": metric_rows(data),
        "config_text": data.config_text,
        "notes": data.notes,
        "version": __version__,
    }
    return write_atomic(data.run_dir / REPORT_FILE, _render(context).encode("utf-8", errors="replace"))


def _render(context: dict[str, Any]) -> str:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plotly, script = get_plotlyjs(), (_TEMPLATES / "report.js").read_text("utf-8")
    page_data = {"charts": context["charts"], "samples": context["samples"]}
    template = environment.from_string((_TEMPLATES / "report.html.jinja").read_text("utf-8"))
    return template.render(
        **context,
        style=Markup((_TEMPLATES / "report.css").read_text("utf-8")),
        plotly=Markup(plotly),
        script=Markup(script),
        script_hashes=f"{_hash(plotly)} {_hash(script)}",
        data=script_json(page_data),
    )


def script_json(value: Any) -> Markup:
    """JSON that may stand inside a `<script>` element: no `<`, `>` or `&` remains, so no text can end the element."""
    text = orjson.dumps(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
