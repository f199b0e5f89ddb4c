"""One piece of a training run: compile, step until the time or the plan ends, log, save."""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.training import carry, curve
from deepinfer_jax.training.batches import Feed, Planned, Shape, Source
from deepinfer_jax.training.carry import Carried
from deepinfer_jax.training.evaluate import HeldOut, exact_match
from deepinfer_jax.training.optimizer import TrainState
from deepinfer_jax.training.optimizer import start as fresh
from deepinfer_jax.training.parameters import initial_values
from deepinfer_jax.training.settings import TrainingSettings
from deepinfer_jax.training.steps import (
    SCALARS,
    SKILL_SLOTS,
    Kind,
    batch_shapes,
    evaluation,
    train_step,
)

Compiled = Callable[..., Any]
LOG = logging.getLogger("deepinfer_jax.training")
_FASTEST = 25.0  # steps a second that no device here exceeds; bounds what a piece may compile
_IN_FLIGHT = 3  # steps dispatched before the host waits
_SAVING_S = 15.0  # kept free at the end for the log, the weights and the picture


@dataclass(frozen=True)
class Plan:
    """What a run is made of; the same for all its pieces.

    Attributes:
        config: the network. settings: numbers of the run. token_map: int32 [vocab],
            compressed token ids.
        source: host batches. short, long: row shapes a device. mesh: devices.
        held_out: sets for the exact-match evaluation, by "short" and "long".
        skills: names by skill number. compiler: options for XLA.
    """

    config: ModelConfig
    settings: TrainingSettings
    token_map: np.ndarray
    source: Source
    short: Shape
    long: Shape
    mesh: Mesh
    held_out: Mapping[str, HeldOut]
    skills: Sequence[str]
    compiler: Mapping[str, str | int | bool] = field(default_factory=dict)

    def kind(self, shape: str, quantize: bool) -> Kind:
        """The compiled function of a shape ("short" or "long")."""
        rows = self.short if shape == "short" else self.long
        start_column = rows.columns - rows.decoder_rows
        return Kind(rows.rows * self.mesh.devices.size, rows.columns, start_column, quantize)

    def shape(self, step: int) -> str:
        """Row shape of a step."""
        return "long" if self.settings.is_long(step) else "short"

    def kind_of(self, step: int) -> Kind:
        """The compiled function of a step."""
        return self.kind(self.shape(step), self.settings.quantizes(step))

    def planned(self, first: int) -> Iterator[Planned]:
        """The batches from step `first` to the end of the run."""
        for step in range(first, self.settings.steps):
            yield Planned(step, self.shape(step), self.settings.level(step))  # type: ignore[arg-type]


def begin(plan: Plan, start: Carried | None) -> TrainState:
    """The state a piece starts from, on every device; a resumed one has fresh moments."""
    if start is None:
        seed, std = plan.settings.seed, plan.settings.embed_std
        start = Carried(0, {}, initial_values(plan.config, seed, embed_std=std))
    return jax.device_put(fresh(start.weights, start.step), NamedSharding(plan.mesh, P()))


def compile_all(
    plan: Plan, state: TrainState, kinds: Sequence[Kind]
) -> tuple[Mapping[Kind, Compiled], Mapping[Kind, Compiled]]:
    """Train and evaluation functions of `kinds`, compiled side by side before the clock matters."""
    judged = [k for k in kinds if ("long" if k.decoder_start else "short") in plan.held_out]
    with ThreadPoolExecutor(max(2 * len(kinds), 1)) as pool:
        steps = {kind: pool.submit(_compile, plan, kind, "training", state) for kind in kinds}
        checks = {k: pool.submit(compile_check, plan, k, state.weights) for k in judged}
        return (
            {kind: f.result() for kind, f in steps.items()},
            {kind: f.result() for kind, f in checks.items()},
        )


def compile_check(plan: Plan, kind: Kind, weights: Mapping[str, jax.Array]) -> Compiled:
    """The evaluation function of `kind`."""
    return _compile(plan, kind, "evaluation", weights)


def _compile(plan: Plan, kind: Kind, what: Literal["training", "evaluation"], first: Any) -> Any:
    began = time.monotonic()
    make = train_step if what == "training" else evaluation
    jitted = make(plan.config, plan.settings, plan.token_map, plan.mesh, kind)
    lowered = jitted.lower(first, batch_shapes(kind, plan.mesh))
    compiled = lowered.compile(compiler_options=dict(plan.compiler))
    LOG.info(f"compiled {kind.name} {what} in {time.monotonic() - began:.0f} s")
    return compiled


def run(
    plan: Plan,
    output: Path,
    minutes: float,
    began: float,
    start: Carried | None = None,
    rows: Sequence[curve.Row] = (),
) -> int:
    """Train from `start` until the plan's last step or `minutes` after `began`.

    Args:
        plan: the run.
        output: gets weights, state.json and, once there is a logged step, loss.csv and, when
            matplotlib is there, loss.png.
        minutes: of this piece. began: its start, as `time.monotonic` says it.
        start: where the run stands; None starts it.
        rows: loss.csv up to here.

    Returns the step it stands at.
    """
    settings = plan.settings
    deadline = began + 60 * minutes - _SAVING_S
    output.mkdir(parents=True, exist_ok=True)
    rows = list(rows)
    state = begin(plan, start)
    step = int(state.step)
    reach = min(settings.steps, step + int(60 * minutes * _FASTEST) + 1)
    kinds = list(dict.fromkeys(plan.kind_of(s) for s in range(step, reach)))
    trains, checks = compile_all(plan, state, kinds)
    LOG.info(f"step {step} of {settings.steps}, {time.monotonic() - began:.0f} s since the start")
    log = _Log(plan)
    recent: deque[jax.Array] = deque()
    with Feed(plan.source, plan.planned(step), settings.seed, plan.mesh) as feed:
        while step < settings.steps and time.monotonic() < deadline:
            kind = plan.kind_of(step)
            state, report = trains[kind](state, feed.next())
            log.add(kind, report)
            step += 1
            recent.append(report)
            if len(recent) > _IN_FLIGHT:
                recent.popleft().block_until_ready()
            last = step == settings.steps
            if step % settings.log_every == 0 or last:
                rows.append(log.row(step))
            if (step % settings.eval_every == 0 or last) and rows:
                found = judge(plan, checks, state.weights, settings.quantizes(step - 1))
                exact = {f"exact:{k}": round(100 * a / n, 2) for k, (a, n) in found.items()}
                rows[-1] = {**rows[-1], **exact}
                log.restart()
    if log.pending:
        rows.append(log.row(step))
    carried = jax.device_get(state.weights)
    carry.save(output, step, dataclasses.asdict(settings), carried, plan.config)
    if rows:
        curve.write(output, rows)
        _draw(output)
    LOG.info(f"stopped at step {step} after {time.monotonic() - began:.0f} s; saved to {output}")
    return step


def judge(
    plan: Plan, checks: Mapping[Kind, Compiled], weights: Mapping[str, jax.Array], quantize: bool
) -> dict[str, tuple[int, int]]:
    """Right and counted answers per label of the held-out sets that `checks` can judge, logged."""
    found: dict[str, tuple[int, int]] = {}
    for shape, held_out in plan.held_out.items():
        kind = plan.kind(shape, quantize)
        if kind not in checks:  # a shape that this piece's steps never take
            continue
        here = exact_match(held_out, checks[kind], weights, plan.mesh, kind.rows)
        found |= here
        parts = [f"{k} {100 * a / n:.0f}% of {n}" for k, (a, n) in here.items()]
        LOG.info(f"exact match, {kind.name}: " + ", ".join(parts))
    return found


def _draw(output: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        LOG.info(
            "loss.png was not drawn: matplotlib is missing (pip install 'deepinfer-jax[plots]')"
        )
        return
    curve.draw(output)


class _Log:
    """Reports of the steps since the last line, averaged into one."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.pending: list[tuple[Kind, jax.Array]] = []
        self.restart()

    def restart(self) -> None:
        self.since = time.monotonic()

    def add(self, kind: Kind, report: jax.Array) -> None:
        self.pending.append((kind, report))

    def row(self, step: int) -> dict[str, float | int]:
        reports = np.stack(jax.device_get([report for _, report in self.pending]))
        now = time.monotonic()
        positions = sum(kind.rows * kind.columns for kind, _ in self.pending)
        is_long = np.array([kind.decoder_start > 0 for kind, _ in self.pending])
        scalars = {name: reports[:, i] for i, name in enumerate(SCALARS)}
        row: dict[str, float | int] = {"step": step}
        for name, chosen in (("short", ~is_long), ("long", is_long)):
            if chosen.any():
                row[name] = float(scalars["answer"][chosen].mean())
        row |= {
            "index": float(scalars["index"].mean()),
            "norm": float(np.median(scalars["norm"])),
            "norm_max": float(scalars["norm"].max()),
            "skipped": int(scalars["skipped"].sum()),
            "peak": float(scalars["peak"].max()),
            "index_peak": float(scalars["index_peak"].max()),
            "imbalance": float(scalars["imbalance"].mean()),
            "partition": float(np.sqrt(scalars["z"].mean())),
            "rate": float(scalars["rate"][-1]),
            "level": self.plan.settings.level(step),
            "tokens_s": positions / max(now - self.since, 1e-9),
        }
        counts = reports[:, len(SCALARS) :].sum(axis=0)
        right, counted = counts[:SKILL_SLOTS], counts[SKILL_SLOTS:]
        for number, skill in enumerate(self.plan.skills):
            if counted[number]:
                row[f"token:{skill}"] = float(100 * right[number] / counted[number])
        row = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}
        LOG.info("  ".join(f"{k} {v}" for k, v in row.items()))
        self.pending = []
        self.since = now
        return row
