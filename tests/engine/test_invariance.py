"""Batch-invariant arithmetic through the whole engine: alone and among others, the same bytes.

`pytest --every-batch` also compares processes that simulate 2 and 4 devices.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from bitwise import assert_same_bits
from short_llm import letters, open_llm, shorter_config, write_short_model

from deepinfer_jax import SamplingParams

ENGINE = {"batch_invariant": True, "max_num_batched_tokens": 4}
DEVICES = "--xla_force_host_platform_device_count"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_short_model(tmp_path_factory.mktemp("model") / "shorter", shorter_config())


@pytest.fixture(scope="module")
def invariant(folder, compiled):
    # Small steps, so that the programs of 1, 4 and 5 rows are all there are.
    return open_llm(folder, compiled, **ENGINE)


def test_a_request_has_the_same_tokens_and_log_prob_bytes_alone_and_among_others(invariant):
    llm = invariant
    seeded = SamplingParams(seq_seed=7, max_tokens=9, ignore_eos=True, logprobs=0, top_p=0.9)
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)
    prompt = letters("The quick brown fox jumps")
    others = [letters("abc" * 9), letters("Hello"), letters("x")]
    for params in (seeded, greedy):
        (alone,) = llm.generate(None, params, [prompt])
        *_, among = llm.generate(None, [greedy, seeded, seeded, params], [*others, prompt])
        made, expected = among.outputs[0], alone.outputs[0]
        assert among.error is None and len(made.token_ids) == 9
        assert made.logprobs is not None and expected.logprobs is not None
        assert made.token_ids == expected.token_ids
        assert_same_bits(made.logprobs.token, expected.logprobs.token)


@pytest.mark.parametrize("count", [4, 31])
def test_a_score_has_the_same_bits_whoever_stands_beside_it(invariant, count):
    pair = letters("The quick brown"), letters(" fox")
    longer = letters("abc" * 9), letters("Hello" * 3)
    (alone,) = invariant.score([pair])
    for score in invariant.score([*[pair] * count, longer])[:-1]:
        assert score.error is None and score.is_greedy == alone.is_greedy
        assert_same_bits(score.logprobs, alone.logprobs)
        assert score.logprob_sum == alone.logprob_sum
    forced = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, golden_token_ids=tuple(pair[1])
    )
    (made,) = invariant.generate(None, forced, [pair[0]])
    assert made.outputs[0].logprobs is not None
    assert_same_bits(made.outputs[0].logprobs.token, alone.logprobs)


def digests(llm):
    """One digest of prompt, tokens and log-prob bytes for each of a few requests."""
    seeded = SamplingParams(seq_seed=7, max_tokens=9, ignore_eos=True, logprobs=0, top_p=0.9)
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)
    prompts = [letters(text) for text in ("The quick brown fox", "abc" * 9, "x", "Hello")]
    found = []
    for output in llm.generate(None, [seeded, greedy, greedy, seeded], prompts):
        sample = output.outputs[0]
        assert output.error is None and sample.logprobs is not None
        text = json.dumps([output.prompt_token_ids, sample.token_ids, sample.finish_reason])
        found.append(hashlib.sha256(text.encode() + sample.logprobs.token.tobytes()).hexdigest())
    return found


def elsewhere(folder, compiled, devices):
    """`digests` of a fresh process with so many devices, which runs one row at a time."""
    program = f"""
import json, pathlib
import jax
from short_llm import open_llm
from test_invariance import ENGINE, digests
alone = ENGINE | {{"max_num_seqs": 1, "max_num_batched_tokens": 1}}
llm = open_llm(pathlib.Path({str(folder)!r}), pathlib.Path({str(compiled)!r}), **alone)
print(json.dumps([len(jax.devices()), digests(llm)]))
"""
    here = Path(__file__).parent
    paths = [str(here.parent.parent), str(here.parent), str(here)]
    changes = {"XLA_FLAGS": f"{DEVICES}={devices}", "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | changes, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_another_process_with_other_devices_and_batches_writes_the_same_digests(
    invariant, folder, compiled, devices, request
):
    if devices > 1 and not request.config.getoption("--every-batch"):
        pytest.skip("programs of each number of devices are compiled anew: pass --every-batch")
    assert len(jax.devices()) == 8
    assert elsewhere(folder, compiled, devices) == [devices, digests(invariant)]
