"""The training forward of a block drafter: the golden blocks, and what a block sees."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint.load import load
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.training.draft import smoke_drafter_config
from deepinfer_jax.training.drafter_blocks import Blocks, make_blocks
from deepinfer_jax.training.drafter_forward import DrafterOptions, draft_forward
from deepinfer_jax.training.parameters import from_checkpoint, initial_values

CONFIG = dataclasses.replace(
    smoke_drafter_config(),
    sliding_window=5,
    num_nextn_predict_layers=2,
    compress_ratios=(0, 2, 0, 0),
    dspark_block_size=3,
)
D, G, T = CONFIG.hidden_size, CONFIG.dspark_block_size, 20
OPTIONS = DrafterOptions(quantize=False)


def random_weights() -> dict[str, np.ndarray]:
    """Every tensor different from its neutral value, so that none can be forgotten."""
    rng = np.random.default_rng(1)
    values = initial_values(CONFIG, 0, drafter=True)
    for name, value in values.items():
        rough = rng.normal(0, 0.3, value.shape).astype(np.float32)
        small = name.endswith(("norm.weight", "attn_sink", "gate.bias", "_scale", "_base"))
        values[name] = value + rough if small or not value.any() else value
    return values


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(2)
    frozen = {
        name: rng.normal(0, 0.5, (CONFIG.vocab_size, D)).astype(np.float32)
        for name in ("embed.weight", "head.weight")
    }
    return {
        "weights": random_weights(),
        "frozen": frozen,
        "taps": rng.normal(size=(1, T, 2 * D)).astype(np.float32),
        "ids": rng.integers(4, CONFIG.vocab_size, (1, T)).astype(np.int32),
        "segment": np.array([[1] * 4 + [2] * 14 + [0] * 2], np.int32),
        "mask": np.ones((1, T), bool),
    }


ANCHORS, KEEP = np.array([[6, 12, 15, 0]], np.int32), np.array([[True, True, True, False]])


@pytest.fixture(scope="module")
def run(case):
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def forward(taps, ids, segment, anchors, keep):
        mask = jnp.asarray(case["mask"])
        noise = CONFIG.dspark_noise_token_id
        blocks = make_blocks(ids, segment, mask, anchors, keep, size=G, noise=noise)
        weights, frozen = (jax.tree.map(jnp.asarray, case[k]) for k in ("weights", "frozen"))
        r = draft_forward(weights, frozen, taps, segment, blocks, CONFIG, OPTIONS)
        return r.logits, r.confidence, r.load

    def call(**changes):
        given = {k: case[k] for k in ("taps", "ids", "segment")} | {
            "anchors": ANCHORS,
            "keep": KEEP,
        }
        given = {k: jnp.asarray(v) for k, v in (given | changes).items()}
        return tuple(np.asarray(x) for x in forward(*given.values()))

    return call


def changed(array, column, by):
    array = array.copy()
    array[0, column] += by
    return array


def test_a_block_sees_its_window_strictly_before_the_anchor_and_nothing_else(case, run):
    base = run()[0][0]
    for column in range(T):
        other = run(taps=changed(case["taps"], column, np.float32(1)))[0][0]
        for index, anchor in enumerate(ANCHORS[0, :3].tolist()):
            seen = max(anchor - CONFIG.sliding_window, 4) <= column < anchor
            assert (other[index] != base[index]).any() == seen, (anchor, column)


def test_no_token_after_the_previous_ones_leaks_into_a_slot(case, run):
    base = run()[0][0]
    for column in range(T):
        other = run(ids=changed(case["ids"], column, np.int32(-1)))[0][0]
        for index, anchor in enumerate(ANCHORS[0, :3].tolist()):
            touched = (other[index] != base[index]).any(axis=-1)
            # The anchor's token reaches every slot, a later one the Markov bias after it alone.
            expected = [column == anchor or column == anchor + k for k in range(G)]
            assert touched.tolist() == expected, (anchor, column)


def test_dummies_are_inert(case, run):
    logits, confidence, load = run()
    others = run(anchors=np.array([[6, 12, 15, 9]], np.int32))
    np.testing.assert_array_equal(others[0][0, :3], logits[0, :3])
    np.testing.assert_array_equal(others[1][0, :3], confidence[0, :3])
    np.testing.assert_array_equal(others[2], load)
    per_slot = CONFIG.dspark_num_experts_per_tok
    np.testing.assert_array_equal(load.sum(axis=1), [3 * G * per_slot] * 2)


def test_blocks_of_a_row_do_not_see_each_other(run):
    alone = run(keep=np.array([[False, True, False, False]]))
    np.testing.assert_array_equal(alone[0][0, 1], run()[0][0, 1])


def test_without_heads_the_markov_bias_and_the_confidence_are_gone(case):
    w = {k: jnp.asarray(v) for k, v in case["weights"].items()}
    frozen = {k: jnp.asarray(v) for k, v in case["frozen"].items()}
    given = [jnp.asarray(case[k]) for k in ("ids", "segment", "mask")]
    blocks: Blocks = make_blocks(
        *given, jnp.asarray(ANCHORS[:, :1]), jnp.asarray(KEEP[:, :1]), size=G, noise=3
    )
    taps = jnp.asarray(case["taps"])

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(w):
        def result(heads):
            options = DrafterOptions(quantize=False, heads=heads)
            r = draft_forward(w, frozen, taps, given[1], blocks, CONFIG, options)
            assert (r.confidence is None) == (not heads)
            return r.logits

        return result(True), result(False)

    with_heads, without = both(w)
    bias = w["mtp.1.markov_head.embed.weight"][blocks.previous]
    bias = bias @ w["mtp.1.markov_head.head.weight"].T
    np.testing.assert_allclose(with_heads - without, bias, atol=1e-5)
    assert float(jnp.abs(bias).max()) > 0.1


def test_every_block_of_the_golden_decode_has_the_golden_logits_and_confidence(golden):
    config = ModelConfig.from_file(golden / "config.json")
    path = golden / "model_release.safetensors"
    tensors = load(path, config, drafter=True, dtype="float32", digest=False).tensors
    weights = jax.tree.map(jnp.asarray, from_checkpoint(tensors, config, drafter=True))
    frozen = {n: jnp.asarray(tensors[n]) for n in ("embed.weight", "head.weight")}
    taps = jnp.asarray(np.load(golden / "p40_f32.npz")["main_hidden"])
    decode = np.load(golden / "decode_p3_t24_f32.npz")
    drafted = decode["spec_draft_ids"].astype(np.int32)
    size = config.dspark_block_size
    inputs = np.full((*drafted.shape[:2], size), config.dspark_noise_token_id, np.int32)
    inputs[:, :, 0] = drafted[:, :, 0]
    # Step i has decoded position 3 + i; the token after it is the anchor.
    anchors = np.arange(4, 4 + drafted.shape[1], dtype=np.int32)[None]
    unused = jnp.zeros(inputs.shape, jnp.int32)
    blocks = Blocks(
        anchors=jnp.asarray(anchors),
        keep=jnp.ones(anchors.shape, bool),
        inputs=jnp.asarray(inputs),
        previous=jnp.asarray(drafted[:, :, :size]),
        labels=unused,
        places=unused,
        valid=unused > 0,
    )

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def forward(weights, frozen, taps, blocks):
        segment = jnp.ones(taps.shape[:2], jnp.int32)
        r = draft_forward(weights, frozen, taps, segment, blocks, config, OPTIONS)
        return r.logits, r.confidence

    logits, confidence = forward(weights, frozen, taps, blocks)
    np.testing.assert_allclose(logits, decode["spec_logits"], atol=1e-4)
    np.testing.assert_allclose(confidence, decode["spec_confidence"], atol=1e-4)
