import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.training.attend import attend, entry_masks, window_mask

B, T, H, D, W = 2, 32, 3, 8, 8
SEGMENTS = np.ones((B, T), np.int32)
SEGMENTS[1, 18:] = 2
SEGMENTS[0, 30:] = 0


def plain(q, kv, entries, sink, seen, visible):
    """The same attention over full score matrices, differentiated by JAX."""
    near = jnp.einsum("bqhd,bkd->bqhk", q, kv)
    near = jnp.where(seen[:, :, None, :], near, -jnp.inf)
    far = jnp.einsum("bqhd,bnd->bqhn", q, entries)
    far = jnp.where(visible[:, :, None, :], far, -jnp.inf)
    logits = jnp.concatenate([near, far, jnp.broadcast_to(sink[:, None], (B, T, H, 1))], -1)
    p = jax.nn.softmax(logits, axis=-1)
    o = jnp.einsum("bqhk,bkd->bqhd", p[..., :T], kv)
    return o + jnp.einsum("bqhn,bnd->bqhd", p[..., T:-1], entries), p[..., T:-1].mean(2)


def arrays():
    rng = np.random.default_rng(0)
    shapes = (B, T, H, D), (B, T, D), (B, T // 2, D), (H,)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


def full_masks():
    row, column = np.arange(T)[:, None], np.arange(T)[None, :]
    same = SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
    valid = SEGMENTS[:, :, None] > 0
    seen = (column <= row) & (row - column < W) & same & valid
    ends = SEGMENTS[:, 1::2]
    closed = np.arange(T // 2)[None, :] < (np.arange(T)[:, None] + 1) // 2
    visible = closed & (SEGMENTS[:, :, None] == ends[:, None, :]) & valid
    return jnp.asarray(seen), jnp.asarray(visible)


def test_values_mass_and_gradients_equal_those_of_full_matrices():
    seen, visible = full_masks()
    segments = jnp.asarray(SEGMENTS)
    masks = entry_masks(segments, 2, [0, 8, 24, 32])
    g = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, H, D)), jnp.float32)

    def ours(*a):
        return attend(*a, window_mask(segments, W), masks)

    (o, mass, _), pull = jax.vjp(ours, *arrays())
    (expected, expected_mass), pull_plain = jax.vjp(lambda *a: plain(*a, seen, visible), *arrays())
    np.testing.assert_allclose(o, expected, atol=1e-5)
    for part, low, high in zip(mass, (0, 8, 24), (8, 24, 32), strict=True):
        count = part.shape[2]
        np.testing.assert_allclose(part, expected_mass[:, low:high, :count], atol=1e-6)
    zeros = jax.tree.map(jnp.zeros_like, (mass, jnp.zeros(H)))
    got = pull((g, *zeros))
    wanted = pull_plain((g, jnp.zeros_like(expected_mass)))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_padding_rows_attend_to_nothing():
    segments = jnp.asarray(SEGMENTS)
    masks = entry_masks(segments, 2, [0, T])
    o, _, _ = attend(*arrays(), window_mask(segments, W), masks)
    assert np.all(np.asarray(o)[0, 30:] == 0)


def test_the_peak_is_the_largest_visible_logit_of_each_head():
    q, kv, entries, sink = arrays()
    segments = jnp.asarray(SEGMENTS)
    masks = entry_masks(segments, 2, [0, 16, T])
    _, _, peak = attend(q, kv, entries, sink, window_mask(segments, W), masks)
    seen, visible = full_masks()
    near = np.where(seen[:, :, None], np.einsum("bqhd,bkd->bqhk", q, kv), -np.inf)
    far = np.where(visible[:, :, None], np.einsum("bqhd,bnd->bqhn", q, entries), -np.inf)
    expected = np.maximum(near.max((0, 1, 3)), far.max((0, 1, 3)))
    np.testing.assert_allclose(peak, expected, rtol=1e-5)
