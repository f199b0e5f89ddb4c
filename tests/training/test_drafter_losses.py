import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.training.drafter_losses import (
    DFLASH,
    DSPARK,
    block_loss,
    metric_sums,
    metrics,
    slot_weights,
)

B, A, G, V = 2, 3, 4, 6


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    valid = np.cumprod(rng.random((B, A, G)) < 0.8, axis=-1) > 0
    valid[0, 0] = True
    return {
        "logits": rng.normal(0, 2, (B, A, G, V)).astype(np.float32),
        "target": rng.normal(0, 2, (B, A, G, V)).astype(np.float32),
        "confidence": rng.normal(0, 1, (B, A, G)).astype(np.float32),
        "labels": rng.integers(0, V, (B, A, G)).astype(np.int32),
        "valid": valid,
    }


def reference(case, ce, tv, conf, decay):
    """Slot by slot, in float64."""
    sums, total = np.zeros(3), 0.0
    for b, a, k in np.ndindex(B, A, G):
        if not case["valid"][b, a, k]:
            continue
        w = np.exp(-k / decay)
        q = softmax(case["logits"][b, a, k].astype(np.float64))
        p = softmax(case["target"][b, a, k].astype(np.float64))
        l1 = np.abs(q - p).sum()
        c, s = 1 - l1 / 2, 1 / (1 + np.exp(-np.float64(case["confidence"][b, a, k])))
        bce = -(c * np.log(s) + (1 - c) * np.log(1 - s))
        sums += w * np.array([-np.log(q[case["labels"][b, a, k]]), l1, bce])
        total += w
    parts = sums / (total + 1e-6)
    return float(np.dot(parts, [ce, tv, conf])), parts


def arrays(case):
    return {k: jnp.asarray(v) for k, v in case.items()}


def test_slot_weights_fall_from_one():
    w = slot_weights(jnp.asarray([[True, True, False, False]]), 4.0)
    np.testing.assert_allclose(w, [[1, np.exp(-0.25), 0, 0]], rtol=1e-6)


def test_the_loss_of_dspark_is_that_of_a_plain_loop(case):
    loss, parts = block_loss(**arrays(case), weights=DSPARK)
    expected, (ce, tv, conf) = reference(case, 0.1, 0.9, 1.0, 4.0)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(
        [parts["ce"], parts["tv"], parts["confidence"]], [ce, tv, conf], rtol=1e-5
    )


def test_dflash_is_cross_entropy_alone(case):
    loss, parts = block_loss(**(arrays(case) | {"confidence": None}), weights=DFLASH)
    np.testing.assert_allclose(loss, reference(case, 1, 0, 0, 4.0)[0], rtol=1e-5)
    assert "confidence" not in parts


def test_acceptance_and_target_get_no_gradient(case):
    given = arrays(case)

    def confidence_part(logits, target):
        weights = type(DSPARK)(ce=0.0, tv=0.0, confidence=1.0)
        return block_loss(**(given | {"logits": logits, "target": target}), weights=weights)[0]

    for slope in jax.grad(confidence_part, argnums=(0, 1))(given["logits"], given["target"]):
        assert not np.asarray(slope).any()
    whole = jax.grad(lambda t: block_loss(**(given | {"target": t}), weights=DSPARK)[0])
    assert not np.asarray(whole(given["target"])).any()


def test_slots_that_are_not_valid_change_nothing(case):
    given = arrays(case)
    off = ~given["valid"]
    assert bool(off.any())
    changed = given | {
        "logits": given["logits"]
        + jnp.where(off[..., None], 3.0, 0.0) * jnp.arange(V, dtype=jnp.float32),
        "confidence": given["confidence"] + jnp.where(off, 2.0, 0.0),
        "labels": jnp.where(off, 0, given["labels"]),
    }
    first, parts = block_loss(**given, weights=DSPARK)
    second, others = block_loss(**changed, weights=DSPARK)
    np.testing.assert_array_equal(first, second)
    one = metric_sums(parts["acceptance"], given["confidence"], given["valid"])
    two = metric_sums(others["acceptance"], changed["confidence"], given["valid"])
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def test_metrics_by_hand():
    accepted = jnp.asarray([[0.5, 0.5], [1.0, 0.25], [0.9, 0.9]])
    trust = jnp.asarray([[0.5, 0.25], [0.5, 0.5], [0.1, 0.1]])
    valid = jnp.asarray([[True, True], [True, False], [False, False]])
    logit = jnp.log(trust) - jnp.log1p(-trust)
    found = metrics({k: np.asarray(v) for k, v in metric_sums(accepted, logit, valid).items()})
    expected = {
        "accept_rate@1": 0.75,
        "accept_rate@2": 0.5,
        "tau_probabilistic": 1 + (0.5 + 0.25 + 1.0) / 2,
        "confidence_abs_error": (0 + 0.25 + 0.5) / 3,
        "confidence_bias": (0 - 0.25 - 0.5) / 3,
        "confidence_cumprod_bias": (0 + (0.125 - 0.25) - 0.5) / 3,
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_a_valid_slot_has_a_loss_of_zero_and_no_metric(case):
    given = arrays(case) | {"valid": jnp.zeros((B, A, G), bool)}
    loss, parts = block_loss(**given, weights=DSPARK)
    assert float(loss) == 0
    sums = metric_sums(parts["acceptance"], given["confidence"], given["valid"])
    assert metrics({k: np.asarray(v) for k, v in sums.items()}) == {}
