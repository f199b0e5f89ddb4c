"""What a run shows and keeps while it goes on: a live line, and a line of metrics a second."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deepinfer_jax.engine.acceptance import Acceptance
from deepinfer_jax.engine.meter import Snapshot, figures
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.protocol.metrics_file import MetricsFile

_EVERY_S = 1.0


class Watched(Protocol):
    """As much of `LLM` as is watched."""

    @property
    def snapshot(self) -> Snapshot:
        """What runs, waits and is held now, with the counts so far."""
        ...

    def watch(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` after every step; None ends it."""
        ...


@dataclass
class Requests:
    """How far a run has come: requests in all, and those with an answer and with an error."""

    total: int
    done: int = 0
    failed: int = 0


class Watch:
    """Called after every step; acts when a second has passed since it last did."""

    def __init__(
        self,
        engine: Watched,
        requests: Requests,
        live: Live | None,
        file: MetricsFile | None,
        *,
        phase: str,
        renewed: bool = True,
    ):
        """Begin to watch.

        Args:
            engine: whose counts are shown; what it did before is left out.
            requests: kept up to date by the caller.
            live: the line to renew, if there is one; it also gets the notes at the end.
            file: gets the lines, if there is one.
            phase: what the live line says is being done.
            renewed: whether the live line is, which is no use while an answer is printed.
        """
        self._engine, self._requests, self._phase = engine, requests, phase
        self._live, self._file, self._renewed = live, file, renewed
        self._start = self._before = engine.snapshot
        self._already = requests.done + requests.failed
        self._began = self._last = time.monotonic()
        self.show()

    def tick(self) -> None:
        """After a step."""
        if time.monotonic() - self._last >= _EVERY_S:
            self.write()

    def write(self) -> None:
        """A line now, about the time since the last one."""
        at, now = time.monotonic(), self._engine.snapshot
        line = figures(self._start, self._before, now, at - self._last)
        self._before, self._last = now, at
        if self._file is not None:
            r = self._requests
            counts = {"requests": r.total, "done": r.done, "failed": r.failed}
            head = {"time": round(time.time(), 3), "seconds": round(at - self._began, 3)}
            self._file.append(head | counts | line)
        self.show(line["output_tokens_per_s"])

    def show(self, speed: float | None = None) -> None:
        """Renew the live line; `speed` is in tokens a second."""
        if self._live is None or not self._renewed:
            return
        r, now = self._requests, self._before
        ended = r.done + r.failed
        parts = [f"{ended} of {r.total} requests"]
        if now.running or now.waiting:
            parts += [
                f"{now.running} running, {now.waiting} waiting",
                f"{now.pages_used} of {now.pages_total} pages",
            ]
        if speed is not None:
            parts.append(f"{speed:.0f} tokens/s")
        self._live.doing(
            self._phase, ", ".join(parts), done=ended, total=r.total, before=self._already
        )

    @property
    def drafts(self) -> dict[str, Any] | None:
        """What became of the run's drafts so far, as plain JSON values; None if there were none."""
        found = self._acceptance
        return found.counts() | found.rates() if found.steps else None

    @property
    def _acceptance(self) -> Acceptance:
        return self._engine.snapshot.acceptance.since(self._start.acceptance)

    def close(self) -> None:
        """Say what drafts have brought and what bounded replay of the decoder has saved, if any."""
        if self._live is not None and self._acceptance.steps:
            self._live.note(_told(self._acceptance))
        now = self._engine.snapshot
        rows = now.skipped_rows - self._start.skipped_rows
        if self._live is not None and rows:
            flops = now.skipped_flops - self._start.skipped_flops
            self._live.note(
                f"{rows:,} prompt tokens left out the decoder's layers: {flops:.3g} operations "
                "on weights saved"
            )


def _told(found: Acceptance) -> str:
    """Tokens a step, and a table of drafts by place, as lines."""
    drafts, kept, rates = int(found.offered.sum()), int(found.kept.sum()), found.rates()
    rows = [
        ("place", [str(place) for place in range(1, len(found.kept) + 1)]),
        ("verified", [f"{count:,}" for count in found.offered.tolist()]),
        ("kept", [f"{count:,}" for count in found.kept.tolist()]),
        ("of those reached", [_percent(rate) for rate in rates["kept_of_reached"]]),
    ]
    width = max(len(cell) for _, cells in rows for cell in cells)
    return "\n".join(
        [
            f"{kept:,} of {drafts:,} drafts kept: {rates['tokens_per_step']:.2f} tokens a step of "
            f"a sequence, {rates['offered_per_step']:.2f} drafts verified",
            *(
                "  ".join([f"  {name:16}", *(f"{c:>{width}}" for c in cells)])
                for name, cells in rows
            ),
        ]
    )


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


@contextmanager
def watching(
    engine: Watched,
    requests: Requests,
    *,
    phase: str,
    live: Live | None = None,
    renewed: bool = True,
    metrics: Path | None = None,
) -> Iterator[Watch]:
    """Watch a run, with a last line of metrics at its end, however it ends.

    Args:
        engine, requests, phase, live, renewed: see `Watch`.
        metrics: the file that gets a line a second, or None.

    Raises:
        ConfigError: the file cannot be written.
    """
    with ExitStack() as stack:
        file = None if metrics is None else stack.enter_context(MetricsFile(metrics))
        watch = Watch(engine, requests, live, file, phase=phase, renewed=renewed)
        engine.watch(watch.tick)
        stack.callback(engine.watch, None)
        try:
            yield watch
        finally:
            if file is not None:
                watch.write()
            watch.close()
