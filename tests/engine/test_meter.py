from deepinfer_jax.engine.acceptance import Acceptance
from deepinfer_jax.engine.meter import Meter, figures, snapshot


def drafts(*steps, places=2):
    made = Acceptance.empty(places)
    for offered, accepted in steps:
        made.count(offered, accepted)
    return made


def of(meter, **changes):
    sizes = {"running": 3, "waiting": 2, "pages": (40, 30, 4), "compiled": 5, "late": 1}
    return snapshot(meter, **({"acceptance": drafts()} | sizes | changes))


def test_seconds_go_to_prefill_or_decode_and_to_waiting():
    meter = Meter()
    meter.count(True, 2.0, 0.5)
    meter.count(False, 1.0, 0.25)
    assert (meter.prefill_s, meter.decode_s) == (2.0, 1.0)
    assert (meter.wait_s, meter.decode_wait_s) == (0.75, 0.25)
    now = of(meter)
    assert (now.step_s, now.wait_s) == (3.0, 0.75)
    assert (now.pages_used, now.pages_cached, now.pages_total) == (10, 4, 40)


def test_figures_count_from_the_start_and_measure_from_the_line_before():
    first, second, third = (2, 2), (2, 0), (2, 1)
    start = of(
        Meter(prompt_tokens=100, output_tokens=50, steps=10, preempted=1),
        acceptance=drafts(first),
    )
    before = of(
        Meter(prompt_tokens=300, output_tokens=70, steps=20, preempted=1),
        acceptance=drafts(first, second),
    )
    later = Meter(
        prompt_tokens=400,
        output_tokens=110,
        cached_tokens=128,
        skipped_rows=200,
        skipped_flops=9000,
        steps=30,
        prefill_s=1.0,
        decode_s=1.0,
        wait_s=1.5,
        compile_s=2.0,
        preempted=3,
        drafted=40,
        accepted=25,
    )
    now = of(later, running=1, waiting=0, acceptance=drafts(first, second, third, third))
    assert figures(start, before, now, 2.0) == {
        "steps": 20,
        "running": 1,
        "waiting": 0,
        "pages_used": 10,
        "pages_cached": 4,
        "pages_total": 40,
        "prompt_tokens": 300,
        "output_tokens": 60,
        "cached_tokens": 128,
        "skipped_rows": 200,
        "skipped_flops": 9000,
        "prompt_tokens_per_s": 50.0,
        "output_tokens_per_s": 20.0,
        "wait_share": 0.75,
        "host_us_per_step": 50000.0,
        "preempted": 2,
        "drafted": 40,
        "accepted": 25,
        "compiled": 5,
        "compile_s": 2.0,
        "late_compiles": 1,
        "verify_steps": 3,
        "offered_by_place": [3, 3],
        "reached_by_place": [3, 2],
        "kept_by_place": [2, 0],
        "offered_per_step": 2.0,
        "tokens_per_step": 2.0,
        "kept_of_offered": [1.0, 0.0],
        "kept_of_reached": [1.0, 0.0],
    }


def test_a_ratio_of_nothing_is_none():
    same = of(Meter())
    line = figures(same, same, same, 0.0)
    ratios = ("prompt_tokens_per_s", "output_tokens_per_s", "wait_share", "host_us_per_step")
    ratios += ("offered_per_step", "tokens_per_step")
    assert [line[name] for name in ratios] == [None] * 6
    assert line["kept_of_offered"] == line["kept_of_reached"] == [None, None]


def test_without_drafts_there_is_no_place():
    none = of(Meter(), acceptance=drafts(places=0))
    line = figures(none, none, none, 1.0)
    assert (line["kept_by_place"], line["kept_of_reached"], line["verify_steps"]) == ([], [], 0)


def test_a_snapshot_keeps_what_was_counted_then():
    counted = drafts((2, 2))
    then = of(Meter(), acceptance=counted)
    counted.count(2, 2)
    assert then.acceptance.steps == 1
