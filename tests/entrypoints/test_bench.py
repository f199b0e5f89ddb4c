"""The command `bench`: what it asks of engines, prints and refuses. Its figures are made up."""

import json
from types import SimpleNamespace

import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import RequestError

SHORT = ("--requests", "3", "--prompt-tokens", "4:6", "--output-tokens", "2", "--quiet")
ROW = {
    "output_tokens_s": 50.0,
    "prompt_tokens_s": 20.0,
    "steps": 10,
    "wait_share": 0.5,
    "host_us_step": 100.0,
    "wall_s": 2.0,
}


def figures(speed=50.0, valid=(True, True)):
    row = ROW | {"output_tokens_s": speed}
    repeats = [row | {"valid": ok, "compile_s": 0.0 if ok else 3.0} for ok in valid]
    some = any(valid)
    return {
        "requests": 3,
        "warm_up": {"passes": 1, "compile_s": 7.0},
        "repeats": repeats,
        "valid": sum(valid),
        "median": row if some else None,
        "spread": {name: [value, value] for name, value in row.items()} if some else None,
    }


@pytest.fixture
def bench(deepinfer, golden, monkeypatch):
    """Types the command; engines and figures are made up. Returns what was asked of both."""
    asked = SimpleNamespace(engines=[], measured=[], answers=[], nextn=0)
    config = ModelConfig.from_file(golden)

    def open_engine(live, **fields):
        asked.engines.append(fields)
        slots = fields.get("max_num_seqs") or 32
        return SimpleNamespace(
            config=config,
            max_model_len=1024,
            nextn=asked.nextn,
            meter=SimpleNamespace(drafted=50, accepted=31),
            plan=lambda: SimpleNamespace(slots=slots),
            manifest=lambda: {
                "device": {"kind": "cpu", "name": "cpu", "count": 1},
                "checkpoint": {"model": "tiny"},
                "settings": [slots],
            },
        )

    def measure(llm, lengths, *, tell, **how):
        tell("warm-up", 1, 3)
        asked.measured.append((lengths, how))
        answer = asked.answers.pop(0) if asked.answers else figures()
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("deepinfer_jax.entrypoints.bench.open_engine", open_engine)
    monkeypatch.setattr("deepinfer_jax.bench.throughput.measure", measure)
    asked.type = lambda *words: deepinfer("bench", *words)
    return asked


def test_what_is_drafted_stands_in_the_record(bench):
    bench.nextn = 5
    _, out, _ = bench.type(*SHORT, "--json")
    report = json.loads(out)
    assert (report["nextn"], report["acceptance"]) == (5, "31 of 50 drafts kept")


def test_the_record_holds_every_repeat_and_what_a_figure_means_nothing_without(bench):
    code, out, err = bench.type(*SHORT, "--json", "--repeats", "2", "--seed", "9")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["context"] == {
        "prompt_tokens": [4, 6],
        "spread": "even",
        "output_tokens": [2, 2],
        "longest": 8,
        "max_model_len": 1024,
    }
    assert (report["nextn"], report["acceptance"]) == (0, "nothing is drafted")
    assert report["parameters"] > 1e6 and report["device"]["kind"] == "cpu"
    (run,) = report["runs"]
    assert len(run["repeats"]) == 2 and run["manifest"]["settings"] == [32]
    assert "window of 2.0 s, shorter than 10 s: --requests asks for 3" == run["note"]
    (lengths, how) = bench.measured[0]
    assert (lengths.prompt, lengths.output) == ((4, 6), (2, 2))
    assert how == {"requests": 3, "least": 128, "repeats": 2, "seed": 9, "group": None}


def test_the_table_names_context_device_drafts_and_the_short_window(bench):
    code, out, _ = bench.type(*SHORT)
    assert code == 0
    for words in ("prompts of 4 to 6 tokens", "outputs of 2 to 2", "nextn 0", "parameters, on cpu",
                  "warm-up of 1 passes with 7.0 s of compiling",
                  "shorter than 10 s: --requests asks for 3"):  # fmt: skip
        assert words in " ".join(out.split()), words


def test_a_compiling_repeat_is_visible_and_does_not_fail_the_rest(bench):
    bench.answers = [figures(valid=(True, False))]
    code, out, err = bench.type(*SHORT)
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines() if line.split()[1:2] == ["INVALID"]]
    assert "repeat 2 INVALID: it compiled for 3.0 s" in " ".join(out.split())
    assert "1 of 2 repeats are invalid: something was compiled inside their window." in err


def test_without_a_valid_repeat_the_command_fails(bench):
    bench.answers = [figures(valid=(False,))]
    code, out, err = bench.type(*SHORT, "--json")
    assert code == 1
    assert json.loads(out)["runs"][0]["median"] is None
    assert "1 of 1 repeats are invalid" in err
    bench.answers = [figures(valid=(False,))]
    assert "no valid repeat" in bench.type(*SHORT)[1]


def test_other_loops_run_in_the_same_process_and_are_compared(bench):
    bench.answers = [figures(100.0), figures(25.0), figures(80.0)]
    words = ("--sequences", "64", "--compare", "static", "--compare", "plain", "--json")
    runs = json.loads(bench.type(*SHORT, *words)[1])["runs"]
    assert [run["loop"] for run in runs] == ["engine", "static", "plain"]
    assert [run["sequences"] for run in runs] == [64, 16, 64]
    assert [run.get("engine_ratio") for run in runs] == [None, 4.0, 1.25]
    assert [how["group"] for _, how in bench.measured] == [None, 16, None]
    assert [fields.get("overlap") for fields in bench.engines] == [None, False, False]


def test_several_numbers_of_sequences_are_measured_in_turn(bench):
    bench.type(*SHORT, "--sequences", "1,8", "--model", "nano", "--set", "engine.pages=9")
    assert [fields["max_num_seqs"] for fields in bench.engines] == [1, 8]
    assert all(f["model"] == "nano" for f in bench.engines)
    assert all(f["overrides"] == ["engine.pages=9"] for f in bench.engines)


def test_names_of_other_tools_are_understood(bench):
    bench.type("--num-prompts", "5", "--input-len", "7", "--output-len", "3", "--quiet")
    lengths, how = bench.measured[0]
    assert (lengths.prompt, lengths.output, how["requests"]) == ((7, 7), (3, 3), 5)


def test_a_request_that_cannot_run_is_a_refusal(bench):
    bench.answers = [RequestError("Too long.", "It is.", "Cut.")]
    code, _, err = bench.type(*SHORT)
    assert code == 2 and "RequestError: Too long." in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prompt-tokens", "9:4"), "--prompt-tokens is '9:4'."),
        (("--prompt-tokens", "0"), "--prompt-tokens is '0'."),
        (("--output-tokens", "a:b"), "--output-tokens is 'a:b'."),
        (("--sequences", "4,"), "--sequences is '4,'."),
        (("--sequences", "0"), "--sequences is '0'."),
        (("--compare", "vllm"), "The engine can be compared with static and plain."),
        (("--repeats", "0"), "--repeats is '0'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_an_engine_is_opened(bench, words, message):
    code, _, err = bench.type(*words)
    assert code == 2 and message in err
    assert bench.engines == []


def test_the_record_can_be_kept_in_a_file(bench, tmp_path):
    _, out, _ = bench.type(*SHORT, "--json", "--out", str(tmp_path / "bench.json"))
    assert json.loads((tmp_path / "bench.json").read_text()) == json.loads(out)
    code, _, err = bench.type(*SHORT, "--out", str(tmp_path / "no" / "bench.json"))
    assert code == 2 and "there is no folder" in err
