import pytest

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.training.settings import TrainingSettings, override


def test_assignments_are_applied_with_the_type_of_their_setting():
    changed = override(TrainingSettings(), ["lr=3e-4", "steps=100"])
    assert changed.lr == 3e-4
    assert changed.steps == 100
    assert isinstance(changed.steps, int)


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(ConfigError) as refusal:
        override(TrainingSettings(), ["learning_rate=1"])
    assert "'learning_rate'" in refusal.value.what
    assert "lr" in refusal.value.do


def test_a_value_of_another_type_is_refused():
    with pytest.raises(ConfigError) as refusal:
        override(TrainingSettings(), ["steps=many"])
    assert "steps was given 'many'" in refusal.value.what
    assert "int" in refusal.value.why


def test_phases_follow_the_step():
    s = TrainingSettings(steps=1000, long_from=0.1, long_every=4, qat_from=0.9, ramp=0.5)
    assert [s.is_long(n) for n in (96, 100, 101, 104)] == [False, True, False, True]
    assert [s.quantizes(n) for n in (899, 900)] == [False, True]
    assert [s.level(n) for n in (0, 250, 500, 900)] == [0.0, 0.5, 1.0, 1.0]
