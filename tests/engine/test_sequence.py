import dataclasses
import tomllib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.errors import RequestError
from deepinfer_jax.request import RequestOutput, ToolCall
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.settings import package_folder
from deepinfer_jax.text.events import ParserOptions
from deepinfer_jax.text.output import ChatText, PlainText
from deepinfer_jax.text.tokenizer import Piece, Tokenizer

EOS, LIMIT = 1, 20


@pytest.fixture(scope="module")
def tokenizer():
    text = (package_folder("configs") / "tiny.toml").read_text()
    config = ModelConfig.from_dict(tomllib.loads(text)["model"])
    return Tokenizer.from_folder(package_folder("models") / "tiny_tokenizer", config)


@pytest.fixture
def make(tokenizer):
    def sequence(chat=False, **params):
        params = SamplingParams(**params)
        stop = tuple(params.stop)
        options = ParserOptions("reasoning_start", parse_tool_calls=True, stop=stop)
        text = ChatText(tokenizer, options) if chat else PlainText(tokenizer, stop)
        return Sequence(0, 0, np.array([0, 5], np.int32), params, 7, text)

    return sequence


def take(sequence, tokens):
    for token in tokens:
        assert not sequence.finished
        sequence.append(token, eos=EOS, limit=LIMIT)
    return sequence.finish_reason, sequence.stop_reason, sequence.text.whole().content


def letters(text):
    return [3 + b for b in text.encode()]


def test_the_end_of_sequence_token_ends_it_without_text(make):
    sequence = make()
    assert take(sequence, [*letters("ab"), EOS]) == ("stop", None, "ab")
    assert sequence.completion("raw").token_ids == (*letters("ab"), EOS)


def test_ignoring_the_end_goes_on_to_the_last_token(make):
    reason, stop, text = take(make(ignore_eos=True, max_tokens=3), [EOS, *letters("ab")])
    assert (reason, stop) == ("length", None) and text.endswith("ab")


def test_a_stop_token_is_reported_and_wins_nothing_over_the_end(make):
    assert take(make(stop_token_ids=[9, EOS]), [*letters("a"), 9]) == ("stop", 9, "a")
    assert take(make(stop_token_ids=[9, EOS]), [EOS]) == ("stop", None, "")
    assert take(make(stop_token_ids=[EOS], ignore_eos=True), [EOS]) == ("stop", EOS, "")


def test_a_stop_string_across_tokens_is_cut_and_was_never_shown(make):
    sequence, shown = make(stop=["END", "EX"]), []
    for token in letters("aENbEND"):
        sequence.append(token, eos=EOS, limit=LIMIT)
        shown.append(sequence.news("raw").text)
    assert shown == ["a", "", "", "ENb", "", "", ""]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "END")


def test_text_held_back_for_a_stop_string_is_released_at_another_end(make):
    assert take(make(stop=["END"]), [*letters("aEN"), EOS]) == ("stop", None, "aEN")
    assert take(make(stop=["END"], max_tokens=3), letters("aEN")) == ("length", None, "aEN")


def test_a_stop_string_in_the_last_token_beats_the_length(make):
    assert take(make(stop=["b"], max_tokens=2), letters("ab")) == ("stop", "b", "a")


def test_max_tokens_and_the_engines_limit_end_it_by_length(make):
    assert take(make(max_tokens=2), letters("ab"))[0] == "length"
    sequence = make(max_tokens=100)
    assert take(sequence, letters("a" * 18))[0] == "length"
    assert sequence.length == LIMIT


def test_an_unfinished_character_becomes_a_replacement_at_the_end(make):
    sequence = make()
    assert take(sequence, letters("é")[:1]) == (None, None, "")
    assert take(sequence, [EOS]) == ("stop", None, "\ufffd")


def test_forced_tokens_come_by_output_index(make):
    sequence = make(golden_token_ids=[8, 9])
    assert [sequence.forced(i) for i in range(3)] == [8, 9, -1]
    assert make().forced(0) == -1


def test_the_tokens_of_a_sequence_are_its_prompt_and_its_output(make):
    sequence = make()
    take(sequence, letters("ab"))
    assert sequence.tokens.tolist() == [*sequence.prompt, *letters("ab")]


@pytest.mark.parametrize(("reason", "failed"), [("abort", False), ("deadline", True)])
def test_an_interrupted_sequence_keeps_what_it_has(make, reason, failed):
    sequence = make()
    take(sequence, letters("ab"))
    sequence.interrupt(reason)
    assert sequence.finish_reason == "abort" and sequence.output == letters("ab")
    assert (sequence.error is not None) == failed


def test_a_failure_keeps_what_was_produced(make):
    sequence, error = make(logprobs=2), RequestError("What.", "Why.", "Do.")
    sequence.record(-1.5, np.array([4, 5], np.int32), np.array([-1.0, -1.5], np.float32))
    take(sequence, letters("a"))
    sequence.fail(error)
    done = sequence.completion("processed")
    assert (done.text, done.finish_reason, sequence.error) == ("a", "error", error)
    assert done.logprobs is not None and done.logprobs.mode == "processed"
    assert done.cumulative_logprob == -1.5 and done.logprobs.top_ids.tolist() == [[4, 5]]


MARK = "｜DSML｜"
CALL = [
    *(Piece("\n\n<"), Piece(MARK, True), Piece(" calls>\n<"), Piece(MARK, True)),
    *(Piece(' invoke name="f">\n<'), Piece(MARK, True), Piece(' parameter name="x" string="')),
    *(Piece('true">a "é" b</'), Piece(MARK, True), Piece(" parameter>\n</"), Piece(MARK, True)),
    *(Piece(" invoke>\n</"), Piece(MARK, True), Piece(" calls>")),
]
written = st.lists(
    st.one_of(
        st.sampled_from(["é", "中", "END", "EN", "\n", "a", " "]).map(lambda text: [Piece(text)]),
        st.just([Piece("</think>", True)]),
        st.just(CALL),
        st.integers(1, len(CALL)).map(lambda n: CALL[:n]),
    ),
    max_size=12,
)


def streamed(make, ids, steps, chat, stop):
    """What `ids` give, and the parts told after every so many of them."""
    sequence = make(stop=stop, max_tokens=len(ids), logprobs=1, chat=chat)
    parts, pause = [], list(steps)
    for i, token in enumerate(ids):
        sequence.record(-0.1 * i, np.array([i], np.int32), np.array([-0.25 * i], np.float32))
        sequence.append(token, eos=EOS, limit=10_000)
        if sequence.finished or pause.pop(0):
            parts.append(sequence.news("raw"))
        if sequence.finished:
            break
    return sequence.completion("raw"), parts


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), chat=st.booleans(), stop=st.sampled_from([(), ("END",), ("N", "a ")]))
def test_the_parts_of_a_stream_are_together_the_whole(make, tokenizer, data, chat, stop):
    pieces = [piece for several in data.draw(written) for piece in several]
    ids = [*tokenizer.encode_pieces(pieces), EOS][data.draw(st.integers(0, 2)) :] or [EOS]
    ids = ids[: data.draw(st.integers(1, len(ids)))]
    steps = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    whole, parts = streamed(make, ids, steps, chat, stop)
    joined = RequestOutput.join(
        RequestOutput(request_id="0", prompt=None, prompt_token_ids=(), outputs=(part,))
        for part in parts
    ).outputs[0]
    without = {"logprobs": None}
    assert dataclasses.replace(joined, **without) == dataclasses.replace(whole, **without)
    for name in ("token", "top_ids", "top"):
        np.testing.assert_array_equal(
            getattr(joined.logprobs, name), getattr(whole.logprobs, name), strict=True
        )
    assert [p.finish_reason is not None for p in parts] == [False] * (len(parts) - 1) + [True]
    assert sum(len(p.token_ids) for p in parts) == len(whole.token_ids)
    assert sum(len(p.text) for p in parts) == len(whole.text)


def test_a_call_streams_its_name_once_and_its_arguments_in_pieces(make, tokenizer):
    ids = [*tokenizer.encode_pieces(CALL), *tokenizer.encode_pieces(CALL), EOS]
    _, parts = streamed(make, ids, [True] * len(ids), True, ())
    told = [call for part in parts for call in part.tool_calls]
    assert [call.name for call in told if call.name] == ["f"]
    assert told[0] == ToolCall("f", "") and {call.index for call in told} == {0}
    assert "".join(call.arguments for call in told) == '{"x": "a \\"é\\" b"}'
    assert len(told) > 5
    assert parts[-1].finish_reason == "tool_calls"
