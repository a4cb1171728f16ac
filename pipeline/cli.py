"""How every command ends: one clear error, its exit code, no traceback for what was expected."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, NoReturn

import typer

from pipeline.errors import FastverifyError, InputError, nearest

# The disk is full, a place cannot be written: the machine's state and no fault of the program.
_MACHINES = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE),
)


def run_command(app: typer.Typer) -> NoReturn:
    """Run a typer app; print an expected error, a wrong flag too, in one line on stderr and exit with its code.

    Help is plain text: boxes waste a narrow terminal, and a pipe.
    """
    app.rich_markup_mode = None
    _open_standard_streams()
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except FastverifyError as error:
        _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        _fail(str(_misused(error)), InputError.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:  # the reader has gone, as `head` does; Python would complain of it at its exit
        discard_stdout()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _MACHINES:
            raise
        _fail(str(error), 2 if error.errno == errno.ENAMETOOLONG else 1)
    sys.exit(code)


def discard_stdout() -> None:
    """Send what is still printed nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _open_standard_streams() -> None:
    """Give a program that was started without them somewhere to print: files would take their numbers otherwise."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for the program's life
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows only ASCII gets ? for ±
            stream.reconfigure(errors="replace")


def _fail(said: str, code: int) -> NoReturn:
    print(f"error: {said}", file=sys.stderr)
    sys.exit(code)


def _misused(error: Any) -> InputError:
    """What typer refuses, in the words of every other mistake."""
    param, cause = getattr(error, "param", None), error.__cause__
    name = next((text for text in param.opts if text.startswith("--")), param.name) if param else None
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):
        valid = [text for known in error.ctx.command.params for text in known.opts]
        return InputError("no such option", key=error.option_name, nearest=nearest(error.option_name, valid))
    if param is not None and hasattr(error, "param_type"):
        said = (param.help or "").rstrip(".")
        return InputError("missing", key=name, expected=said[:1].lower() + said[1:] or None)
    if param is not None and hasattr(cause, "errors"):
        first = cause.errors()[0]
        expected = first["msg"].removeprefix("Input should be ").partition(",")[0]
        return InputError(f"{first['input']!r} does not fit", key=name, expected=expected)
    return InputError(error.format_message().rstrip("."))
