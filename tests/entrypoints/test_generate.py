import dataclasses
import io
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from deepinfer_jax import SamplingParams
from deepinfer_jax import env as environment
from deepinfer_jax.entrypoints import answers, generate, results
from deepinfer_jax.entrypoints.engine_options import effort_level, open_engine
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.request import CompletionOutput, RequestOutput, TokenLogprobs, ToolCall

GREEDY = ("--temperature", "0", "--max-tokens", "5")


def texts(llm, *prompts, **more):
    params = SamplingParams(temperature=0, max_tokens=5, **more)
    return [o.outputs[0].text for o in llm.generate(list(prompts), params)]


def screen(terminal: bool) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=20, markup=False, highlight=False
    )


def test_one_prompt_prints_its_text_and_nothing_else(deepinfer, opened, tiny_llm):
    code, out, err = deepinfer("generate", "hello", *GREEDY)
    assert code == 0
    assert out == texts(tiny_llm, "hello")[0] + "\n"
    assert err.splitlines()[-1].startswith("computing")


def test_quiet_leaves_standard_error_empty(deepinfer, opened):
    assert deepinfer("generate", "hello", *GREEDY, "--quiet")[2] == ""


def test_several_prompts_are_printed_in_order_under_their_numbers(deepinfer, opened, tiny_llm):
    code, out, _ = deepinfer("generate", "ab", "cd", *GREEDY, "--quiet")
    one, two = texts(tiny_llm, "ab", "cd")
    assert (code, out) == (0, f"[0] {one}\n[1] {two}\n")


def test_a_dash_is_standard_input_as_it_is(deepinfer, opened, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    _, out, _ = deepinfer("generate", "-", *GREEDY, "--json", "--quiet")
    assert json.loads(out)["results"][0]["prompt"] == "from a pipe\n"


def test_two_dashes_are_refused(deepinfer, opened):
    code, _, err = deepinfer("generate", "-", "-")
    assert code == 2
    assert "2 prompts are '-'. Each stands for" in " ".join(err.split())
    assert opened == []


def test_input_that_is_no_text_is_refused(deepinfer, opened, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"))
    code, _, err = deepinfer("generate", "-")
    assert code == 2
    assert "Standard input is no UTF-8 text (byte 1: invalid start byte)." in err


def test_json_is_one_object_with_ids_seeds_and_log_probs(deepinfer, opened, tiny_llm):
    arguments = ("hello", "--max-tokens", "4", "--logprobs", "0", "--seq-seed", "7", "--n", "2")
    _, out, _ = deepinfer("generate", *arguments, "--json", "--quiet")
    (result,) = json.loads(out)["results"]
    params = SamplingParams(max_tokens=4, logprobs=0, seq_seed=7, n=2)
    (expected,) = tiny_llm.generate("hello", params)
    assert result["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert len(result["outputs"]) == 2
    for made, sample in zip(result["outputs"], expected.outputs, strict=True):
        assert made["token_ids"] == list(sample.token_ids)
        assert made["seq_seed"] == sample.seq_seed
        np.testing.assert_array_equal(made["logprobs"]["token"], sample.logprobs.token.tolist())
    assert result["error"] is None


def test_the_same_seed_repeats_and_another_differs(deepinfer, opened):
    def run(seed):
        return deepinfer("generate", "hello", "--seq-seed", seed, "--quiet")[1]

    assert run("1") == run("1") != run("2")


def test_stops_reach_the_engine(deepinfer, opened, tiny_llm):
    (output,) = tiny_llm.generate("hello", SamplingParams(temperature=0, max_tokens=5))
    ids = output.outputs[0].token_ids
    arguments = ("hello", *GREEDY, "--stop-token-id", str(ids[2]), "--json", "--quiet")
    sample = json.loads(deepinfer("generate", *arguments)[1])["results"][0]["outputs"][0]
    assert sample["token_ids"] == list(ids[: ids.index(ids[2]) + 1])
    assert (sample["finish_reason"], sample["stop_reason"]) == ("stop", ids[2])


def test_ids_are_shown_when_asked_for(deepinfer, opened, tiny_llm):
    _, out, _ = deepinfer("generate", "hello", *GREEDY, "--show-ids", "--quiet")
    (output,) = tiny_llm.generate("hello", SamplingParams(temperature=0, max_tokens=5))
    assert f"prompt ids 0: {' '.join(map(str, output.prompt_token_ids))}\n" in out
    assert f"output ids 0: {' '.join(map(str, output.outputs[0].token_ids))}\n" in out


def test_chat_renders_the_prompt_as_a_user_s_message(deepinfer, opened, tiny_llm):
    _, out, _ = deepinfer("generate", "hi", *GREEDY, "--chat", "--json", "--quiet")
    params = SamplingParams(temperature=0, max_tokens=5)
    (expected,) = tiny_llm.chat([{"role": "user", "content": "hi"}], params)
    (result,) = json.loads(out)["results"]
    assert result["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert result["outputs"][0]["reasoning"] == expected.outputs[0].reasoning


def test_a_request_that_fails_does_not_stop_the_others(deepinfer, opened, tiny_llm, tmp_path):
    out_dir = tmp_path / "run"
    arguments = ("x" * 2000, "ok", *GREEDY, "--quiet", "--out", str(out_dir))
    code, out, err = deepinfer("generate", *arguments)
    assert code == 1
    assert texts(tiny_llm, "ok")[0] in out
    lines = err.splitlines()
    do = "Shorten it to 1023, or have engine.truncate (--truncate) cut it on the left or right."
    assert lines[0].startswith("RequestError: Request 0: prompt 2001 + max_tokens 5 exceeds")
    assert lines[1:] == ["  Nothing was truncated.", f"  {do}"]
    rows = [json.loads(line) for line in (out_dir / "results.jsonl").read_text().splitlines()]
    assert {row["request_id"]: row["error"] is None for row in rows} == {"0": False, "1": True}


def test_prompts_that_were_cut_are_counted(deepinfer, opened, tiny_llm, tmp_path, monkeypatch):
    short = dataclasses.replace(tiny_llm._admission, limit=20, truncate="left")
    monkeypatch.setattr(tiny_llm, "_admission", short)
    out_dir = tmp_path / "run"
    words = ("x" * 40, "ok", *GREEDY, "--truncate", "left", "--json", "--out", str(out_dir))
    code, out, err = deepinfer("generate", *words)
    report = json.loads(out)
    assert (code, opened[-1]["truncate"], report["truncated_requests"]) == (0, "left", 1)
    cut, whole = report["results"]
    assert cut["prompt_token_ids"] == [0] + [3 + ord("x")] * 14
    assert cut["metrics"]["truncated_tokens"] == 26
    assert "truncated_tokens" not in whole["metrics"]
    assert "1 of 2 prompts were truncated to fit." in err
    assert json.loads((out_dir / "run.json").read_text())["truncated_requests"] == 1


def test_out_holds_a_line_per_request_and_the_manifest(deepinfer, opened, tiny_llm, tmp_path):
    arguments = ("ab", "cd", *GREEDY, "--quiet", "--out", str(tmp_path / "new" / "run"))
    assert deepinfer("generate", *arguments)[0] == 0
    folder = tmp_path / "new" / "run"
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [row["outputs"][0]["text"] for row in rows] == texts(tiny_llm, "ab", "cd")
    assert json.loads((folder / "run.json").read_text()) == tiny_llm.manifest()
    assert sorted(p.name for p in folder.iterdir()) == ["results.jsonl", "run.json"]


def test_a_folder_with_results_is_not_written_again(deepinfer, opened, tmp_path):
    (tmp_path / "results.jsonl").write_text("{}\n")
    code, out, err = deepinfer("generate", "ab", *GREEDY, "--quiet", "--out", str(tmp_path))
    assert (code, out) == (2, "")
    assert f"ConfigError: {tmp_path} already is, or holds, the result of a run." in err
    assert "A second run is never mixed into the lines of the first." in err
    assert (tmp_path / "results.jsonl").read_text() == "{}\n"


def test_an_out_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        results.ResultFolder(tmp_path / "file" / "run", {})


def test_a_terminal_gets_the_text_as_it_comes(deepinfer, opened, tiny_llm, monkeypatch):
    terminal, seen = screen(True), []
    show = answers.Transcript.show

    def watched(self, sample):
        show(self, sample)
        seen.append(terminal.file.getvalue())

    monkeypatch.setattr(generate, "console", lambda: terminal)
    monkeypatch.setattr(answers.Transcript, "show", watched)
    assert deepinfer("generate", "hello", *GREEDY, "--quiet")[0] == 0
    expected = texts(tiny_llm, "hello")[0] + "\n"
    assert terminal.file.getvalue() == expected
    assert len(seen) == 5
    assert seen[0] != seen[-1]


@pytest.fixture
def interrupted(opened, tiny_llm, monkeypatch):
    """Lets the first of two prompts finish, and presses Ctrl-C in the middle of the second."""
    stream = tiny_llm.stream

    def stopped(*arguments):
        for part in stream(*arguments):
            yield part
            if part.request_id == "1":
                raise KeyboardInterrupt

    monkeypatch.setattr(tiny_llm, "stream", stopped)


def test_an_interrupted_run_leaves_what_was_finished(deepinfer, interrupted, tiny_llm, tmp_path):
    code, out, err = deepinfer("generate", "ab", "cd", *GREEDY, "--quiet", "--out", str(tmp_path))
    assert (code, err) == (130, "Interrupted. What was finished is kept.\n")
    assert out == texts(tiny_llm, "ab")[0] + "\n"
    (row,) = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert (row["request_id"], row["outputs"][0]["text"]) == ("0", out.removesuffix("\n"))


def test_an_interrupted_run_under_json_is_still_one_object(deepinfer, interrupted):
    code, out, _ = deepinfer("generate", "ab", "cd", *GREEDY, "--quiet", "--json")
    assert code == 130
    assert [result["request_id"] for result in json.loads(out)["results"]] == ["0"]


def test_metrics_are_written_where_they_are_asked_for(deepinfer, opened, tmp_path):
    path = tmp_path / "metrics.jsonl"
    words = ("generate", "ab", "x" * 2000, *GREEDY, "--quiet", "--metrics", str(path))
    assert deepinfer(*words)[0] == 1
    last = json.loads(path.read_text().splitlines()[-1])
    assert (last["requests"], last["done"], last["failed"], last["output_tokens"]) == (2, 1, 1, 5)
    assert (last["prompt_tokens"], last["running"], last["late_compiles"]) == (3, 0, 0)


@pytest.mark.parametrize("words", [("generate", "hello"), ("chat", "--message", "hello")])
def test_the_way_to_compile_reaches_the_engine(deepinfer, opened, words):
    assert deepinfer(*words, "--max-tokens", "2", "--compile", "none", "--quiet")[0] == 0
    assert opened[0]["compile"] == "none"


def test_a_parameter_that_cannot_be_served_is_refused_before_the_model_is_opened(deepinfer, opened):
    code, _, err = deepinfer("generate", "hello", "--top-p", "0")
    assert code == 2
    assert "top_p=0.0 is outside (0, 1]." in err
    assert opened == []


def test_a_transcript_separates_reasoning_answer_and_calls():
    plain, terminal = screen(False), screen(True)
    long = "an answer longer than the width of the screen"
    calls = (ToolCall("look", '{"a": 1}'),)
    first = CompletionOutput(index=0, text="", token_ids=(1,), reasoning="think")
    second = CompletionOutput(index=0, text=long[:9], token_ids=(2,), reasoning=" hard")
    third = CompletionOutput(index=0, text=long[9:], token_ids=(3,), tool_calls=calls)
    for target in (plain, terminal):
        transcript = answers.Transcript(target)
        for part in (first, second, third):
            transcript.show(part)
        transcript.end(third)
    call = '{"name": "look", "arguments": "{\\"a\\": 1}"}'
    assert plain.file.getvalue() == f"think hard\n\n{long}\n{call}\n"
    assert "\x1b[2mthink\x1b[0m" in terminal.file.getvalue()
    assert re.sub(r"\x1b\[\d*m", "", terminal.file.getvalue()) == plain.file.getvalue()


def test_log_probs_are_printed_with_the_likeliest_ids(deepinfer, opened, monkeypatch):
    found = TokenLogprobs(
        token=np.array([-0.5, -1.25], np.float32),
        top_ids=np.array([[7, 3], [9, 2]]),
        top=np.array([[-0.5, -2], [-0.25, -1.5]], np.float32),
    )
    sample = CompletionOutput(index=0, text="ab", token_ids=(7, 5), logprobs=found)
    output = RequestOutput(
        request_id="0", prompt="p", prompt_token_ids=(1,), outputs=(sample,), finished=True
    )
    monkeypatch.setattr(generate, "_run", lambda *arguments: [output])
    _, out, _ = deepinfer("generate", "p", "--logprobs", "2", "--quiet")
    assert out.splitlines() == [
        "ab",
        "log-probs 0: token id, its log-prob, likeliest ids with theirs",
        "  7 -0.5000  7:-0.5000 3:-2.0000",
        "  5 -1.2500  9:-0.2500 2:-1.5000",
    ]


def test_options_reach_the_engine_and_programs_are_kept_in_the_user_s_cache(
    tiny_folder, tmp_path, monkeypatch, no_compile_cache
):
    monkeypatch.setattr(environment, "user_cache", lambda: tmp_path)
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", "/nowhere")
    settings = ["engine.max_num_seqs=3", "engine.model=/nowhere/either"]
    llm = open_engine(Live(quiet=True), model=str(tiny_folder), overrides=settings)
    found = {row["key"]: row["value"] for row in llm.manifest()["settings"]}
    assert found["engine.max_num_seqs"] == 3
    assert found["engine.model"] == tiny_folder.name
    assert found["engine.compile_cache_dir"] == "compiled"
    kept = jax.config.jax_compilation_cache_dir
    assert kept is not None
    assert Path(kept).parent == tmp_path / "deepinfer_jax" / "compiled"


def test_a_cache_folder_that_a_setting_names_is_used(
    tiny_folder, tmp_path, monkeypatch, no_compile_cache
):
    monkeypatch.setattr(environment, "user_cache", lambda: pytest.fail("not needed"))
    monkeypatch.setenv("DEEPINFER_JIT_CACHE_DIR", str(tmp_path))
    open_engine(Live(quiet=True), model=str(tiny_folder))
    assert Path(str(jax.config.jax_compilation_cache_dir)).parent == tmp_path


def test_a_cache_that_cannot_be_written_is_said_and_not_needed(
    tiny_folder, tmp_path, monkeypatch, no_compile_cache
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(environment, "user_cache", lambda: tmp_path / "file")
    told = screen(False)
    open_engine(Live(console=told), model=str(tiny_folder))
    assert "compiled programs are not kept:" in told.file.getvalue()
    assert jax.config.jax_compilation_cache_dir is None


def test_a_model_that_does_not_exist_is_bad_input(deepinfer):
    code, out, err = deepinfer("generate", "p", "--model", "nono", "--quiet")
    assert (code, out) == (2, "")
    assert "CheckpointError: There is no model 'nono'" in err


def test_an_effort_of_digits_is_a_number():
    assert [effort_level(text) for text in ("50", "high", None)] == [50, "high", None]
