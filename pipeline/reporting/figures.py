"""The report's plots as plotly.js figures: plain data, no colours of the page (the page sets those)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipeline.reporting.model import Point, Report, Row
from pipeline.reporting.sections import telling

Figure = dict[str, Any]

# One hue an algorithm, readable on light and dark (after Okabe and Ito).
_HUES = {
    "none": "#6f7680", "NGRAM": "#e69f00", "EAGLE3": "#3d8fdb", "EAGLE": "#56b4e9", "NEXTN": "#cc79a7",
    "STANDALONE": "#1aa37a", "DFLASH": "#d5682c",
}  # fmt: skip
_OTHERS = ("#3d8fdb", "#e69f00", "#1aa37a", "#cc79a7", "#d5682c")
_PARTS = {"collectives": "#d5682c", "compute": "#3d8fdb", "draft": "#e69f00", "other": "#1aa37a", "idle": "#8a8f98"}
_PHASES = ("#8a8f98", "#3d8fdb", "#e69f00", "#1aa37a", "#cc79a7", "#d5682c")
_DASHES = ("solid", "dot", "dash", "longdash")  # a workload each, and
_MARKS = ("circle", "diamond", "square", "triangle-up")  # so that a hue is never the only difference


def figures(report: Report) -> dict[str, Figure]:
    """Every plot that the report's data allows, by the name that sections use."""
    made: dict[str, Callable[[Report], Figure | None]] = {
        "throughput_latency": throughput_latency,
        "break_even": break_even,
        "cycle": cycle,
        "step_time": step_time,
        "parallel": parallel,
        "timeline": timeline,
    }
    drawn = {name: draw(report) for name, draw in made.items()}
    return {name: found for name, found in drawn.items() if found is not None}


def _figure(data: list[Figure], x: str, y: str, **layout: Any) -> Figure:
    base: Figure = {
        "xaxis": {"title": {"text": x}, "zeroline": False, "automargin": True, "tickformat": ",~g"},
        "yaxis": {"title": {"text": y}, "zeroline": False, "automargin": True, "tickformat": ",~g"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "margin": {"t": 24, "r": 16, "b": 48, "l": 56},
        "hovermode": "closest",
        "height": 420,
    }
    for key, value in layout.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) else value
    return {"data": data, "layout": base}


def _hue(algorithm: str, groups: Sequence[str] = ()) -> str:
    """An algorithm's hue; names that are none take hues by their place among `groups`."""
    place = groups.index(algorithm) if algorithm in groups else 0
    return _HUES.get(algorithm) or _OTHERS[place % len(_OTHERS)]


def throughput_latency(report: Report) -> Figure | None:
    """Throughput against time per token: a line a configuration and workload, a point a load level."""
    points = [p for p in report.points if p.mean_tpot_ms is not None]
    if not points:
        return None
    shown = leaders(report.ranking)
    workloads = list(dict.fromkeys(p.workload for p in points))
    styles = [(workload, _DASHES[i % 4], _MARKS[i % 4]) for i, workload in enumerate(workloads)]
    traces = [
        _line(row, [p for p in points if p.config_id == row.config_id and p.workload == workload], dash, mark)
        for row in shown
        for workload, dash, mark in styles
    ]
    rest = [p for p in points if p.config_id not in {row.config_id for row in shown}]
    marks = [next(f"{mark}-open" for workload, _, mark in styles if workload == p.workload) for p in rest]
    others = _scatter(rest, "other configurations", "#8a8f98", marks, opacity=0.7)
    which = "; ".join(f"{mark} {dash}: {workload}" for workload, dash, mark in styles) if len(styles) > 1 else ""
    axis = f"mean TPOT, ms a token{f'<br>{which}' if which else ''}"
    return _figure([others, *traces] if rest else traces, axis, "output throughput, tok/s", margin={"b": 64})


def leaders(ranking: Iterable[Row]) -> list[Row]:
    """Winner, baseline and the best of each algorithm, in the ranking's order."""
    chosen: list[Row] = []
    for row in ranking:
        if row.is_winner or row.is_baseline or row.algorithm not in {other.algorithm for other in chosen}:
            chosen.append(row)
    return chosen


def _label(row: Row) -> str:
    roles = [role for role, has in (("winner", row.is_winner), ("baseline", row.is_baseline)) if has]
    return ", ".join(roles) or row.name


def _line(row: Row, points: list[Point], dash: str, mark: str) -> Figure:
    """One configuration over the loads of one workload; the winner's points say how many streams they are."""
    ordered = sorted(points, key=lambda p: p.concurrency or 0)
    first = dash == _DASHES[0]
    trace = _scatter(ordered, _short(_label(row), 34), _hue(row.algorithm), mark, mode="lines+markers")
    trace["line"] = {"dash": dash, "width": 3 if row.is_winner else 1.5}
    trace["legendgroup"], trace["showlegend"] = row.config_id, first
    if row.is_winner and first and len(ordered) > 1:
        trace |= {"mode": "lines+markers+text", "textposition": "top center", "cliponaxis": False}
        trace["text"] = [f"{p.concurrency} stream{'' if p.concurrency == 1 else 's'}" for p in ordered]
    return trace


def _scatter(
    points: list[Point], name: str, hue: str, mark: str | list[str], mode: str = "markers", opacity: float = 1.0
) -> Figure:
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "opacity": opacity,
        "x": [p.mean_tpot_ms for p in points],
        "y": [p.tok_per_s.value for p in points],
        "customdata": [f"{p.name}<br>{p.level}" for p in points],
        "hovertemplate": "%{customdata}<br>%{y:,.4~g} tok/s, TPOT %{x:.2f} ms<extra></extra>",
        "marker": {"color": hue, "size": 9, "symbol": mark},
    }


def break_even(report: Report) -> Figure | None:
    """Accept length against speed-up. Speculation pays above the line; a ray is one cycle time."""
    found = report.anatomies
    if not found:
        return None
    algorithms = {row.name: row.algorithm for row in report.ranking}
    groups = list(dict.fromkeys(algorithms.get(a.name, a.name) for a in found))
    longest = max(a.accept_length for a in found) + 0.5
    subject = report.subject or found[0]
    longest = max(longest, subject.break_even_accept_length + 0.5)
    edge = subject.break_even_accept_length
    traces: list[Figure] = [
        {
            "type": "scatter", "mode": "lines", "name": "break-even line", "x": [1, longest], "y": [1, 1],
            "line": {"dash": "dash", "color": "#c0392b", "width": 2}, "hoverinfo": "skip",
        },
        {
            "type": "scatter", "mode": "lines", "name": f"cycle of {subject.cycle_ms:.1f} ms",
            "x": [1, longest], "y": [1 / edge, longest / edge], "line": {"width": 1.5, "color": "#8a8f98"},
            "hoverinfo": "skip",
        },
    ]  # fmt: skip
    for place, group in enumerate(groups):
        inside = [a for a in found if algorithms.get(a.name, a.name) == group]
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": group, "x": [a.accept_length for a in inside],
                "y": [a.speedup for a in inside],
                "marker": {"size": 9, "color": _hue(group, groups), "symbol": _MARKS[place % 4]},
                "text": [f"{a.name}<br>{a.level or ''} break-even {a.break_even_accept_length:.2f}" for a in inside],
                "hovertemplate": "%{text}<br>accept length %{x:.2f}, %{y:.2f}×<extra></extra>",
            }
        )  # fmt: skip
    note = {
        "x": edge, "y": 1, "text": f"break-even {edge:.2f}", "showarrow": True, "arrowhead": 2, "ax": 0, "ay": 36,
    }  # fmt: skip
    traces.append(
        {
            "type": "scatter", "mode": "markers", "name": _short(f"what-if: {subject.name}", 34), "hoverinfo": "skip",
            "x": [subject.accept_length], "y": [subject.speedup],
            "marker": {"size": 18, "symbol": "circle-open", "color": "#c0392b", "line": {"width": 2}},
        }
    )  # fmt: skip
    x, y = "accept length, tokens a verify step", "speed-up over the baseline, ×"
    return _figure(traces, x, y, annotations=[note], yaxis={"rangemode": "tozero"})


def cycle(report: Report) -> Figure | None:
    """What a verify cycle takes, beside what it may take to break even at its accept length."""
    found = [a for a in telling(report) if report.subject is None or a.level == report.subject.level]
    if not found:
        return None
    names = [_short(a.name) for a in found]
    bars = (
        ("plain step", "#8a8f98", [a.plain_step_ms for a in found]),
        ("cycle", "#3d8fdb", [a.cycle_ms for a in found]),
        ("allowed: accept length × plain step", "#e69f00", [a.allowed_cycle_ms for a in found]),
    )
    traces: list[Figure] = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": names, "x": values, "marker": {"color": hue},
            "hovertemplate": "%{y}<br>%{x:.2f} ms<extra></extra>",
        }
        for name, hue, values in bars
    ]  # fmt: skip
    height = 120 + _rows(names, 46)
    where = f"ms a step, at {found[0].level}" if found[0].level else "ms a step"
    return _figure(traces, where, "", barmode="group", height=height, yaxis={"autorange": "reversed"})


def _short(name: str, width: int = 26) -> str:
    """Break a long label into lines, since narrow screens have no room for it."""
    lines = [""]
    for word in name.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(lines)


def _rows(names: Sequence[str], least: int) -> int:
    """Pixels for bars with these labels, so that none runs into the next."""
    return len(names) * max(least, *(14 + 15 * (name.count("<br>") + 1) for name in names))


def step_time(report: Report) -> Figure | None:
    """Where a decode step's milliseconds go, by rank."""
    if not report.profiles:
        return None
    names = [_short(f"{p.label} {p.rank}".strip()) for p in report.profiles]
    traces: list[Figure] = [
        {
            "type": "bar", "orientation": "h", "name": part, "y": names,
            "x": [p.parts_ms[part] for p in report.profiles], "marker": {"color": hue},
            "hovertemplate": "%{y}<br>" + part + " %{x:.2f} ms<extra></extra>",
        }
        for part, hue in _PARTS.items()
    ]  # fmt: skip
    height = 140 + _rows(names, 40)
    return _figure(traces, "ms of one decode step", "", barmode="stack", height=height, yaxis={"autorange": "reversed"})


def parallel(report: Report) -> Figure | None:
    """Parallel coordinates of the settings that differ, coloured by the objective."""
    rows = [row for row in report.ranking if row.value is not None]
    stated = dict.fromkeys(name for row in rows for name in row.params if name != "speculation.draft_model")
    settings = [name for name in stated if _differs(rows, name)]
    if len(rows) < 3 or not settings:
        return None
    values = [row.value.value for row in rows if row.value is not None]
    last = {"label": report.unit, "values": values, "tickformat": ",.4~g"}
    trace: Figure = {
        "type": "parcoords",
        "dimensions": [*(_axis(rows, setting) for setting in settings), last],
        "line": {"color": values, "colorscale": [[0, "#8a8f98"], [0.5, "#3d8fdb"], [1, "#e69f00"]]},
        "labelfont": {"size": 13},
        "tickfont": {"size": 12},
        "rangefont": {"size": 12},
    }
    return {
        "data": [trace],
        "layout": {
            "height": 380,
            "margin": {"t": 60, "r": 50, "b": 24, "l": 96},
            "meta": {"least_width": 150 + 95 * len(settings)},  # the page scrolls sideways below that
        },
    }


def _differs(rows: Iterable[Row], setting: str) -> bool:
    return len({str(row.params.get(setting, "default")) for row in rows}) > 1


def _axis(rows: list[Row], setting: str) -> Figure:
    words = [str(row.params.get(setting, "default")) for row in rows]
    ticks = sorted(
        set(words), key=lambda word: (word != "default", not word.isdigit(), int(word) if word.isdigit() else 0, word)
    )
    label = setting.removeprefix("speculation.").removeprefix("collectives.")
    return {
        "label": label,
        "values": [ticks.index(w) for w in words],
        "tickvals": list(range(len(ticks))),
        "ticktext": ticks,
    }


def timeline(report: Report) -> Figure | None:
    """Trials as bars in time, a colour a phase."""
    spans = report.timeline
    if not spans:
        return None
    phases = list(dict.fromkeys(phase for span in spans for phase in span.phases_s))
    labels = [f"{span.trial}" for span in spans]
    starts = [span.start_s / 60 for span in spans]
    traces: list[Figure] = []
    for phase, hue in zip(phases, _PHASES * len(phases), strict=False):
        lengths = [span.phases_s.get(phase, 0.0) / 60 for span in spans]
        traces.append(
            {
                "type": "bar", "orientation": "h", "name": phase, "y": labels, "x": lengths, "base": starts,
                "marker": {"color": hue}, "text": [f"{s.name} ({s.role}, {s.status})" for s in spans],
                "textposition": "none",
                "hovertemplate": "%{text}<br>" + phase + " %{x:.1f} min<extra></extra>",
            }
        )  # fmt: skip
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    height = 140 + 16 * len(spans)
    axis = {"autorange": "reversed", "type": "category", "dtick": 1 if len(spans) < 40 else 5}
    return _figure(traces, "minutes since the study's start", "trial", barmode="overlay", height=height, yaxis=axis)
