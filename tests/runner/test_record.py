"""A step in a file, on a state that has every kind of leaf, with a step of two lines."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.errors import ConfigError, RequestError
from deepinfer_jax.runner.layout import Bucket, ProgramKey
from deepinfer_jax.runner.record import (
    Difference,
    Recorder,
    digests,
    first_difference,
    leaves,
    read_record,
    replayed,
    write_record,
)
from deepinfer_jax.runner.schedule import StepInput

BUCKET, ABOUT = Bucket(3, 3, 1, 2), {"manifest": {"config": "abc"}}
KEY = ProgramKey(BUCKET, 8)


def state():
    rng = np.random.default_rng(0)
    return {
        "wide": rng.standard_normal((2, 3)).astype(ml_dtypes.bfloat16),
        "pages": (
            rng.standard_normal(7).astype(ml_dtypes.float8_e4m3fn),
            rng.integers(0, 255, (4, 2), np.uint8),
        ),
        "scale": np.array([1, 2], np.uint8).view(ml_dtypes.float8_e8m0fnu),
        "length": np.arange(3, dtype=np.int32),
        "done": np.array(False),
        "empty": np.zeros((0, 4), np.float32),
    }


def step(params, state, inputs):
    """Writes into the state that it was given, as a donated one may be written."""
    out = {
        "logits": np.array([np.nan, -0.0, 1.5], np.float32),
        "wide": state["wide"] * state["wide"].dtype.type(2),
        "seen": np.array(inputs.ints[:3]),
        "none": np.zeros((3, 0), np.float32),
    }
    state["length"] += params
    return state, out


def inputs():
    ints, floats = BUCKET.empty()
    ints[:3] = [7, 8, 9]
    return StepInput(ints, floats, (np.full((3, 2), 0.5, ml_dtypes.bfloat16),))  # type: ignore[arg-type]


@pytest.fixture
def recorded(tmp_path):
    recorder = Recorder(tmp_path / "steps", [4, 9], ABOUT)
    for _ in range(3):
        assert recorder.around(step, KEY) is step
    run = recorder.around(step, KEY)
    new, out = run(1, state(), inputs())
    assert out["seen"].tolist() == [7, 8, 9] and new["length"].tolist() == [1, 2, 3]
    assert recorder.missing == {9}
    return read_record(recorder.path(4))


def test_every_kind_of_leaf_survives_the_file(recorded):
    expected = leaves(state())
    assert list(recorded.state) == list(expected)
    assert {"wide", "pages.0", "pages.1"} < set(expected)
    assert digests(recorded.state) == digests(expected)
    assert recorded.state["wide"].dtype == ml_dtypes.bfloat16
    assert recorded.state["pages.0"].dtype == ml_dtypes.float8_e4m3fn
    assert list(recorded.inputs) == ["ints", "floats", "memory.0"]
    assert (recorded.step, recorded.key) == (4, KEY)
    assert recorded.about == ABOUT
    after = state()
    after["length"] += 1
    assert recorded.after == digests(leaves(after))


def test_the_state_is_copied_before_the_step_may_write_into_it(recorded):
    assert recorded.state["length"].tolist() == [0, 1, 2]


def test_a_step_that_never_ends_leaves_its_state_and_inputs(tmp_path):
    def broken(params, state, inputs):
        raise RuntimeError("the device is gone")

    recorder = Recorder(tmp_path, [1], ABOUT)
    with pytest.raises(RuntimeError):
        recorder.around(broken, KEY)(1, state(), inputs())
    found = read_record(tmp_path / "step-1.npz")
    assert digests(found.state) == digests(leaves(state()))
    assert (found.outputs, found.after, recorder.missing) == (None, None, {1})


def test_a_replay_gives_the_same_bits_and_names_the_first_that_differs(recorded):
    shapes = jax.eval_shape(lambda: state())
    same = replayed(recorded, step, 1, shapes)
    assert first_difference(recorded, same) is None

    other = replayed(recorded, step, 2, shapes)
    found = first_difference(recorded, other)
    assert found is not None and (found.leaf, found.index) == ("state.length", None)
    assert (found.recorded, found.replayed) == (recorded.after["length"], other.after["length"])

    def changed(name, index, value):
        outputs = {k: v.copy() for k, v in recorded.outputs.items()}
        outputs[name][index] = value
        return first_difference(recorded, dataclasses.replace(recorded, outputs=outputs))

    # NaN equals itself above; 0 is not -0, which no comparison of values would see.
    expected = Difference("outputs.logits", (1,), "-0.0 (0x80000000)", "0.0 (0x00000000)")
    assert changed("logits", 1, 0.0) == expected
    found = changed("wide", (1, 2), 1.0)
    assert found is not None and (found.leaf, found.index) == ("outputs.wide", (1, 2))
    assert found.replayed == "1.0 (0x3f80)"


def test_outputs_of_another_type_or_a_missing_one_differ_as_a_whole(recorded):
    outputs = dict(recorded.outputs)
    outputs["seen"] = outputs["seen"].astype(np.float32)
    found = first_difference(recorded, dataclasses.replace(recorded, outputs=outputs))
    assert found == Difference("outputs.seen", None, "int32 [3]", "float32 [3]")
    del outputs["seen"]
    found = first_difference(recorded, dataclasses.replace(recorded, outputs=outputs))
    assert found == Difference("outputs.seen", None, "int32 [3]", "missing")


def test_a_state_that_the_program_does_not_take_is_refused(recorded):
    shapes = jax.eval_shape(lambda: state() | {"wide": np.zeros((2, 4), np.float32)})
    with pytest.raises(RequestError) as caught:
        replayed(recorded, step, 1, shapes)
    assert str(caught.value) == (
        "state.wide of the recorded step is bfloat16 [2, 3]. The program here takes float32 "
        "[2, 4]. Replay it with the model, the settings and the version that recorded it."
    )
    less = dataclasses.replace(recorded, inputs={"ints": recorded.inputs["ints"]})
    with pytest.raises(RequestError, match="inputs.floats of the recorded step is missing"):
        replayed(less, step, 1, jax.eval_shape(lambda: state()))


def test_a_step_is_never_written_over(recorded, tmp_path):
    with pytest.raises(ConfigError, match=r"step-4.npz exists\. It is the step of another run"):
        Recorder(tmp_path / "steps", [3, 4], ABOUT)
    Recorder(tmp_path / "steps", [3], ABOUT)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: Not a directory. Recorded steps go"):
        Recorder(tmp_path / "file" / "steps", [1], ABOUT)


def test_a_write_that_fails_leaves_no_part_of_a_file(recorded, tmp_path, monkeypatch):
    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deepinfer_jax.runner.record.np.savez", full)
    run = Recorder(tmp_path / "other", [1], ABOUT).around(step, KEY)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        run(1, state(), inputs())
    assert list((tmp_path / "other").iterdir()) == []


def spoil_head(path, **changes):
    with np.load(path) as file:
        arrays = dict(file)
    head = json.loads(arrays["record"].tobytes()) | changes
    arrays["record"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "FileNotFoundError"),
        (lambda path: path.write_bytes(b"no archive"), "ValueError"),
        (lambda path: path.write_bytes(path.read_bytes()[:300]), "BadZipFile"),
        (lambda path: np.savez(path, record=np.zeros(3)), "JSONDecodeError"),
        (lambda path: np.savez(path, token_ids=np.zeros(3)), "KeyError"),
        (lambda path: spoil_head(path, format=2), "its format is 2, and this is 1"),
        (lambda path: spoil_head(path, bucket={"rows": 1}), "TypeError"),
        (lambda path: spoil_head(path, raw={"state.wide": ["int3", [1]]}), "AttributeError"),
    ],
)
def test_a_file_that_holds_no_step_is_refused(recorded, tmp_path, spoil, words):
    path = tmp_path / "step.npz"
    write_record(path, recorded)
    assert digests(read_record(path).state) == digests(recorded.state)
    spoil(path)
    with pytest.raises(RequestError) as caught:
        read_record(path)
    assert f"{path} holds no recorded step (" in caught.value.what and words in caught.value.what
