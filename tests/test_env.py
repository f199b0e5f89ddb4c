from pathlib import Path

import pytest

from deepinfer_jax import env
from deepinfer_jax.errors import EnvError


def test_an_empty_environment_gives_the_defaults():
    assert env.read({"PATH": "/bin"}) == env.Env()


def test_the_process_environment_is_read_by_default(monkeypatch):
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", "/models/flash")
    assert env.read().hf_model_dir == "/models/flash"


def test_honoured_variables_arrive_parsed():
    read = env.read(
        {
            "DEEPINFER_HF_MODEL_DIR": "/m",
            "DEEPINFER_BATCH_INVARIANT": "1",
            "DEEPINFER_JIT_CACHE_DIR": "/c",
            "DEEPINFER_ENGRAM_FORCE_GPU_STORAGE": "0",
            "DEEPINFER_KERNEL_POLICY": "strict",
            "DEEPINFER_KERNEL_SPARSE_MLA": "xla",
            "DEEPINFER_USE_NEXTN_DECODE": "0",
            "DEEPINFER_MAX_BACKTRACKING_TOKENS": "11",
            "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "compact",
            "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140",
            "XLA_FLAGS": "--xla_x=1",
        }
    )
    assert read.hf_model_dir == "/m"
    assert read.batch_invariant is True
    assert read.compile_cache_dir == "/c"
    assert read.engram == "host"
    assert read.kernel_policy == "strict"
    assert read.kernels == (("sparse_mla", "xla"),)
    assert (read.nextn, read.max_backtracking_tokens) == (0, 11)
    assert (read.prefill_truncation, read.prefill_keep_tokens) == ("compact", 140)
    assert read.xla_flags == "--xla_x=1"
    assert ("DEEPINFER_BATCH_INVARIANT", "1") in read.given


@pytest.mark.parametrize("text", ["true", "False", "", "no", "2", " 1"])
def test_a_boolean_is_zero_or_one_and_nothing_else(text):
    with pytest.raises(EnvError, match="DEEPINFER_BATCH_INVARIANT is .* not 0 or 1"):
        env.read({"DEEPINFER_BATCH_INVARIANT": text})


def test_a_number_that_does_not_parse_is_refused():
    with pytest.raises(EnvError, match="'five', which is not an integer"):
        env.read({"DEEPINFER_USE_NEXTN_DECODE": "five"})


def test_a_choice_is_one_of_its_names():
    with pytest.raises(EnvError) as caught:
        env.read({"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "Compact"})
    assert "MODE is 'Compact', which is not one of off, mask, compact" in caught.value.what


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(EnvError, match="Did you mean DEEPINFER_BATCH_INVARIANT"):
        env.read({"DEEPINFER_BATCH_INVARIENT": "1"})


def test_a_name_like_no_other_is_refused_too():
    with pytest.raises(EnvError, match="DEEPINFER_QQQQ is not a variable of this engine"):
        env.read({"DEEPINFER_QQQQ": "1"})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("DEEPINFER_KERNEL_POLICY", "auto", "without a trace"),
        ("DEEPINFER_NCCL_NUM_SMS", "32", "belong to XLA"),
        ("DEEPINFER_ACCELERATOR", "nvidia", "JAX_PLATFORMS"),
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "0..3", "never overridden"),
    ],
)
def test_a_variable_of_a_missing_feature_is_refused_by_name_and_reason(name, value, reason):
    with pytest.raises(EnvError) as caught:
        env.read({name: value})
    assert f"{name}={value} cannot be honoured" in caught.value.what
    assert reason.lower() in caught.value.why.lower()
    assert caught.value.do.startswith("Unset it")


@pytest.mark.parametrize("variable", [v for v in env.VARIABLES.values() if v.only])
def test_the_value_that_describes_what_happens_anyway_is_accepted(variable):
    assert env.read({variable.name: variable.default}).given == ((variable.name, variable.default),)


@pytest.mark.parametrize("variable", [v for v in env.VARIABLES.values() if v.refused])
def test_a_variable_without_such_a_value_is_refused_whatever_it_holds(variable):
    with pytest.raises(EnvError, match=f"{variable.name}=1 cannot be honoured"):
        env.read({variable.name: "1"})


def test_every_variable_has_one_fate():
    for name, variable in env.VARIABLES.items():
        assert name == variable.name
        assert not (variable.only and variable.refused)
        assert variable.default or not variable.only


@pytest.mark.parametrize("name", ["DEEPINFER_KERNEL_", "DEEPINFER_KERNEL_linear"])
def test_a_kernel_variable_that_names_no_op_is_refused(name):
    with pytest.raises(EnvError, match="does not name an op and a kernel"):
        env.read({name: "xla"})


def test_the_report_tells_what_was_set_from_what_was_not():
    rows = env.read({"DEEPINFER_BATCH_INVARIANT": "1"}).rows()
    assert ("DEEPINFER_BATCH_INVARIANT", "1", "environment") in rows
    assert ("DEEPINFER_USE_NEXTN_DECODE", "0", "default") in rows
    assert len([row for row in rows if row[0] == "DEEPINFER_BATCH_INVARIANT"]) == 1
    unset = {name for name, v in env.VARIABLES.items() if v.default}
    assert {name for name, _, _ in rows} == unset


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/fast", "HOME": "/home/a"}, "/fast"),
        ({"HOME": "/home/a"}, "/home/a/.cache"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/a"}, "/home/a/.cache"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/a"}, "/home/a/.cache"),
    ],
)
def test_the_user_s_cache_is_where_xdg_says(environ, folder):
    assert env.user_cache(environ) == Path(folder)
