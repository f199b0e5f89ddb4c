import dataclasses

import pytest

from deepinfer_jax.engine_settings import check_replay, limits_of
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.report.plan import MemoryPlan
from deepinfer_jax.settings import EngineConfig, load


@pytest.fixture(scope="module")
def flash():
    return load("v41_flash").model_config()


def asked(mode="compact", keep=140):
    return EngineConfig(prefill_truncation=mode, prefill_keep_tokens=keep)


@pytest.mark.parametrize("mode", ["mask", "compact"])
@pytest.mark.parametrize("keep", [0, 120, 133])
def test_bounded_replay_keeps_a_window_and_what_drafts_take_back(flash, mode, keep):
    with pytest.raises(ConfigError) as caught:
        check_replay(asked(mode, keep), flash)
    assert str(caught.value) == (
        f"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS (engine.prefill_keep_tokens) is {keep}; with "
        f"truncation mode {mode} at least 134 are needed. The decoder's window is 128 tokens, and "
        "6 more must stay for drafts that are rejected. Set it to 134 or more; 140 is the "
        "published value for a window of 128."
    )
    check_replay(asked(mode, 134), flash)


@pytest.mark.parametrize(
    ("backtracking", "drafts", "least"), [(6, 5, 134), (0, 5, 134), (0, 0, 129), (10, 5, 138)]
)
def test_what_is_kept_covers_backtracking_or_the_rows_that_a_step_verifies(
    flash, backtracking, drafts, least
):
    keep = dataclasses.replace(asked(keep=least), max_backtracking_tokens=backtracking)
    check_replay(keep, flash, drafts)
    less = dataclasses.replace(keep, prefill_keep_tokens=least - 1)
    with pytest.raises(ConfigError, match=f"at least {least} are needed"):
        check_replay(less, flash, drafts)


def test_a_number_that_would_do_nothing_is_refused(flash):
    with pytest.raises(ConfigError, match="is 140, but prefill truncation is off"):
        check_replay(asked("off", 140), flash)
    check_replay(asked("off", 0), flash)


def test_a_decoder_with_engram_memory_cannot_leave_rows_out():
    tiny = load("tiny").model_config()
    check_replay(asked(), tiny)
    late = dataclasses.replace(tiny, engram_layer_ids=(1, tiny.num_hidden_layers - 1))
    with pytest.raises(ConfigError, match=r"layers \[\d+\] of the decoder have Engram memory"):
        check_replay(asked(), late)


def test_the_engine_has_the_sizes_that_were_planned(flash):
    parts = ("weights", "engram_tables", "windows", "entries", "index_keys", "slot_state", "step")
    sizes = {"slots": 64, "positions": 4096, "rows": 400, "pages": 2048}
    plan = MemoryPlan(**dict.fromkeys(parts, 0), **sizes, drafts=5, backtrack=9)
    limits = limits_of(plan, flash)
    assert (limits.slots, limits.rows, limits.pages) == (64, 400, 1 + 2048)
    assert (limits.drafts, limits.backtrack) == (5, 9)
    assert (limits.max_model_len, limits.table_pages) == (4096, 32)
    # A step of one row a slot can also send a whole table; four ids lead a replay.
    assert (limits.updates, limits.look_back) == (64 + 1 + 32, 4)
