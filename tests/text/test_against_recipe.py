"""Seeded differential tests against the public `deepseek-recipe` library, version 0.2.

Left out by rule, because the library's behaviour is a known fault there:
integers beyond 64 bits and -0 (printed as floats); quotes in parameter names (written unescaped);
conversations of empty system messages only (no effort line); a prefix without another message
(its answer is read as reasoning); in outputs, parameter names with spaces (cut at the space), tags
without their string attribute (everything up to the next marker is lost), newlines after an
aborted partial marker (one is kept), JSON answers in several chunks (spaces depend on the chunks).
Or because it refuses what we render: a prefix together with tools or calls, and strict tools
together with other tools or a response format.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from text.chat_cases import render_arguments, special_ranges

from deepinfer_jax.text.chat import render
from deepinfer_jax.text.events import Answer, ParserOptions, ToolCall, accumulate
from deepinfer_jax.text.parse import OutputParser
from deepinfer_jax.text.tokenizer import Piece, Tokenizer

recipe = pytest.importorskip("deepseek_recipe", minversion="0.2.0")

WORDS = (
    "a",
    " b",
    "\n",
    "\n\n",
    "é",
    "日本",
    "<",
    "</think>",
    "<｜DSML｜",
    "｜DSML｜",
    "<｜User｜>",
    "7",
)
VALUES = (1, -3, 2.5, 1e16, 1e-7, True, None, "s", "", 'a\n"b"', [1, "é"], {"k": {"z": []}}, 0.1)
ADD = {"type": "function", "function": {"name": "add", "description": "Add 日 numbers"}}
STRICT = {
    "type": "function",
    "function": {
        "name": "get-it",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["q", "n"],
        },
    },
}
OPEN = {"name": "f", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}
TOOL_SETS = ([ADD], [STRICT], [ADD, {"type": "function", "function": OPEN}])


def some_text(rng: random.Random, most: int = 5) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(most)))


def arguments(rng: random.Random) -> str:
    if rng.random() < 0.15:
        return rng.choice(("", "[1]", "oops", '"{}"', '{"a": NaN}', '{"a": 1e999}', "{} x"))
    keys = ("a", "b", "long key", "é", "")
    value = {rng.choice(keys): rng.choice(VALUES) for _ in range(rng.randrange(4))}
    return json.dumps(value, ensure_ascii=rng.random() < 0.5)


def request(rng: random.Random) -> dict[str, Any]:
    """A random Chat Completions body that both sides accept."""

    def content() -> Any:
        if rng.random() < 0.7:
            return some_text(rng)
        image = {"type": "image_url", "image_url": {"url": "https://example.com/i.png"}}
        text = {"type": "text", "text": some_text(rng)}
        return [rng.choice((text, text, image)) for _ in range(rng.randrange(4))]

    messages: list[dict[str, Any]] = []
    for n in range(rng.randint(1, 7)):
        match rng.choice(("system", "user", "user", "assistant", "calls", "latest_reminder")):
            case "calls":
                ids = [f"{n}-{k}" for k in range(rng.randint(1, 3))]
                calls = [
                    {
                        "id": i,
                        "type": "function",
                        "function": {"name": "add", "arguments": arguments(rng)},
                    }
                    for i in ids
                ]
                message = {"role": "assistant", "content": some_text(rng), "tool_calls": calls}
                if rng.random() < 0.5:
                    message["reasoning_content"] = some_text(rng)
                messages.append(message)
                rng.shuffle(ids)
                messages += [{"role": "tool", "tool_call_id": i, "content": content()} for i in ids]
            case "assistant":
                message = {"role": "assistant", "content": some_text(rng)}
                if rng.random() < 0.5:
                    message["reasoning_content"] = some_text(rng)
                messages.append(message)
            case "latest_reminder":
                messages.append({"role": "latest_reminder", "content": some_text(rng)})
            case role:
                messages.append({"role": role, "content": content()})
    body: dict[str, Any] = {"messages": messages}
    if rng.random() < 0.4:
        body["thinking"] = {"type": rng.choice(("enabled", "adaptive", "disabled"))}
    if rng.random() < 0.4:
        body["reasoning_effort"] = rng.choice(("none", "minimal", "low", "medium", "xhigh", "max"))
    if rng.random() < 0.4:
        body["tools"] = rng.choice(TOOL_SETS)
        choices = ["auto", "none"]
        if body.get("thinking", {}).get("type") == "disabled":
            choices += [
                "required",
                {"type": "function", "function": {"name": body["tools"][-1]["function"]["name"]}},
            ]
        body["tool_choice"] = rng.choice(choices)
    elif rng.random() < 0.4 and not any("tool_calls" in m for m in messages):
        prefix = {"role": "assistant", "content": some_text(rng), "prefix": True}
        if rng.random() < 0.5:
            prefix["reasoning_content"] = some_text(rng)
        messages.append(prefix)
    if rng.random() < 0.2 and body.get("tools") != [STRICT]:
        schema = {"type": "object", "properties": {"é": {"type": "number", "default": 1.0}}}
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema},
        }
    if messages[0].get("prefix") or all(m["role"] == "system" for m in messages):
        messages.insert(0, {"role": "user", "content": "q"})
    return body


def test_random_conversations_render_and_encode_alike(release: Tokenizer, release_file: Path):
    special = recipe.SpecialTokens(image="<｜deepseek_image｜>")
    options = recipe.ConversionOptions().with_special_tokens(special)
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(special)
    encoding = encoding.with_tokenizer(recipe.Tokenizer.from_file(str(release_file)))
    prefixes = forced = 0
    for seed in range(800):
        body = request(random.Random(seed))
        converted = recipe.ChatCompletionRequest(
            {"model": "DeepSeek-V4.1-Flash", **json.loads(json.dumps(body))}
        ).convert(options)
        theirs = encoding.render_conversation(converted.conversation)
        ours = render(**render_arguments(body))
        assert ours.text == theirs.prompt, body
        assert special_ranges(ours) == theirs.special_ranges, body
        assert len(ours.images) == len(theirs.image_sources), body
        stage = converted.parsing_options.thinking_initial_stage
        assert (stage is None) == (ours.parsing.initial_stage is None), body
        if stage is not None:
            name = str(stage).rsplit(".", 1)[-1]
            assert (ours.parsing.initial_stage or "").replace("_", "") == name.lower(), body
        assert ours.parsing.parse_tool_calls == converted.parsing_options.parse_tool_calls
        assert ours.parsing.starts_in_tool_calls == converted.parsing_options.starts_in_tool_calls
        if seed % 4 == 0:
            assert release.encode_pieces(ours.pieces) == encoding.encode(converted.conversation)
        prefixes += ours.parsing.initial_stage in ("content_continuation", "reasoning_continuation")
        forced += ours.parsing.starts_in_tool_calls
    assert prefixes > 20 and forced > 10


# Fragments of outputs: (text, the spelling is a special token).
FRAGMENTS = (
    *(("</think>", True), ("\n", False), ("\n\n", False), ("text", False), (" 日本", False)),
    *(("<", False), ("</", False), ("<think>", True), ("STOP", False), ("ST", False)),
    *(("{", False), ("```json\n", False), ("\n```", False), ('"', False), ("`", False)),
)
CALL = (
    '<｜DSML｜ invoke name="f">\n',
    '<｜DSML｜ parameter name="k" string="true">',
    '<｜DSML｜ parameter name="n" string="false">',
    "</｜DSML｜ parameter>\n",
    "</｜DSML｜ invoke>\n",
    "</｜DSML｜ calls>",
    "1.5",
    'q"\\\n',
    "<b> </ y>",
    "</",
)
PARTIAL = "|".join(
    re.escape(marker[:n]) for marker in ("<｜DSML｜", "</think>") for n in range(1, len(marker))
)
EXCLUDED = re.compile(
    f"(?:{PARTIAL})\n"
    r'|parameter name="[^"]* '
    r'|parameter name="[^"]*"(?! string="(?:true|false)">)'
)


def output(rng: random.Random) -> list[Piece]:
    """A random output in pieces; special pieces are single tokens in token mode."""
    parts = [rng.choice(FRAGMENTS) for _ in range(rng.randrange(8))]
    if rng.random() < 0.5:
        parts.append(("\n\n<｜DSML｜ calls>\n", False))
        if rng.random() < 0.5:
            order = (0, 1, 7, 3, 2, 6, 3, 4, 5)
            parts += [(CALL[i], False) for i in order[: rng.randint(1, 9)]]
        else:
            parts += [(rng.choice(CALL), False) for _ in range(rng.randrange(9))]
        parts += [rng.choice(FRAGMENTS) for _ in range(rng.randrange(3))]
    pieces: list[Piece] = []
    for text, special in parts:
        if special:
            pieces.append(Piece(text, special=True))
            continue
        split = re.split("(｜DSML｜)", text)
        pieces += [Piece(part, part == "｜DSML｜") for part in split if part]
    return pieces


def their_chunks(
    options: ParserOptions, inputs: list[Any], finish: str, tokenizer: Any, **body: Any
) -> list[Any]:
    """What the library streams for the engine's chunks; `body` joins its request."""
    stages = recipe.ThinkingInitialStage
    stage = {
        None: None,
        "reasoning_start": stages.ReasoningStart,
        "reasoning_continuation": stages.ReasoningContinuation,
        "content_continuation": stages.ContentContinuation,
    }[options.initial_stage]
    body |= {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "q"}],
        "thinking": {"type": "disabled" if stage is None else "enabled"},
    }
    converted = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(converted, "id", "m"),
        recipe.ParsingOptions(
            parse_tool_calls=options.parse_tool_calls,
            starts_in_tool_calls=options.starts_in_tool_calls,
            parse_json_output=options.parse_json_output,
            thinking_initial_stage=stage,
            stop_sequences=list(options.stop),
        ),
        tokenizer,
    )
    reasons = recipe.InferenceFinishReason
    ending = {"stop": reasons.Stop, "length": reasons.Length}[finish]
    outputs = []
    for chunk in [recipe.InferenceChunk.ready(), *inputs, recipe.InferenceChunk.finish(ending)]:
        if not processor.finished:
            outputs += processor.push(chunk)
    return outputs + ([] if processor.finished else processor.finish())


def their_answer(options: ParserOptions, chunks: list[Any], finish: str, tokenizer: Any) -> Answer:
    outputs = their_chunks(options, chunks, finish, tokenizer)
    return joined([json.loads(chunk.to_json()) for chunk in outputs])


def joined(chunks: list[dict[str, Any]]) -> Answer:
    reasoning = content = ""
    reason = None
    calls: list[list[str]] = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        reasoning += delta.get("reasoning_content") or ""
        content += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(calls):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"].get("arguments") or ""
        reason = choice.get("finish_reason") or reason
    return Answer(
        reasoning, content, tuple(ToolCall(*call, i) for i, call in enumerate(calls)), reason
    )


def options_and_finish(rng: random.Random) -> tuple[ParserOptions, str]:
    stages = ("reasoning_start", "reasoning_continuation", "content_continuation", None)
    options = ParserOptions(
        initial_stage=rng.choice(stages),  # pyright: ignore[reportArgumentType]
        parse_tool_calls=rng.random() < 0.8,
        parse_json_output=rng.random() < 0.15,
        stop=("STOP", "T\n")[: rng.randrange(3)],
    )
    return options, rng.choice(("stop", "stop", "length"))


def test_random_text_outputs_parse_alike():
    compared = 0
    for seed in range(2500):
        rng = random.Random(seed)
        options, finish = options_and_finish(rng)
        text = "".join(piece.text for piece in output(rng))
        if EXCLUDED.search(text):
            continue
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(4)))
        if options.parse_json_output:
            cuts = []
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        chunks = [recipe.InferenceChunk.text(piece, 1) for piece in pieces]
        parser = OutputParser(options)
        events = [event for piece in pieces for event in parser.push_text(piece)]
        ours = accumulate(events + parser.finish(finish))
        assert ours == their_answer(options, chunks, finish, None), (seed, options, pieces)
        compared += 1
    assert compared > 1500


def test_random_token_outputs_parse_alike(release: Tokenizer, release_file: Path):
    tokenizer = recipe.Tokenizer.from_file(str(release_file))
    compared = 0
    for seed in range(40):
        rng = random.Random(10_000 + seed)
        options, finish = options_and_finish(rng)
        pieces = output(rng)
        # Forged markers: the same spellings as ordinary text.
        pieces.insert(rng.randrange(len(pieces) + 1), Piece("x</think>y<｜DSML｜ calls>"))
        if options.parse_json_output or EXCLUDED.search("".join(p.text for p in pieces)):
            continue
        ids = release.encode_pieces(pieces)
        chunks = [recipe.InferenceChunk.tokens([i]) for i in ids]
        parser = OutputParser(options, release)
        events = [event for i in ids for event in parser.push_ids([i])]
        ours = accumulate(events + parser.finish(finish))
        assert ours == their_answer(options, chunks, finish, tokenizer), (seed, options, pieces)
        compared += 1
    assert compared > 15
