"""What the benchmark of drafts makes of two engines' runs; clocks stand in for engines."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from deepinfer_jax.bench.drafting import compare, total
from deepinfer_jax.engine.meter import Meter


class Clocked:
    """Answers every prompt with five tokens, three of them drafts; call n takes `seconds[n]`."""

    def __init__(self, clock, seconds, drafts, tokens=5):
        self.clock, self.seconds = clock, list(seconds)
        self.drafts, self.tokens, self._meter = drafts, tokens, Meter()

    @property
    def meter(self):
        return dataclasses.replace(self._meter)

    def generate(self, prompts, params, ids):
        assert prompts is None and all(p.temperature == 0.0 for p in params)
        spent = self.seconds.pop(0)
        self.clock.now += spent
        self._meter.decode_s += spent / 2
        token_ids = list(range(self.tokens))
        answer = SimpleNamespace(token_ids=token_ids, accepted=3 if self.drafts else 0)
        return [SimpleNamespace(outputs=[answer]) for _ in ids]


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    return clock


def test_speeds_are_ratios_of_medians_after_a_warm_up(clock):
    engines = Clocked(clock, (99, 6, 8, 7), False), Clocked(clock, (99, 2, 3.5, 9), True)
    row = compare(engines, 4, "sort", [[1], [2]], 5, 3)
    assert (row.without_s, row.with_s, row.speed) == (7, 3.5, 2)
    assert (row.without_decode_s, row.with_decode_s, row.decode_speed) == (3.5, 1.75, 2)
    # Four tokens of each answer come after its first, three of them as drafts.
    assert (row.tokens, row.length, row.different) == (10, 4.0, 0)


def test_answers_that_differ_are_counted_and_a_step_that_was_not_has_no_length(clock):
    engines = Clocked(clock, (1, 1), False, tokens=2), Clocked(clock, (1, 1), False, tokens=1)
    row = compare(engines, 1, "count", [[1], [2], [3]], 5, 1)
    assert row.different == 3 and math.isnan(row.length)


def test_all_skills_together_add_times_and_steps(clock):
    engines = Clocked(clock, (1, 4, 1, 2), False), Clocked(clock, (1, 2, 1, 4), True)
    rows = [compare(engines, 1, name, [[1]], 5, 1) for name in ("a", "b")]
    whole = total(rows)
    assert (whole.skill, whole.speed, whole.length, whole.tokens) == ("all", 1.0, 4.0, 10)
