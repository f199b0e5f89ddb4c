"""The training forward of a block drafter against a plain single block, and what it sees."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.training.draft import smoke_drafter_config
from deepinfer_jax.training.drafter_blocks import Blocks, make_blocks
from deepinfer_jax.training.drafter_forward import DrafterOptions, draft_forward
from deepinfer_jax.training.parameters import initial_values

CONFIG = dataclasses.replace(smoke_drafter_config(), sliding_window=5)
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


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, weight):
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + CONFIG.rms_norm_eps)


def rope(x, position, sign=1):
    """One vector: the last channels turned pair by pair as complex numbers."""
    half = CONFIG.qk_rope_head_dim // 2
    turn = np.exp(1j * sign * position * CONFIG.rope_theta ** (-np.arange(half) / half))
    pairs = x[-2 * half :].reshape(half, 2)
    turned = (pairs[:, 0] + 1j * pairs[:, 1]) * turn
    return np.concatenate([x[: -2 * half], np.stack([turned.real, turned.imag], -1).ravel()])


def mix(h, w, prefix):
    n = CONFIG.hc_mult
    flat = h.reshape(-1)
    m = w[f"{prefix}_fn"] @ flat / np.sqrt(np.mean(flat * flat) + 1e-20)
    scale, base = w[f"{prefix}_scale"], w[f"{prefix}_base"]
    pre = sigmoid(m[:n] * scale[0] + base[:n]) + CONFIG.hc_eps
    post = 2 * sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n])
    c = (m[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
    c = np.exp(c - c.max(1, keepdims=True))
    c = c / c.sum(1, keepdims=True) + CONFIG.hc_eps
    c = c / (c.sum(0) + CONFIG.hc_eps)
    for _ in range(CONFIG.hc_sinkhorn_iters - 1):
        c = c / (c.sum(1, keepdims=True) + CONFIG.hc_eps)
        c = c / (c.sum(0) + CONFIG.hc_eps)
    return pre, post, c


def experts(u, w, prefix):
    def run(w1, w2, w3):
        gate = np.minimum(w1 @ u, CONFIG.swiglu_limit)
        up = np.clip(w3 @ u, -CONFIG.swiglu_limit, CONFIG.swiglu_limit)
        return w2 @ (gate * sigmoid(gate) * up)

    scores = np.sqrt(np.log1p(np.exp(w[f"{prefix}.gate.weight"] @ u)))
    top = np.argsort(-(scores + w[f"{prefix}.gate.bias"]))[: CONFIG.dspark_num_experts_per_tok]
    y = run(*(w[f"{prefix}.shared_experts.w{i}.weight"] for i in (1, 2, 3)))
    for e in top:
        part = run(*(w[f"{prefix}.experts.w{i}.weight"][e] for i in (1, 2, 3)))
        y = y + CONFIG.routed_scaling_factor * scores[e] / scores[top].sum() * part
    return y


def one_block(case, tokens, taps, position):
    """One block as it is drafted: `tokens` [g + 1] from the anchor on, taps [n, m d] before it."""
    w = {k: v.astype(np.float64) for k, v in case["weights"].items()}
    embed, head = (case["frozen"][k].astype(np.float64) for k in ("embed.weight", "head.weight"))
    heads, width = CONFIG.num_attention_heads, CONFIG.head_dim
    first = position - len(taps)
    main = rms(taps.astype(np.float64) @ w["mtp.0.main_proj.weight"].T, w["mtp.0.main_norm.weight"])
    slots = [tokens[0]] + [CONFIG.dspark_noise_token_id] * (G - 1)
    h = [np.repeat(embed[token][None], CONFIG.hc_mult, axis=0) for token in slots]
    pre = [np.eye(CONFIG.hc_mult)[0]] * G
    for stage in range(CONFIG.num_nextn_predict_layers):
        p, a = f"mtp.{stage}", f"mtp.{stage}.attn"

        def latent(x, t, a=a):
            return rope(rms(w[f"{a}.wkv.weight"] @ x, w[f"{a}.kv_norm.weight"]), t)

        u = [rms(pre[k] @ h[k], w[f"{p}.attn_norm.weight"]) for k in range(G)]
        keys = [latent(x, first + i) for i, x in enumerate(main)]
        keys = np.stack(keys + [latent(u[k], position + k) for k in range(G)])
        for k in range(G):
            qr = rms(w[f"{a}.wq_a.weight"] @ u[k], w[f"{a}.q_norm.weight"])
            q = (w[f"{a}.wq_b.weight"] @ qr).reshape(heads, width)
            o = []
            for head_number in range(heads):
                s = keys @ rope(q[head_number], position + k) / np.sqrt(width)
                s = np.append(s, w[f"{a}.attn_sink"][head_number])
                weight = np.exp(s - s.max())
                o.append(rope((weight / weight.sum())[:-1] @ keys, position + k, -1))
            groups = np.concatenate(o).reshape(CONFIG.o_groups, -1)
            low = w[f"{a}.wo_a.weight"].reshape(CONFIG.o_groups, CONFIG.o_lora_rank, -1)
            z = np.concatenate([m @ g for m, g in zip(low, groups, strict=True)])
            pre_a, post, comb = mix(h[k], w, f"{p}.hc_attn")
            h[k] = post[:, None] * (w[f"{a}.wo_b.weight"] @ z) + comb.T @ h[k]
            pre_f, post, comb = mix(h[k], w, f"{p}.hc_ffn")
            y = experts(rms(pre_a @ h[k], w[f"{p}.ffn_norm.weight"]), w, f"{p}.ffn")
            h[k] = post[:, None] * y + comb.T @ h[k]
            pre[k] = pre_f
    last = f"mtp.{CONFIG.num_nextn_predict_layers - 1}"
    logits, confidence = [], []
    for k in range(G):
        z, e = pre[k] @ h[k], w[f"{last}.markov_head.embed.weight"][tokens[k]]
        bias = w[f"{last}.markov_head.head.weight"] @ e
        logits.append(head @ rms(z, w[f"{last}.norm.weight"]) + bias)
        confidence.append(w[f"{last}.confidence_head.proj.weight"][0] @ np.concatenate([z, e]))
    return np.stack(logits), np.array(confidence)


# Anchor 6 has two columns of its segment before it, 12 a full window; positions are columns.
@pytest.mark.parametrize(("index", "anchor", "first"), [(0, 6, 4), (1, 12, 7)])
def test_a_block_is_that_of_a_plain_single_block(case, run, index, anchor, first):
    logits, confidence, _ = run()
    tokens, taps = case["ids"][0, anchor : anchor + G], case["taps"][0, first:anchor]
    expected, trust = one_block(case, tokens, taps, anchor)
    np.testing.assert_allclose(logits[0, index], expected, atol=2e-4)
    np.testing.assert_allclose(confidence[0, index], trust, atol=2e-4)


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
