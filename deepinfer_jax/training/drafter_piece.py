"""One piece of a drafter's training: compile, step until the time or the plan ends, log, save."""

import dataclasses
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.files import replacing
from deepinfer_jax.training import drafter_state
from deepinfer_jax.training.batches import Feed, Planned, Shape, Source
from deepinfer_jax.training.drafter_batches import (
    TAP_CONVENTION,
    cached_batches,
    check_cache,
    samples_of,
)
from deepinfer_jax.training.drafter_blocks import Targets
from deepinfer_jax.training.drafter_export import DRAFTER_FILE, write_drafter
from deepinfer_jax.training.drafter_forward import DrafterOptions
from deepinfer_jax.training.drafter_losses import metrics
from deepinfer_jax.training.drafter_step import (
    DrafterSettings,
    DrafterState,
    Method,
    begin,
    teach,
    train_step,
)
from deepinfer_jax.training.forward import ForwardOptions
from deepinfer_jax.training.steps import AXIS, Kind, batch_shapes, data_mesh
from deepinfer_jax.training.target_cache import TargetCache, TargetCacheWriter

LOG = logging.getLogger("deepinfer_jax.training")
METRICS = "metrics.jsonl"
_IN_FLIGHT = 3  # steps dispatched before the host waits
_SAVING_S = 5.0  # kept free at the end for the state
_LEAST_TRAINED = 2  # tokens: an anchor and one label
_MEANS = ("loss", "ce", "tv", "confidence", "norm", "rate", "imbalance")


@dataclass(frozen=True)
class DrafterRun:
    """What a run is made of; the same for all its pieces.

    Attributes:
        method: of the drafter. config: the target's. settings: numbers of the run.
        target: float32 weights of the frozen backbone by training name.
        token_map: int32 [vocab], compressed token ids.
        source: host batches; None with a cache. short, long: their shapes.
        cache: hidden states to train from instead, in batches of shape `short`.
        compiler: options for XLA.
    """

    method: Method
    config: ModelConfig
    settings: DrafterSettings
    target: Mapping[str, np.ndarray]
    token_map: np.ndarray
    source: Source | None
    short: Shape
    long: Shape
    cache: TargetCache | None = None
    compiler: Mapping[str, str | int | bool] = field(default_factory=dict)

    def shape(self, step: int) -> str:
        """Row shape of a step, "short", "long" or "cached"."""
        if self.cache is not None:
            return "cached"
        return "long" if self.settings.is_long(step) else "short"


def train(
    run: DrafterRun,
    output: Path,
    *,
    seconds: float,
    began: float,
    resume: bool = False,
    until: int | None = None,
) -> int:
    """Train until the last step, `seconds` after `began`, or step `until`.

    Args:
        run: what is trained.
        output: gets the state, `metrics.jsonl` and, at the last step, `drafter.safetensors`.
        seconds: of this piece. began: its start, as `time.monotonic` says it.
        resume: continue the state in `output`, exactly as if it had not stopped.
        until: end the piece at this step at the latest.

    Returns the step it stands at. Raises ConfigError for a run that has diverged, for a resumed
    folder of another method and for a state that would be overwritten.
    """
    settings = run.settings
    deadline = began + seconds - _SAVING_S
    output.mkdir(parents=True, exist_ok=True)
    state = _start(run, output, resume)
    step = int(state.step)
    log = _Log(output / METRICS, step)
    last = min(settings.steps, settings.steps if until is None else until)
    device = jax.devices()[0]
    names = ("embed.weight", "head.weight") if run.cache is not None else tuple(run.target)
    target = jax.device_put({name: run.target[name] for name in names}, device)
    state = jax.device_put(state, device)
    shapes = list(dict.fromkeys(run.shape(s) for s in range(step, last)))
    compiled = _compile(run, shapes, state, target)
    LOG.info(f"step {step} of {settings.steps}, {time.monotonic() - began:.0f} s since the start")
    recent: deque[jax.Array] = deque()
    with _batches(run, step) as next_batch:
        while step < last and time.monotonic() < deadline:
            state, report = compiled[run.shape(step)](state, target, next_batch())
            log.add(report)
            step += 1
            recent.append(report["loss"])
            if len(recent) > _IN_FLIGHT:
                recent.popleft().block_until_ready()
            if step % settings.log_every == 0 or step == last:
                log.write(step)
            if step % settings.save_every == 0 and step < last:
                _save(run, output, state, log, step)
    _save(run, output, state, log, step)
    LOG.info(f"stopped at step {step} after {time.monotonic() - began:.0f} s; saved to {output}")
    if step == settings.steps:
        path = output / DRAFTER_FILE
        size = write_drafter(path, jax.device_get(state.weights), run.method, run.config)
        LOG.info(f"{path} has {size:,} bytes, {len(state.weights)} trained tensors")
    return step


def write_cache(run: DrafterRun, folder: Path, batches: int) -> int:
    """Write what the target says of `batches` short batches as a target cache; returns samples.

    Conversations with fewer than two trained tokens hold no anchor and are left out.
    """
    config = run.config
    target = jax.device_put(dict(run.target), jax.devices()[0])
    told = jax.jit(lambda target, batch: _targets(run, "short")(target, batch))
    free = {
        "tap_convention": TAP_CONVENTION,
        "max_length": run.short.columns,
        "min_loss_tokens": _LEAST_TRAINED,
    }
    writer = TargetCacheWriter(
        folder,
        target_layer_ids=config.dspark_target_layer_ids,
        hidden_size=config.hidden_size,
        free=free,
    )
    only_short = dataclasses.replace(run, settings=dataclasses.replace(run.settings, long_every=0))
    count = 0
    with writer, _batches(only_short, 0) as next_batch:
        for _ in range(batches):
            t = told(target, next_batch())
            arrays = jax.device_get((t.ids, t.segment, t.mask))
            wide = (np.asarray(x.astype(jax.numpy.bfloat16)) for x in (t.taps, t.hidden))
            for sample in samples_of(*arrays, *wide, least=_LEAST_TRAINED):
                writer.add(sample)
                count += 1
    return count


def _start(run: DrafterRun, output: Path, resume: bool) -> DrafterState:
    state = begin(run.method, run.config, run.settings)
    exists = (output / drafter_state.STATE).exists()
    if not resume:
        if exists:
            raise ConfigError(
                f"{output} already holds the state of a run.",
                "A new run would overwrite it.",
                "Add --resume to continue it, or choose another --out.",
            )
        return state
    found = drafter_state.read_header(output).method
    if found != run.method:
        raise ConfigError(
            f"{output} holds a run of method {found}, and {run.method} was asked for.",
            "The two drafters have other tensors or other losses.",
            f"Resume with --method {found}, or choose another --out.",
        )
    return drafter_state.load(output, state)


def _save(run: DrafterRun, output: Path, state: DrafterState, log: "_Log", step: int) -> None:
    log.write(step)
    drafter_state.save(output, state, run.method, dataclasses.asdict(run.settings))


def _targets(
    run: DrafterRun, shape: str
) -> Callable[[Mapping[str, jax.Array], Mapping[str, jax.Array]], Targets]:
    """How a batch of `shape` becomes targets inside the compiled step."""
    if shape == "cached":
        return lambda target, batch: Targets(**batch)
    rows = run.short if shape == "short" else run.long
    gpu = jax.devices()[0].platform == "gpu"
    options = ForwardOptions(
        bfloat16=gpu,
        kernel=gpu,
        quantize_caches=True,
        decoder_start=rows.columns - rows.decoder_rows,
        chunk=0 if rows.columns <= 256 else 256 if shape == "short" else 1024,
    )
    return lambda target, batch: teach(target, batch, run.config, options, run.token_map)


def _compile(
    run: DrafterRun,
    shapes: Sequence[str],
    state: DrafterState,
    target: Mapping[str, jax.Array],
) -> dict[str, Any]:
    """The steps of `shapes`, compiled side by side before the clock matters."""
    gpu = jax.devices()[0].platform == "gpu"
    options = DrafterOptions(bfloat16=gpu, kernel=gpu, heads=run.method == "dspark")

    def compiled(shape: str) -> Any:
        began = time.monotonic()
        jitted = train_step(run.method, run.config, run.settings, options, _targets(run, shape))
        lowered = jitted.lower(state, target, _abstract(run, shape))
        made = lowered.compile(compiler_options=dict(run.compiler))
        LOG.info(f"compiled {shape} in {time.monotonic() - began:.0f} s")
        return made

    with ThreadPoolExecutor(max(len(shapes), 1)) as pool:
        return dict(zip(shapes, pool.map(compiled, shapes), strict=True))


def _abstract(run: DrafterRun, shape: str) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = data_mesh(jax.devices()[:1])
    if shape != "cached":
        rows = run.short if shape == "short" else run.long
        return batch_shapes(Kind(rows.rows, rows.columns, 0, True), mesh)
    sharding = NamedSharding(mesh, P(AXIS))
    first = next(cached_batches(_cache(run), run.short.rows, run.short.columns, 0, 0))
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        for name, array in first.items()
    }


def _cache(run: DrafterRun) -> TargetCache:
    assert run.cache is not None
    return run.cache


class _Cached(AbstractContextManager[Callable[[], dict[str, jax.Array]]]):
    """Batches of a cache, put on the device one ahead of their use."""

    def __init__(self, run: DrafterRun, step: int):
        check_cache(_cache(run), run.config, run.short.columns)
        rows, columns = run.short.rows, run.short.columns
        self._host = cached_batches(_cache(run), rows, columns, run.settings.seed, step)
        self._place = NamedSharding(data_mesh(jax.devices()[:1]), P(AXIS))

    def __enter__(self) -> Callable[[], dict[str, jax.Array]]:
        self._ahead = self._put()
        return self._next

    def __exit__(self, *_: object) -> None:
        return None

    def _put(self) -> dict[str, jax.Array]:
        return jax.device_put(next(self._host), self._place)

    def _next(self) -> dict[str, jax.Array]:
        ready, self._ahead = self._ahead, self._put()
        return ready


class _Fed(AbstractContextManager[Callable[[], dict[str, jax.Array]]]):
    """Batches of a source, made by the feed's thread."""

    def __init__(self, run: DrafterRun, step: int):
        mesh = data_mesh(jax.devices()[:1])
        assert run.source is not None
        self._feed = Feed(run.source, _planned(run, step), run.settings.seed, mesh)

    def __enter__(self) -> Callable[[], dict[str, jax.Array]]:
        self._feed.__enter__()
        return self._feed.next

    def __exit__(self, *given: object) -> None:
        self._feed.__exit__(*given)


def _batches(
    run: DrafterRun, step: int
) -> AbstractContextManager[Callable[[], dict[str, jax.Array]]]:
    return _Fed(run, step) if run.cache is None else _Cached(run, step)


def _planned(run: DrafterRun, step: int) -> Iterator[Planned]:
    """Batches from `step` on, at full difficulty; the feed runs ahead of the last step."""
    while True:
        yield Planned(step, "long" if run.settings.is_long(step) else "short", 1.0)
        step += 1


class _Log:
    """Reports of the steps since the last line, averaged into one line of `metrics.jsonl`."""

    def __init__(self, path: Path, step: int):
        """Keep the lines up to `step`; later ones are of steps that were lost."""
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        with replacing(path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in kept))
        self.pending: list[Mapping[str, jax.Array]] = []
        self.since = time.monotonic()

    def add(self, report: Mapping[str, jax.Array]) -> None:
        self.pending.append(report)

    def write(self, step: int) -> None:
        """Append the line of the steps up to `step`; nothing when there are none since the last."""
        if not self.pending:
            return
        reports = jax.device_get(self.pending)
        means = {
            name: float(np.mean([r[name] for r in reports]))
            for name in _MEANS
            if name in reports[0]
        }
        if not math.isfinite(means["loss"]) or not math.isfinite(means["norm"]):
            raise ConfigError(
                f"The run has diverged: loss {means['loss']} and gradient norm {means['norm']} in "
                f"the {len(reports)} steps before step {step}.",
                "Training on would only spread numbers that are not finite.",
                "Resume from the last saved state with a smaller --set lr=RATE.",
            )
        others = [name for name in reports[0] if name not in _MEANS]
        found = metrics({name: np.sum([r[name] for r in reports], axis=0) for name in others})
        now = time.monotonic()
        row = {
            "step": step,
            **means,
            **found,
            "steps_s": len(reports) / max(now - self.since, 1e-9),
        }
        row = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        LOG.info("  ".join(f"{k} {v}" for k, v in row.items()))
        self.pending, self.since = [], now
