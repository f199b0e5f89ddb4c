"""Batch lines: which are requests, what the others get, and results from an engine."""

from pathlib import Path
from typing import Any

import pytest
from protocol.batch_lines import CHAT, line, write
from protocol.fake_engine import SERVED, FakeEngine

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.protocol import batch_file
from deepinfer_jax.protocol.batch import answer_batch
from deepinfer_jax.protocol.batch_file import read_batch


def answered(path: Path, engine: FakeEngine | None = None, done: tuple[str, ...] = ()) -> list[Any]:
    engine = engine or FakeEngine()
    batch = read_batch(path, SERVED)
    made = answer_batch(batch, done, engine.answer, engine.tokenizer, clock=lambda: 5.9)
    return [result for result, _ in made]


def error_of(path: Path, number: int = 1) -> str:
    (found,) = [at for at in read_batch(path, SERVED).lines if at.number == number]
    return str(found.error)


def test_a_request_becomes_a_result_in_the_format(tmp_path: Path):
    (result,) = answered(write(tmp_path, line("abc", seed=3)))
    key = result["id"].removeprefix("batch_req_")
    assert len(key) == 24
    assert result["custom_id"] == "abc"
    assert result["error"] is None
    response = result["response"]
    assert (response["status_code"], response["request_id"]) == (200, f"req_{key}")
    body = response["body"]
    assert (body["id"], body["created"]) == (f"cmpl-{key}", 5)
    assert body["choices"][0]["text"] == "cba"
    assert result["deepinfer"]["seq_seed"] == [7]
    assert result["deepinfer"]["line"] == 1
    assert len(result["deepinfer"]["digest"]) == 64


def test_a_chat_is_answered_with_its_reasoning(tmp_path: Path):
    messages = [{"role": "user", "content": "olleh"}]
    (result,) = answered(write(tmp_path, line("c", CHAT, messages=messages, logprobs=True)))
    body = result["response"]["body"]
    assert body["id"].startswith("chatcmpl-")
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "ello", "reasoning_content": "h"}
    assert [e["token"] for e in body["choices"][0]["logprobs"]["content"]] == list("ello")


def test_results_come_as_they_finish_and_requests_are_drawn_late(tmp_path: Path):
    path = write(tmp_path, *(line(f"r{i}") for i in range(7)))
    engine = FakeEngine(slots=3)
    batch = read_batch(path, SERVED)
    results = answer_batch(batch, (), engine.answer, engine.tokenizer, clock=lambda: 0)
    first, _ = next(results)
    assert first["custom_id"] == "r2"
    assert len(engine.asked) == 3
    assert [r["custom_id"] for r, _ in results] == ["r1", "r0", "r5", "r4", "r3", "r6"]


def test_a_body_with_several_prompts_is_one_result(tmp_path: Path):
    path = write(tmp_path, line("a", prompt=["xy", "pq", "rs", "tu"], n=2), line("b"))
    results = {r["custom_id"]: r for r in answered(path)}
    texts = [c["text"] for c in results["a"]["response"]["body"]["choices"]]
    assert texts == ["yx", "yx", "qp", "qp", "sr", "sr", "ut", "ut"]
    assert results["b"]["response"]["body"]["choices"][0]["text"] == "b"


BAD = {
    b"{": "Line 1 is no JSON",
    b'{"a": NaN}': "Line 1 is no JSON",
    b"[1]": "Line 1 is [1].",
    b'"\xff"': "Line 1 is no UTF-8 text (byte 1: invalid start byte).",
    b'{"custom_id": "a"}': "Line 1 has no member 'method'.",
    b'{"custom_id": 5}': "custom_id is 5.",
    line("a").replace(b"POST", b"GET"): 'method is "GET".',
    line("a", "/v1/embeddings"): 'url is "/v1/embeddings".',
    line(""): "Line 1 has an empty custom_id.",
    line("a")[:-1] + b', "extra": 1}': "Line 1 has the member 'extra'",
    b"[" * 100_000: "Line 1 is no JSON",
}


@pytest.mark.parametrize(("bad", "words"), BAD.items(), ids=list(BAD.values()))
def test_a_bad_line_has_its_error_and_stops_no_other(tmp_path: Path, bad: bytes, words: str):
    path = write(tmp_path, bad, line("good"))
    assert words in error_of(path)
    refused, fine = answered(path)
    assert refused["response"] is None
    assert refused["error"]["code"] == "invalid_request_error"
    assert words in refused["error"]["message"]
    assert fine["custom_id"] == "good" and fine["error"] is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"model": "other"}, "The body names the model 'other'."),
        ({"temprature": 1}, "Did you mean 'temperature'?"),
        ({"stream": True}, "The body sets stream to true."),
        ({"prompt": "too long"}, "a: prompt 9 exceeds 8."),
    ],
)
def test_a_body_that_is_refused_has_the_status_400(
    tmp_path: Path, body: dict[str, Any], words: str
):
    results = {r["custom_id"]: r for r in answered(write(tmp_path, line("a", **body), line("b")))}
    refused = results["a"]
    assert refused["response"]["status_code"] == 400
    assert words in refused["response"]["body"]["error"]["message"]
    assert refused["error"]["message"] == refused["response"]["body"]["error"]["message"]
    assert results["b"]["error"] is None


def test_a_repeated_custom_id_is_refused_and_the_first_is_answered(tmp_path: Path):
    path = write(tmp_path, line("a"), line("b"), line("a", prompt="other"), line("a"))
    assert "Line 3 has the custom_id 'a' of line 1." in error_of(path, 3)
    results = answered(path)
    assert len({r["id"] for r in results}) == 4
    assert [(r["custom_id"], r["error"] is None) for r in results] == [
        *(("a", False), ("a", False), ("b", True), ("a", True))
    ]


def test_a_huge_line_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_file, "MAX_LINE", 1000)
    huge = [line(f"h{i}", prompt="x" * 5000) for i in range(2)]
    exact = line("e").ljust(1000)
    path = write(tmp_path, huge[0], exact, huge[1], line("z"))
    assert f"Line 1 has {len(huge[0]) + 1} bytes." in error_of(path)
    results = answered(path)
    assert [(r["custom_id"], r["error"] is None) for r in results] == [
        *((None, False), (None, False), ("z", True), ("e", True))
    ]


def test_blank_lines_line_ends_and_a_byte_order_mark_mean_nothing(tmp_path: Path):
    lines = (line("a"), b"  ", line("b"))
    plain = read_batch(write(tmp_path, line("a"), line("b")), SERVED)
    other = write(tmp_path, *lines, end=b"\r\n")
    other.write_bytes(b"\xef\xbb\xbf" + other.read_bytes().rstrip())
    marked = read_batch(other, SERVED)
    assert marked.digest == plain.digest
    assert [at.key for at in marked.lines] == [at.key for at in plain.lines]
    assert [at.number for at in marked.lines] == [1, 3]
    assert len(answered(other)) == 2


def test_the_digest_knows_the_lines_and_not_their_order(tmp_path: Path):
    one = read_batch(write(tmp_path, line("a"), line("b")), SERVED)
    turned = read_batch(write(tmp_path, line("b"), line("a")), SERVED)
    changed = read_batch(write(tmp_path, line("a"), line("b", n=2)), SERVED)
    doubled = read_batch(write(tmp_path, line("a"), line("b"), line("b")), SERVED)
    assert one.digest == turned.digest
    assert len({one.digest, changed.digest, doubled.digest}) == 3


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_lines_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="has no lines"):
        read_batch(path, SERVED)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_batch(tmp_path / "none.jsonl", SERVED)


def test_a_file_that_changes_during_the_run_is_refused(tmp_path: Path):
    # Longer than what is read ahead.
    path = write(tmp_path, *(line(f"r{i}", user="u" * 300_000) for i in range(5)))
    engine = FakeEngine(slots=2)
    batch = read_batch(path, SERVED)
    results = answer_batch(batch, (), engine.answer, engine.tokenizer, clock=lambda: 0)
    next(results)
    path.write_bytes(path.read_bytes().replace(b"r4", b"r9"))
    with pytest.raises(ConfigError, match="Line 5 of .* is not the one that was read before"):
        list(results)


def test_digests_follow_from_tokens_and_log_probs_alone(tmp_path: Path):
    def digest(**body: Any) -> str:
        (result,) = answered(write(tmp_path, line("a", **body)))
        return result["deepinfer"]["digest"]

    assert digest() == digest(max_tokens=9)
    assert len({digest(), digest(prompt="b"), digest(logprobs=1), digest(n=2)}) == 4
