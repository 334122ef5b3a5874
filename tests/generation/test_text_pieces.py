"""Text piece by piece: joined, the pieces are the text of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from offramp.generation.serving.text_pieces import TextPieces


def of_bytes(tokens: Sequence[int]) -> str:
    """A byte-level tokenizer: a token is a byte."""
    return bytes(tokens).decode(errors="replace")


WORDS = ("▁in", "▁3", "min", "utes", "", "▁")


def of_words(tokens: Sequence[int]) -> str:
    """A tokenizer whose words have a space before them, but for the first; 4 is a special token."""
    return "".join(WORDS[token] for token in tokens).replace("▁", " ").removeprefix(" ")


@given(
    st.lists(st.integers(0, 255), max_size=12) | st.text(max_size=6).map(lambda s: [*s.encode()])
)
def test_bytes_make_the_text_of_all(tokens: list[int]) -> None:
    pieces = TextPieces(of_bytes)
    assert "".join([*map(pieces.add, tokens), pieces.end()]) == of_bytes(tokens)


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=12))
def test_words_make_the_text_of_all(tokens: list[int]) -> None:
    pieces = TextPieces(of_words)
    assert "".join([*map(pieces.add, tokens), pieces.end()]) == of_words(tokens)


def test_a_character_comes_whole() -> None:
    pieces = TextPieces(of_bytes)
    assert [pieces.add(token) for token in "a😀é".encode()] == ["a", "", "", "", "😀", "", "é"]
    assert pieces.end() == ""


def test_what_is_no_character_comes_at_the_end() -> None:
    pieces = TextPieces(of_bytes)
    assert [pieces.add(token) for token in b"a\xf0\x9f"] == ["a", "", ""]
    assert pieces.end() == "\ufffd"


def test_few_tokens_are_decoded_at_a_time() -> None:
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return of_bytes(tokens)

    pieces = TextPieces(decode)
    for token in ("中" * 200).encode():
        pieces.add(token)
    assert longest == 6  # two characters
