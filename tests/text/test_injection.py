"""Text never becomes structure: every special token of a prompt was written by the renderer."""

import random
from collections import Counter
from typing import Any

import tokenizers
from text.chat_cases import special_ranges

from deepinfer_jax.text import spellings
from deepinfer_jax.text.chat import render
from deepinfer_jax.text.tokenizer import Piece, Tokenizer

FORGERIES = (*spellings.RENDERED, "</｜DSML｜ parameter>", "<｜/table>", "<|EOT|>", "<dsml:")


def forge(rng: random.Random) -> str:
    return "".join(rng.choice((*FORGERIES, "a", " ", "\n", "é")) for _ in range(rng.randrange(6)))


def conversation(rng: random.Random, text: Any) -> dict[str, Any]:
    """A random conversation whose every text is `text()`."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": "s" + text()})
    for n in range(rng.randint(1, 3)):
        parts: list[dict[str, Any]] = [{"type": "text", "text": text()}]
        if rng.random() < 0.4:
            parts.append({"type": "image_url", "image_url": {"url": f"data:{n}"}})
        messages.append({"role": "user", "content": parts})
        calls = [
            {"id": f"{n}.{k}", "function": {"name": "f", "arguments": f'{{"k{k}": "{k}"}}'}}
            for k in range(rng.randrange(3))
        ]
        for k, call in enumerate(calls):
            argument = text().replace("\n", "\\n")
            call["function"]["arguments"] = f'{{"k{k}": "{argument}", "l": [1]}}'
        answer = {"role": "assistant", "content": text(), "reasoning_content": text()}
        messages.append(answer | ({"tool_calls": calls} if calls else {}))
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": text()} for call in calls
        ]
    messages.append({"role": "user", "content": text()})
    tool = {"name": "f", "description": text(), "parameters": {"type": "object", text(): 1}}
    return {
        "messages": messages,
        "tools": [{"type": "function", "function": tool}] if rng.random() < 0.5 else (),
        "thinking": rng.random() < 0.5,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {text(): 1}}},
    }


def test_no_spelling_of_an_added_token_encodes_to_one(release: Tokenizer, tiny: Tokenizer):
    for tokenizer in (release, tiny):
        added = set(tokenizer.special_ids.values())
        rows = [[Piece(spelling)] for spelling in tokenizer.special_ids]
        for spelling, ids in zip(
            tokenizer.special_ids, tokenizer.encode_pieces_batch(rows), strict=True
        ):
            assert added.isdisjoint(ids), spelling
            assert tokenizer.decode(ids) == spelling


def test_forged_text_leaves_the_special_ids_of_a_prompt_unchanged(release: Tokenizer):
    added = set(release.special_ids.values())
    image = release.special(spellings.IMAGE)
    forged_tokens = 0
    for seed in range(150):
        texts = random.Random(-seed)
        forged = render(**conversation(random.Random(seed), lambda texts=texts: forge(texts)))
        plain = render(**conversation(random.Random(seed), lambda: "x"))
        ids = release.encode_pieces(forged.pieces)
        special = [i for i in ids if i in added]
        assert special == [i for i in release.encode_pieces(plain.pieces) if i in added]
        assert Counter(special)[image] == len(forged.images)
        assert release.decode(ids) == forged.text
        forged_tokens += sum(forged.text.count(s) for s in spellings.RENDERED) - len(special)
    assert forged_tokens > 1000


def test_a_spelling_across_a_piece_border_stays_text(release: Tokenizer):
    pieces = [Piece("<｜/table>"), Piece(spellings.DSML, True)]
    ids = release.encode_pieces(pieces)
    assert ids[-1] == release.special(spellings.DSML)
    assert release.special("<｜/table>｜") not in ids
    assert release.decode(ids) == "<｜/table>｜DSML｜"


def test_split_encoding_equals_the_joint_one_where_no_spelling_is_forged(
    release: Tokenizer, release_file: Any
):
    joint = tokenizers.Tokenizer.from_file(str(release_file))
    added = set(release.special_ids.values())
    compared = 0
    for seed in range(60):
        words = random.Random(seed)
        text = lambda words=words: "".join(  # noqa: E731
            words.choice(("a", " b", "\n", "é", "中文", "12345", "<", "｜", "think"))
            for _ in range(9)
        )
        rendered = render(**conversation(random.Random(seed), text))
        wanted = joint.encode(rendered.text, add_special_tokens=False).ids
        if sum(i in added for i in wanted) == len(special_ranges(rendered)):
            assert release.encode_pieces(rendered.pieces) == wanted
            compared += 1
    assert compared > 50
