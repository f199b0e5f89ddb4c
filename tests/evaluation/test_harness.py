"""The harness itself on nano: tasks of local files, and what it must not depend on."""

import json
from pathlib import Path

import pytest

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness is not installed (pip install 'deepinfer-jax[eval]')"
)
pytestmark = pytest.mark.filterwarnings("default")  # the harness and what it imports warn

TASKS = Path(__file__).parent / "tasks"


@pytest.fixture(scope="module")
def nano():
    from deepinfer_jax import LLM

    return LLM("nano", max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512)


@pytest.fixture(scope="module")
def model_of(nano):
    from deepinfer_jax.evaluation.harness import DeepInferLM

    return lambda **options: DeepInferLM(nano, **options)


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """Task files name their data relative to their folder; nothing else is written there."""
    monkeypatch.chdir(TASKS)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def run(model, *tasks, **options):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    chat = {"apply_chat_template": True, "bootstrap_iters": 0}
    return lm_eval.simple_evaluate(
        model=model, tasks=list(tasks), task_manager=manager, **(chat | options)
    )


def test_nano_answers_a_multiple_choice_and_a_generative_task(model_of):
    found = run(model_of(), "nano_choice", "nano_answer", limit=4)
    assert found["results"]["nano_choice"]["acc,none"] == 1.0
    assert found["results"]["nano_answer"]["exact_match,none"] == 1.0
    assert found["config"]["truncated"] == 0 and "SHA-256" in found["config"]["seed_rule"]


def digests(model_of, tmp_path, **options):
    place = tmp_path / "digests.jsonl"
    run(model_of(digests=place, **options.pop("model", {})), "nano_sampled", limit=2, **options)
    return [json.loads(line) for line in place.read_text().splitlines()]


def test_a_base_seed_repeats_every_draw_and_repeats_of_a_document_differ(model_of, tmp_path):
    first = digests(model_of, tmp_path, model={"seed": 42})
    assert digests(model_of, tmp_path, model={"seed": 42}) == first
    other = digests(model_of, tmp_path, model={"seed": 43})
    assert len(first) == len({line["digest"] for line in first}) == 6
    assert {line["repeat"] for line in first} == {0, 1, 2}
    assert not {line["digest"] for line in first} & {line["digest"] for line in other}


def instance(kind, *arguments, doc=0):
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0, ("task", doc, 1))


def test_seeds_do_not_depend_on_the_order_of_documents(model_of):
    asked = {"do_sample": True, "temperature": 3.0, "max_gen_toks": 6}
    requests = [instance("generate_until", f"Question {i}", asked, doc=i) for i in range(3)]
    texts = model_of(seed=1).generate_until(requests)
    assert len(set(texts)) == 3
    assert model_of(seed=1).generate_until(requests[::-1]) == texts[::-1]


def test_log_likelihoods_are_scores_and_come_in_order(model_of, nano):
    pairs = [("What is", " DSpark?"), ("", "Hello"), ("A ", "b"), ("x", " y")]
    model = model_of()
    told = []
    model.set_cache_hook(type("Hook", (), {"add_partial": lambda s, *a: told.append(a)})())
    found = model.loglikelihood([instance("loglikelihood", *pair) for pair in pairs])
    for (value, greedy), score in zip(found, nano.score(pairs), strict=True):
        assert value == pytest.approx(score.logprob_sum, abs=1e-4)
        assert greedy == score.is_greedy
    assert sorted(told) == sorted(
        ("loglikelihood", pair, value) for pair, value in zip(pairs, found, strict=True)
    )


def test_a_document_longer_than_the_model_is_scored_in_windows_of_each_token_once(nano, model_of):
    text = "The code of Rosa is 90984. " * 60
    model = model_of()
    ids = model.tok_encode(text, add_special_tokens=False)
    assert len(ids) > model.max_length
    (found,) = model.loglikelihood_rolling([instance("loglikelihood_rolling", text)])
    first, rest = ids[: model.max_length - 1], ids[model.max_length - 1 :]
    context = ids[len(ids) - model.max_length : -len(rest)]
    scores = nano.score([([model.prefix_token_id], first), (context, rest)])
    assert found == pytest.approx(sum(s.logprob_sum for s in scores), rel=1e-5)
    assert model.loglikelihood_rolling([instance("loglikelihood_rolling", "")]) == [0.0]


def test_a_prompt_that_is_too_long_is_an_error_or_cut_when_asked(model_of):
    from deepinfer_jax.errors import RequestError

    requests = [instance("generate_until", "word " * 600, {"until": ["\n"], "max_gen_toks": 4})]
    with pytest.raises(RequestError, match="^1 of 1 requests are longer than max_model_len 512"):
        model_of().generate_until(requests)
    model = model_of(truncate="left")
    assert len(model.generate_until(requests)) == 1
    assert model.get_model_info()["truncated"] == 1


def test_what_the_harness_always_passes_is_told_to_have_no_effect(model_of, caplog):
    with caplog.at_level("INFO"):
        model_of(batch_size=1, device="cuda:0", seed=9)
    told = [record.getMessage() for record in caplog.records]
    assert "base seed 9: seq_seed = the first 8 bytes" in told[0]
    assert told[1].startswith("batch_size=1, device=cuda:0: no effect")


def test_what_the_model_would_ignore_is_refused(model_of):
    from deepinfer_jax.errors import ConfigError
    from deepinfer_jax.evaluation.harness import DeepInferLM

    with pytest.raises(ConfigError, match="truncate is 'right'"):
        model_of(truncate="right")
    with pytest.raises(ConfigError, match="An open model was given max_num_seqs."):
        model_of(max_num_seqs=4)
    with pytest.raises(ConfigError, match="unknown keywords: max_num_sqs"):
        DeepInferLM.create_from_arg_string("model=nano,max_num_sqs=4")


def test_the_command_runs_the_harness(nano, monkeypatch, capsys):
    from deepinfer_jax.entrypoints import cli

    opened = []

    def open_nano(model, **engine):
        opened.append((model, engine))
        return nano

    monkeypatch.setattr("deepinfer_jax.evaluation.harness.LLM", open_nano)
    words = "--include_path . --tasks nano_choice --limit 2 --apply_chat_template --seed 5"
    with pytest.raises(SystemExit) as caught:
        cli.main(["eval", "--set", "engine.max_model_len=512", "--", *words.split()])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "|nano_choice|" in out and "'seed': 5" in out
    assert opened == [("nano", {"overrides": ["engine.max_model_len=512"]})]
