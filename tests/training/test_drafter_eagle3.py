import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.training.draft import smoke_drafter_config
from deepinfer_jax.training.drafter_blocks import Targets
from deepinfer_jax.training.drafter_forward import DrafterOptions
from deepinfer_jax.training.eagle3 import eagle3_initial_values, eagle3_objective

CONFIG = dataclasses.replace(smoke_drafter_config(), sliding_window=4)
D, T, STEPS = CONFIG.hidden_size, 16, 3
START = 7  # the one index that counts: tokens 8 to 11 are trained


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    weights = eagle3_initial_values(CONFIG, 0)
    names = ("embed.weight", "head.weight")
    frozen = {n: rng.normal(0, 0.5, (CONFIG.vocab_size, D)).astype(np.float32) for n in names}
    mask = np.zeros((1, T), bool)
    mask[0, START + 1 : START + STEPS + 2] = True
    targets = Targets(
        ids=rng.integers(0, CONFIG.vocab_size, (1, T)).astype(np.int32),
        segment=np.array([[1] * 3 + [2] * 13], np.int32),
        mask=mask,
        taps=rng.normal(size=(1, T, 2 * D)).astype(np.float32),
        hidden=rng.normal(size=(1, T, D)).astype(np.float32),
    )
    return {"weights": weights, "frozen": frozen, "targets": targets}


@pytest.fixture(scope="module")
def run(case):
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def objective(weights, frozen, targets):
        options = DrafterOptions(quantize=False)
        return eagle3_objective(weights, frozen, targets, CONFIG, options, STEPS)

    def call(**changes):
        targets = dataclasses.replace(case["targets"], **changes)
        given = jax.tree.map(jnp.asarray, (case["weights"], case["frozen"], targets))
        return jax.device_get(objective(*given))

    return call


def shifted(array, column):
    array = array.copy()
    array[0, column] += array.dtype.type(1)
    return array


def changes(run, case, name):
    """Columns of a target array whose change the loss notices."""
    base = run()[0]
    array = getattr(case["targets"], name)
    return [t for t in range(T) if run(**{name: shifted(array, t)})[0] != base]


def test_only_one_chain_counts_and_the_last_step_has_the_least_of_it(run):
    sums = run()[1]
    # Index 7 predicts tokens 9, 10, 11; index 8, after token 9, predicts 10, 11; index 9 only 11.
    assert sums["slots"].tolist() == [3, 2, 1]


def test_a_chain_sees_target_states_up_to_its_index_and_no_other_segment(run, case):
    mask = np.zeros((1, T), bool)
    mask[0, START + 1 : START + 3] = True
    alone = partial(run, mask=mask)
    assert alone()[1]["slots"].tolist() == [1, 0, 0]
    assert changes(alone, case, "taps") == list(range(3, START + 1))
    # Its tokens are those one place later; none comes from after the last that was accepted.
    assert changes(alone, case, "ids") == list(range(4, START + 2))
    assert changes(alone, case, "hidden") == [START + 1]


def test_later_steps_take_the_true_tokens_of_their_chain_and_the_targets_word_on_the_next(
    run, case
):
    assert changes(run, case, "hidden") == list(range(START + 1, START + STEPS + 1))
    # Token 11 is a label only: the loss is against distributions, so it is not noticed.
    assert changes(run, case, "ids") == list(range(4, START + STEPS + 1))


def test_the_loss_is_a_discounted_cross_entropy_against_the_target(run, case):
    """One step's loss is recovered by masks that leave one, two and three valid steps."""
    losses = []
    for count in range(1, STEPS + 1):
        mask = np.zeros((1, T), bool)
        mask[0, START + 1 : START + count + 2] = True
        loss, sums = run(mask=mask)
        assert sums["slots"].tolist() == [max(count - k, 0) for k in range(STEPS)]
        losses.append(float(loss))
    head = case["frozen"]["head.weight"].astype(np.float64)
    logits = case["targets"].hidden[0, START + 1] @ head.T
    odds = np.exp(logits - logits.max())
    entropy = -np.sum(odds / odds.sum() * np.log(odds / odds.sum()))
    # A cross-entropy is at least the target's entropy, and at first near that of a blind guess.
    assert entropy / T < losses[0] < 3 * np.log(CONFIG.vocab_size) / T
    assert losses[0] < losses[1] < losses[2]


def test_rotary_positions_follow_the_steps(run, case):
    """Moving the whole segment leaves every score as it is: only distances count."""
    moved = {
        name: np.roll(getattr(case["targets"], name), 2, axis=1)
        for name in ("ids", "mask", "taps", "hidden")
    }
    segment = np.array([[1] * 5 + [2] * 11], np.int32)
    np.testing.assert_allclose(run(**moved, segment=segment)[0], run()[0], rtol=1e-4)
