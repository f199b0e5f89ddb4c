import json

import numpy as np
import pytest

TOKENS = 5


@pytest.fixture
def write(tmp_path):
    def write(name, **arrays):
        np.savez(tmp_path / name, **arrays)
        return str(tmp_path / name)

    return write


@pytest.fixture
def pair(write):
    """Two traces whose first difference, in the order of a forward, is in layer 2."""
    same = np.arange(6, dtype=np.float32).reshape(2, 3)
    other = same.copy()
    other[1, 2] += 0.5
    a = {"logits": same, "L10.stream": same, "L2.stream": same, "embed": same, "extra": same}
    b = {"logits": other, "L10.stream": other, "L2.stream": other, "embed": same}
    return write("a.npz", **a), write("b.npz", **b)


def test_equal_traces_are_said_to_be_equal(deepinfer, pair):
    code, out, err = deepinfer("trace", "--compare", pair[0], pair[0])
    assert (code, out, err) == (0, "equal: 5 arrays within 0\n", "")


def test_the_first_array_that_differs_is_named_in_the_order_of_a_forward(deepinfer, pair):
    code, out, _ = deepinfer("trace", "--compare", *pair)
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "first difference: L2.stream, largest 0.5 at [1, 2]"
    assert [line.split()[0] for line in lines[2:]] == ["L2.stream", "L10.stream", "logits"]


def test_a_difference_within_the_tolerance_is_none(deepinfer, pair):
    code, out, _ = deepinfer("trace", "--compare", *pair, "--tolerance", "0.5")
    assert (code, out) == (0, "equal: 4 arrays within 0.5\n")


def test_a_comparison_as_json_names_arrays_of_one_side_only(deepinfer, pair):
    code, out, _ = deepinfer("trace", "--compare", *pair, "--json")
    found = json.loads(out)
    assert code == 1
    assert [row["name"] for row in found["differ"]] == ["L2.stream", "L10.stream", "logits"]
    assert found["differ"][0]["where"] == [1, 2]
    assert found["only"] == {"a": ["extra"], "b": []}


def test_a_file_that_is_no_archive_is_refused(deepinfer, tmp_path, pair):
    (tmp_path / "c.npz").write_text("text")
    code, _, err = deepinfer("trace", "--compare", pair[0], str(tmp_path / "c.npz"))
    assert code == 2
    assert "c.npz cannot be read as .npz" in err
    assert "trace reads and writes NumPy archives." in err


def test_a_trace_without_files_is_refused(deepinfer, pair):
    code, _, err = deepinfer("trace", "--input", pair[0])
    assert code == 2
    assert err.startswith("ConfigError: trace has no --input or no --output.")


def test_a_forward_is_written_and_equals_the_reference(deepinfer, golden, write, tmp_path):
    with np.load(golden / "p40_f32.npz") as file:
        reference = {name: file[name] for name in ("token_ids", "logits", "L0.stream", "L9.stream")}
    token_map = np.load(golden / "engram.npz")["tiny_token_map"]
    source = write(
        "in.npz", token_ids=reference["token_ids"][:, :TOKENS], engram_token_map=token_map
    )
    output = tmp_path / "out.npz"
    weights = str(golden / "model_release.safetensors")
    arguments = ("--model", weights, "--input", source, "--output", str(output), "--mode", "f32")
    code, out, _ = deepinfer("trace", *arguments, "--json", "--quiet")
    assert code == 0
    with np.load(output) as file:
        made = {name: file[name] for name in file.files}
    assert json.loads(out) == {name: list(value.shape) for name, value in made.items()}
    for name, expected in reference.items():
        np.testing.assert_allclose(made[name], expected[:, :TOKENS], atol=1e-4, rtol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz", "out.npz"]


@pytest.mark.parametrize(
    ("token_map", "words"),
    [
        (None, "no tokenizer.json, and the input no engram_token_map."),
        (np.zeros(3, np.int32), "engram_token_map is int32 of shape [3]."),
        (np.zeros(512, np.float32), "engram_token_map is float32 of shape [512]."),
    ],
)
def test_compressed_ids_that_cannot_be_had_are_refused(
    deepinfer, golden, write, tmp_path, token_map, words
):
    arrays = {"token_ids": np.zeros((1, 3), np.int32)}
    if token_map is not None:
        arrays["engram_token_map"] = token_map
    files = ("--input", write("in.npz", **arrays), "--output", str(tmp_path / "out.npz"))
    weights = str(golden / "model_release.safetensors")
    code, _, err = deepinfer("trace", "--model", weights, *files, "--quiet")
    assert code == 2
    assert words in err
    assert not (tmp_path / "out.npz").exists()


def test_sampler_rows_are_recomputed_from_their_seeds(deepinfer, golden, write, tmp_path):
    with np.load(golden / "sampler.npz") as file:
        recording = {name: file[name] for name in file.files}
    count = recording["task"].shape
    small = np.flatnonzero((recording["vocab"] == 512) & recording["robust"])
    tasks = recording["task"][small]
    rows = np.concatenate([small[tasks == task][:12] for task in ("fresh", "verify")])
    columns = {k: v[rows] for k, v in recording.items() if v.shape == count}
    results = ("token", "accepted", "kept")
    blank = columns | {name: np.zeros_like(columns[name]) for name in results}
    output = tmp_path / "out.npz"
    files = ("--input", write("in.npz", **blank), "--output", str(output))
    code, out, _ = deepinfer("trace", "--sampler", *files)
    assert code == 0
    assert out == f"wrote {output}: 4 arrays\n"
    with np.load(output) as made:
        for name in results:
            np.testing.assert_array_equal(made[name], columns[name])
    assert set(columns["task"]) == {"fresh", "verify"}
    assert len(set(columns["token"].tolist())) > 4


def test_a_recording_without_a_column_is_refused(deepinfer, write, tmp_path):
    files = ("--input", write("in.npz", task=np.array(["fresh"])), "--output", str(tmp_path / "o"))
    code, _, err = deepinfer("trace", "--sampler", *files)
    assert code == 2
    assert "The recording lacks 12 of its 13 columns: vocab, kind," in err
