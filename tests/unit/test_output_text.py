"""Text of an output: held-back characters and stop strings."""

import random

import pytest

from engine.runner.scripted import ScriptedTokenizer
from engine.text import OutputText


def feed(text, stop=(), *, include=False, may_stop_from=0):
    """Push a text byte by byte; returns the pieces and the stop string that ended it."""
    output = OutputText(ScriptedTokenizer().stream_decoder([]), stop, include_stop_string=include)
    pieces = []
    for index, token_id in enumerate(text.encode()):
        piece = output.push(token_id, may_stop=index >= may_stop_from)
        pieces.append(piece.text)
        if piece.stop_string is not None:
            return pieces, piece.stop_string
    pieces.append(output.flush().text)
    return pieces, None


def test_without_stop_strings_every_character_comes_at_once():
    assert feed("abc") == (["a", "b", "c", ""], None)


def test_half_a_character_is_never_emitted():
    pieces, _ = feed("aé€𝄞z")
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "𝄞", "z", ""]


def test_an_incomplete_character_at_the_end_is_marked():
    output = OutputText(ScriptedTokenizer().stream_decoder([]))
    assert output.push("é".encode()[0]).text == ""
    assert output.flush().text == "\ufffd"


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one END")])
def test_a_stop_string_ends_the_text(include, expected):  # vLLM 66
    pieces, stop = feed("one END two", ["END"], include=include)
    assert "".join(pieces) == expected
    assert stop == "END"


def test_the_beginning_of_a_stop_string_is_held_back_and_released():
    pieces, stop = feed("aENzEN", ["END"])
    assert pieces == ["a", "", "", "ENz", "", "", "EN"]
    assert stop is None


def test_overlapping_beginnings():
    assert "".join(feed("aaab", ["aab"])[0]) == "a"
    assert "".join(feed("ababac", ["abac"])[0]) == "ab"


def test_the_stop_string_that_ends_first_wins_and_of_those_the_longest():
    assert feed("xabcd", ["abcd", "bc"])[1] == "bc"
    assert feed("xabc", ["bc", "abc"])[1] == "abc"
    assert "".join(feed("xabc", ["bc", "abc"])[0]) == "x"


def test_stop_strings_do_not_count_before_min_tokens():
    pieces, stop = feed("END and END", ["END"], may_stop_from=5)
    assert "".join(pieces) == "END and "
    assert stop == "END"


def test_a_stop_string_split_over_a_multibyte_character():
    pieces, stop = feed("ok ünd so", ["ün"])
    assert "".join(pieces) == "ok "
    assert stop == "ün"


@pytest.mark.parametrize("stop", [["ab"], ["ba", "abb"], ["bbbb"], ["aba", "b"]])
def test_pieces_equal_the_text_up_to_the_first_match(stop):
    import itertools

    for letters in itertools.product("ab", repeat=7):
        text = "".join(letters)
        pieces, found = feed(text, stop)
        ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
        if not ends:
            assert ("".join(pieces), found) == (text, None)
        else:
            end, _, expected = min(ends)
            assert ("".join(pieces), found) == (text[: end - len(expected)], expected)


def test_a_stop_string_that_begins_too_early_and_ends_in_time_counts():
    """As in vLLM: where it ends is what ``min_tokens`` looks at."""
    pieces, stop = feed("-ab-xyz", ["xyz", "ab"], may_stop_from=6)
    assert ("".join(pieces), stop) == ("-ab-", "xyz")


def test_a_stop_string_that_ended_too_early_does_not_count_later():
    pieces, stop = feed("xab-d", ["ab", "xabc"], may_stop_from=3)
    assert ("".join(pieces), stop) == ("xab-d", None)


def _plainly(text, stop_strings, may_stop_from):
    """What the text ends with, by looking at every beginning of it."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop_strings if text[:end].endswith(s)]
        if found and end - 1 >= may_stop_from:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_any_stop_strings_end_any_text_as_a_plain_search_does():
    source = random.Random(5)
    for _ in range(2000):
        text = "".join(source.choices("ab", k=source.randint(1, 24)))
        stop = ["".join(source.choices("ab", k=source.randint(1, 6))) for _ in range(source.randint(1, 4))]
        may_stop_from = source.choice([0, 0, source.randint(0, 10)])
        pieces, ended_by = feed(text, stop, may_stop_from=may_stop_from)
        assert ("".join(pieces), ended_by) == _plainly(text, stop, may_stop_from), (text, stop)


class _Counted(str):
    """A stop string that counts how often one of its characters is looked at."""

    __slots__ = ("looks",)

    def __getitem__(self, place):
        self.looks = getattr(self, "looks", 0) + 1
        return super().__getitem__(place)


@pytest.mark.parametrize("text", ["a" * 4000, "ab" * 2000, ("a" * 254 + "b") * 16])
def test_the_work_of_a_character_does_not_grow_with_the_length_of_a_stop_string(text):
    stop = _Counted("a" * 255 + "c")
    feed(text, [stop])
    assert stop.looks < 6 * (len(text) + len(stop))
