import json

import pytest

PAIRS = [
    {"context": "Hello ", "continuation": "there"},
    {"context": [0, 75], "continuation": [104]},
    {"context": "", "continuation": "abc"},
]


@pytest.fixture
def pairs(tmp_path):
    def written(*lines):
        path = tmp_path / "in.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    return written


def test_pairs_are_scored_in_order(deepinfer, opened, tiny_llm, pairs, tmp_path):
    place = tmp_path / "out.json"
    source = pairs(*map(json.dumps, PAIRS), "")
    code, out, _ = deepinfer("score", source, "--json", "--out", str(place), "--quiet")
    assert code == 0
    report = json.loads(out)
    assert report == json.loads(place.read_text())
    assert report["manifest"] == json.loads(json.dumps(tiny_llm.manifest()))
    expected = tiny_llm.score([(p["context"], p["continuation"]) for p in PAIRS])
    for row, score in zip(report["scores"], expected, strict=True):
        assert row["logprob_sum"] == pytest.approx(score.logprob_sum, abs=1e-4)
        assert row["is_greedy"] == score.is_greedy
        assert row["token_ids"] == list(score.token_ids)
        assert len(row["logprobs"]) == len(row["token_ids"])


BAD = {
    "not JSON": ("{", "Line 2 must be a JSON object of a pair; it is none."),
    "another key": (
        json.dumps(PAIRS[0] | {"n": 1}),
        "Line 2 must be a JSON object of a pair; it has the keys context, continuation, n.",
    ),
    "mixed": ('{"context": "a", "continuation": [5]}', "mixes a text and token ids."),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD)
def test_a_bad_line_fails_alone(deepinfer, opened, pairs, line, message):
    good = json.dumps(PAIRS[0])
    code, out, _ = deepinfer("score", pairs(good, line, good), "--json", "--quiet")
    rows = json.loads(out)["scores"]
    assert code == 1 and message in rows[1]["error"]["what"]
    assert rows[0] == rows[2] and "error" not in rows[0]


def test_the_table_shows_sums_and_errors(deepinfer, opened, pairs):
    code, out, _ = deepinfer("score", pairs(json.dumps(PAIRS[0]), "[]"), "--quiet")
    lines = out.splitlines()
    assert code == 1
    assert lines[0].split() == ["pair", "tokens", "log-prob", "a", "token", "greedy", "error"]
    assert lines[1].split()[:2] == ["1", "6"] and lines[1].split()[-1] in ("yes", "no")
    assert lines[2].startswith("   2")
    assert " ".join(" ".join(lines[2:]).split()[1:]) == (
        "Line 2 must be a JSON object of a pair; it is none."
    )


def test_a_file_without_pairs_is_refused_before_a_model_is_opened(deepinfer, opened, pairs):
    code, _, err = deepinfer("score", pairs(""))
    assert code == 2 and "holds no pair. There is nothing" in " ".join(err.split())
    code, _, err = deepinfer("score", "/nowhere/in.jsonl")
    assert code == 2 and "/nowhere/in.jsonl cannot be read (FileNotFoundError)." in err
    assert opened == []
