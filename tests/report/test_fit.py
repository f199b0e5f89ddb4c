"""Which sizes fit: whatever is offered in place of what does not fit is planned again here."""

import dataclasses
import itertools
import tomllib

import jax
import pytest
from short_llm import short_config

from deepinfer_jax.assembly import planner_of
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError, MemoryPlanError
from deepinfer_jax.ops.device import Device
from deepinfer_jax.report.fit import ALTERNATIVES, Planner
from deepinfer_jax.report.plan import size_text
from deepinfer_jax.settings import EngineConfig, load, package_folder

CONFIG = ModelConfig.from_dict(short_config())
LIMIT = CONFIG.max_position_embeddings
ENGINE = EngineConfig(arithmetic="f32", max_num_seqs=8, max_num_batched_tokens=64)
LONGEST = dataclasses.replace(ENGINE, max_model_len=LIMIT)


def planner(free, engine=ENGINE, config=CONFIG, kind="cpu") -> Planner:
    return planner_of(config, engine, Device.described(kind), free=free)


def whole(engine=LONGEST, **changes):
    return planner(None).fitting(dataclasses.replace(engine, **changes))


def offers(free, engine=LONGEST, kind="cpu"):
    """The offers of a refusal, each planned again."""
    made = planner(free, kind=kind)
    verdict = made.judge(engine)
    assert verdict.refusal is not None and not verdict.plan.fits
    for way in verdict.alternatives:
        plan = made.fitting(dataclasses.replace(engine, **way.changes))
        assert plan.fits and plan == way.plan
        assert str(way) in verdict.refusal.do
    return [dict(way.changes) for way in verdict.alternatives]


def test_what_fits_to_the_byte_is_taken_and_one_byte_less_is_refused():
    total = whole().total
    assert planner(total).fitting(LONGEST).fits
    with pytest.raises(MemoryPlanError):
        planner(total - 1).fitting(LONGEST)


def test_a_refusal_says_the_numbers_the_parts_and_three_ways_out():
    plan = whole()
    free = plan.total - plan.cache // 4
    with pytest.raises(MemoryPlanError) as caught:
        planner(free).fitting(LONGEST)
    error = caught.value
    assert error.what == (
        f"The engine needs {size_text(plan.total)} ({plan.total:,} bytes), and {size_text(free)} "
        "are available."
    )
    for name, size in plan.parts.items():
        assert f"{name} {size_text(size)}" in error.why
    assert error.why.endswith(
        f"for 8 sequences of {LIMIT} tokens, {plan.pages} pages and steps of 64 tokens."
    )
    ways = error.do.removeprefix("Set ").removesuffix(".").split(", or ")
    names = ["max_num_seqs", "max_model_len", "pages"]
    assert [way.partition("=")[0] for way in ways] == [f"engine.{name}" for name in names]


def test_one_smaller_size_is_offered_as_large_as_it_fits():
    plan = whole()
    free = plan.total - plan.cache // 4
    made = planner(free)
    for changes in offers(free):
        ((name, value),) = changes.items()
        more = dataclasses.replace(LONGEST, **{name: value + 1})
        with pytest.raises(MemoryPlanError):
            made.fitting(more)


def test_pages_are_never_too_few_for_the_longest_sequence():
    plan = whole()
    pages = [way["pages"] for way in offers(plan.total - plan.cache // 4) if "pages" in way]
    assert pages and pages[0] >= whole(max_num_seqs=1).pages


def test_a_step_that_is_too_large_is_offered_smaller():
    engine = dataclasses.replace(LONGEST, max_num_batched_tokens=4096)
    first = offers(whole().total + (1 << 20), engine)[0]
    assert list(first) == ["max_num_batched_tokens"] and 64 <= first["max_num_batched_tokens"]


def test_weights_that_are_too_large_are_offered_packed_and_tables_elsewhere():
    small = dataclasses.replace(LONGEST, max_num_seqs=1)
    packed = whole(small, weights="packed").total
    assert packed < whole(small).total
    assert offers(packed, small)[0] == {"weights": "packed"}
    # Off a CPU the host's memory is another one.
    release = planner(None, kind="sm90").fitting(small)
    found = offers(release.total - 1, small, kind="sm90")
    assert {"engram": "host"} in found or {"weights": "packed"} in found
    assert {"engram": "mmap"} not in found


@pytest.mark.parametrize("share", [0.55, 0.7, 0.8, 0.9, 0.99])
def test_three_different_offers_are_made_wherever_anything_fits(share):
    found = offers(int(whole().total * share))
    assert len(found) == ALTERNATIVES
    assert all(a != b for a, b in itertools.combinations(found, 2))


def test_where_nothing_fits_the_least_is_named():
    error = planner(1000).judge(LONGEST).refusal
    assert error is not None and planner(1000).alternatives(LONGEST) == ()
    assert error.do.startswith("Run where there is more memory: no plan of this network takes ")
    sizes = {"max_num_seqs": 1, "max_model_len": 1, "max_num_batched_tokens": 1, "pages": 1}
    places = itertools.product(("dequantized", "packed"), ("device", "mmap"))
    totals = [whole(**sizes, weights=weights, engram=engram).total for weights, engram in places]
    assert error.do.endswith(f"less than {size_text(min(totals))}.")


def test_without_a_length_the_longest_that_fits_is_taken_in_coarse_steps():
    assert planner(1 << 34).fitting(ENGINE).positions == LIMIT
    fits = whole(max_model_len=700)
    # The step is an estimate; a length that nobody asked for leaves it room to be off by half.
    plan = planner(fits.total + fits.step // 2).fitting(ENGINE)
    assert (plan.positions, plan.fits) == (512, True)
    exact = whole(max_model_len=512)
    assert planner(exact.total).fitting(dataclasses.replace(ENGINE, max_model_len=512)).fits
    assert planner(exact.total).fitting(ENGINE).positions == 256


def test_what_fits_at_most_is_told_for_each_size():
    room = whole(max_model_len=700).total
    most = planner(room).most(ENGINE)
    made = planner(room)
    assert 700 <= most["max_model_len"] < 768
    sizes = {"max_model_len": 512, "max_num_seqs": most["max_num_seqs"]}
    assert most["max_num_seqs"] >= 8 and made.fitting(dataclasses.replace(ENGINE, **sizes)).fits
    with pytest.raises(MemoryPlanError):
        sizes["max_num_seqs"] += 1
        made.fitting(dataclasses.replace(ENGINE, **sizes))
    assert planner(1000).most(ENGINE) == {"max_model_len": 0, "max_num_seqs": 0}
    assert planner(None).most(ENGINE) == {}


def test_a_length_beyond_the_models_limit_is_refused():
    with pytest.raises(ConfigError, match=f"the model's limit is {LIMIT}"):
        planner(None).fitting(dataclasses.replace(ENGINE, max_model_len=LIMIT + 1))


def test_the_release_is_planned_without_its_weights_or_its_device():
    asked = load("v41_flash", ["engine.weights=packed"])
    made = planner(560 << 30, asked.engine, asked.model_config(), "sm90")
    plan = made.fitting(asked.engine)
    # Half a byte a weight of 552 billion in experts, and a byte for the Engram tables' 197.
    assert 270 < plan.weights / 2**30 < 290
    assert 185 < plan.engram_tables / 2**30 < 190
    assert plan.fits and plan.positions < asked.model_config().max_position_embeddings


def test_no_array_is_made_for_a_plan(monkeypatch):
    raw = tomllib.loads((package_folder("configs") / "tiny.toml").read_text())["model"]
    monkeypatch.setattr(jax, "device_put", None)
    planner(1 << 30, ENGINE, ModelConfig.from_dict(raw)).fitting(ENGINE)
