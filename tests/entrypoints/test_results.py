import json

import numpy as np
import pytest

from deepinfer_jax.entrypoints.results import (
    as_json,
    check_can_write,
    json_text,
    write_json,
    writing,
)
from deepinfer_jax.errors import ConfigError, RequestError
from deepinfer_jax.request import CompletionOutput, RequestOutput, TokenLogprobs

INF = float("inf")


def strict(text):
    return json.loads(text, parse_constant=pytest.fail)


def test_what_is_not_finite_is_null_at_any_depth():
    content = {"a": [1.5, INF, (float("nan"), -INF)], "b": {"c": INF, "d": "Infinity", "e": True}}
    assert strict(json_text(content)) == {
        "a": [1.5, None, [None, None]],
        "b": {"c": None, "d": "Infinity", "e": True},
    }


def test_log_probs_of_ruled_out_tokens_are_null():
    found = TokenLogprobs(
        token=np.array([-INF], np.float32),
        top_ids=np.array([[7, 3]]),
        top=np.array([[-0.5, -INF]], np.float32),
    )
    sample = CompletionOutput(
        index=0,
        text="a",
        token_ids=(7,),
        logprobs=found,
        cumulative_logprob=-INF,
        drafted=4,
        accepted=3,
    )
    output = RequestOutput(
        request_id="0", prompt="p", prompt_token_ids=(1,), outputs=(sample,), finished=True
    )
    (made,) = strict(json.dumps(as_json(output), allow_nan=False))["outputs"]
    assert made["cumulative_logprob"] is None
    assert (made["drafted"], made["accepted"]) == (4, 3)
    assert (made["logprobs"]["token"], made["logprobs"]["top"]) == ([None], [[-0.5, None]])


def test_a_refusal_is_its_kind_and_three_sentences():
    error = RequestError("What.", "Why.", "Do.")
    assert error.as_text() == "RequestError: What.\n  Why.\n  Do."
    assert error.as_json() == {"kind": "RequestError", "what": "What.", "why": "Why.", "do": "Do."}


def test_a_json_file_is_whole_or_not_there(tmp_path):
    write_json(tmp_path / "a.json", {"x": INF})
    assert strict((tmp_path / "a.json").read_text()) == {"x": None}
    with pytest.raises(KeyboardInterrupt), writing(tmp_path / "b.json"):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    check_can_write(tmp_path / "a.json")
    with pytest.raises(ConfigError, match="folder cannot be written: it is a folder."):
        check_can_write(tmp_path / "folder")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_can_write(tmp_path / "no" / "a.json")
    with pytest.raises(ConfigError, match="a.json cannot be written: No space left."):
        with writing(tmp_path / "a.json"):
            raise OSError(28, "No space left")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="is read-only."):
        check_can_write(tmp_path / "a.json")
