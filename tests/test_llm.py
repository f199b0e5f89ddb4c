import copy
import dataclasses
import inspect
import json
import shutil

import jax
import numpy as np
import pytest
from short_llm import (
    CHUNK,
    LIMIT,
    SLOTS,
    letters,
    open_llm,
    short_config,
)

from deepinfer_jax import LLM, RequestOutput, SamplingParams
from deepinfer_jax.assembly import assemble
from deepinfer_jax.errors import CheckpointError, ConfigError, MemoryPlanError, RequestError
from deepinfer_jax.protocol.ask import Ask
from deepinfer_jax.runner.trace import TraceInput, run_trace
from deepinfer_jax.sampling_params import sample_seed
from deepinfer_jax.settings import EngineConfig, package_folder
from deepinfer_jax.text.compressed_ids import compressed_token_map
from deepinfer_jax.text.options import ChatOptions
from deepinfer_jax.text.tokenizer import Piece

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
PROMPTS = ["Hello", "a", "Two words", "The fourth", "x" * 70, "six", "seven!"]


@pytest.fixture(scope="module")
def single(llm):
    """Every prompt answered alone."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0] for prompt in PROMPTS]


def only(outputs):
    (request,) = outputs
    assert request.error is None and request.finished
    (sample,) = request.outputs
    return sample


def assert_same(made, expected, tolerance=1e-4):
    assert made.token_ids == expected.token_ids
    assert (made.text, made.finish_reason) == (expected.text, expected.finish_reason)
    np.testing.assert_allclose(made.logprobs.token, expected.logprobs.token, atol=tolerance)


def forcing(text, **params):
    """Parameters that make the random network write `text` and then end."""
    ids = [*letters(text), 1]
    return SamplingParams(golden_token_ids=ids, max_tokens=len(ids), **params)


def test_a_batch_gives_what_each_prompt_gives_alone(llm, single):
    assert len(PROMPTS) > SLOTS
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.request_id for o in outputs] == [str(i) for i in range(len(PROMPTS))]
    assert [o.prompt for o in outputs] == PROMPTS
    for made, alone in zip(outputs, single, strict=True):
        assert_same(made.outputs[0], alone)
        assert made.outputs[0].finish_reason == "length"
    assert len({o.outputs[0].token_ids for o in outputs}) == len(PROMPTS)


def test_requests_of_different_lengths_share_the_slots(llm, single):
    lengths = [1, 8, 2, 7, 3, 6, 4]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    for made, alone, n in zip(llm.generate(PROMPTS, params), single, lengths, strict=True):
        assert made.outputs[0].token_ids == alone.token_ids[:n]


def test_a_prompt_of_several_chunks_equals_one_forward_over_all_of_it(llm, short_folder):
    ids = np.random.default_rng(1).integers(3, 259, 150)
    assert len(ids) > 2 * CHUNK
    made = only(llm.generate(ids, SamplingParams(temperature=0, max_tokens=1, logprobs=4)))
    tokens = compressed_token_map(llm.tokenizer)
    engine = EngineConfig(model=str(short_folder), arithmetic="f32", max_model_len=200)
    net = assemble(short_folder, llm.config, engine, tokens, traced=True)
    given = TraceInput.from_arrays({"token_ids": ids[None]}, llm.config.vocab_size)
    logits = run_trace(net.params, given, net.network, net.mesh)["logits"][0, -1]
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_array_equal(made.logprobs.top_ids[0], np.argsort(-logprobs)[:4])
    np.testing.assert_allclose(made.logprobs.top[0], np.sort(logprobs)[::-1][:4], atol=1e-4)
    assert made.token_ids == (int(logprobs.argmax()),)


def test_the_next_owner_of_a_slot_gets_the_same_bits(llm):
    first = only(llm.generate("Hello", GREEDY))
    llm.generate([[9] * 200] * SLOTS, GREEDY)
    again = only(llm.generate("Hello", GREEDY))
    assert again.token_ids == first.token_ids
    np.testing.assert_array_equal(again.logprobs.token, first.logprobs.token)


BAD = {
    "empty": ("", GREEDY, "has an empty prompt."),
    "long": ("x" * 1090, GREEDY, "prompt 1091 + max_tokens 8 exceeds max_model_len 1088. Nothing"),
    "outside": ([5, 300], GREEDY, "holds token id 300; the vocabulary has 288 ids."),
    "image": ([5, 272], GREEDY, "holds an image."),
    "grammar": (
        "a",
        SamplingParams(so_args={"schema_type": "regex", "schema": "a"}),
        "sets so_args.",
    ),
    "prompt log-probs": ("a", SamplingParams(prompt_logprobs=289), "asks for prompt_logprobs=289;"),
}


def test_bad_requests_fail_alone_and_the_others_keep_order_and_result(llm, single):
    prompts, params, place = list(PROMPTS), [GREEDY] * len(PROMPTS), {}
    for i, (name, (prompt, own, _)) in enumerate(BAD.items()):
        place[name] = 2 * i + 1
        prompts.insert(2 * i + 1, prompt)
        params.insert(2 * i + 1, own)
    outputs = llm.generate(prompts, params)
    assert len(outputs) == len(prompts)
    for name, (_, _, words) in BAD.items():
        failed = outputs[place[name]]
        assert isinstance(failed.error, RequestError) and failed.outputs == ()
        assert f"Request {place[name]}" in str(failed.error) and words in str(failed.error)
        assert failed.finished
    rest = [o for i, o in enumerate(outputs) if i not in place.values()]
    for made, alone in zip(rest, single, strict=True):
        assert made.error is None
        assert_same(made.outputs[0], alone)


def test_only_bad_requests_and_no_requests_are_answered_too(llm):
    assert [o.error is not None for o in llm.generate(["", ""], GREEDY)] == [True, True]
    assert [o.finished for o in llm.stream(["", ""], GREEDY)] == [True, True]
    assert llm.generate([]) == [] and list(llm.stream([])) == []


def test_images_are_refused_wherever_they_come_from(llm):
    (output,) = llm.generate("Hello", GREEDY, multi_modal_data={"image": np.zeros((2, 2))})
    assert "Request 0 holds an image." in str(output.error)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    (output,) = llm.chat([{"role": "user", "content": [part]}], GREEDY)
    assert "Request 0 holds an image." in str(output.error)


def test_a_seed_repeats_its_tokens_and_samples_have_their_own(llm):
    drawn = SamplingParams(seq_seed=11, n=3, max_tokens=10, ignore_eos=True)
    (request,) = llm.generate("Hello", drawn)
    assert [o.seq_seed for o in request.outputs] == [sample_seed(11, i) for i in range(3)]
    assert len({o.token_ids for o in request.outputs}) == 3
    assert llm.generate("Hello", drawn)[0].outputs == request.outputs
    for sample in request.outputs:
        own = SamplingParams(seq_seed=sample.seq_seed, max_tokens=10, ignore_eos=True)
        assert only(llm.generate("Hello", own)).token_ids == sample.token_ids


def test_a_seed_that_was_not_given_is_reported_and_repeats(llm):
    first, second = (only(llm.generate("Hello", SamplingParams(max_tokens=10))) for _ in "ab")
    assert first.seq_seed != second.seq_seed
    again = llm.generate("Hello", SamplingParams(max_tokens=10, seq_seed=first.seq_seed))
    assert only(again) == first


def test_top_k_of_one_is_the_argmax(llm, single):
    params = SamplingParams(top_k=1, seq_seed=3, max_tokens=8, ignore_eos=True)
    assert only(llm.generate("Hello", params)).token_ids == single[0].token_ids


def test_forced_tokens_are_written_and_have_their_own_log_probs(llm):
    made = only(llm.generate("Hello", forcing("Hi", logprobs=0, temperature=0)))
    assert made.token_ids == (*letters("Hi"), 1) and made.text == "Hi"
    assert (made.finish_reason, made.stop_reason) == ("stop", None)
    assert (made.logprobs.token < 0).all() and np.isfinite(made.logprobs.token).all()
    assert made.cumulative_logprob == pytest.approx(float(made.logprobs.token.sum()), rel=1e-6)


def test_generation_goes_on_freely_after_the_forced_tokens(llm, single):
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, golden_token_ids=single[0].token_ids[:3]
    )
    assert only(llm.generate("Hello", params)).token_ids == single[0].token_ids


def test_top_log_probs_are_raw_sorted_and_hold_the_argmax(llm, single):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    made = only(llm.generate("Hello", params))
    kept = made.logprobs
    assert kept.mode == "raw"
    assert (kept.token.shape, kept.top.shape, kept.top_ids.shape) == ((8,), (8, 3), (8, 3))
    assert kept.token.dtype == kept.top.dtype == np.float32 and kept.top_ids.dtype == np.int32
    assert (np.diff(kept.top) <= 0).all()
    assert tuple(kept.top_ids[:, 0]) == made.token_ids == single[0].token_ids
    np.testing.assert_array_equal(kept.top[:, 0], kept.token)
    assert (np.exp(kept.top).sum(-1) < 1).all()
    assert made.cumulative_logprob == pytest.approx(float(kept.token.sum()), rel=1e-6)
    np.testing.assert_allclose(kept.token, single[0].logprobs.token, atol=1e-4)


def test_without_log_probs_there_are_none(llm):
    made = only(llm.generate("Hello", SamplingParams(max_tokens=2)))
    assert made.logprobs is None and made.cumulative_logprob is None


def test_a_stop_string_cuts_the_text_and_ends_the_sequence(llm):
    made = only(llm.generate("Hello", forcing("one END two", stop=["END"])))
    assert (made.text, made.finish_reason, made.stop_reason) == ("one ", "stop", "END")
    assert made.token_ids == tuple(letters("one END"))


def test_a_streamed_stop_string_is_held_back_and_never_shown(llm):
    seen = [o.outputs[0].text for o in llm.stream("Hello", forcing("a ENd END", stop=["END"]))]
    assert seen == ["a", " ", "", "", "ENd", " ", "", "", ""]


def test_stop_tokens_are_reported_and_the_end_can_be_ignored(llm):
    stop = letters("c")
    made = only(llm.generate("Hello", forcing("abcd", stop_token_ids=stop)))
    assert (made.text, made.finish_reason, made.stop_reason) == ("ab", "stop", stop[0])
    assert made.token_ids == tuple(letters("abc"))
    ids = [*letters("a"), 1, *letters("b")]
    going_on = SamplingParams(golden_token_ids=ids, max_tokens=3, ignore_eos=True)
    made = only(llm.generate("Hello", going_on))
    assert (made.token_ids, made.finish_reason) == (tuple(ids), "length")


def test_the_longest_sequence_fills_the_engine_to_its_last_position(llm):
    ids = np.random.default_rng(2).integers(3, 259, LIMIT - 3)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    made = only(llm.generate(ids, params))
    assert len(made.token_ids) == 3 and made.finish_reason == "length"


def parts_of(stream):
    """The streamed outputs of each request, and each request's result."""
    parts = {}
    for part in stream:
        assert not parts.get(part.request_id) or not parts[part.request_id][-1].finished
        parts.setdefault(part.request_id, []).append(part)
    assert all(several[-1].finished for several in parts.values())
    return parts, [RequestOutput.join(parts[str(i)]) for i in range(len(parts))]


def test_a_stream_tells_every_token_once_and_together_what_generate_gives(llm, single):
    parts, results = parts_of(llm.stream(PROMPTS[:5] + [""], GREEDY))
    assert "has an empty prompt" in str(results[5].error) and len(parts["5"]) == 1
    for i in range(5):
        assert [len(part.outputs[0].token_ids) for part in parts[str(i)]] == [1] * 8
        assert [part.outputs[0].logprobs.token.shape for part in parts[str(i)]] == [(1,)] * 8
        assert_same(results[i].outputs[0], single[i])
        total = pytest.approx(float(single[i].logprobs.token.sum()), rel=1e-5)
        assert results[i].outputs[0].cumulative_logprob == total
        assert results[i].metrics["time_to_first_token_s"] > 0


def test_samples_of_one_prompt_stream_apart_and_each_ends_once(llm):
    stop = [chr(c) for c in range(32, 127)]
    drawn = SamplingParams(seq_seed=11, n=6, max_tokens=12, stop=stop)
    (whole,) = llm.generate("Hello", drawn)
    parts, (joined,) = parts_of(llm.stream("Hello", drawn))
    assert joined.outputs == whole.outputs and joined.finished
    assert len({len(o.token_ids) for o in whole.outputs}) > 1
    told = [sample for part in parts["0"] for sample in part.outputs]
    assert sorted(s.index for s in told if s.finish_reason is not None) == list(range(6))
    assert len(told) == sum(len(o.token_ids) for o in whole.outputs)


def test_two_streams_cannot_share_the_slots_and_closing_one_frees_them(llm, single):
    stream = llm.stream("Hello", GREEDY)
    next(stream)
    with pytest.raises(RequestError) as caught:
        llm.generate("a", GREEDY)
    assert str(caught.value) == (
        "The engine is in the middle of another call. Its slots belong to one call at a time, and "
        "a stream holds them until its end. Read the other stream to its end or close it, or pass "
        "all prompts in one call."
    )
    stream.close()
    assert_same(only(llm.generate("a", GREEDY)), single[1])


def user(text):
    return [{"role": "user", "content": text}]


def test_a_chat_splits_reasoning_from_the_answer(llm):
    think_end = llm.tokenizer.special("</think>")
    ids = [*letters("I see."), think_end, *letters("Yes. STOP no"), 1]
    params = SamplingParams(golden_token_ids=ids, max_tokens=len(ids), stop="STOP")
    made = only(llm.chat(user("Well?"), params))
    assert (made.reasoning, made.text, made.stop_reason) == ("I see.", "Yes. ", "STOP")
    assert made.tool_calls == () and made.finish_reason == "stop"
    params = forcing("Yes.", seq_seed=1)
    made = only(llm.chat(user("Well?"), params, thinking=False))
    assert (made.reasoning, made.text) == (None, "Yes.")
    _, (joined,) = parts_of(llm.stream_chat(user("Well?"), params, thinking=False))
    assert joined.outputs == (made,)


def test_a_chat_reads_tool_calls(llm):
    mark = Piece("｜DSML｜", True)
    pieces = [
        *(Piece("\n\n<"), mark, Piece(" calls>\n<"), mark, Piece(' invoke name="add">\n<'), mark),
        *(Piece(' parameter name="x" string="false">1.5</'), mark, Piece(" parameter>\n</"), mark),
        *(Piece(" invoke>\n</"), mark, Piece(" calls>")),
    ]
    ids = [*llm.tokenizer.encode_pieces(pieces), 1]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    messages, tools = user("1.5?"), [tool]
    before = copy.deepcopy((messages, tools))
    params = SamplingParams(golden_token_ids=ids, max_tokens=len(ids))
    made = only(llm.chat(messages, params, thinking=False, tools=tools))
    assert [(call.name, call.arguments) for call in made.tool_calls] == [("add", '{"x": 1.5}')]
    assert (made.text, made.finish_reason) == ("", "tool_calls")
    assert (messages, tools) == before
    stream = llm.stream_chat(messages, params, thinking=False, tools=tools)
    parts, (joined,) = parts_of(stream)
    assert dataclasses.replace(joined.outputs[0], seq_seed=made.seq_seed) == made
    told = [call for part in parts["0"] for call in part.outputs[0].tool_calls]
    assert [call.name for call in told if call.name] == ["add"] and len(told) > 2


def test_the_callers_objects_stay_as_they_were(llm):
    prompts, ids, params = ["a", "b"], [[5, 6], [7]], [GREEDY, SamplingParams(max_tokens=2)]
    before = copy.deepcopy((prompts, ids, params))
    llm.generate(prompts, params, ids)
    assert (prompts, ids, params) == before


def test_progress_of_a_call_ends_with_all_of_its_prompts(llm):
    calls = []
    llm.generate(["a", "", "b"], GREEDY, use_tqdm=lambda *call: calls.append(call))
    assert calls[-1] == (3, 3) and calls == sorted(calls)


def test_the_meter_counts_tokens(llm):
    prompt, output = llm.meter.prompt_tokens, llm.meter.output_tokens
    llm.generate([[5] * 70, [6] * 3], GREEDY)
    assert llm.meter.prompt_tokens - prompt == 73
    assert llm.meter.output_tokens - output == 16


def test_the_manifest_is_plain_stable_and_tells_engines_apart(llm, short_folder, compiled):
    manifest = llm.manifest()
    assert json.loads(json.dumps(manifest)) == manifest == llm.manifest()
    assert open_llm(short_folder, compiled).manifest() == manifest
    other = open_llm(short_folder, compiled, max_model_len=100).manifest()
    assert other["config"] != manifest["config"] and other["max_model_len"] == 100
    assert other["checkpoint"] == manifest["checkpoint"]
    assert (manifest["arithmetic"], manifest["max_model_len"]) == ("f32", LIMIT)
    assert manifest["cache_format"] == "f32"
    sources = {row["key"]: row["source"] for row in manifest["settings"]}
    assert (sources["engine.max_num_seqs"], sources["engine.sampler"]) == ("explicit", "default")


def test_the_manifest_says_what_ran_where_and_nothing_of_whose_machine_it_was(
    llm, short_folder, compiled
):
    manifest = llm.manifest()
    assert manifest["versions"]["jax"] == jax.__version__
    assert manifest["versions"]["numpy"] == np.__version__
    assert "python" in manifest["versions"] and "deepinfer-jax" in manifest["versions"]
    assert manifest["device"] == {"kind": "cpu", "name": "cpu", "count": 1}
    assert manifest["level"] == "R1"
    checkpoint = manifest["checkpoint"]
    assert (checkpoint["model"], checkpoint["revision"]) == (short_folder.name, None)
    variables = {row["name"]: row for row in manifest["variables"]}
    assert variables["DEEPINFER_BATCH_INVARIANT"]["source"] == "default"
    assert "device_count=8" in variables["XLA_FLAGS"]["value"]
    text = json.dumps(manifest)
    assert str(short_folder.parent) not in text and str(compiled.parent) not in text


def test_the_plan_counts_what_is_held(llm):
    plan = llm.plan()
    assert (plan.slots, plan.positions) == (SLOTS, LIMIT)
    tables = sum(rows * 32 for rows in llm.config.engram_num_embeddings)
    assert plan.engram_tables == 4 * tables
    window = 5 * SLOTS * (16 + 6) * 64
    entries = SLOTS * (LIMIT // 2 + LIMIT) * (64 + 32)
    assert 4 * (window + entries) <= plan.cache < 4 * (window + entries) * 1.1
    assert plan.total == plan.weights + plan.engram_tables + plan.cache + plan.step
    assert plan.fits in (True, None)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    short_folder, compiled, monkeypatch
):
    monkeypatch.setattr("deepinfer_jax.llm.free_bytes", lambda device: 1000)
    with pytest.raises(MemoryPlanError) as caught:
        open_llm(short_folder, compiled)
    assert "are available" in caught.value.what and "no plan of this network" in caught.value.do


def test_an_unknown_argument_is_refused_with_the_nearest_one(short_folder):
    with pytest.raises(ConfigError) as caught:
        LLM(short_folder, max_seqs=4)
    assert "max_seqs" in caught.value.what and "max_num_seqs" in str(caught.value)


def test_a_model_that_is_named_wins_over_the_environment_even_if_it_is_the_default(monkeypatch):
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", "/nowhere")
    asked = {}

    def stop(config, overrides, *, env, explicit):
        asked.update(explicit)
        raise ConfigError("Far enough.", "Why.", "Do.")

    monkeypatch.setattr("deepinfer_jax.settings.load", stop)
    for arguments, model in (((), None), (("nano",), "nano"), (("other",), "other")):
        asked.clear()
        with pytest.raises(ConfigError, match="Far enough"):
            LLM(*arguments)
        assert asked.get("model") == model
    assert inspect.signature(LLM).parameters["model"].default == "nano"


def test_an_unknown_option_of_a_streamed_chat_is_refused_at_once(llm):
    with pytest.raises(RequestError) as caught:
        llm.stream_chat(user("Hello"), thinkin=False)
    assert str(caught.value) == (
        "stream_chat got an unknown keyword 'thinkin'. Its keywords are those of chat: thinking, "
        "effort, tools, tool_choice, response_format, task. Did you mean 'thinking'?"
    )
    assert isinstance(caught.value, TypeError)
    options = list(inspect.signature(LLM.chat).parameters)[3:]
    assert options == list(ChatOptions.__annotations__)


def test_a_config_without_weights_and_a_length_beyond_the_model_are_refused(short_folder):
    with pytest.raises(ConfigError) as caught:
        LLM(config="tiny")
    assert "The config tiny describes a network, but no weights." in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        LLM(short_folder, max_model_len=2000)
    assert "engine.max_model_len is 2000; the model's limit is 1088." in str(caught.value)


def changed(short_folder, tmp_path, **changes):
    shutil.copytree(short_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(short_config(**changes)))
    return tmp_path / "model"


def test_a_tokenizer_that_does_not_match_the_config_is_refused(short_folder, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        LLM(short_folder, tokenizer=package_folder("models") / "nano")
    assert "has ids up to 3071, but vocab_size is 288. An id without an embedding row" in str(
        caught.value
    )
    with pytest.raises(CheckpointError) as caught:
        LLM(changed(short_folder, tmp_path, engram_compressed_vocab_size=254))
    assert "The tokenizer gives 253 compressed ids, but engram_compressed_vocab_size is" in str(
        caught.value
    )


def test_engram_tables_of_a_size_that_the_hash_does_not_fill_are_refused(short_folder, tmp_path):
    with pytest.raises(ConfigError) as caught:
        LLM(changed(short_folder, tmp_path, engram_num_embeddings=[630, 840]))
    assert "engram_num_embeddings is [630, 840], but the hash of this config addresses [630, " in (
        str(caught.value)
    )


def test_asks_are_answered_as_they_finish_and_a_bad_one_alone_fails(llm, single):
    asks = [
        Ask(params=GREEDY, prompt="Hello"),
        Ask(params=GREEDY, prompt=(), name="mine"),
        Ask(params=dataclasses.replace(GREEDY, max_tokens=65_536), prompt="a", open_ended=True),
        Ask(params=GREEDY, messages=({"role": "user", "content": "x"},)),
    ]
    found = dict(llm.answer(asks))
    assert sorted(found) == [0, 1, 2, 3]
    assert found[0].outputs[0].token_ids == single[0].token_ids
    assert str(found[1].error).startswith("Request mine has an empty prompt.")
    # What was left open gives way to the room that the prompt leaves.
    assert len(found[2].prompt_token_ids) + len(found[2].outputs[0].token_ids) == LIMIT
    assert found[2].outputs[0].token_ids[:8] == single[1].token_ids
    (chat,) = llm.chat([{"role": "user", "content": "x"}], GREEDY)
    assert found[3].outputs[0].token_ids == chat.outputs[0].token_ids
