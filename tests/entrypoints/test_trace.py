import json

import numpy as np
import pytest

from deepinfer_jax.entrypoints import trace as command

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
    *lines, last = out.splitlines()
    assert lines[0] == "first difference: L2.stream, largest 0.5 at [1, 2]"
    assert [line.split()[0] for line in lines[2:]] == ["L2.stream", "L10.stream", "logits"]
    assert last == f"only in {pair[0]}: extra"


def test_an_array_of_one_trace_only_is_a_difference_unless_common_ones_are_asked_for(
    deepinfer, pair
):
    arguments = ("trace", "--compare", *pair, "--tolerance", "0.5")
    said = f"equal: 4 arrays within 0.5\nonly in {pair[0]}: extra\n"
    assert deepinfer(*arguments)[:2] == (1, said)
    assert deepinfer(*arguments, "--common")[:2] == (0, said)


def test_many_arrays_of_one_trace_only_are_counted(deepinfer, write):
    many = {f"x{i:02}": np.zeros(1) for i in range(15)}
    a, b = write("a.npz", same=np.zeros(1)), write("b.npz", same=np.zeros(1), **many)
    code, out, _ = deepinfer("trace", "--compare", a, b)
    assert code == 1
    assert out.endswith("x10, x11, and 3 more\n")


def test_traces_without_a_common_array_cannot_be_compared(deepinfer, write):
    a, b = write("a.npz", x=np.zeros(1)), write("b.npz", y=np.zeros(1), z=np.zeros(1))
    code, out, err = deepinfer("trace", "--compare", a, b)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"ConfigError: {a} and {b} have no array in common: 1 and 2 arrays.",
        "  Arrays are compared by name.",
        "  Compare two traces of the same kind.",
    ]


def test_texts_of_a_recording_are_compared(deepinfer, write):
    a = write("a.npz", task=np.array(["fresh", "verify"]))
    b = write("b.npz", task=np.array(["fresh", "fresh"]))
    code, out, _ = deepinfer("trace", "--compare", a, b, "--json")
    assert code == 1
    (row,) = json.loads(out, parse_constant=pytest.fail)["differ"]
    assert (row["name"], row["differing"], row["max_abs"]) == ("task", 1, None)


@pytest.mark.parametrize("tolerance", ["nan", "inf", "-0.5"])
def test_a_tolerance_that_is_no_distance_is_refused(deepinfer, pair, tolerance):
    code, out, err = deepinfer("trace", "--compare", *pair, "--tolerance", tolerance)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"ConfigError: --tolerance is {tolerance}.",
        "  It is the largest absolute difference that counts as equal.",
        "  Give a finite number that is not negative.",
    ]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ("--compare", "a", "b", "--input", "c", "--output", "d", "--sampler", "--mode", "f32"),
            [
                "--compare and --input, --output, --sampler, --mode are given together.",
                "It reads two traces that exist, and runs nothing.",
                "Leave out --compare, or --input, --output, --sampler, --mode.",
            ],
        ),
        (
            ("--compare", "a", "b", "--model", "m", "--set", "engine.model=m", "--config", "c"),
            [
                "--compare and --model, --config, --set are given together.",
                "It reads two traces that exist, and runs nothing.",
                "Leave out --compare, or --model, --config, --set.",
            ],
        ),
        (
            ("--sampler", "--input", "a", "--output", "b", "--model", "m", "--mode", "f32"),
            [
                "--sampler and --model, --mode are given together.",
                "The rows are redone from their seeds, without a network.",
                "Leave out --sampler, or --model, --mode.",
            ],
        ),
        (
            ("--input", "a", "--output", "b", "--tolerance", "0", "--common"),
            [
                "--tolerance and --common without --compare.",
                "It says when two traces count as equal.",
                "Add --compare A.npz B.npz, or leave it out.",
            ],
        ),
    ],
)
def test_options_that_do_not_belong_together_are_refused_by_name(deepinfer, arguments, lines):
    code, out, err = deepinfer("trace", *arguments)
    assert (code, out) == (2, "")
    assert [line.strip() for line in err.removeprefix("ConfigError: ").splitlines()] == lines


def test_a_comparison_as_json_names_arrays_of_one_side_only(deepinfer, pair):
    code, out, _ = deepinfer("trace", "--compare", *pair, "--json")
    found = json.loads(out)
    assert code == 1
    assert [row["name"] for row in found["differ"]] == ["L2.stream", "L10.stream", "logits"]
    assert found["differ"][0]["where"] == [1, 2]
    assert found["only"] == {"a": ["extra"], "b": []}
    assert found["compared"] == 4


def test_a_comparison_can_be_kept_in_a_file(deepinfer, pair, tmp_path):
    file = tmp_path / "report.json"
    code, out, _ = deepinfer("trace", "--compare", *pair, "--json", "--out", str(file))
    assert code == 1
    assert json.loads(file.read_text()) == json.loads(out)


def broken(kind, path):
    if kind == "text":
        path.write_text("text")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "one array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif kind == "cut":
        np.savez_compressed(path, x=np.arange(1000))
        path.write_bytes(path.read_bytes()[:200])
    elif kind == "objects":
        np.savez(path, x=np.array([{}]))
    else:
        np.savez_compressed(path, x=np.arange(1000))
        content = bytearray(path.read_bytes())
        content[90:120] = bytes(30)
        path.write_bytes(content)


@pytest.mark.parametrize(
    "kind", ["text", "empty", "one array", "cut", "objects", "damaged", "missing"]
)
def test_a_file_that_is_no_archive_is_refused(deepinfer, tmp_path, pair, kind):
    if kind != "missing":
        broken(kind, tmp_path / "c.npz")
    code, _, err = deepinfer("trace", "--compare", pair[0], str(tmp_path / "c.npz"))
    assert code == 2
    assert len(err.splitlines()) == 3
    assert "c.npz cannot be read as .npz" in err
    assert "trace reads and writes NumPy archives." in err


def test_a_trace_without_files_is_refused(deepinfer, pair):
    code, _, err = deepinfer("trace", "--input", pair[0])
    assert code == 2
    assert err.startswith("ConfigError: trace has no --input or no --output.")


@pytest.mark.parametrize("option", ["--output", "--out"])
def test_a_missing_folder_is_refused_before_anything_runs(deepinfer, pair, tmp_path, option):
    place = str(tmp_path / "no" / "x")
    files = ("--input", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz"))
    code, _, err = deepinfer("trace", *files, option, place)
    assert code == 2
    assert err.splitlines() == [
        f"ConfigError: {place} cannot be written: there is no folder {tmp_path / 'no'}.",
        "  The result goes there.",
        "  Name a file in a folder that exists and can be written.",
    ]


def test_a_config_that_describes_a_network_has_no_weights(deepinfer, write, tmp_path):
    source = write("in.npz", token_ids=np.zeros((1, 3), np.int32))
    files = ("--input", source, "--output", str(tmp_path / "out.npz"))
    code, _, err = deepinfer("trace", *files, "--config", "v41_flash", "--quiet")
    assert code == 2
    assert err.startswith("ConfigError: The config v41_flash describes a network, but no weights.")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"token_ids": np.full((1, 3), 512)}, "token_ids spans 512 to 512"),
        ({"token_ids": np.zeros((1, 1025), int)}, "The input has 1025 tokens"),
        (
            {
                "token_ids": np.zeros((1, 3), int),
                "L12.stream": np.zeros((1, 3, 4, 128)),
                "L12.pre_next": np.zeros((1, 3, 4)),
            },
            "The input has L12.stream, and the network 10 layers.",
        ),
    ],
)
def test_an_input_that_cannot_run_is_refused_before_weights_are_read(
    deepinfer, golden, write, tmp_path, monkeypatch, arrays, words
):
    monkeypatch.setattr(command, "assemble", lambda *a, **k: pytest.fail("weights were read"))
    files = ("--input", write("in.npz", **arrays), "--output", str(tmp_path / "out.npz"))
    weights = str(golden / "model_release.safetensors")
    code, _, err = deepinfer("trace", "--model", weights, *files, "--quiet")
    assert code == 2
    assert words in err


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
