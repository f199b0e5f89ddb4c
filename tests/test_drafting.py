"""How many drafts a run takes, and what is refused."""

from pathlib import Path

import pytest
from short_llm import shorter_config, write_short_model

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.drafting import Drafting, drafting_of
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.settings import EngineConfig

CONFIG = ModelConfig.from_dict(shorter_config())


@pytest.fixture(scope="module")
def with_drafter(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("with") / "model"
    return write_short_model(folder, shorter_config(), drafter=True)


@pytest.fixture(scope="module")
def without(tmp_path_factory) -> Path:
    return write_short_model(tmp_path_factory.mktemp("without") / "model", shorter_config())


def test_the_block_is_drafted_where_the_choice_is_the_engine_s(with_drafter, without):
    asked = EngineConfig()
    assert drafting_of(asked, CONFIG, with_drafter) == Drafting(5, (1.0,) * 5)
    assert drafting_of(asked, CONFIG, without) == Drafting()
    assert drafting_of(asked, CONFIG, None) == Drafting()
    on_host = EngineConfig(nextn=None, engram="host")
    assert drafting_of(on_host, CONFIG, with_drafter) == Drafting()


def test_fewer_drafts_than_the_block_have_a_temperature_each(with_drafter):
    asked = EngineConfig(nextn=3, confidence_temperature="0.5, 1, 2e0")
    assert drafting_of(asked, CONFIG, with_drafter) == Drafting(3, (0.5, 1.0, 2.0))


def test_a_plan_assumes_the_drafter_of_weights_that_are_not_there(without, tmp_path):
    asked = EngineConfig(nextn=4)
    for folder in (None, tmp_path):
        assert drafting_of(asked, CONFIG, folder, assumed=True).count == 4
    with pytest.raises(ConfigError, match="the checkpoint has no drafter"):
        drafting_of(asked, CONFIG, without, assumed=True)


def test_no_drafts_can_be_asked_for(with_drafter):
    assert drafting_of(EngineConfig(nextn=0), CONFIG, with_drafter) == Drafting()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"nextn": 6},
            "DEEPINFER_USE_NEXTN_DECODE (engine.nextn) is 6; the drafter was trained on blocks of "
            "5. All rows of a block see each other, so a wider one is none that it knows. Set it "
            "to 5 or less.",
        ),
        ({"nextn": 5, "engram": "mmap"}, "not on the device (engine.engram=mmap)"),
        ({"nextn": 2, "confidence_temperature": "1,2,3"}, "is '1,2,3'"),
        ({"nextn": 2, "confidence_temperature": "1,0"}, "is '1,0'"),
        ({"nextn": 2, "confidence_temperature": "warm"}, "one for each of 2 drafts"),
        (
            {"varlen": True, "verification": "rejection", "batch_invariant": True},
            "engine.varlen is on with engine.verification=rejection and engine.batch_invariant. "
            "How many drafts are verified then depends on the other sequences, and with it the "
            "random numbers that rejection uses. Set DEEPINFER_ENABLE_MTP_VARLEN=0, or "
            "engine.verification=coupled.",
        ),
        (
            {"varlen": True, "sampler": "original", "batch_invariant": True},
            "engine.varlen is on with engine.sampler=original and engine.batch_invariant. How many "
            "drafts are verified then depends on the other sequences, and with it the random "
            "numbers that original uses. Set DEEPINFER_ENABLE_MTP_VARLEN=0, or "
            "engine.sampler=stable.",
        ),
        (
            {"nextn": 3, "pages": 9, "verification": "block", "batch_invariant": True},
            "engine.pages is 9 with 3 drafts, engine.verification=block and "
            "engine.batch_invariant. A sequence that waits for a page, or gives its pages up, has "
            "other drafts verified than by itself, and block then uses other random numbers. Leave "
            "engine.pages out, which gives every sequence its own, or set "
            "engine.verification=coupled or DEEPINFER_USE_NEXTN_DECODE=0.",
        ),
    ],
)
def test_what_cannot_be_drafted_is_refused_by_name(with_drafter, asked, words):
    with pytest.raises(ConfigError) as caught:
        drafting_of(EngineConfig(**asked), CONFIG, with_drafter)
    assert words in str(caught.value)


def test_drafts_without_a_drafter_are_refused(without):
    with pytest.raises(ConfigError) as caught:
        drafting_of(EngineConfig(nextn=5), CONFIG, without)
    assert str(caught.value) == (
        "DEEPINFER_USE_NEXTN_DECODE (engine.nextn) is 5, and the checkpoint has no drafter. "
        "Drafts come from the mtp.* weights, which this one left out. "
        "Set it to 0, leave it out, or use a checkpoint with a drafter."
    )


@pytest.mark.parametrize(
    "changed", [{"nextn": 0}, {"pages": None}, {"verification": "coupled"}, {"batch_invariant": 0}]
)
def test_pages_that_may_run_out_are_refused_only_with_drafts_that_depend_on_them(
    with_drafter, changed
):
    asked = {"nextn": 3, "pages": 9, "verification": "block", "batch_invariant": True} | changed
    assert drafting_of(EngineConfig(**asked), CONFIG, with_drafter).count == asked["nextn"]


def test_coupled_verification_may_vary_in_length_where_runs_are_to_repeat(with_drafter):
    asked = EngineConfig(nextn=5, varlen=True, batch_invariant=True)
    assert drafting_of(asked, CONFIG, with_drafter).count == 5
