"""The report as one HTML page that opens from disk: text, tables and plots in inline SVG, nothing from a network."""

import math
from collections.abc import Sequence
from html import escape

from deepinfer.golden.report import COUNTING, PromptReport, Report, describe_divergences, describe_tensor

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860, 200, 62, 26, 10
# Where 0 is drawn on a logarithmic axis: below everything that rounding can cause.
FLOOR = 1e-10
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 64em; padding: 0 1em; color: #1c2430; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em } h3 { font-size: 1em; margin-bottom: .2em }
.verdict { padding: .6em 1em; border-left: 6px solid; font-weight: 600 }
.equal { border-color: #18794e; background: #eaf6ef } .differs { border-color: #b42318; background: #fdecea }
table { border-collapse: collapse; font-size: 13px }
td, th { padding: .2em .7em; text-align: left; border-bottom: 1px solid #dde3ea }
tr.outside td { color: #b42318 }
code { font-size: .93em } svg text { font: 11px system-ui, sans-serif; fill: #5a6675 } .note { color: #5a6675 }
"""


def to_html(report: Report) -> str:
    """The whole page."""
    state = "equal" if report.is_equal else "differs"
    first = report.first_outside
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Golden outputs: "
        f"{escape(state)}</title><style>{STYLE}</style></head><body>",
        "<h1>Golden outputs</h1>",
        f"<p class='verdict {state}'>{escape(report.verdict.capitalize())}</p>",
    ]
    if first is not None:
        parts.append(f"<p>First outside its tolerance, in execution order: <b>{escape(describe_tensor(first))}</b></p>")
    parts.append(
        f"<p>golden <code>{escape(report.golden)}</code><br>other <code>{escape(report.other)}</code><br>"
        f"basis: {escape(report.basis)}, precision {escape(report.precision)}<br>"
        f"counted: {escape(COUNTING)}</p>"
    )
    parts += [f"<p class='note'>Note: {escape(note)}</p>" for note in report.notes]
    for prompt in report.prompts:
        parts += _prompt(prompt)
    if report.jaccard:
        parts.append("<h2>Choices shared by both builds</h2>")
        parts.append(_table(("choice", "share"), [(n, f"{s:.2%}") for n, s in sorted(report.jaccard.items(), key=lambda i: i[1])]))
    return "\n".join([*parts, "</body></html>", ""])


def _prompt(prompt: PromptReport) -> list[str]:
    title = f"Prompt {prompt.index}: {prompt.num_prompt_tokens} + {prompt.num_tokens} tokens"
    state = "; ".join(prompt.problems) or "equal within tolerance"
    parts = [f"<h2>{escape(title)}</h2><p>{escape(state)}</p>"]
    if prompt.widening is not None:
        parts.append(f"<p class='note'>{escape(prompt.widening)}</p>")
    if prompt.positions:
        places = [p.position for p in prompt.positions]
        parts.append("<h3>KL divergence by position (nats)</h3>")
        parts.append(plot(places, [p.kl for p in prompt.positions], "position", marks=_marks(prompt)))
        parts.append("<h3>Largest difference of log probabilities by position; the line is what is allowed</h3>")
        values = [p.max_logprob_difference for p in prompt.positions]
        parts.append(plot(places, values, "position", limit=prompt.logprob_tolerance, marks=_marks(prompt)))
    if prompt.divergences:
        parts.append("<h3>Tokens chosen otherwise</h3>")
        parts += [f"<p>{escape(line.strip())}</p>" for line in describe_divergences(prompt)]
        rows = [
            (str(d.index + 1), str(d.position), str(d.ours), str(d.theirs), f"{d.gap:.4g}", f"{d.top2_gap:.4g}", str(d.kind))
            for d in prompt.divergences
        ]
        parts.append(_table(("token", "position", "ours", "theirs", "gap", "top-2 gap", "kind"), rows))
    if prompt.tensors:
        parts.append("<h3>Tensors in execution order: how many times their tolerance (1 is the limit)</h3>")
        titles = [t.name for t in prompt.tensors]
        parts.append(plot(range(len(titles)), [t.severity for t in prompt.tensors], "tensor", limit=1.0, titles=titles))
        outside = [t for t in prompt.tensors if not t.is_within]
        if outside:
            far = [(t.name, t.module, f"{t.relative:.3g}", f"{t.worst_row:.3g}", describe_tensor(t)) for t in outside]
            parts.append(_table(("outside", "module", "relative", "worst row", "what"), far, "outside"))
    return parts


def _marks(prompt: PromptReport) -> list[int]:
    """Rows that predicted a token which was chosen otherwise."""
    return [d.position - 1 for d in prompt.divergences]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], row_class: str = "") -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr class='{row_class}'>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def plot(
    places: Sequence[int],
    values: Sequence[float],
    unit: str,
    limit: float | None = None,
    marks: Sequence[int] = (),
    titles: Sequence[str] = (),
) -> str:
    """Points on a logarithmic axis; 0 lies on the floor, what is infinite on the ceiling. Points above `limit` are red.

    `marks` are places with a vertical line; `titles` appear when a point is pointed at.
    """
    finite = [v for v in (*values, limit or 0.0) if FLOOR < v < math.inf]
    low = math.floor(math.log10(min(finite, default=FLOOR)))
    if any(v <= FLOOR for v in values):
        # Zeros stand apart from the smallest number.
        low -= 1
    high = max(math.ceil(math.log10(max(finite, default=1.0))), low + 1)
    first, last = min(places), max(places)

    def x(place: float) -> float:
        return LEFT + (place - first) / max(last - first, 1) * (WIDTH - LEFT - 12)

    def y(value: float) -> float:
        level = high if value == math.inf else math.log10(value) if value > FLOOR else low
        return TOP + (high - min(max(level, low), high)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='100%' role='img'>"]
    step = max((high - low) // 5, 1)
    for exponent in range(low, high + 1, step):
        height = y(10.0**exponent)
        label = f"1e{exponent}" if exponent > low else f"≤1e{exponent}"
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - 12}' y1='{height:.1f}' y2='{height:.1f}' stroke='#e6ebf0'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{height + 4:.1f}' text-anchor='end'>{label}</text>")
    parts += [f"<line x1='{x(m):.1f}' x2='{x(m):.1f}' y1='{TOP}' y2='{HEIGHT - BOTTOM}' stroke='#e0a030'/>" for m in marks]
    if limit:
        parts.append(
            f"<line x1='{LEFT}' x2='{WIDTH - 12}' y1='{y(limit):.1f}' y2='{y(limit):.1f}' stroke='#b42318' stroke-dasharray='5 4'/>"
        )
    for number, (place, value) in enumerate(zip(places, values, strict=True)):
        is_outside = limit is not None and not value <= limit
        title = titles[number] if titles else f"{unit} {place}"
        color = "#b42318" if is_outside else "#2563a8"
        parts.append(
            f"<circle cx='{x(place):.1f}' cy='{y(value):.1f}' r='2.6' fill='{color}'>"
            f"<title>{escape(title)}: {value:.4g}</title></circle>"
        )
    for place in (first, last):
        anchor = "start" if place == first else "end"
        parts.append(f"<text x='{x(place):.1f}' y='{HEIGHT - 8}' text-anchor='{anchor}'>{escape(unit)} {place}</text>")
    return "".join([*parts, "</svg>"])
