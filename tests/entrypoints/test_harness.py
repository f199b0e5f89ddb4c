import json
import sys

import pytest

from deepinfer_jax.entrypoints.harness import completed
from deepinfer_jax.errors import ConfigError


def test_the_harness_gets_the_model_its_seed_and_what_was_typed():
    typed = ["--tasks", "gsm8k", "--limit", "4"]
    assert completed(typed, {}) == ["run", "--model", "deepinfer_jax", *typed]
    assert completed(["run", *typed], {}) == ["run", "--model", "deepinfer_jax", *typed]
    assert completed(["-M", "dummy", *typed], {}) == ["run", "-M", "dummy", *typed]
    assert completed(["--model=dummy"], {"truncate": None}) == ["run", "--model=dummy"]
    for seed in (["--seed", "42"], ["--seed=42,1,2,3"]):
        made = completed([*typed, *seed], {"truncate": "left"})
        assert made[:4] == ["run", "--model", "deepinfer_jax", "--model_args"]
        assert json.loads(made[4]) == {"seed": 42, "truncate": "left"}
        assert made[5:] == [*typed, *seed]
    made = completed(["--output_path", "out", "--seed", "7"], {})
    assert json.loads(made[4]) == {"seed": 7, "digests": "out/digests.jsonl"}
    assert completed(["-o", "out.json"], {})[3:] == ["-o", "out.json"]
    assert completed(["--seed", "None,1,2,3"], {})[3:] == ["--seed", "None,1,2,3"]
    assert completed(["ls", "tasks"], {"truncate": "left"}) == ["ls", "tasks"]


def test_what_is_no_command_of_the_harness_is_refused():
    with pytest.raises(ConfigError, match="^The harness has no command 'gsm8k'."):
        completed(["gsm8k"], {})


def test_a_missing_harness_is_one_line_with_the_command_that_installs_it(deepinfer, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = deepinfer("eval", "--", "--tasks", "gsm8k")
    assert code == 2
    assert "lm-evaluation-harness is not installed." in err
    assert "pip install 'deepinfer-jax[eval]'" in err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--strict", "--", "--tasks", "x"], "--strict, which the harness"),
        (["--n", "3", "--json", "--", "--tasks", "x"], "--n, --json, which the harness"),
        (["--truncate", "left"], "--truncate, which the suite nano"),
    ],
)
def test_options_of_the_other_kind_of_evaluation_are_refused(deepinfer, words, name):
    code, _, err = deepinfer("eval", *words)
    assert code == 2 and f"deepinfer eval was given {name} does not use." in err
