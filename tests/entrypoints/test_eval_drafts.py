import json
from types import SimpleNamespace

import pytest
from short_llm import fewer_sizes, largest, open_llm, shorter_config, write_short_model

from deepinfer_jax.checkpoint.load import load
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.entrypoints import eval_drafts
from deepinfer_jax.errors import RequestError
from deepinfer_jax.request import CompletionOutput, RequestOutput
from deepinfer_jax.sampling.verified import VerifiedBlock
from deepinfer_jax.training import drafter_state
from deepinfer_jax.training.drafter_step import DrafterSettings, begin
from deepinfer_jax.training.parameters import from_checkpoint

SUM = ("eval", "--suite", "spec", "--limit-skill", "sum_direct")


class Drafting:
    """An engine that verifies the same two blocks for every prompt."""

    max_model_len, folder = 4096, "models/m"
    config = SimpleNamespace(dspark_block_size=2)

    def __init__(self, tokenizer, nextn=2, error=None):
        self.tokenizer, self.nextn, self.error = tokenizer, nextn, error
        self.asked, self.params, self.tell_block = [], [], None

    def manifest(self):
        return {"checkpoint": "abc"}

    def watch_drafts(self, callback):
        self.tell_block = callback

    def generate(self, prompts, params, ids, tell):
        self.params += params
        outputs = []
        for place, prompt in enumerate(ids):
            if self.nextn:
                self.tell_block(place, 0, VerifiedBlock(2, 2, (0.0, 0.0)))
                self.tell_block(place, 0, VerifiedBlock(2, 0, (0.0, 0.0)))
            sample = CompletionOutput(index=0, text="", token_ids=(5, 6, 7, 8))
            output = RequestOutput(
                request_id=str(place),
                prompt=None,
                prompt_token_ids=tuple(prompt),
                outputs=() if self.error else (sample,),
                finished=True,
                error=self.error,
            )
            outputs.append(output)
        tell(len(ids), len(ids))
        return outputs


@pytest.fixture
def drafting(tiny_llm, monkeypatch):
    def drafting(**how):
        llm = Drafting(tiny_llm.tokenizer, **how)

        def open_engine(live, **arguments):
            llm.asked.append(arguments)
            return llm

        monkeypatch.setattr(eval_drafts, "open_engine", open_engine)
        return llm

    return drafting


def test_everything_is_in_the_json_and_in_the_file(deepinfer, drafting, tmp_path):
    drafting()
    file = tmp_path / "spec.json"
    code, out, err = deepinfer(
        *SUM, "--limit-skill", "count", "--n", "2", "--json", "--out", str(file)
    )
    assert code == 0
    found = json.loads(out)
    assert found == json.loads(file.read_text())
    (shipped,) = found.pop("drafters")
    assert found.pop("seed") == 2147483648
    assert found == {
        "suite": "spec",
        "n": 2,
        "temperature": 0.0,
        "places": 2,
        "finished": True,
        "manifest": {"checkpoint": "abc"},
    }
    assert (shipped["name"], shipped["judged_by"]) == ("shipped", "engine")
    assert len(shipped["temperatures"]) == 2
    assert [row["skill"] for row in shipped["rows"]] == ["sum_direct", "count", "all"]
    whole = shipped["rows"][-1]
    assert (whole["n"], whole["steps"], whole["drafts"]) == (4, 8, 16)
    assert whole["accept_length"] == 2.0
    assert whole["acceptance"] == [0.5, 1.0]
    # Confidence one half; two of three drafts that were reached are kept.
    assert whole["ece"] == pytest.approx(2 / 3 - 0.5)
    assert whole["auroc"] == 0.5
    assert whole["judged_half"]["ece"] == pytest.approx(2 / 3 - 0.5)
    assert "sum_direct, skill 1 of 2: 0 of 2 answers" in err.splitlines()


def test_the_tables_have_a_line_for_each_skill_and_for_each_drafter(deepinfer, drafting):
    drafting()
    code, out, _ = deepinfer(*SUM, "--n", "2", "--quiet")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["accept", "length", "n", "shipped"]
    assert lines[1] == ["sum_direct", "2", "2.00"]
    assert lines[2] == ["all", "2", "2.00"]
    assert lines[4] == ["all", "skills", "steps", "1", "2", "ECE", "scaled", "AUROC"]
    assert lines[5][:4] == ["shipped", "4", "0.500", "1.000"]
    assert lines[5][4] == "0.1667"


def test_the_engine_drafts_whole_blocks_and_answers_with_fixed_seeds(
    deepinfer, drafting, monkeypatch
):
    llm = drafting()
    rule = ("--verification", "block", "--temperature", "0.7")
    assert deepinfer(*SUM, "--n", "3", "--quiet", *rule)[0] == 0
    assert llm.asked[0] == {
        "model": None,
        "config": None,
        "overrides": None,
        "arithmetic": None,
        "verification": "block",
        "nextn": "auto",
        "varlen": False,
        "overlap": False,
        "confidence_temperature": "10",
    }
    assert [p.temperature for p in llm.params] == [0.7] * 3
    assert [p.seq_seed for p in llm.params] == [980406, 980407, 980408]
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "3")
    deepinfer(*SUM, "--n", "1", "--quiet")
    assert llm.asked[1]["nextn"] == 3
    assert llm.params[-1].temperature == 0


def test_a_model_without_a_drafter_leaves_nothing_to_judge(deepinfer, drafting):
    drafting(nextn=0)
    code, out, err = deepinfer(*SUM, "--quiet")
    assert (code, out) == (2, "")
    assert " ".join(err.split()) == (
        "ConfigError: There is nothing to judge: the model in models/m drafts no tokens. "
        "Its checkpoint has no drafter (mtp.* weights), or its Engram tables are off the device. "
        "Use a checkpoint with a drafter, or add --drafter NAME=FOLDER."
    )


def test_a_prompt_that_cannot_run_is_not_judged(deepinfer, drafting):
    drafting(error=RequestError("Too long.", "Why.", "Do."))
    code, _, err = deepinfer(*SUM, "--n", "1", "--quiet")
    assert code == 2
    assert err.startswith("RequestError: Too long.")


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (("--drafter", "dflash"), "--drafter is 'dflash'. It is NAME=FOLDER; every name stands"),
        (("--drafter", "shipped=."), "--drafter is 'shipped=.'."),
        (("--drafter", "a=.", "--drafter", "a=.."), "--drafter is 'a=..'."),
        (
            ("--drafter", "a=no/where"),
            "--drafter a names no/where, and there is no such folder. It is the folder that a "
            "drafter's training wrote with --out. Correct the path.",
        ),
        (
            ("--drafter", "a=.", "--temperature", "0.5"),
            "--drafter was given together with --temperature 0.5. A folder is judged by a replay "
            "of greedy decoding; only the engine draws. Leave one of the two out.",
        ),
        (
            ("--strict", "--mask-main-kv"),
            "given --mask-main-kv, --strict, which the suite spec does not use.",
        ),
        (
            ("--suite", "nano", "--drafter", "a=.", "--temperature", "0"),
            "given --drafter, --temperature, which the suite nano does not use.",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused_before_the_model_is_opened(
    deepinfer, drafting, arguments, sentences
):
    llm = drafting()
    code, _, err = deepinfer(*SUM, *arguments)
    assert code == 2
    assert sentences in " ".join(err.split())
    assert llm.asked == []


def test_drafts_of_other_numbers_are_not_compared(deepinfer, drafting):
    drafting(nextn=1)
    code, _, err = deepinfer(*SUM, "--drafter", "a=.", "--quiet")
    assert code == 2
    assert "engine.nextn is 1, and drafters of training runs have blocks of 2." in err


def test_a_drafter_judged_by_replay_is_what_the_engine_finds_it_to_be(
    deepinfer, tmp_path, compiled, monkeypatch
):
    """The checkpoint's own drafter, given once more as the folder of a training run."""
    one_stage = {"num_nextn_predict_layers": 1, "compress_ratios": [2, 1, 0]}
    folder = write_short_model(tmp_path / "model", shorter_config() | one_stage, drafter=True)

    def open_engine(live, *, model, config, overrides, **engine):
        del live, config, overrides
        given = {k: v for k, v in engine.items() if v is not None}
        # The size, and so the program, of the engine in tests/training/test_drafter_evaluate.py.
        with fewer_sizes(largest):
            return open_llm(model, compiled, late_compile="warn", max_num_seqs=1, **given)

    monkeypatch.setattr(eval_drafts, "open_engine", open_engine)
    config = ModelConfig.from_file(folder)
    loaded = load(folder, config, drafter=True, dtype="float32", digest=False)
    state = begin("dspark", config, DrafterSettings())
    weights = from_checkpoint(loaded.tensors, config, drafter=True)
    drafter_state.save(tmp_path / "run", state.replace(weights=weights), "dspark", {})
    file = tmp_path / "spec.json"
    code, out, _ = deepinfer(
        *SUM, "--limit-skill", "count", "--n", "1", "--model", str(folder), "--quiet",
        "--drafter", f"again={tmp_path / 'run'}", "--out", str(file),
    )  # fmt: skip
    assert code == 0
    assert out.splitlines()[0].split() == ["accept", "length", "n", "shipped", "again"]
    shipped, again = json.loads(file.read_text())["drafters"]
    assert again["method"] == "dspark"
    assert (again["judged_by"], again["trained_steps"]) == ("replay", 0)
    for one, other in zip(shipped["rows"], again["rows"], strict=True):
        for name in ("skill", "n", "steps", "drafts", "accept_length", "acceptance", "auroc"):
            assert one[name] == other[name]
        assert one["ece"] == pytest.approx(other["ece"], abs=1e-4)
    assert shipped["rows"][-1]["steps"] > 2
