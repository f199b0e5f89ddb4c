import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training.networks import tiny_checkpoint

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.training.engram import table_rows
from deepinfer_jax.training.forward import ForwardOptions, forward
from deepinfer_jax.training.parameters import from_checkpoint


@pytest.fixture(scope="module")
def tiny(golden):
    config, tensors = tiny_checkpoint(golden)
    expected = dict(np.load(golden / "training_forward.npz"))
    weights = {k: jnp.asarray(v) for k, v in from_checkpoint(tensors, config).items()}

    def result(ids, segments, options):
        def arrays_of(weights, ids, segments):
            hashes = table_rows(expected["token_map"], ids, segments, config)
            r = forward(weights, ids, segments, hashes, config, options)
            return r.logits, r.hidden, r.taps

        arrays = weights, jnp.asarray(ids[None]), jnp.asarray(segments[None])
        fast = {"xla_backend_optimization_level": 1}
        compiled = jax.jit(arrays_of).lower(*arrays).compile(compiler_options=fast)
        return [np.asarray(array)[0] for array in compiled(*arrays)]

    def run(ids, segments, options):
        return result(ids, segments, options)[0]

    return config, expected, run, result, weights


def test_two_packed_conversations_each_give_the_golden_logits_and_taps(tiny, golden):
    _, expected, _, result, weights = tiny
    ids, segments = np.zeros(96, np.int32), np.zeros(96, np.int32)
    ids[:40] = ids[44:84] = expected["p40_ids"]
    segments[:40], segments[44:84] = 1, 2
    logits, hidden, taps = result(ids, segments, ForwardOptions())
    main_hidden = np.load(golden / "p40_f32.npz")["main_hidden"][0]
    for here in (slice(0, 40), slice(44, 84)):
        np.testing.assert_allclose(logits[here], expected["p40_logits"], atol=1e-4)
        np.testing.assert_allclose(taps[here], main_hidden, atol=1e-4)
    np.testing.assert_allclose(hidden @ np.asarray(weights["head.weight"]).T, logits, atol=1e-4)


def test_a_chunked_prompt_with_binding_selections_gives_the_golden_logits(tiny):
    _, expected, run, *_ = tiny
    ids, segments = np.zeros(304, np.int32), np.zeros(304, np.int32)
    ids[:300], segments[:300] = expected["p300_ids"], 1
    logits = run(ids, segments, ForwardOptions(chunk=64))
    rows = expected["p300_rows"]
    np.testing.assert_allclose(logits[rows], expected["p300_logits"], atol=1e-4)


def test_decoder_layers_on_the_last_rows_only_give_the_golden_bounded_replay(tiny):
    config, expected, _, result, _ = tiny
    ids, segments = np.zeros(304, np.int32), np.zeros(304, np.int32)
    ids[4:], segments[4:] = expected["p300_ids"], 1
    start = 304 - int(expected["replay_keep"])
    logits, hidden, taps = result(ids, segments, ForwardOptions(decoder_start=start))
    assert logits.shape == (16, config.vocab_size)
    assert hidden.shape == (16, config.hidden_size)
    assert taps.shape == (16, 3 * config.hidden_size)
    np.testing.assert_allclose(logits, expected["replay_logits"], atol=1e-4)


def test_rows_that_do_not_divide_by_the_window_are_refused(tiny):
    _, _, run, *_ = tiny
    with pytest.raises(ConfigError) as refusal:
        run(np.zeros(40, np.int32), np.ones(40, np.int32), ForwardOptions())
    assert "Rows of 40 columns" in refusal.value.what
    assert "window 16" in refusal.value.what
    assert "Pad the rows" in refusal.value.do
