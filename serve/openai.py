"""The endpoint's own words: error bodies in OpenAI's shape, and the paths it lets through. Pure."""

from __future__ import annotations

import json
import math
import re
import uuid
from dataclasses import dataclass, field

Headers = list[tuple[bytes, bytes]]

ROUTES: dict[str, str] = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/embeddings": "POST",
    "/v1/models": "GET",
    "/health": "GET",
    "/metrics": "GET",
}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Connection-level headers belong to one hop; `server` and `date` are written by the server in front.
_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
}  # fmt: skip
# The engine needs no key, and its log must not get one.
_NOT_FORWARDED = _HOP | {b"host", b"content-length", b"authorization", b"cookie", b"expect", b"x-request-id"}
_NOT_RETURNED = _HOP | {b"server", b"date", b"x-request-id"}


@dataclass(eq=False)
class Refusal(Exception):  # noqa: N818 (an answer, not a fault)
    """An answer that is an error, in OpenAI's shape.

    Args:
        status: HTTP status.
        code: machine-readable word, such as `overloaded`.
        message: what happened and what the caller may do.
        retry_after_s: seconds until a retry makes sense; None leaves the header out.
    """

    status: int
    code: str
    message: str
    retry_after_s: float | None = None
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())

    def body(self) -> bytes:
        """The JSON body."""
        kind = "invalid_request_error" if self.status < 429 else _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode()

    def event(self) -> bytes:
        """The same as a server-sent event, for a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"

    def all_headers(self) -> Headers:
        """Headers of the answer, `Retry-After` in whole seconds rounded up."""
        found = [(b"content-type", b"application/json"), (b"content-length", str(len(self.body())).encode())]
        if self.retry_after_s is not None:
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        return [*found, *self.headers]


_TYPES = {429: "rate_limit_error", 504: "timeout_error"}


def check_route(path: str, method: str) -> str:
    """The route that a path belongs to.

    Raises:
        Refusal: 404 for a path that is not offered, 405 for another method.
    """
    route = "/v1/models" if path.startswith("/v1/models/") else path
    allowed = ROUTES.get(route)
    if allowed is None:
        raise Refusal(404, "unknown_url", f"Unknown request URL: {method} {path[:200]}")
    if method != allowed:
        allow = ((b"allow", allowed.encode()),)
        raise Refusal(405, "method_not_allowed", f"{route} takes {allowed}, not {method}", headers=allow)
    return route


def request_id(headers: Headers) -> str:
    """The caller's `x-request-id`, or a new one when it is missing or unfit for a header and a log."""
    given = header(headers, b"x-request-id")
    return given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def header(headers: Headers, name: bytes) -> str | None:
    """The first header of that lower-case name."""
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


def forwarded(headers: Headers, identity: str) -> list[tuple[str, str]]:
    """Request headers for the engine."""
    kept = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in headers if k not in _NOT_FORWARDED]
    return [*kept, ("x-request-id", identity)]


def returned(raw: Headers) -> Headers:
    """Response headers for the client, of the engine's."""
    return [(key.lower(), value) for key, value in raw if key.lower() not in _NOT_RETURNED]
