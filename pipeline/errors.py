"""Every error the project raises on purpose. Read this first.

FastverifyError
├── UserError            the caller can fix it; exit code 2; nothing was started
│   ├── InputError       a file, flag or key is wrong: says where, what was expected, the nearest name
│   └── PreflightError   the machine is not ready: GPUs busy, a port taken, no disk
├── EngineError          an engine failed to launch, answer or stay alive; carries a `Failure`
├── MeasurementError     figures could not be taken, or must not be trusted
├── ClusterError         Ray died under a study; nothing is known of the trial in flight
├── TeardownError        an engine's remains could not be proven gone; the node is not used again
└── PromotionError       a configuration may not be promoted: says which gate refused it
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.records import Failure


class FastverifyError(Exception):
    """Base of all errors that end a command with one clear message."""

    exit_code = 1


class UserError(FastverifyError):
    """The caller can fix this; nothing was started."""

    exit_code = 2


class InputError(UserError):
    """A wrong file, flag or key.

    Args:
        problem: what is wrong, in one sentence.
        source: file or flag that holds it.
        line: 1-based line in the file, None for flags.
        key: dotted key or flag name.
        expected: what would have been right.
        nearest: the valid name closest to what was written.
    """

    def __init__(
        self,
        problem: str,
        *,
        source: str | None = None,
        line: int | None = None,
        key: str | None = None,
        expected: str | None = None,
        nearest: str | None = None,
    ) -> None:
        self.problem, self.source, self.line = problem, source, line
        self.key, self.expected, self.nearest = key, expected, nearest
        super().__init__(self._text())

    def _text(self) -> str:
        where = ":".join(str(part) for part in (self.source, self.line) if part is not None)
        parts = [f"{where}: " if where else "", f"{self.key}: " if self.key else "", self.problem]
        if self.expected:
            parts.append(f"; expected {self.expected}")
        if self.nearest:
            parts.append(f"; did you mean {self.nearest!r}?")
        return re.sub(r"\s*\n\s*", " ", "".join(parts).strip())  # what others say of it may take several lines


class PreflightError(UserError):
    """The machine is not ready for a trial."""


class EngineError(FastverifyError):
    """An engine failed. `failure` holds the class, the cause in words and where to look next."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.text())

    def __reduce__(self) -> tuple[type[EngineError], tuple[Failure]]:
        # Ray pickles errors across processes; the default would pass the text as `failure`.
        return type(self), (self.failure,)


class MeasurementError(FastverifyError):
    """Figures could not be taken, or must not be trusted."""


class ClusterError(FastverifyError):
    """Ray itself died under a study: no fault of the configuration that was being tried."""


class TeardownError(FastverifyError):
    """What an engine left behind could not be proven gone."""


class PromotionError(FastverifyError):
    """A gate refused the promotion."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name closest to `name`, or None when nothing is close."""
    by_folded = {candidate.casefold(): candidate for candidate in valid}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None
