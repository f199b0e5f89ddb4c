"""What drafts add to a plan: exact bytes of the state, and an estimate of a step's temporaries."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from short_llm import short_config, shorter_config

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine_settings import limits_of
from deepinfer_jax.model.arithmetic import arithmetic
from deepinfer_jax.model.params import build_params
from deepinfer_jax.model.transformer import Network
from deepinfer_jax.ops.device import Device
from deepinfer_jax.ops.table import select
from deepinfer_jax.report.fit import Planner
from deepinfer_jax.report.plan import MemoryPlan, memory_plan, nbytes, page_updates, told
from deepinfer_jax.runner.compile import lower_step, one_device_mesh
from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.runner.schedule import StepInput
from deepinfer_jax.runner.step import StepOptions, init_state
from deepinfer_jax.settings import EngineConfig

WIDE = 32768  # a vocabulary whose logits take more than all else in a step
SLOTS, ROWS, POSITIONS = 4, 64, 512
RULES = {
    "coupled": {},
    "rejection": {"verification": "rejection"},
    "block": {"verification": "block"},
    "original": {"sampler": "original"},
}


def network(raw, drafter=True):
    config = ModelConfig.from_dict(raw)
    return Network(config, arithmetic("f32"), select(Device.described("cpu")), False, drafter)


def asked(rule="coupled", **changes):
    sizes = {"arithmetic": "f32", "max_num_seqs": SLOTS, "max_num_batched_tokens": ROWS}
    return EngineConfig(**(sizes | RULES[rule] | changes))


def plan(net, engine, drafts=5) -> MemoryPlan:
    return memory_plan(net, engine, POSITIONS, free=None, drafts=drafts)


def analysis(net, engine, drafts=5):
    """What XLA says of the largest step program, from shapes alone."""
    shape = jax.ShapeDtypeStruct
    params = build_params(
        net.config,
        lambda spec: shape(spec.full_shape, jnp.float32),
        token_map=shape((net.config.vocab_size,), jnp.int32),
        positions=POSITIONS,
        drafter=True,
    )
    options = StepOptions(
        draw=engine.sampler,
        verification=engine.verification,
        confidence_temperature=(1.0,) * drafts,
    )
    state = jax.eval_shape(
        lambda: init_state(
            net,
            slots=SLOTS,
            positions=POSITIONS,
            drafts=drafts,
            compared=options.rule != "coupled",
        )
    )
    bucket = Bucket(ROWS, ROWS, SLOTS, page_updates(SLOTS, POSITIONS), drafts)
    inputs = StepInput(shape((bucket.ints,), jnp.int32), shape((SLOTS, 2), jnp.float32), None)
    arguments = params, state, inputs
    lowered = lower_step(net, one_device_mesh(), arguments, bucket=bucket, options=options)
    # Buffers are assigned before machine code is made, and that need not be fast here.
    return lowered.compile({"xla_backend_optimization_level": 0}).memory_analysis()


@pytest.mark.parametrize("rule", RULES)
def test_the_state_with_drafts_is_planned_to_the_byte(rule):
    net, engine = network(shorter_config()), asked(rule, max_backtracking_tokens=8)
    made, config = plan(net, engine, drafts=3), net.config
    assert engine.rule == rule
    state = init_state(
        net,
        slots=SLOTS,
        positions=POSITIONS,
        drafts=3,
        compared=rule != "coupled",
        backtrack=8,
    )
    assert made.cache == nbytes(state)
    record = config.head_dim * 4
    layers = config.num_hidden_layers + len(config.stages)
    assert made.windows == layers * SLOTS * (config.sliding_window + 8) * record
    logprobs = 0 if rule == "coupled" else SLOTS * 3 * config.vocab_size * 4
    assert made.draft_logprobs == made.parts["draft log-probs"] == logprobs
    assert sum(made.parts.values()) == made.total
    assert "of 512 tokens with 3 drafts each" in told(made)


# `block` holds what `rejection` holds.
@pytest.mark.parametrize("rule", ["coupled", "rejection", "original"])
def test_the_peak_of_a_step_with_drafts_is_within_a_tenth_of_the_compiled_programs(rule):
    net, engine = network(shorter_config() | {"vocab_size": WIDE}), asked(rule)
    made, said = plan(net, engine), analysis(net, engine)
    peak = said.argument_size_in_bytes + said.temp_size_in_bytes
    assert made.total == pytest.approx(peak, rel=0.1)
    assert made.step == pytest.approx(said.temp_size_in_bytes, rel=0.1)
    assert said.alias_size_in_bytes == made.cache
    inputs = said.argument_size_in_bytes - (made.total - made.step)
    assert 0 < inputs < made.step
    # Every row after which a token is drawn has logits: without them the estimate fails.
    assert made.step > 3 * plan(net, engine, drafts=1).step / 2


def test_activations_of_a_block_are_estimated_as_well_as_those_of_the_layers():
    net, engine = network(short_config()), asked()
    made, said = plan(net, engine), analysis(net, engine)
    assert made.total == pytest.approx(
        said.argument_size_in_bytes + said.temp_size_in_bytes, rel=0.1
    )
    assert made.step == pytest.approx(said.temp_size_in_bytes, rel=0.3)


def test_a_step_has_a_row_for_every_token_that_may_be_verified_and_one_more():
    net, few = network(shorter_config()), asked(max_num_batched_tokens=8)
    for drafts in (1, 5):
        made = plan(net, few, drafts)
        assert made.rows == SLOTS * (1 + drafts) + 1
        assert limits_of(made, net.config).drafts == drafts  # which the engine would else refuse


def test_what_is_offered_can_be_drafted_with():
    net, engine = network(shorter_config()), asked("block", max_model_len=POSITIONS)
    whole = Planner(net, None, drafts=5).fitting(engine)
    made = Planner(net, whole.total - whole.cache // 2, drafts=5)
    verdict = made.judge(engine)
    assert verdict.refusal is not None and verdict.alternatives
    for way in verdict.alternatives:
        assert "engram" not in way.changes
        changed = made.fitting(dataclasses.replace(engine, **way.changes))
        assert changed.fits and limits_of(changed, net.config).drafts == 5


def test_weights_in_other_forms_take_room_for_the_drafter_too():
    config = ModelConfig.from_dict(shorter_config())
    for arithmetic_name, formats in (("release", "dequantized"), ("f32", "packed")):
        ops = select(Device.described("cpu"))
        net = Network(config, arithmetic(arithmetic_name), ops, False, True)
        engine = asked(weights=formats, arithmetic=arithmetic_name)
        assert plan(net, engine).step > plan(net, engine, drafts=0).step
