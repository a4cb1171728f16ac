"""How every command ends: one clear error, its exit code, no traceback for what was expected."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pipeline.errors import FastverifyError


def run_command(app: Callable[..., Any]) -> None:
    """Run a typer app; print an expected error in one line on stderr and exit with its code."""
    try:
        app()
    except FastverifyError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
