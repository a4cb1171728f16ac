"""Tokens to text: whole characters, in order, and nothing past a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.embedded.text import REPLACEMENT, TextStream


def decode(ids: list[int]) -> str:
    """One byte a token, as the worst byte-level tokenizer would have it."""
    return bytes(ids).decode(errors="replace")


def streamed(text: str, *stops: str) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, stops)
    pieces = []
    for byte in text.encode():
        pieces.append(stream.push(byte))
        if stream.matched is not None:
            break
    return [*pieces, stream.finish()], stream


plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT))


@given(plain)
def test_the_pieces_join_to_the_text_and_hold_only_whole_characters(text: str) -> None:
    pieces, _ = streamed(text)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_text_ends_before_the_first_stop_string_to_be_complete(text: str, stops: list[str]) -> None:
    pieces, stream = streamed(text, *stops)
    complete = [(text.index(stop) + len(stop), stop) for stop in stops if stop in text]
    if not complete:
        assert "".join(pieces) == text
        assert stream.matched is None
    else:
        first_end = min(end for end, _ in complete)
        begun = min(text.index(stop) for end, stop in complete if end == first_end)
        assert "".join(pieces) == text[:begun]
        assert stream.matched in stops


def test_what_could_begin_a_stop_string_is_held_back_and_then_released() -> None:
    stream = TextStream(decode, ["</end>"])
    assert "".join(stream.push(byte) for byte in b"a</e") == "a"
    assert stream.push(ord("x")) == "</ex"
    assert stream.finish() == ""


@pytest.mark.parametrize("tail", [b"\xf0\x9f\x98", b"\xe2\x82"])
def test_an_incomplete_character_comes_out_as_a_replacement_at_the_end(tail: bytes) -> None:
    stream = TextStream(decode)
    assert "".join(stream.push(byte) for byte in b"ok" + tail) == "ok"
    assert stream.finish().strip(REPLACEMENT) == ""
