"""What a person watches: a table that redraws on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.cli import discard_stdout
from pipeline.records import TrialRecord

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

COLUMNS = ("#", "role", "configuration", "phase", "tok/s", "accept length", "s")


@dataclass
class Row:
    """One trial as it goes."""

    number: int
    role: str
    words: str
    phase: str = "queued"
    began: float = field(default_factory=time.monotonic)
    throughput: str = ""
    accept_length: str = ""
    seconds: float | None = None

    def cells(self) -> tuple[str, ...]:
        """The row's texts, in the order of COLUMNS."""
        seconds = self.seconds if self.seconds is not None else time.monotonic() - self.began
        return (
            str(self.number), self.role, self.words, self.phase, self.throughput, self.accept_length, f"{seconds:.0f}",
        )  # fmt: skip


class Board:
    """Shows a study while it runs; `quiet` keeps it silent (`--json`)."""

    def __init__(self, *, quiet: bool = False, tty: bool | None = None) -> None:
        self._quiet = quiet
        self._tty = (sys.stdout.isatty() if tty is None else tty) and not quiet
        self._rows: dict[int, Row] = {}
        self._live: Live | None = None
        self._durations: list[float] = []
        self._expected: int | None = None

    def __enter__(self) -> Board:
        if self._tty:
            from rich.live import Live

            self._live = Live(get_renderable=self._table, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def expect(self, trials: int | None) -> None:
        """Say how many launches are expected in all, for the ETA."""
        self._expected = trials

    def say(self, text: str) -> None:
        """Print one line, above the table on a terminal. Where nobody reads any more the study goes on unseen."""
        try:
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False)
            elif not self._quiet:
                print(text, flush=True)
        except OSError:  # the pipe's reader, or the terminal, has gone
            discard_stdout()

    def start(self, number: int, role: str, words: str) -> None:
        """A trial was launched."""
        self._rows[number] = Row(number, role, words)

    def phase(self, number: int, phase: str) -> None:
        """A trial entered a phase."""
        row = self._rows.get(number)
        if row is not None and row.phase != phase:
            row.phase = phase
            if not self._tty:
                self.say(f"trial {number:3d}  {row.role:9s} {row.words}: {phase}")

    def finish(self, record: TrialRecord) -> None:
        """A trial ended; its record has the figures or the reason."""
        row = self._rows.setdefault(record.number, Row(record.number, record.role, record.config.words()))
        row.phase = record.status if record.failure is None else f"failed: {record.failure.failure_class}"
        row.seconds = time.monotonic() - row.began
        if record.status in ("ok", "stopped"):
            self._durations.append(row.seconds)
        row.throughput, row.accept_length = _figures(record)
        if not self._tty:
            self.say(f"trial {record.number:3d}  {row.role:9s} {row.words}: {_summary(record, row)}{self._eta()}")

    def _eta(self) -> str:
        left = (self._expected or 0) - len(self._durations)
        if left <= 0 or not self._durations:
            return ""
        minutes = left * sum(self._durations) / len(self._durations) / 60
        return f" (about {minutes:.0f} min left)" if minutes >= 1 else " (less than a minute left)"

    def _table(self) -> Table:
        from rich.table import Table

        table = Table(*COLUMNS, title=f"fastverify{self._eta()}", title_justify="left")
        for row in list(self._rows.values())[-20:]:
            table.add_row(*row.cells())
        return table


def _figures(record: TrialRecord) -> tuple[str, str]:
    if record.measurement is None:
        return "", ""
    levels = record.measurement.levels
    throughput = " / ".join(f"{level.output_tok_per_s.value:.1f}" for level in levels)
    accept = " / ".join("-" if level.accept_length is None else f"{level.accept_length:.2f}" for level in levels)
    return throughput, accept if any(level.accept_length is not None for level in levels) else ""


def _summary(record: TrialRecord, row: Row) -> str:
    if record.status in ("failed", "pruned", "reused"):
        why = record.reason or f"the same as trial {record.reused_from}"
        return f"{row.phase} ({why})"
    names = " / ".join(level.level.key for level in record.measurement.levels) if record.measurement else ""
    accept = f", accept length {row.accept_length}" if row.accept_length else ""
    return f"{row.phase}: {row.throughput} tok/s ({names}){accept}, {row.seconds:.0f} s"
