"""`python -m pipeline.drift`: is the champion still what was promoted? From counters alone, not from texts.

Two readings of `/metrics` make a window. Its throughput per stream, time to first token, accept length and
share of errors are held against the promoted figures; what is off for several windows in a row is an alarm:
a line in the log, a gauge file for Prometheus, a tag on the registered version, and a rollback if asked.
"""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli import run_command
from pipeline.config import Frozen
from pipeline.errors import PromotionError

if TYPE_CHECKING:
    from pipeline.records import LevelResult

Counters = Mapping[str, float]
FEWEST_REQUESTS = 5  # a window with fewer says nothing
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? ([-+.\deE]+|NaN)$", re.MULTILINE)


class Figures(Frozen):
    """What is watched. None is unknown, and unknown figures raise no alarm."""

    tok_per_s_per_stream: float | None = None
    ttft_ms: float | None = None
    accept_length: float | None = None
    error_rate: float | None = None


class Tolerance(Frozen):
    """How far a live figure may be from the promoted one, as shares; errors as an absolute share."""

    tok_per_s_per_stream: float = 0.3
    ttft_ms: float = 1.0
    accept_length: float = 0.2
    error_rate: float = 0.02


class Alarm(Frozen):
    """One figure that is off, and by how much."""

    figure: str
    promoted: float
    live: float

    def text(self) -> str:
        """For the log and the tag."""
        return f"{self.figure}: {self.live:.3g}, promoted {self.promoted:.3g}"


def promoted_figures(levels: Iterable[LevelResult]) -> Figures:
    """The figures of a promoted launch, means over its load levels."""
    found = list(levels)
    tpot = [level.tpot_ms.mean for level in found if level.tpot_ms and level.tpot_ms.mean]
    ttft = [level.ttft_ms.mean for level in found if level.ttft_ms and level.ttft_ms.mean]
    return Figures(
        tok_per_s_per_stream=1e3 / _mean(tpot) if tpot else None,
        ttft_ms=_mean(ttft) if ttft else None,
        accept_length=_mean(accept) if (accept := [x.accept_length for x in found if x.accept_length]) else None,
        error_rate=0.0,
    )


def figures_of(report: Mapping[str, Any], config_id: str) -> Figures:
    """The promoted figures from a promotion's report."""
    from pipeline.records import LevelResult

    measured = [x["measurement"] for x in report["launches"] if x["config_id"] == config_id and x["measurement"]]
    return promoted_figures(LevelResult.model_validate(level) for found in measured for level in found["levels"])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def read_counters(text: str) -> dict[str, float]:
    """Sums over all label sets of every series in Prometheus' text; streams only, where that is a label.

    The endpoint's answers keep their status: `fastverify_endpoint_answers_total/200`.
    """
    totals: dict[str, float] = {}
    for name, labels, value in _LINE.findall(text):
        if 'is_streaming="false"' in labels or value == "NaN":
            continue
        status = re.search(r'answer="(\w+)"', labels)
        key = f"{name}/{status[1]}" if status else name
        totals[key] = totals.get(key, 0.0) + float(value)
    return totals


def live_figures(before: Counters, after: Counters) -> Figures | None:
    """The figures of the window between two readings; None when too little happened or an engine restarted."""
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    answers = {name: n for name, n in gained.items() if name.startswith("fastverify_endpoint_answers_total/")}
    counted = [*answers.values(), gained.get("sglang:generation_tokens_total", 0.0)]
    if sum(answers.values()) < FEWEST_REQUESTS or min(counted) < 0:
        return None
    seconds_a_token = _average(gained, "sglang:inter_token_latency_seconds")
    ttft = _average(gained, "sglang:time_to_first_token_seconds")
    verified, tokens = gained.get("sglang:spec_verify_calls_total"), gained.get("sglang:generation_tokens_total")
    bad = sum(n for name, n in answers.items() if name.rpartition("/")[2].startswith("5") or name.endswith("/broken"))
    return Figures(
        tok_per_s_per_stream=1 / seconds_a_token if seconds_a_token else None,
        ttft_ms=1e3 * ttft if ttft is not None else None,
        accept_length=tokens / verified if tokens and verified else None,
        error_rate=bad / sum(n for name, n in answers.items() if not name.endswith("/broken")),
    )


def _average(gained: Counters, histogram: str) -> float | None:
    count = gained.get(f"{histogram}_count", 0.0)
    return gained.get(f"{histogram}_sum", 0.0) / count if count > 0 else None


def alarms(live: Figures, promoted: Figures, allowed: Tolerance) -> tuple[Alarm, ...]:
    """What is off: slower, later, shorter accepted or more failures than allowed. Better is never an alarm."""
    worse: dict[str, Callable[[float, float, float], bool]] = {
        "tok_per_s_per_stream": lambda now, then, share: now < then * (1 - share),
        "ttft_ms": lambda now, then, share: now > then * (1 + share),
        "accept_length": lambda now, then, share: now < then * (1 - share),
        "error_rate": lambda now, then, share: now > then + share,
    }
    found = []
    for name, is_worse in worse.items():
        now, then = getattr(live, name), getattr(promoted, name)
        if now is not None and then is not None and is_worse(now, then, getattr(allowed, name)):
            found.append(Alarm(figure=name, promoted=then, live=now))
    return tuple(found)


class Watch:
    """Alarms that last: only what was off in `patience` windows in a row counts."""

    def __init__(self, promoted: Figures, allowed: Tolerance | None = None, patience: int = 3) -> None:
        self._promoted, self._allowed, self._patience = promoted, allowed or Tolerance(), patience
        self._before: Counters | None = None
        self._row: dict[str, int] = {}
        self.live: Figures | None = None

    def see(self, counters: Counters) -> tuple[Alarm, ...]:
        """Take a reading; return the alarms that have lasted long enough."""
        if not counters:
            return ()  # the endpoint was away: the next reading makes a longer window
        before, self._before = self._before, counters
        self.live = live_figures(before, counters) if before is not None else None
        if self.live is None:
            return ()
        now = alarms(self.live, self._promoted, self._allowed)
        self._row = {alarm.figure: self._row.get(alarm.figure, 0) + 1 for alarm in now}
        return tuple(alarm for alarm in now if self._row[alarm.figure] >= self._patience)


def prometheus(live: Figures | None, lasting: Iterable[Alarm]) -> str:
    """Gauges of the watch, for a textfile collector."""
    lines = ["# TYPE fastverify_drift_alarm gauge"]
    off = {alarm.figure for alarm in lasting}
    lines += [f'fastverify_drift_alarm{{figure="{name}"}} {int(name in off)}' for name in Figures.model_fields]
    known = {} if live is None else live.model_dump(exclude_none=True)
    lines += [f'fastverify_drift_live{{figure="{name}"}} {value:g}' for name, value in known.items()]
    return "\n".join(lines) + "\n"


# -- the command -------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    url: Annotated[str, typer.Argument(help="The endpoint.")] = "http://127.0.0.1:8000",
    every: Annotated[float, typer.Option(min=1, help="Seconds between readings.")] = 60.0,
    patience: Annotated[int, typer.Option(min=1, help="Windows in a row until an alarm counts.")] = 3,
    windows: Annotated[int | None, typer.Option(help="Stop after so many readings.")] = None,
    rollback: Annotated[bool, typer.Option(help="Go back to the previous champion on an alarm.")] = False,
    runs: Annotated[Path, typer.Option(help="Where the champion's file lies.")] = Path("runs"),
    tracking_uri: Annotated[str | None, typer.Option(help="MLflow server, which holds the registry.")] = None,
    textfile: Annotated[Path | None, typer.Option(help="Write gauges for Prometheus' textfile collector.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the endpoint's API key.")] = None,
) -> None:
    """Watch the champion in service and raise an alarm when it drifts from what was promoted."""
    from pipeline.promote import open_registry, roll_back
    from pipeline.registry import CHAMPION, answering
    from pipeline.tracking import check_uri, default_uri

    uri = tracking_uri or default_uri(runs)
    check_uri(uri)
    registry = open_registry(uri, None, runs)
    with answering(uri):
        version = registry.by_alias(CHAMPION)
        if version is None:
            raise PromotionError(f"{registry.name} has no champion to watch")
        watch = Watch(figures_of(registry.report(version), version.tags["config_id"]), patience=patience)
    key = api_key_file.read_text().strip() if api_key_file else None
    count = 0
    while windows is None or count < windows:
        lasting = watch.see(read_counters(fetch(url, key)))
        if textfile is not None:
            textfile.write_text(prometheus(watch.live, lasting))
        if lasting:
            said = "; ".join(alarm.text() for alarm in lasting)
            typer.echo(f"drift: {said}")
            registry.tag(version, "drift", said)
            if rollback:
                roll_back(registry, runs / "champion.json", "auto", typer.echo)
                return
        count += 1
        if windows is None or count < windows:
            time.sleep(every)


def fetch(url: str, key: str | None) -> str:
    """The endpoint's metrics page; an endpoint that is away has none, which is no reading."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics", headers=headers)  # noqa: S310 (a given http URL)
    try:
        with urllib.request.urlopen(request, timeout=30) as page:  # noqa: S310
            return str(page.read().decode())
    except urllib.error.URLError:
        return ""


if __name__ == "__main__":
    run_command(app)
