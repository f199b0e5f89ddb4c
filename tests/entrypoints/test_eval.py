import json
import subprocess
import sys

import pytest

from deepinfer_jax.engine.meter import Meter
from deepinfer_jax.entrypoints import eval as command
from deepinfer_jax.entrypoints.engine_options import open_engine
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.errors import RequestError
from deepinfer_jax.request import CompletionOutput, RequestOutput
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.skills.conversation import completion
from deepinfer_jax.skills.evaluation import SUITE, prompt_ids
from deepinfer_jax.skills.sample import HELD_OUT_SEED

SUM = next(entry for entry in SUITE if entry.name == "sum_direct")


class Knowing:
    """An engine that gives the right answer to every prompt of a skill but the wrong ones."""

    def __init__(self, tokenizer, entry, wrong=(), error=None):
        self.tokenizer, self.calls, self.error = tokenizer, [], error
        self.meter, self.answers = Meter(), {}
        for i, sample in enumerate(entry.samples(HELD_OUT_SEED, 8)):
            ids = tuple(tokenizer.encode_pieces(completion(sample)))
            answer = ids if i not in wrong else (*ids[:-1], ids[0], ids[-1])
            self.answers[tuple(prompt_ids(sample, tokenizer))] = answer

    def manifest(self):
        return {"checkpoint": "abc"}

    def generate(self, prompts, params, ids, tell):
        self.calls.append((len(ids), params))
        tell(len(ids), len(ids))
        if any(tuple(prompt) not in self.answers for prompt in ids):
            raise KeyboardInterrupt
        return [self.output(tuple(prompt)) for prompt in ids]

    def output(self, prompt):
        sample = CompletionOutput(index=0, text="", token_ids=self.answers[prompt])
        return RequestOutput(
            request_id="0",
            prompt=None,
            prompt_token_ids=prompt,
            outputs=() if self.error else (sample,),
            finished=True,
            error=self.error,
        )


@pytest.fixture
def knowing(tiny_llm, monkeypatch):
    def knowing(entry=SUM, **how):
        llm = Knowing(tiny_llm.tokenizer, entry, **how)
        monkeypatch.setattr(command, "open_engine", lambda live, **arguments: llm)
        return llm

    return knowing


def test_rows_are_a_list_with_accuracy_and_standard_error(deepinfer, knowing):
    llm = knowing(wrong=(1, 2))
    code, out, err = deepinfer("eval", "--limit-skill", "sum_direct", "--n", "8", "--json")
    row = json.loads(out)[0]
    assert code == 0
    assert row == {
        "skill": "sum_direct",
        "n": 8,
        "accuracy": 0.75,
        "stderr": pytest.approx((0.75 * 0.25 / 8) ** 0.5),
        "required": None,
        "pass": None,
    }
    assert llm.calls == [(8, SamplingParams(temperature=0, max_tokens=SUM.max_tokens))]
    assert err.splitlines() == ["sum_direct, skill 1 of 1: 0 of 8 prompts, 0 tokens/s"]


def test_the_table_shows_what_is_required_and_whether_it_is_met(deepinfer, knowing):
    knowing(next(entry for entry in SUITE if entry.name == "sort"), wrong=(0, 1))
    code, out, _ = deepinfer("eval", "--limit-skill", "sort", "--n", "8", "--quiet")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["skill", "n", "accuracy", "stderr", "required", "pass"]
    assert lines[1] == ["sort", "8", "0.750", "0.153", "0.90", "no"]


@pytest.mark.parametrize(("wrong", "code"), [((), 0), ((0, 1), 1)])
def test_strict_fails_when_a_requirement_is_missed(deepinfer, knowing, wrong, code):
    knowing(next(entry for entry in SUITE if entry.name == "sort"), wrong=wrong)
    arguments = ("--limit-skill", "sort", "--n", "8", "--quiet", "--strict")
    assert deepinfer("eval", *arguments)[0] == code


def test_a_prompt_that_cannot_run_is_not_graded(deepinfer, knowing):
    knowing(error=RequestError("Too long.", "Why.", "Do."))
    code, out, err = deepinfer("eval", "--limit-skill", "sum_direct", "--n", "1", "--quiet")
    assert (code, out) == (2, "")
    assert err.startswith("RequestError: Too long.")


def test_rows_are_kept_with_what_they_were_measured_on(deepinfer, knowing, tmp_path):
    knowing()
    arguments = ("--limit-skill", "sum_direct", "--n", "8", "--json", "--quiet")
    code, out, _ = deepinfer("eval", *arguments, "--out", str(tmp_path / "rows.json"))
    assert code == 0
    assert json.loads((tmp_path / "rows.json").read_text()) == {
        "suite": "nano",
        "seed": HELD_OUT_SEED,
        "finished": True,
        "rows": json.loads(out),
        "manifest": {"checkpoint": "abc"},
    }


def test_an_interruption_keeps_and_shows_the_finished_rows(deepinfer, knowing, tmp_path):
    knowing()  # an engine that is interrupted in the second skill
    arguments = ("--limit-skill", "sum_direct", "--limit-skill", "count", "--n", "8")
    file = tmp_path / "rows.json"
    code, out, err = deepinfer("eval", *arguments, "--json", "--out", str(file))
    assert code == 130
    assert {row["skill"].partition("/")[0] for row in json.loads(out)} == {"sum_direct"}
    assert err.splitlines()[-1] == "Interrupted. What was finished is kept."
    kept = json.loads(file.read_text())
    assert (kept["finished"], kept["rows"]) == (False, json.loads(out))
    code, out, _ = deepinfer("eval", *arguments, "--quiet")
    assert code == 130
    assert out.splitlines()[1].split()[0] == "sum_direct"


def test_an_interruption_in_the_first_skill_leaves_nothing_to_show(deepinfer, knowing):
    knowing()
    code, out, _ = deepinfer("eval", "--limit-skill", "count", "--n", "8", "--quiet")
    assert (code, out) == (130, "")


def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_opened(
    deepinfer, opened, tmp_path
):
    code, _, err = deepinfer("eval", "--out", str(tmp_path))
    assert code == 2
    assert f"{tmp_path} cannot be written: it is a folder." in err
    assert opened == []


def test_the_engine_answers_the_suite_the_same_twice(deepinfer, opened):
    arguments = ("--limit-skill", "sum_direct", "--n", "2", "--json", "--quiet")
    code, out, _ = deepinfer("eval", *arguments)
    assert code == 0
    assert json.loads(out)[0]["n"] == 2
    assert deepinfer("eval", *arguments)[1] == out


def test_options_reach_the_engine(deepinfer, opened):
    arguments = ("--limit-skill", "count", "--n", "1", "--arithmetic", "release", "--quiet")
    deepinfer("eval", *arguments, "--mask-main-kv", "--set", "engine.max_num_seqs=2")
    assert opened == [
        {
            "model": None,
            "config": None,
            "overrides": ["engine.max_num_seqs=2"],
            "arithmetic": "release",
            "kernels": {"sparse_mla": "window_only"},
        }
    ]


def test_masking_the_main_kv_names_its_kernel_in_the_manifest(tiny_folder, tmp_path):
    llm = open_engine(
        Live(quiet=True),
        model=str(tiny_folder),
        kernels={"sparse_mla": "window_only"},
        compile_cache_dir=None,
        overrides=[f"engine.compile_cache_dir={tmp_path}"],
    )
    (row,) = [row for row in llm.manifest()["kernels"] if row["op"] == "sparse_mla"]
    assert (row["kernel"], row["why"]) == ("window_only", "asked for by name")


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (
            ("--suite", "mega"),
            "There is no suite 'mega'. The suites are nano, spec. Name one of these with --suite.",
        ),
        (("--limit-skill", "sorts"), "The suite nano has no skill 'sorts'. Its skills are "),
        (("--limit-skill", "sorts"), "Did you mean sort?"),
        (("--limit-skill", "qqq"), "Name one of these with --limit-skill."),
        (("--seed", "5"), "The suite was asked for seed 5."),
    ],
)
def test_what_cannot_be_graded_is_refused_before_the_model_is_opened(
    deepinfer, opened, arguments, sentences
):
    code, _, err = deepinfer("eval", *arguments)
    assert code == 2
    assert sentences in " ".join(err.split())
    assert opened == []


def test_no_prompts_are_no_evaluation(deepinfer, opened):
    assert deepinfer("eval", "--n", "0")[0] == 2
    assert opened == []


def test_the_command_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer_jax", "eval", "--suite", "mega", "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["kind"] == "ConfigError"
