import enum
from dataclasses import fields

import pytest

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.keywords import SETTLED
from deepinfer_jax.settings import EngineConfig, engine_fields, load

# Every keyword of the original LLM but its model and tokenizer.
ORIGINAL = """
served_model_name trust_remote_code load_format seed max_model_len data_parallel_size
context_parallel_size expert_parallel_size engram_parallel_size engine_rank engine_group_rank
gpu_memory_utilization max_num_batched_tokens max_num_seqs chunked_prefill stop_preempted_request
tokens_per_block lookahead_tokens ignore_len engine_type disable_log_stats revision
tokenizer_revision decode_sequence
""".split()


class EngineType(enum.Enum):
    NORMAL = 0
    PROMPT = 1


def refusal(**keywords) -> str:
    with pytest.raises(ConfigError) as caught:
        engine_fields(keywords)
    assert all((caught.value.what, caught.value.why, caught.value.do))
    return str(caught.value)


@pytest.mark.parametrize("name", ORIGINAL)
def test_every_keyword_of_the_original_is_known(name):
    try:
        engine_fields({name: object()})
    except ConfigError as error:
        assert f"{name}=" in error.what and "cannot be honoured." in error.what


def test_engine_fields_pass_and_the_original_s_names_are_translated():
    given = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 2,
        "max_model_len": 128,
        "engram": "mmap",
    }
    assert engine_fields(given) == {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 2,
        "max_model_len": 128,
        "engram": "mmap",
    }
    engine = load(explicit=engine_fields(given)).engine
    assert (engine.max_num_batched_tokens, engine.max_num_seqs, engine.max_model_len) == (
        64,
        2,
        128,
    )
    assert given["max_num_batched_tokens"] == 64


def test_every_field_of_the_engine_passes_as_it_is():
    values = {f.name: f.default for f in fields(EngineConfig)}
    assert engine_fields(values) == values


def test_none_leaves_the_prompt_rows_of_a_step_to_the_engine():
    assert engine_fields({"max_num_batched_tokens": None, "max_model_len": None}) == {
        "max_model_len": None
    }


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, row in SETTLED.items() for value in row.accepted]
)
def test_a_value_that_describes_what_happens_anyway_sets_nothing(name, value):
    assert engine_fields({name: value}) == {}


def test_an_engine_type_may_be_a_member_of_an_enumeration():
    assert engine_fields({"engine_type": EngineType.NORMAL}) == {}
    assert "cannot be taken apart" in refusal(engine_type=EngineType.PROMPT)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("load_format", "dummy", "never made up. Leave it out, or pass 'auto'."),
        ("trust_remote_code", True, "code of a checkpoint is never run."),
        ("served_model_name", "mine", "Nothing is served under a name."),
        ("seed", 0, "Leave it out, and set seq_seed in SamplingParams."),
        ("data_parallel_size", 2, "not built yet. Leave it out, or pass 1 or 0."),
        ("context_parallel_size", 2, "One engine runs on one device"),
        ("expert_parallel_size", True, "Leave it out, or pass 1."),
        ("engram_parallel_size", 8, "One engine runs on one device"),
        ("engine_rank", 1, "no ranks to tell apart."),
        ("engine_group_rank", 1, "no ranks to tell apart."),
        ("engine_type", "PROMPT", "cannot be taken apart."),
        ("gpu_memory_utilization", 0.9, "set max_num_seqs and max_model_len"),
        ("chunked_prefill", False, "is always read in chunks."),
        ("stop_preempted_request", True, "is run again, and never ends for it."),
        ("tokens_per_block", 64, "A page of the cache holds 128 tokens."),
        ("lookahead_tokens", 8, "A chunk is scheduled however short it is."),
        ("ignore_len", 1, "Prompts are bounded by max_model_len alone."),
        ("disable_log_stats", False, "There is no statistics line"),
        ("decode_sequence", True, "read outputs[0].text of each result."),
        ("revision", "main", "name the model as owner/name@revision."),
        ("tokenizer_revision", "main", "tokenizer.json as tokenizer."),
    ],
)
def test_any_other_value_is_refused_with_the_reason(name, value, words):
    message = refusal(**{name: value})
    assert message.startswith(f"LLM was given {name}={value!r}, which cannot be honoured. ")
    assert words in message


def test_every_settled_keyword_has_a_refusal_that_is_tested():
    (mark,) = test_any_other_value_is_refused_with_the_reason.pytestmark
    assert {case[0] for case in mark.args[1]} == set(SETTLED)


@pytest.mark.parametrize(
    ("misspelt", "nearest"),
    [
        ("max_num_sequences", "max_num_seqs"),
        ("chunk_prefill", "chunked_prefill"),
        ("tokeniser", "tokenizer"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(misspelt, nearest):
    assert refusal(**{misspelt: 1}) == (
        f"LLM was given 1 unknown keywords: {misspelt}. A misspelt option that is ignored would "
        f"leave its default in force. Did you mean {nearest}?"
    )


def test_a_name_like_no_other_meets_the_list_of_options():
    message = refusal(qqqqqqqq=1, zzzzzzzz=2)
    assert "2 unknown keywords: qqqqqqqq, zzzzzzzz." in message
    assert "The options are model, arithmetic, " in message
