"""The folder of a batch run: results as they come, and how a killed run goes on.

`results.jsonl` is the journal. `run.json` says what the results were made with and of.
`errors.jsonl` repeats the failed lines; it is written at the end of a run, if there are any.
`metrics.jsonl` says how fast it went, second by second; nothing is read from it.
"""

import hashlib
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.protocol.batch import Result
from deepinfer_jax.protocol.batch_file import BatchFile
from deepinfer_jax.protocol.metrics_file import METRICS
from deepinfer_jax.protocol.result_file import ResultFile, key_of, replace_json, writing

Resume = Literal["auto", "force", "never"]
RESULTS, ERRORS, RUN = "results.jsonl", "errors.jsonl", "run.json"
# Members of a manifest that decide nothing beyond what the config's digest says.
_INERT = ("settings", "variables")


@dataclass
class Tally:
    """Counts over the result lines of a folder.

    Attributes:
        answered, failed: lines.
        truncated: lines of which a prompt was cut.
        finish_reasons: choices by why they ended.
    """

    answered: int = 0
    failed: int = 0
    truncated: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    _digests: list[str] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Count one more line."""
        self._digests.append(result["deepinfer"]["digest"])
        # Absent from results of earlier versions, which cut nothing.
        self.truncated += result["deepinfer"].get("truncated_tokens", 0) > 0
        if result["error"] is not None:
            self.failed += 1
            return
        self.answered += 1
        for choice in result["response"]["body"]["choices"]:
            self.finish_reasons[choice["finish_reason"]] += 1

    @property
    def digest(self) -> str:
        """SHA-256 over the sorted digests of the lines, which their order does not change."""
        return hashlib.sha256("".join(sorted(self._digests)).encode()).hexdigest()


class Journal:
    """The open folder of a run; a context manager, which closes it.

    Attributes:
        done: keys of the lines that have their result.
        tally: counts over them.
        resumed: how many of them an earlier run had left.
        drafts: what became of this run's drafts, plain JSON values; None if there were none.
    """

    def __init__(
        self,
        folder: Path,
        batch: BatchFile,
        engine: Mapping[str, Any],
        *,
        resume: Resume = "auto",
        ordered: bool = False,
    ):
        """Open the folder for new lines, those of an earlier run in place.

        Args:
            folder: made if it does not exist.
            batch: the input.
            engine: the engine's manifest, plain JSON values.
            resume: what to do with results that are there already. `auto` goes on if input and
                engine are the same, `force` also if not, and records that in run.json; results of
                lines that are no longer in the input are then removed. `never` refuses.
            ordered: put the results into the input's order when closed.

        Raises:
            ConfigError: the folder cannot be used, or holds another run's results.
        """
        self.done: set[str] = set()
        self.tally = Tally()
        self._folder, self._batch, self._ordered = folder, batch, ordered
        self._started = time.monotonic()
        self.drafts: Mapping[str, Any] | None = None
        _refuse_input_as_output(folder, batch.path)
        self._results = ResultFile(folder / RESULTS)
        try:
            self._record = self._opened(engine, resume)
        except BaseException:
            self._results.close()
            raise
        self.resumed = len(self.done)
        self._open = True

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def fingerprint(self) -> str:
        """Names the engine in responses."""
        return "fp_" + self._record["engine"]["digest"].removeprefix("sha256:")[:10]

    def append(self, result: Result) -> None:
        """Add a result line; it outlives the process from here on."""
        self._results.append(result)
        self._count(result)

    def summary(self) -> dict[str, Any]:
        """The content of run.json."""
        tally = self.tally
        count = tally.answered + tally.failed
        return self._record | {
            "finished": count == len(self._batch.lines),
            "requests": {
                "file": RESULTS,
                "count": count,
                "errors": tally.failed,
                "truncated": tally.truncated,
                "finish_reasons": dict(sorted(tally.finish_reasons.items())),
                "digest": f"sha256:{tally.digest}",
            },
            "time": {"run_s": round(time.monotonic() - self._started, 3)},
            "drafts": None if self.drafts is None else dict(self.drafts),
        }

    def close(self) -> None:
        """Write what is derived from the results, and let go of the folder."""
        if not self._open:
            return
        self._open = False
        try:
            with writing(self._folder):
                self._results.cut()
                self._results.sync()
                if self._ordered:
                    self._results.rewrite(line.key for line in self._batch.lines)
                self._write_errors()
                replace_json(self._folder / RUN, self.summary())
        finally:
            self._results.close()

    def _opened(self, engine: Mapping[str, Any], resume: Resume) -> dict[str, Any]:
        """The run's record, once it is certain that the folder's results belong to it."""
        compared = {name: value for name, value in engine.items() if name not in _INERT}
        made_with = {name: _digest(value) for name, value in compared.items()}
        made_with |= {"input": f"sha256:{self._batch.digest}"}
        record: dict[str, Any] = {
            "schema": 1,
            "run_id": secrets.token_hex(4),
            "input": {"lines": len(self._batch.lines), "digest": made_with["input"]},
            "engine": {"digest": _digest(compared), "manifest": dict(engine)},
            "made_with": made_with,
            "breaks": [],
        }
        foreign = 0
        if not self._results.is_empty:
            foreign = self._read()
            record |= self._continued(engine, made_with, foreign, resume)
        with writing(self._folder):
            self._results.cut()
            # Before the first foreign line goes, so that a kill here cannot hide the break.
            replace_json(self._folder / RUN, record | {"finished": False})
            if foreign:
                kept = [line.key for line in self._batch.lines if line.key in self.done]
                self._results.rewrite(kept)
        return record

    def _read(self) -> int:
        """Count the results of this input; returns how many are there of other lines."""
        known, foreign = {line.key for line in self._batch.lines}, 0
        for result in self._results.read():
            if key_of(result) in known:
                self._count(result)
            else:
                foreign += 1
        return foreign

    def _continued(
        self,
        engine: Mapping[str, Any],
        made_with: Mapping[str, str],
        foreign: int,
        resume: Resume,
    ) -> dict[str, Any]:
        """What the record takes over from the earlier run's. Raises ConfigError."""
        old = self._old_record()
        was, breaks = old.get("made_with"), old.get("breaks", [])
        held = f"{self._folder} holds {len(self.done) + foreign} results"
        if resume == "never":
            raise ConfigError(
                f"{held} of an earlier run.",
                "A run that is not to go on where another stopped starts with an empty folder.",
                "Name another folder, or pass --resume=auto.",
            )
        differing, changed = [RUN], []
        if isinstance(was, dict):
            names = {*was, *made_with}
            differing = sorted(name for name in names if was.get(name) != made_with.get(name))
            changed = _changed_settings(old, engine) if "config" in differing else []
        # A forced run may have been killed before it removed what it had to.
        forced = bool(breaks) and breaks[-1]["removed"] > 0
        if foreign and not differing and not forced:
            differing = [RESULTS]
        if differing and resume != "force":
            raise ConfigError(
                f"{held} of another run; what differs: {_told(differing, changed)}.",
                "Results of different inputs or engines in one file cannot be told apart.",
                "Name another folder, or pass --resume=force, which records the break in run.json.",
            )
        if differing:
            before = {name: was.get(name) if isinstance(was, dict) else None for name in differing}
            kept = {"kept": len(self.done), "removed": foreign}
            breaks = [*breaks, {"differ": differing, "was": before} | kept]
        return {"breaks": breaks} | {name: old[name] for name in ("run_id",) if name in old}

    def _old_record(self) -> dict[str, Any]:
        try:
            record = json.loads((self._folder / RUN).read_bytes())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _count(self, result: Result) -> None:
        self.done.add(key_of(result))
        self.tally.add(result)

    def _write_errors(self) -> None:
        path = self._folder / ERRORS
        if not self.tally.failed:
            path.unlink(missing_ok=True)
            return
        temporary = path.with_name(f".{ERRORS}.tmp")
        with self._results.path.open("rb") as results, temporary.open("wb") as errors:
            errors.writelines(line for line in results if json.loads(line)["error"] is not None)
        os.replace(temporary, path)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _changed_settings(old: Mapping[str, Any], engine: Mapping[str, Any]) -> list[str]:
    """Keys of settings whose values are not those of an earlier run's record."""
    try:
        was = {row["key"]: row["value"] for row in old["engine"]["manifest"]["settings"]}
        now = {row["key"]: row["value"] for row in engine["settings"]}
    except (KeyError, TypeError):
        return []  # a record of another kind; that the config differs is known anyway
    return sorted(key for key in {*was, *now} if was.get(key) != now.get(key))


def _told(differing: list[str], changed: list[str]) -> str:
    named = f"config ({', '.join(changed)})" if changed else "config"
    return ", ".join(named if name == "config" else name for name in differing)


def _refuse_input_as_output(folder: Path, source: Path) -> None:
    for name in (RESULTS, ERRORS, RUN, METRICS):
        path = folder / name
        if path.exists() and path.samefile(source):
            raise ConfigError(
                f"The input {source} is the output's {name}.",
                "The run would write into the file that it reads.",
                "Name another output folder.",
            )
