"""The output parser: golden streams under many splits, and the rules that have no golden case."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from text.chat_cases import cases

from deepinfer_jax.errors import RequestError
from deepinfer_jax.text.events import Answer, Event, ParserOptions, ToolCall, accumulate, merge
from deepinfer_jax.text.parse import OutputParser, parse_ids
from deepinfer_jax.text.tokenizer import Piece, Tokenizer

TOOLS = ParserOptions(parse_tool_calls=True)
OPEN = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'


def options_of(raw: dict[str, Any]) -> ParserOptions:
    fields = dict(raw)
    return ParserOptions(stop=tuple(fields.pop("stop_sequences", ())), **fields)


def as_lists(events: list[Event]) -> list[list[Any]]:
    """Merged events in the golden files' form."""
    merged = merge(events)
    return [[e.kind, e.text] if e.index is None else [e.kind, e.index, e.text] for e in merged]


def splits(text: str) -> Iterator[list[str]]:
    """The whole, single characters, and seeded random cuts."""
    yield [text]
    yield list(text)
    for seed in range(5):
        rng = random.Random(seed)
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(seed + 1))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def run_text(options: ParserOptions, pieces: list[str], finish: str = "stop") -> list[Event]:
    parser = OutputParser(options)
    events = [event for piece in pieces for event in parser.push_text(piece)]
    return events + parser.finish(finish)


def parse_text(text: str, options: ParserOptions, finish: str = "stop") -> Answer:
    return accumulate(run_text(options, [text], finish))


@pytest.mark.parametrize("case", cases("stream_text"), ids=lambda c: c["name"])
def test_golden_text_gives_its_events_under_every_split(case: dict[str, Any]):
    options, finish = options_of(case["options"]), case["backend_finish"]
    for pieces in (case["chunks"], *splits("".join(case["chunks"]))):
        assert as_lists(run_text(options, pieces, finish)) == case["expected"], pieces


def golden_pieces(case: dict[str, Any]) -> list[Piece]:
    return [Piece(p.get("special") or p["text"], "special" in p) for p in case["pieces"]]


@pytest.mark.parametrize("case", cases("stream_tokens"), ids=lambda c: c["name"])
def test_golden_ids_give_their_events_one_by_one_and_at_once(
    case: dict[str, Any], release: Tokenizer, tiny: Tokenizer
):
    wanted = [e for e in case["expected"] if e[0] != "usage"]
    usage = [e[1]["completion_tokens_details"] for e in case["expected"] if e[0] == "usage"]
    runs = [(release, case["token_ids"]), (tiny, tiny.encode_pieces(golden_pieces(case)))]
    for tokenizer, ids in runs:
        one_by_one, at_once = (OutputParser(options_of(case["options"]), tokenizer) for _ in "ab")
        events = [event for i in ids for event in one_by_one.push_ids([i])] + one_by_one.finish()
        assert as_lists(events) == wanted
        assert as_lists(at_once.push_ids(ids) + at_once.finish()) == wanted
    if usage:
        parser = OutputParser(options_of(case["options"]), release)
        parser.push_ids(case["token_ids"])
        assert parser.reasoning_tokens == usage[0]["reasoning_tokens"]


def test_events_come_as_soon_as_they_are_certain():
    parser = OutputParser(ParserOptions("reasoning_start"))
    assert parser.push_text("hm\n") == [Event("reasoning", "hm")]
    assert parser.push_text("</thi") == []
    assert parser.push_text("s") == [Event("reasoning", "\n</this")]
    assert parser.push_text("</think>\n\nok") == [Event("content", "ok")]
    assert parser.finish("length") == [Event("finish", "length")]


def test_newlines_after_an_aborted_marker_still_belong_to_the_next_one():
    assert parse_text("a<\n<｜DSML｜ x", TOOLS) == Answer(content="a<", finish_reason="stop")


def test_a_long_run_of_newlines_is_held_and_then_shown():
    text = "a" + "\n" * 50_000
    assert parse_text(text + "b", TOOLS).content == text + "b"


def test_a_cut_character_becomes_a_replacement_before_a_marker_and_at_the_end(tiny: Tokenizer):
    cut = 3 + 0xE6
    ids = [cut, tiny.special("</think>"), 3 + ord("a"), cut]
    answer = parse_ids(ids, ParserOptions("reasoning_start"), tiny)
    assert answer == Answer("\ufffd", "a\ufffd", finish_reason="stop")


def test_a_lone_dsml_token_is_visible_text(tiny: Tokenizer):
    ids = tiny.encode_pieces([Piece("a"), Piece("｜DSML｜", True), Piece("<b>")])
    assert parse_ids(ids, TOOLS, tiny).content == "a｜DSML｜<b>"


def test_a_stop_string_is_reported_at_once_and_ends_the_answer(tiny: Tokenizer):
    parser = OutputParser(ParserOptions("reasoning_start", stop=("END",)), tiny)
    ids = tiny.encode_pieces([Piece("END"), Piece("</think>", True), Piece("a END b")])
    seen = []
    events = []
    for i in ids:
        events += parser.push_ids([i])
        seen.append(parser.stopped)
    assert seen.index("END") == len(ids) - 3
    answer = accumulate([*events, *parser.finish("length")])
    assert answer == Answer("END", "a ", finish_reason="stop")


def test_a_parameter_without_its_string_attribute_is_json_or_text():
    tag = "<｜DSML｜ parameter name="
    close = "</｜DSML｜ parameter>\n"
    text = f'{OPEN}{tag}"a">[1]{close}{tag}"b">x "y"{close}{tag}"c">NaN{close}</｜DSML｜ invoke>'
    wanted = ToolCall("f", '{"a": [1], "b": "x \\"y\\"", "c": "NaN"}')
    for pieces in splits(text):
        assert accumulate(run_text(TOOLS, pieces)).tool_calls == (wanted,)


def test_special_text_in_arguments_is_escaped_as_json():
    text = f'{OPEN}<｜DSML｜ parameter name="k" string="true">\x01\t"\\é\x7f</｜DSML｜ x'
    assert parse_text(text, TOOLS).tool_calls[0].arguments == '{"k": "\\u0001\\t\\"\\\\é\x7f"'


def test_skipped_text_around_json_is_one_space_however_it_is_split():
    options = ParserOptions(parse_json_output=True, parse_tool_calls=True)
    for pieces in splits("Here it is:\n```json\n[1]\n``` and more"):
        assert accumulate(run_text(options, pieces)).content == " [1] "


@pytest.mark.parametrize(
    ("reason", "text", "wanted"),
    [
        ("stop", "a", "stop"),
        ("stop", OPEN, "tool_calls"),
        ("length", OPEN, "length"),
        ("abort", "a", "abort"),
        ("error", OPEN, "error"),
    ],
)
def test_the_finish_reason_is_the_engines_unless_calls_were_made(
    reason: str, text: str, wanted: str
):
    assert parse_text(text, TOOLS, reason).finish_reason == wanted


def test_text_and_ids_do_not_mix(tiny: Tokenizer):
    with pytest.raises(RequestError, match="got 5 characters of text, but it reads token ids"):
        OutputParser(ParserOptions(), tiny).push_text("hello")
    with pytest.raises(RequestError, match="got token ids, but it was made without a tokenizer"):
        OutputParser(ParserOptions()).push_ids([1])


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match=r"stop\[0\] of 1 is ''"):
        OutputParser(ParserOptions(stop=("",)))
