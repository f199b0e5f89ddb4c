import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.training.draft import smoke_drafter_config
from deepinfer_jax.training.drafter_batches import (
    TAP_CONVENTION,
    cached_batches,
    check_cache,
    plans,
    samples_of,
)
from deepinfer_jax.training.drafter_blocks import (
    choose_anchors,
    context_mask,
    make_blocks,
    rows_at,
    trained_tokens,
)
from deepinfer_jax.training.target_cache import TargetCache, TargetCacheWriter

#            0  1  2  3  4  5  6  7  8  9 10 11
IDS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]]
SEGMENT = [[1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0]]
MASK = [[0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0]]


def arrays():
    return (
        jnp.asarray(IDS, jnp.int32),
        jnp.asarray(SEGMENT, jnp.int32),
        jnp.asarray(MASK, bool),
    )


def blocks(anchors, keep, size=3):
    ids, segment, mask = arrays()
    return make_blocks(
        ids,
        segment,
        mask,
        jnp.asarray([anchors], jnp.int32),
        jnp.asarray([keep], bool),
        size=size,
        noise=99,
    )


def test_loss_weights_stand_before_the_tokens_they_train():
    weight = jnp.asarray([[0.0, 0.5, 0.0, 2.0]])
    assert trained_tokens(weight).tolist() == [[False, False, True, False]]


def test_anchors_are_trained_with_their_successor_in_one_segment():
    _, segment, mask = arrays()
    for seed in range(5):
        anchors, keep = choose_anchors(jax.random.key(seed), mask, segment, 8)
        # 5 | 6 is a border, 7 is followed by an untrained token, 10 by padding
        assert anchors.tolist() == [[2, 3, 4, 6, 9, 0, 0, 0]]
        assert keep.tolist() == [[True] * 5 + [False] * 3]


def test_anchors_are_drawn_uniformly_without_replacement_and_ascend():
    _, segment, mask = arrays()
    draw = jax.jit(jax.vmap(lambda key: choose_anchors(key, mask, segment, 2)[0][0]))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
    assert (drawn[:, 0] < drawn[:, 1]).all()
    counts = {pair: 0 for pair in itertools.combinations((2, 3, 4, 6, 9), 2)}
    for pair in drawn.tolist():
        counts[tuple(pair)] += 1
    # ten pairs, 400 each: five standard deviations are 95
    assert max(abs(n - 400) for n in counts.values()) < 95


def test_more_anchors_than_columns_are_dummies():
    _, segment, mask = arrays()
    anchors, keep = choose_anchors(jax.random.key(0), mask, segment, 20)
    assert anchors.shape == (1, 20)
    assert int(keep.sum()) == 5


def test_blocks_by_hand():
    made = blocks([2, 4, 9, 0], [True, True, True, False])
    assert made.inputs.tolist() == [[[7, 99, 99], [9, 99, 99], [14, 99, 99], [99, 99, 99]]]
    assert made.previous[0, :3].tolist() == [[7, 8, 9], [9, 10, 11], [14, 15, 16]]
    assert made.labels[0, :3].tolist() == [[8, 9, 10], [10, 11, 12], [15, 16, 16]]
    assert made.places[0, :3].tolist() == [[2, 3, 4], [4, 5, 6], [9, 10, 11]]
    assert made.valid.tolist() == [
        [[True, True, True], [True, False, False], [True, False, False], [False] * 3]
    ]


def test_a_slot_after_an_untrained_label_never_counts():
    ids, segment, _ = arrays()
    mask = jnp.asarray([[1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]], bool)
    anchors, keep = jnp.asarray([[1]], jnp.int32), jnp.asarray([[True]])
    made = make_blocks(ids, segment, mask, anchors, keep, size=4, noise=99)
    assert made.valid.tolist() == [[[True, False, False, False]]]


def test_context_is_strictly_before_the_anchor_in_its_window_and_segment():
    _, segment, _ = arrays()
    made = blocks([4, 9, 5], [True, True, False])
    seen = context_mask(made, segment, 3)[0]
    assert [np.flatnonzero(row).tolist() for row in seen] == [[1, 2, 3], [6, 7, 8], []]
    wide = context_mask(made, segment, 8)[0]
    assert [np.flatnonzero(row).tolist() for row in wide] == [[0, 1, 2, 3], [6, 7, 8], []]


def test_rows_are_taken_by_column():
    x = jnp.arange(12.0).reshape(2, 3, 2)
    found = rows_at(x, jnp.asarray([[[2, 0]], [[1, 1]]], jnp.int32))
    assert found.tolist() == [[[4, 5], [0, 1]], [[8, 9], [8, 9]]]


def test_a_plan_packs_each_epoch_in_its_own_order_and_is_the_same_from_any_step():
    lengths = np.array([3, 5, 2, 4, 1, 5, 3, 2])
    found = list(itertools.islice(plans(lengths, 2, 6, 7), 6))
    for plan in found:
        assert len(plan) == 2
        assert all(sum(lengths[i] for i in row) <= 6 for row in plan)
    order = np.random.default_rng(7).permutation(8).tolist()
    first = [i for plan in found for row in plan for i in row][: len(order)]
    assert first[:4] == order[:4]
    members = [i for plan in found[:2] for row in plan for i in row]
    assert len(set(members)) == len(members)


def test_a_cache_becomes_packed_rows_again(tmp_path):
    config = smoke_drafter_config()
    d, rng = config.hidden_size, np.random.default_rng(0)
    ids, segment, mask = (np.asarray(a) for a in arrays())
    taps = np.asarray(jnp.asarray(rng.normal(size=(1, 12, 2 * d)), jnp.bfloat16))
    hidden = np.asarray(jnp.asarray(rng.normal(size=(1, 12, d)), jnp.bfloat16))
    free = {"tap_convention": TAP_CONVENTION}
    layers = config.dspark_target_layer_ids
    with TargetCacheWriter(tmp_path, target_layer_ids=layers, hidden_size=d, free=free) as writer:
        for one in samples_of(ids, segment, mask, taps, hidden, least=2):
            writer.add(one)
    cache = TargetCache(tmp_path)
    check_cache(cache, config, 12)
    batch = next(cached_batches(cache, 1, 12, 0, 0))
    order = np.random.default_rng(0).permutation(2).tolist()
    columns = np.concatenate([np.flatnonzero(segment[0] == i + 1) for i in order])
    assert batch["segment"].tolist() == [[1] * (6 - order[0]) + [2] * (5 + order[0]) + [0]]
    for name, rows in (("ids", ids), ("mask", mask), ("taps", taps), ("hidden", hidden)):
        expected = rows[0, columns].astype(np.float32)
        np.testing.assert_array_equal(batch[name][0, :11].astype(np.float32), expected)


@pytest.mark.parametrize(
    ("free", "columns", "message"),
    [
        ({}, 12, "has tap_convention None; the model needs 'mean of the streams"),
        ({"tap_convention": TAP_CONVENTION}, 4, "1 samples, the longest of 5 tokens; rows have 4"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(tmp_path, free, columns, message):
    config = smoke_drafter_config()
    d, ones = config.hidden_size, np.ones((1, 5), np.int32)
    zeros = [np.asarray(jnp.zeros((1, 5, n * d), jnp.bfloat16)) for n in (2, 1)]
    layers = config.dspark_target_layer_ids
    with TargetCacheWriter(tmp_path, target_layer_ids=layers, hidden_size=d, free=free) as writer:
        writer.add(next(samples_of(ones, ones, ones > 0, *zeros, least=2)))
    with pytest.raises(ConfigError) as refusal:
        check_cache(TargetCache(tmp_path), config, columns)
    assert message in refusal.value.what
