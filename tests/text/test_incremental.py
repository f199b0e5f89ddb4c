"""Detokenising and stop strings on text that arrives in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.errors import RequestError
from deepinfer_jax.text.incremental import Detokenizer, StopMatcher
from deepinfer_jax.text.tokenizer import Tokenizer


@given(st.binary(max_size=40))
def test_pieces_join_to_the_decoding_of_the_whole(tiny: Tokenizer, data: bytes):
    detokenizer = Detokenizer(tiny)
    text = "".join(detokenizer.push([3 + b]) for b in data) + detokenizer.finish()
    assert text == data.decode("utf-8", "replace")


def test_an_unfinished_character_is_held_back_and_then_replaced(tiny: Tokenizer):
    detokenizer = Detokenizer(tiny)
    ids = [3 + b for b in "a日".encode()]
    assert [detokenizer.push([i]) for i in ids] == ["a", "", "", "日"]
    assert detokenizer.push(ids[1:3]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push([]) == detokenizer.finish() == ""


def test_an_impossible_byte_does_not_hold_back_what_follows(tiny: Tokenizer):
    assert Detokenizer(tiny).push([3 + 0xFF, 3 + ord("a")]) == "\ufffda"


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    out = [matcher.push(piece) for piece in pieces]
    return [*out, matcher.finish()], matcher.matched


def test_text_that_may_begin_a_stop_string_is_held_back():
    assert run(["STOP"], ["a ST", "O", "x"]) == (["a ", "", "STOx", ""], None)
    assert run(["STOP"], ["a ST", "OP b", "c"]) == (["a ", "", "", ""], "STOP")
    assert run(["STOP"], ["a ST"]) == (["a ", "ST"], None)


def test_a_false_start_inside_a_start_is_found():
    assert run(["aab"], ["aaab"]) == (["a", ""], "aab")
    assert run(["\n\n"], ["a\n", "\nb"]) == (["a", "", ""], "\n\n")


def test_the_stop_string_completed_first_wins_and_ties_go_by_order():
    assert run(["bcd", "ab"], ["xxabcd"]) == (["xx", ""], "ab")
    assert run(["b", "ab"], ["xab"]) == (["xa", ""], "b")
    assert run(["ab", "b"], ["xab"]) == (["x", ""], "ab")


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """Text before the stop string that ends first; the first of the list among equals."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab\n", max_size=5), max_size=6),
)
def test_any_split_finds_what_a_search_in_the_whole_text_finds(stops: list[str], pieces: list[str]):
    out, matched = run(stops, pieces)
    wanted, stop = naive(stops, "".join(pieces))
    assert ("".join(out), matched) == (wanted, stop)


@pytest.mark.parametrize("wrong", [[""], ["a", ""], "abc"])
def test_an_unusable_stop_list_is_refused(wrong: list[str]):
    with pytest.raises(RequestError, match=r"stop\[[01]\] of \d is "):
        StopMatcher(wrong)
