import hashlib
import io
import json
import re
import shutil
import struct

import pytest
from rich.console import Console

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.meter import Meter
from deepinfer_jax.entrypoints import demo
from deepinfer_jax.errors import RequestError
from deepinfer_jax.model.cache import kv_bytes_per_token
from deepinfer_jax.request import CompletionOutput, RequestOutput
from deepinfer_jax.settings import package_folder
from deepinfer_jax.skills.conversation import prompt
from deepinfer_jax.skills.evaluation import SUITE, distance
from deepinfer_jax.text.tokenizer import Tokenizer

NANO = package_folder("models") / "nano"


class Nano:
    """The packaged config and tokenizer with an engine that knows the answers."""

    def __init__(self, wrong=(), error=None):
        self.config = ModelConfig.from_file(NANO)
        self.tokenizer = Tokenizer.from_folder(NANO, self.config)
        self.meter = Meter()
        self.wrong, self.error, self.limits = wrong, error, []

    def manifest(self):
        return {"level": "R1"}

    def prepare(self, prompt_tokens):
        assert max(prompt_tokens) > 1500
        self.meter.compile_s += 4.0

    def stream_chat(self, messages, params, *, thinking):
        number = len(self.limits)
        self.limits.append((params.max_tokens, params.temperature))
        sample = demo.prompts()[number].sample
        ids = tuple(self.tokenizer.encode_pieces(prompt(sample).pieces))
        answer = "wrong" if number in self.wrong else sample.answer
        message = sample.messages[-1]
        self.meter.prompt_tokens += len(ids)
        self.meter.output_tokens += 5
        self.meter.decode_s += 0.5
        reasoning = message.get("reasoning_content") if thinking else None
        parts = (("", (7,), reasoning), (answer[:2], (8, 9), None), (answer[2:], (number, 1), None))
        for text, tokens, thought in parts:
            one = CompletionOutput(index=0, text=text, token_ids=tokens, reasoning=thought)
            yield RequestOutput(
                request_id="0",
                prompt=None,
                prompt_token_ids=ids,
                outputs=(one,),
                finished=tokens[-1] == 1,
                error=self.error,
            )


@pytest.fixture
def nano(monkeypatch):
    def nano(**how):
        llm = Nano(**how)
        monkeypatch.setattr(demo, "open_engine", lambda live, **arguments: llm)
        return llm

    return nano


def test_three_prompts_are_shown_with_their_answers_and_a_table(deepinfer, nano):
    llm = nano()
    code, out, _ = deepinfer("demo", "--quiet")
    fact, addition, search = (one.sample for one in demo.prompts())
    assert code == 0
    assert "> What is DSpark?" in out
    assert fact.answer in out
    assert f"{addition.messages[-1]['reasoning_content']}\n\n{addition.answer}\n" in out
    far = distance(search, llm.tokenizer)
    assert f"needle, {far} tokens before the answer: {search.needle}" in out
    assert out.count(search.needle) == 2
    assert search.messages[0]["content"] not in out
    table = dict(re.findall(r"^(\w[\w ]*?) {2,}(\S.*?) *$", out, re.M))
    assert table["right answers"] == "3 of 3"
    assert table["output tokens"] == "15"
    assert table["decode"] == "8.0 tokens/s"
    assert table["seconds"] == "prefill 0.0, decode 1.5, compiling 4.0"
    assert "not the expected answer" not in out


def test_a_wrong_answer_is_said_to_be_wrong(deepinfer, nano):
    nano(wrong=(1,))
    code, out, _ = deepinfer("demo", "--quiet")
    assert code == 0
    assert out.count("not the expected answer") == 1
    assert "  not the expected answer: 86990" in out
    assert "2 of 3" in out


def test_json_holds_the_answers_and_the_numbers(deepinfer, nano):
    llm = nano(wrong=(2,))
    found = json.loads(deepinfer("demo", "--json", "--quiet")[1])
    assert [a["text"] == a["expected"] for a in found["answers"]] == [True, True, False]
    assert found["right"] == 2
    lengths = [
        len(llm.tokenizer.encode_pieces(prompt(one.sample).pieces)) for one in demo.prompts()
    ]
    assert found["prompt_tokens"] == sum(lengths)
    assert found["output_tokens"] == 15
    assert found["decode_tokens_per_s"] == pytest.approx(12 / 1.5)
    assert found["kv_bytes_per_token"] == kv_bytes_per_token(llm.config)
    assert 20e6 < found["parameters"] < 30e6
    assert re.fullmatch("[0-9a-f]{16}", found["run_digest"])


def test_out_holds_the_three_answers_and_the_manifest(deepinfer, nano, tmp_path):
    nano()
    assert deepinfer("demo", "--quiet", "--out", str(tmp_path / "run"))[0] == 0
    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["request_id"] for row in rows] == ["0", "1", "2"]
    answers = [one.sample.answer for one in demo.prompts()]
    assert [row["outputs"][0]["text"] for row in rows] == answers
    assert rows[1]["outputs"][0]["token_ids"] == [7, 8, 9, 1, 1]
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {"level": "R1"}


def test_answers_are_greedy_and_as_long_as_the_suite_allows(deepinfer, nano):
    llm = nano()
    deepinfer("demo", "--json", "--quiet")
    suite = {entry.name: entry.max_tokens for entry in SUITE}
    assert llm.limits == [(suite[n], 0) for n in ("facts", "sum_worked", "lookup_code")]


def test_the_document_is_long_and_its_needle_far(nano):
    llm = nano()
    sample = demo.prompts()[2].sample
    assert len(llm.tokenizer.encode_pieces(prompt(sample).pieces)) > 1800
    assert distance(sample, llm.tokenizer) > 10 * llm.config.sliding_window


def test_the_digest_covers_prompts_outputs_and_where_each_ends():
    expected = hashlib.sha256(struct.pack("<8i", 2, 5, 6, 1, 7, 0, 1, 9)).hexdigest()[:16]
    assert demo.run_digest([((5, 6), (7,)), ((), (9,))]) == expected
    assert demo.run_digest([((5,), (6, 7)), ((), (9,))]) != expected
    assert demo.run_digest([((), (9,)), ((5, 6), (7,))]) != expected


def test_a_request_that_fails_is_refused(deepinfer, nano):
    nano(error=RequestError("Broken.", "Why.", "Do."))
    code, _, err = deepinfer("demo", "--quiet")
    assert code == 2
    assert err.startswith("RequestError: Broken.")


def test_a_terminal_sees_titles_in_bold_and_reasoning_dim(deepinfer, nano, monkeypatch):
    nano()
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, markup=False, highlight=False)
    monkeypatch.setattr(demo, "console", lambda: terminal)
    deepinfer("demo", "--quiet")
    assert "\x1b[1mA sum, with its reasoning\x1b[0m" in file.getvalue()
    assert "\x1b[2m" in file.getvalue()


def test_missing_weights_are_refused_in_three_sentences(deepinfer, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(NANO / name, tmp_path)
    code, out, err = deepinfer("demo", "--model", str(tmp_path), "--quiet")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"CheckpointError: {tmp_path} holds no .safetensors file.",
        "  A model folder holds its weights beside config.json.",
        "  Check the path, or finish the download.",
    ]


def test_the_packaged_model_answers_all_three(deepinfer, tmp_path, no_compile_cache):
    cache = f"engine.compile_cache_dir={tmp_path}"
    code, out, _ = deepinfer("demo", "--json", "--quiet", "--set", cache)
    assert code == 0
    assert json.loads(out)["right"] == 3


def test_the_prompts_do_not_change():
    texts = [str(one.sample.messages[0]["content"]) for one in demo.prompts()]
    assert texts[:2] == ["What is DSpark?", "What is 86744 + 246?"]
    assert texts[2].endswith("\n\nWhat is the code of Rosa?")
