"""The estimate of a step's temporaries against what XLA says of the compiled program."""

import pytest

from deepinfer_jax.report.plan import memory_plan, nbytes
from deepinfer_jax.report.temporaries import step_temporaries
from deepinfer_jax.runner.compile import lower_step
from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.runner.schedule import StepInput
from deepinfer_jax.runner.step import StepOptions, init_state


@pytest.fixture(scope="module")
def analysis(llm, compiled):
    """(plan, what XLA says) of the largest step program, which other tests of this model share."""
    net, plan = llm.assembled, llm.plan()
    state = init_state(net.network, slots=plan.slots, positions=plan.positions)
    bucket = Bucket(plan.rows, plan.rows, plan.slots, plan.slots + 1 + plan.pages // plan.slots)
    inputs = StepInput(*bucket.empty(), None)
    lowered = lower_step(
        net.network,
        net.mesh,
        (net.params, state, inputs),
        bucket=bucket,
        options=StepOptions(),
        kept=next(compiled.iterdir()),
    )
    return plan, lowered.compile().memory_analysis()


def test_the_planned_peak_is_within_a_tenth_of_the_compiled_programs(analysis):
    plan, said = analysis
    peak = said.argument_size_in_bytes + said.temp_size_in_bytes
    assert plan.total == pytest.approx(peak, rel=0.1)
    # Most of the peak are arguments, which are exact: the estimate must be good by itself.
    assert plan.step == pytest.approx(said.temp_size_in_bytes, rel=0.3)


def test_all_other_parts_are_exact(analysis, llm):
    plan, said = analysis
    inputs = said.argument_size_in_bytes - (plan.total - plan.step)
    assert 0 < inputs < plan.step
    held = nbytes(llm.assembled.params)
    assert plan.weights + plan.engram_tables == held


def test_the_caches_are_updated_in_place(analysis):
    plan, said = analysis
    assert said.alias_size_in_bytes == plan.cache


def test_packed_weights_need_room_where_they_are_expanded(llm):
    net, sizes = llm.assembled.network, {"rows": 64, "parts": 4, "slots": 4, "positions": 1088}
    assert step_temporaries(net, packed=True, **sizes) > step_temporaries(
        net, packed=False, **sizes
    )


def test_temporaries_do_not_grow_with_the_prompt_beyond_a_step(llm):
    asked = llm._settings.engine
    plans = [memory_plan(llm.assembled.network, asked, n, free=None) for n in (512, 1024)]
    scores = plans[1].step - plans[0].step
    sources = sum(p.owns_index for p in llm.config.layers)
    assert 0 < scores <= plans[0].rows * (512 + 8) * 4 * (sources + 1)
