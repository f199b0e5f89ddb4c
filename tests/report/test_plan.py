"""What a plan counts, and what is said when the device runs out of memory in spite of it."""

import dataclasses
import tomllib

import jax
import jax.numpy as jnp
import pytest
from short_llm import short_config

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import MemoryPlanError
from deepinfer_jax.model.arithmetic import arithmetic
from deepinfer_jax.model.cache import BACKTRACK, PAGE
from deepinfer_jax.model.transformer import Network
from deepinfer_jax.ops.device import Device
from deepinfer_jax.ops.table import select
from deepinfer_jax.report.plan import memory_plan, nbytes, out_of_memory, size_text
from deepinfer_jax.runner.step import init_state
from deepinfer_jax.settings import EngineConfig, package_folder

CONFIG = ModelConfig.from_dict(short_config())
NET = Network(CONFIG, arithmetic("f32"), select(Device.described("cpu")))
ENGINE = EngineConfig(max_num_seqs=3, max_num_batched_tokens=64)


def plan(positions=300, free=None, net=NET, **engine):
    return memory_plan(net, dataclasses.replace(ENGINE, **engine), positions, free=free)


def test_the_parts_of_the_cache_are_those_of_the_state():
    made = plan()
    state = jax.eval_shape(lambda: init_state(NET, slots=3, positions=300))
    assert made.cache == nbytes(state)
    c = CONFIG
    ring = c.sliding_window + BACKTRACK
    assert made.windows == c.num_hidden_layers * 3 * ring * c.head_dim * 4
    per_page = sum(PAGE // c.compress_ratios[layer] for layer in c.kv_source_layer_ids)
    assert made.entries == (1 + 3 * 3) * per_page * c.head_dim * 4
    assert made.index_keys == (1 + 3 * 3) * per_page * c.index_head_dim * 4
    assert made.slot_state == made.cache - made.windows - made.entries - made.index_keys > 0


def test_pages_that_were_asked_for_are_counted_in_place_of_all_that_could_be_used():
    few, all_of_them = plan(pages=4), plan()
    assert (few.pages, all_of_them.pages) == (4, 9)
    assert few.entries == all_of_them.entries // 2 and few.windows == all_of_them.windows


def test_a_step_has_a_row_for_every_sequence_and_one_more():
    assert plan().rows == 64
    assert plan(max_num_seqs=100).rows == 101


def test_a_plan_as_json_adds_up():
    made = plan(free=10**9)
    told = made.as_json()
    parts = ("weights", "engram_tables", "windows", "entries", "index_keys", "slot_state", "step")
    assert told["total"] == sum(told[name] for name in parts) == made.total
    assert told["left"] == 10**9 - made.total and told["fits"] is True
    assert (told["page"], told["positions"], told["slots"]) == (PAGE, 300, 3)
    unknown = plan().as_json()
    assert (unknown["free"], unknown["left"], unknown["fits"]) == (None, None, None)


@pytest.mark.parametrize(
    ("count", "text"),
    [(2**30, "1.000 GiB"), (3 * 2**29, "1.500 GiB"), (2**30 - 1, "1024.000 MiB"), (0, "0.000 MiB")],
)
def test_sizes_are_told_in_a_unit_that_shows_them(count, text):
    assert size_text(count) == text


def test_running_out_of_memory_is_told_with_the_plan():
    made = plan(free=10**9)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jnp.zeros(1 << 46, jnp.int8))
    error = out_of_memory(caught.value, made)
    assert isinstance(error, MemoryPlanError)
    assert error.what == (
        f"The device ran out of memory while it tried to allocate {1 << 46:,} bytes; "
        f"{size_text(made.total)} were planned of {size_text(10**9)} that were free."
    )
    for name, size in made.parts.items():
        assert f"{name} {size_text(size)}" in error.why
    assert "lower engine.max_num_seqs, engine.max_model_len or" in error.do


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no")
    assert out_of_memory(caught.value, plan()) is None
    assert out_of_memory(MemoryError("RESOURCE_EXHAUSTED"), plan()) is None


def test_a_lack_of_memory_without_a_number_is_told_without_one():
    error = out_of_memory(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no more"), plan())
    assert error is not None
    assert error.what.startswith("The device ran out of memory; ")
    assert error.what.endswith("were planned.")


def test_engram_rows_from_the_host_are_part_of_a_step():
    assert plan(engram="mmap").step > plan().step


def test_more_of_anything_takes_more():
    base = plan()
    for larger in (plan(positions=500), plan(max_num_seqs=4), plan(max_num_batched_tokens=128)):
        assert larger.total > base.total and larger.step > base.step
    assert plan(weights="packed").weights < base.weights
    raw = tomllib.loads((package_folder("configs") / "tiny.toml").read_text())["model"]
    deeper = Network(ModelConfig.from_dict(raw), NET.arithmetic, NET.ops)
    assert plan(net=deeper).total > base.total
