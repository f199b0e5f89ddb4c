"""Steps of a real run, recorded by one command and run again by the other."""

import copy
import dataclasses
import json

import numpy as np
import pytest

from deepinfer_jax import settings
from deepinfer_jax.entrypoints import replay
from deepinfer_jax.runner.record import read_record, write_record

GREEDY = ("--temperature", "0", "--max-tokens", "5", "--quiet")


@pytest.fixture
def recorded(deepinfer, opened, tmp_path):
    """The folder with steps 1 and 3 of a run: a prompt, and a token of its answer."""
    folder = tmp_path / "steps"
    words = ("generate", "hello", *GREEDY, "--record-step", "3,1", str(folder))
    code, _, err = deepinfer(*words)
    assert (code, err) == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == ["step-1.npz", "step-3.npz"]
    opened.clear()
    return folder


def changed(path, **parts):
    record = dataclasses.replace(read_record(path), **parts)
    write_record(path, record)
    return record


def test_a_step_runs_again_to_the_bit(deepinfer, opened, recorded):
    for step in (1, 3):
        code, out, err = deepinfer("replay", str(recorded / f"step-{step}.npz"), "--quiet")
        assert (code, err) == (0, "")
        assert out.startswith(f"identical: step {step}, ")
        assert out.endswith(" leaves of the state, bit for bit\n")
    code, out, _ = deepinfer("replay", str(recorded / "step-3.npz"), "--json", "--quiet")
    found = json.loads(out)
    assert (code, found["identical"], found["difference"], found["forced"]) == (0, True, None, [])
    assert (found["file"], found["step"], found["rows"]) == ("step-3.npz", 3, 1)
    assert found["outputs"] == 12 and found["state_leaves"] > 8


def test_the_engine_is_opened_as_it_was_recorded(deepinfer, opened, recorded, tiny_llm):
    deepinfer("replay", str(recorded / "step-1.npz"), "--set", "engine.arithmetic=f32qdq")
    (asked,) = opened
    engine = settings.load(None, asked["overrides"][:-1]).engine
    mine = tiny_llm._settings.engine
    assert dataclasses.replace(engine, model=mine.model) == mine
    assert asked["overrides"][-1] == "engine.arithmetic=f32qdq"
    assert mine.model.endswith(f"/{asked['model']}")
    deepinfer("replay", str(recorded / "step-1.npz"), "--model", "/m")
    assert opened[-1]["model"] == "/m"


def test_every_field_of_an_engine_is_asked_for_again():
    wanted = ["engine.pages=9", "engine.sampler=original", "engine.kernels.topk=sort"]
    first = settings.load(None, wanted)
    content = json.loads(first.canonical_json())["engine"]
    again = settings.load(None, replay._as_recorded(content))
    assert again.engine == first.engine and again.digest() == first.digest()


def test_the_first_difference_is_named_with_both_values(deepinfer, opened, recorded):
    path = recorded / "step-3.npz"
    outputs = {name: array.copy() for name, array in read_record(path).outputs.items()}
    was = int(outputs["draw.token"][0, 0])
    outputs["draw.token"][0, 0] += 1
    changed(path, outputs=outputs)
    code, out, _ = deepinfer("replay", str(path), "--quiet")
    assert code == 1
    assert out == (
        "first difference: step 3, 1 rows, outputs.draw.token at [0, 0]: "
        f"recorded {was + 1} (0x{was + 1:08x}), here {was} (0x{was:08x})\n"
    )
    _, out, _ = deepinfer("replay", str(path), "--quiet", "--json")
    found = json.loads(out)["difference"]
    assert (found["leaf"], found["index"]) == ("outputs.draw.token", [0, 0])


def test_another_cache_after_the_step_is_a_difference(deepinfer, opened, recorded):
    path = recorded / "step-1.npz"
    state = {name: array.copy() for name, array in read_record(path).state.items()}
    state["cache.history"][0, -1] += 1
    changed(path, state=state)
    code, out, _ = deepinfer("replay", str(path), "--quiet")
    assert (code, "first difference: step 1, " in out) == (1, True)


def test_another_engine_is_refused_unless_forced(deepinfer, opened, recorded):
    path = recorded / "step-1.npz"
    about = copy.deepcopy(dict(read_record(path).about))
    about["manifest"]["checkpoint"]["digest"] = "sha256:other"
    about["manifest"]["versions"]["jax"] = "0.0.1"
    about["manifest"]["kernels"][0]["kernel"] = "slow"
    about["manifest"]["settings"] = []
    op = about["manifest"]["kernels"][0]["op"]
    changed(path, about=about)
    code, out, err = deepinfer("replay", str(path), "--quiet")
    assert (code, out) == (2, "")
    what, why, do = err.splitlines()
    assert what.startswith(
        f"ConfigError: {path} was recorded with another engine: versions.jax was"
    )
    for text in ('versions.jax was "0.0.1", is "', 'checkpoint was "sha256:other", is "'):
        assert text in what
    assert f'kernels.{op} was "slow", is "' in what and "settings" not in what
    assert why == (
        "  A step of another network, kernel or version may differ in its bits for that alone."
    )
    assert do == "  Replay it where it was recorded, or pass --force to run it all the same."
    code, out, err = deepinfer("replay", str(path), "--force")
    assert code == 0
    assert err.count("forced: ") == 3
    assert "(forced: 3 things are not as recorded)" in out
    found = json.loads(deepinfer("replay", str(path), "--force", "--json", "--quiet")[1])
    assert len(found["forced"]) == 3 and found["identical"]


def test_another_source_of_the_package_is_another_engine(recorded, tiny_llm):
    about = read_record(recorded / "step-1.npz").about
    assert replay.differences(about, tiny_llm.about_steps()) == []
    (told,) = replay.differences(dict(about) | {"source": "0"}, tiny_llm.about_steps())
    assert told.startswith('source was "0", is "')


def test_a_step_that_did_not_end_is_run_and_is_not_called_identical(deepinfer, opened, recorded):
    path = recorded / "step-3.npz"
    changed(path, outputs=None, after=None)
    code, out, _ = deepinfer("replay", str(path), "--quiet")
    assert (code, out) == (
        1,
        "not compared: step 3, 1 rows; the recorded run did not finish it, and here it ended\n",
    )


def test_a_file_that_is_no_step_is_bad_input(deepinfer, opened, tmp_path):
    np.savez(tmp_path / "trace.npz", token_ids=np.zeros(3))
    code, _, err = deepinfer("replay", str(tmp_path / "trace.npz"))
    assert code == 2 and "holds no recorded step" in err
    assert opened == []


@pytest.mark.parametrize("text", ["0", "a", "1,,2", "-1", "1-3"])
def test_a_text_that_names_no_steps_is_refused(deepinfer, opened, tmp_path, text):
    code, _, err = deepinfer("generate", "x", *GREEDY, f"--record-step={text}", str(tmp_path))
    assert code == 2
    assert f"ConfigError: --record-step is {text!r}." in err


def test_a_step_that_never_came_is_told_and_the_answer_is_printed(deepinfer, opened, tmp_path):
    words = ("generate", "hello", *GREEDY, "--record-step", "2,900", str(tmp_path / "s"))
    code, out, err = deepinfer(*words)
    assert (code, len(out) > 1) == (1, True)
    assert err.startswith("ConfigError: Steps 900 were not recorded.\n  The run had ")
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["step-2.npz"]
