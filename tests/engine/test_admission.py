import dataclasses
import tomllib

import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.admission import Admission
from deepinfer_jax.errors import RequestError
from deepinfer_jax.sampling_params import SamplingParams, sample_seed
from deepinfer_jax.settings import package_folder
from deepinfer_jax.text.tokenizer import Tokenizer

LIMIT = 64
HELLO = (0, *(3 + b for b in b"Hello"))
SCHEMA = {"schema_type": "json", "schema": {}}


@pytest.fixture(scope="module")
def admission():
    text = (package_folder("configs") / "tiny.toml").read_text()
    config = ModelConfig.from_dict(tomllib.loads(text)["model"])
    folder = package_folder("models") / "tiny_tokenizer"
    return Admission(Tokenizer.from_folder(folder, config), config, LIMIT)


def admit(admission, prompts=None, params=None, ids=None, images=None):
    return admission.prompts(prompts, params, ids, images)


def said_by(error):
    assert isinstance(error, RequestError)
    assert all((error.what, error.why, error.do))
    return str(error)


BAD = {
    "an empty text": (
        ("", None, None, None),
        "Request 1 has an empty prompt. There is no token to continue from. Give at least one "
        "token; a text prompt brings its BOS by itself.",
    ),
    "no ids": (([], None, None, None), "Request 1 has an empty prompt."),
    "a prompt that is too long": (
        (list(range(49)), None, None, None),
        "Request 1: prompt 49 + max_tokens 16 exceeds max_model_len 64. Nothing was truncated. "
        "Lower max_tokens to 15, or have engine.truncate (--truncate) cut it on the left or right.",
    ),
    "a prompt without any room": (
        (list(range(64)), SamplingParams(max_tokens=1), None, None),
        "prompt 64 + max_tokens 1 exceeds max_model_len 64. Nothing was truncated. "
        "Shorten it to 63, or have engine.truncate (--truncate) cut it on the left or right.",
    ),
    "an id behind the vocabulary": (
        ([0, 288], None, None, None),
        "Request 1 holds token id 288; the vocabulary has 288 ids. An id outside the vocabulary "
        "has no embedding. Use ids from 0 to 287, of this model's tokenizer.",
    ),
    "a negative id": (([0, -1], None, None, None), "Request 1 holds token id -1; the"),
    "an id beyond 64 bits": (
        ([0, 2**70], None, None, None),
        "Request 1 has token ids of type object and shape [2]. A prompt is one list of integers. "
        "Pass a flat list of token ids.",
    ),
    "fractions": (([0.5, 1.5], None, None, None), "token ids of type float64 and shape [2]."),
    "booleans": (([True], None, None, None), "token ids of type bool and shape [1]."),
    "nested ids": (([[0, 1]], None, None, None), "of type int64 and shape [1, 2]."),
    "uneven ids": (([0, [1, 2]], None, None, None), "Request 1 has token ids of uneven nesting."),
    "a mapping": (({"prompt": "a"}, None, None, None), "of type object and shape []."),
    "text that is no Unicode": (("\ud800", None, None, None), "Unicode"),
    "an image token": (
        ([0, 272], None, None, None),
        "Request 1 holds an image. The vision tower is not part of this version, and an image is "
        "never skipped. Send text only.",
    ),
    "an image": (("Hello", None, None, {"image": np.zeros((3, 4))}), "Request 1 holds an image."),
    "two images": (("Hello", None, None, {"image": [1, 2]}), "Request 1 holds an image."),
    "more log-probs of the prompt than tokens": (
        ("Hello", SamplingParams(prompt_logprobs=289), None, None),
        "Request 1 asks for prompt_logprobs=289; the vocabulary has 288 ids. There are no more "
        "tokens to report. Set prompt_logprobs to at most 288.",
    ),
    "a grammar": (
        ("Hello", SamplingParams(so_args=SCHEMA), None, None),
        "Request 1 sets so_args. This version does not compute structured output, and an "
        "argument is never ignored. Leave so_args out.",
    ),
    "more log-probs than tokens": (
        ("Hello", SamplingParams(logprobs=289), None, None),
        "Request 1 asks for logprobs=289; the vocabulary has 288 ids. There are no more tokens to "
        "report. Set logprobs to at most 288.",
    ),
    "a forced id behind the vocabulary": (
        ("Hello", SamplingParams(golden_token_ids=[5, 288]), None, None),
        "Request 1 forces token id 288; the vocabulary has 288 ids. A token outside the "
        "vocabulary is never drawn. Use ids from 0 to 287 in golden_token_ids.",
    ),
    "a stop id behind the vocabulary": (
        ("Hello", SamplingParams(stop_token_ids=[300]), None, None),
        "Request 1 stops at token id 300; the vocabulary has 288 ids. A token outside the "
        "vocabulary is never drawn. Use ids from 0 to 287 in stop_token_ids.",
    ),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD)
def test_a_bad_request_keeps_its_place_and_its_reason_and_the_others_run(admission, bad, message):
    prompt, params, _, image = bad
    requests = admit(
        admission,
        ["Hello", prompt, "Hello"],
        [SamplingParams(), params or SamplingParams(), SamplingParams()],
        None,
        [None, image, {"image": []}],
    )
    assert [r.request_id for r in requests] == ["0", "1", "2"]
    assert message in said_by(requests[1].error)
    assert requests[1].samples == [] and requests[1].output("raw").finished
    assert requests[1].output("raw").outputs == ()
    for request in (requests[0], requests[2]):
        assert request.error is None and request.ids == HELLO
        assert len(request.samples) == 1


@pytest.mark.parametrize("tokens", [1, 63, 64, 65])
@pytest.mark.parametrize("most", [1, 63, 64])
def test_a_prompt_is_accepted_exactly_when_it_and_its_output_fit(admission, tokens, most):
    (request,) = admit(admission, [0] * tokens, SamplingParams(max_tokens=most))
    assert (request.error is None) == (tokens + most <= LIMIT)
    assert len(request.ids) == tokens and request.truncated == 0
    if request.error is not None:
        asked = f"Request 0: prompt {tokens} + max_tokens {most} exceeds max_model_len {LIMIT}. "
        assert said_by(request.error).startswith(asked + "Nothing was truncated.")


LONG = [0, *range(3, 103)]


@pytest.mark.parametrize(
    ("truncate", "ids", "kept"),
    [
        ("left", LONG, [0, *LONG[-43:]]),  # the BOS stays
        ("left", LONG[1:], LONG[-44:]),
        ("right", LONG, LONG[:44]),
        ("left", LONG[:44], LONG[:44]),
        ("right", LONG[:44], LONG[:44]),
    ],
)
def test_a_prompt_is_cut_at_the_end_that_was_named(admission, truncate, ids, kept):
    cutting = dataclasses.replace(admission, truncate=truncate)
    (request,) = admit(cutting, ids, SamplingParams(max_tokens=20))
    assert list(request.ids) == kept == request.samples[0].prompt.tolist()
    assert request.truncated == len(ids) - len(kept)
    metrics = request.output("raw").metrics
    assert metrics.get("truncated_tokens", 0) == request.truncated


@pytest.mark.parametrize("truncate", ["left", "right"])
def test_a_prompt_is_never_cut_to_nothing(admission, truncate):
    cutting = dataclasses.replace(admission, truncate=truncate)
    for most in (63, 64, 65):
        (request,) = admit(cutting, LONG, SamplingParams(max_tokens=most))
        assert "prompt 101 + max_tokens" in said_by(request.error)
        assert request.error.do == "Shorten it to 63." and request.truncated == 0


def test_what_is_cut_off_is_checked_all_the_same(admission):
    cutting = dataclasses.replace(admission, truncate="right")
    params = SamplingParams(max_tokens=20)
    assert "holds token id 288" in said_by(admit(cutting, [*LONG, 288], params)[0].error)
    assert "holds an image" in said_by(admit(cutting, [*LONG, 272], params)[0].error)


def test_a_conversation_is_cut_on_the_left_alone(admission):
    long, params = user("x" * 100), SamplingParams(max_tokens=20)
    (whole,) = admission.chats(long, params, {})
    (left,) = dataclasses.replace(admission, truncate="left").chats(long, params, {})
    assert left.error is None and left.ids == (0, *whole.ids[-43:])
    (right,) = dataclasses.replace(admission, truncate="right").chats(long, params, {})
    assert f"a conversation of {len(whole.ids)} tokens leaves no room" in said_by(right.error)
    assert "is where the answer begins" in right.error.why


def test_texts_and_ids_are_told_apart(admission):
    ids = list(HELLO)
    for prompts in ("Hello", ["Hello"], ids, [ids], np.array(ids), [np.array(ids)], (tuple(ids),)):
        (request,) = admit(admission, prompts)
        assert request.ids == HELLO, prompts
        assert request.samples[0].prompt.dtype == np.int32
    assert [r.ids for r in admit(admission, ["Hello", ids])] == [HELLO] * 2
    assert admit(admission, "Hello")[0].prompt == "Hello"
    assert admit(admission, ids)[0].prompt is None
    assert admit(admission, []) == []


def test_ids_win_over_the_text_that_they_stand_for(admission):
    (request,) = admit(admission, "shown", None, [[0, 7]])
    assert (request.prompt, request.ids) == ("shown", (0, 7))
    (request,) = admit(admission, None, None, [0, 7])
    assert (request.prompt, request.ids) == (None, (0, 7))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "generate got no prompts. It answers texts or token ids."),
        (
            {"prompts": ["a", "b"], "ids": [[1]]},
            "generate got 2 prompts and 1 lists of token ids. Ids stand for the prompt at the same "
            "place. Give as many lists of ids as prompts, or one of the two only.",
        ),
        ({"prompts": 5}, "prompts is of type int. A prompt is a text or a list of token ids."),
        ({"prompts": {"prompt": "a"}}, "prompts is of type dict."),
        ({"prompts": b"abc"}, "prompts is of type bytes."),
        ({"ids": {1, 2}}, "prompt_token_ids is of type set."),
        (
            {"prompts": ["a", "b"], "params": [SamplingParams()]},
            "There are 1 sampling_params for 2 prompts. Each prompt is drawn with its own, or all "
            "with one. Pass one SamplingParams, or 2 of them.",
        ),
        (
            {"prompts": "a", "params": {"temperature": 0}},
            "sampling_params is or holds a str. Values are checked when a SamplingParams is made.",
        ),
        ({"prompts": "a", "params": 3}, "sampling_params is or holds a int."),
        ({"prompts": "a", "params": {}}, "sampling_params is or holds a dict."),
        (
            {"prompts": ["a", "b"], "images": {"image": 1}},
            "There are 1 multi_modal_data for 2 prompts. Each stands for the prompt at the same "
            "place. Pass 2 of them, None for a prompt without images.",
        ),
    ],
)
def test_a_call_that_cannot_be_divided_into_requests_is_refused(admission, arguments, message):
    with pytest.raises(RequestError) as caught:
        admit(admission, **arguments)
    assert message in said_by(caught.value)


@pytest.mark.parametrize("images", [None, {}, {"image": None}, {"image": []}, [None]])
def test_no_image_is_no_image(admission, images):
    assert admit(admission, "Hello", None, None, images)[0].error is None


def test_samples_get_derived_seeds_and_an_own_text(admission):
    (request,) = admit(admission, "Hello", SamplingParams(n=3, seq_seed=17))
    assert [s.seed for s in request.samples] == [sample_seed(17, i) for i in range(3)]
    assert [s.index for s in request.samples] == [0, 1, 2]
    assert len({id(s.text) for s in request.samples}) == 3


def test_a_seed_that_is_not_given_is_fresh_and_reported(admission):
    requests = admit(admission, ["Hello"] * 8)
    seeds = [r.output("raw").outputs[0].seq_seed for r in requests]
    assert len(set(seeds)) == 8


def user(content):
    return [{"role": "user", "content": content}]


def test_one_conversation_or_several(admission):
    (one,) = admission.chats(user("Hello"), None, {})
    first, second = admission.chats([user("Hello"), user("Bye")], None, {})
    assert one.ids == first.ids != second.ids
    assert admission.tokenizer.decode(one.ids).startswith("<｜begin▁of▁sentence｜>")
    assert admission.chats([], None, {}) == []


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]


def test_a_bad_conversation_fails_alone(admission):
    conversations = [user("Hello"), user(IMAGE), [], [{"role": "cat"}], user("Hello")]
    requests = admission.chats(conversations, None, {"thinking": False})
    assert "Request 1 holds an image. The vision tower" in said_by(requests[1].error)
    assert "The conversation has 0 messages." in said_by(requests[2].error)
    assert "messages[0] has the role 'cat'." in said_by(requests[3].error)
    assert requests[0].ids == requests[4].ids and requests[4].error is None


@pytest.mark.parametrize("messages", ["Hello", None, {"role": "user", "content": "Hello"}])
def test_what_is_no_list_of_messages_is_refused(admission, messages):
    with pytest.raises(RequestError) as caught:
        admission.chats(messages, None, {})
    assert f"messages is of type {type(messages).__name__}. A conversation is" in said_by(
        caught.value
    )
