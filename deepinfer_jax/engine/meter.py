"""What the engine has done and holds, as counts: for tables, live lines and metrics files."""

from dataclasses import dataclass
from typing import Any

from deepinfer_jax.engine.acceptance import Acceptance


@dataclass
class Meter:
    """What the engine has done, for tables and figures.

    Attributes:
        prompt_tokens, output_tokens: counts; a prompt that is run again counts again.
        cached_tokens: prompt tokens that were not run, because an earlier sequence had.
        skipped_rows: prompt rows that the decoder's layers left out (bounded replay).
        skipped_flops: operations on weights that these rows would have taken.
        steps: launched.
        prefill_s, decode_s: seconds of steps with and without prompt rows, from one collection to
            the next; compiling is not part of them.
        wait_s, decode_wait_s: of those, seconds in which the host waited for the device.
        compile_s: seconds spent compiling.
        preempted: sequences that gave up their pages.
        drafted, accepted: drafts that were verified, and that were kept.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    skipped_rows: int = 0
    skipped_flops: int = 0
    steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    decode_wait_s: float = 0.0
    compile_s: float = 0.0
    preempted: int = 0
    drafted: int = 0
    accepted: int = 0

    def count(self, prefill: bool, spent: float, waited: float) -> None:
        """Add a collected step's seconds, and those of them that the host waited."""
        self.wait_s += waited
        if prefill:
            self.prefill_s += spent
        else:
            self.decode_s += spent
            self.decode_wait_s += waited


@dataclass(frozen=True)
class Snapshot:
    """The engine between two steps.

    Attributes:
        steps, prompt_tokens, output_tokens, cached_tokens, skipped_rows, skipped_flops, preempted,
            drafted, accepted, wait_s, compile_s: as in `Meter`, since the model was loaded.
        step_s: seconds of all steps; what is not waiting in them is the host's.
        running, waiting: sequences.
        pages_used: pages that somebody holds or a launched step may still touch.
        pages_cached: pages of prefixes that nobody holds, which are given up when others need them.
        pages_total: pages that there are.
        compiled: programs; late: of them, those that were missing after warm-up.
        acceptance: of drafts, place by place, since the model was loaded.
    """

    steps: int
    running: int
    waiting: int
    pages_used: int
    pages_cached: int
    pages_total: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    skipped_rows: int
    skipped_flops: int
    preempted: int
    drafted: int
    accepted: int
    step_s: float
    wait_s: float
    compiled: int
    compile_s: float
    late: int
    acceptance: Acceptance


def snapshot(
    meter: Meter,
    *,
    running: int,
    waiting: int,
    pages: tuple[int, int, int],
    compiled: int,
    late: int,
    acceptance: Acceptance,
) -> Snapshot:
    """A `Snapshot` of a meter and of what is held; `pages` are total, allocatable and cached."""
    total, allocatable, cached = pages
    return Snapshot(
        steps=meter.steps,
        running=running,
        waiting=waiting,
        pages_used=total - allocatable,
        pages_cached=cached,
        pages_total=total,
        prompt_tokens=meter.prompt_tokens,
        output_tokens=meter.output_tokens,
        cached_tokens=meter.cached_tokens,
        skipped_rows=meter.skipped_rows,
        skipped_flops=meter.skipped_flops,
        preempted=meter.preempted,
        drafted=meter.drafted,
        accepted=meter.accepted,
        step_s=meter.prefill_s + meter.decode_s,
        wait_s=meter.wait_s,
        compiled=compiled,
        compile_s=meter.compile_s,
        late=late,
        acceptance=acceptance.copy(),
    )


def figures(start: Snapshot, before: Snapshot, now: Snapshot, seconds: float) -> dict[str, Any]:
    """One line of a metrics file, plain JSON values.

    Args:
        start: when the run began; counts are since then.
        before: at the line before this one; speeds and shares are since then.
        now: of this line.
        seconds: between the last two.

    Returns:
        Counts, tokens a second, `wait_share` (of the time of steps, the part in which the host
        waited for the device) and `host_us_per_step` (the other part, in microseconds a step,
        with what the caller does between steps), then counts and rates of drafts by place, whose
        lists are as long as a block and empty where nothing is drafted. A ratio of nothing is None.
    """
    steps, spent = now.steps - before.steps, now.step_s - before.step_s
    waited = now.wait_s - before.wait_s
    prompt = now.prompt_tokens - before.prompt_tokens
    output = now.output_tokens - before.output_tokens
    return {
        "steps": now.steps - start.steps,
        "running": now.running,
        "waiting": now.waiting,
        "pages_used": now.pages_used,
        "pages_cached": now.pages_cached,
        "pages_total": now.pages_total,
        "prompt_tokens": now.prompt_tokens - start.prompt_tokens,
        "output_tokens": now.output_tokens - start.output_tokens,
        "cached_tokens": now.cached_tokens - start.cached_tokens,
        "skipped_rows": now.skipped_rows - start.skipped_rows,
        "skipped_flops": now.skipped_flops - start.skipped_flops,
        "prompt_tokens_per_s": _ratio(prompt, seconds, 1),
        "output_tokens_per_s": _ratio(output, seconds, 1),
        "wait_share": _ratio(waited, spent, 4),
        "host_us_per_step": _ratio(1e6 * (spent - waited), steps, 1),
        "preempted": now.preempted - start.preempted,
        "drafted": now.drafted - start.drafted,
        "accepted": now.accepted - start.accepted,
        "compiled": now.compiled,
        "compile_s": round(now.compile_s, 3),
        "late_compiles": now.late,
        **now.acceptance.since(start.acceptance).counts(),
        **now.acceptance.since(before.acceptance).rates(),
    }


def _ratio(part: float, whole: float, digits: int) -> float | None:
    return round(part / whole, digits) if whole > 0 else None
