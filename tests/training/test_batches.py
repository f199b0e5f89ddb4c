import jax
import numpy as np
import pytest

from deepinfer_jax.training.batches import Feed, Planned, Shape, stacked, synthetic
from deepinfer_jax.training.nano_data import Request
from deepinfer_jax.training.smoke import smoke_config
from deepinfer_jax.training.steps import data_mesh

SHORT, LONG = Shape(4, 64, 64), Shape(2, 64, 32)


def source():
    return synthetic(smoke_config(), SHORT, LONG)


def test_the_feed_gives_each_device_its_own_batch_in_the_order_of_the_plan():
    mesh = data_mesh(jax.devices()[:2])
    plan = [Planned(7, "short", 0.5), Planned(8, "long", 0.5)]
    with Feed(source(), plan, 3, mesh) as feed:
        first, second = feed.next(), feed.next()
    assert first["ids"].shape == (8, 64)
    assert second["ids"].shape == (4, 64)
    expected = stacked(list(source()([Request("short", 3, n, 0.5) for n in (14, 15)])))
    for name, value in expected.items():
        np.testing.assert_array_equal(first[name], value)
    shards = [s.data.shape for s in first["ids"].addressable_shards]
    assert shards == [(4, 64), (4, 64)]


def test_an_error_of_the_source_reaches_the_trainer():
    def broken(requests):
        del requests
        raise ValueError("no data")
        yield

    with Feed(broken, [Planned(0, "short", 0.0)], 0, data_mesh(jax.devices()[:1])) as feed:
        with pytest.raises(ValueError, match="no data"):
            feed.next()


def test_counting_rows_train_every_token_but_the_last_of_a_segment():
    batch = next(iter(source()([Request("long", 0, 0, 1.0)])))
    counted = batch.weight > 0
    assert not counted[:, :32].any()
    assert counted[:, 32:63].all()
    following = (batch.ids[:, 32:63] + 1) % 64
    np.testing.assert_array_equal(batch.ids[:, 33:], following)
