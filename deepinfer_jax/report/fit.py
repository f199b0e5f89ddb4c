"""Which sizes of an engine fit into a memory, and what to offer when those asked for do not.

One function decides for `LLM`, for `deepinfer plan` and for every offer that a refusal makes, so an
offer cannot be refused in its turn.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_jax.errors import MemoryPlanError
from deepinfer_jax.model.cache import pages_of
from deepinfer_jax.model.transformer import Network
from deepinfer_jax.report.plan import MemoryPlan, max_length, memory_plan, size_text, told
from deepinfer_jax.settings import EngineConfig

ALTERNATIVES = 3
_GRAIN = 256  # tokens
_MOST_SLOTS = 1 << 16


@dataclass(frozen=True)
class Alternative:
    """Other settings that fit: engine fields with their values, and the plan that they give."""

    changes: Mapping[str, Any]
    plan: MemoryPlan

    def __str__(self) -> str:
        return " and ".join(f"engine.{name}={value}" for name, value in self.changes.items())


@dataclass(frozen=True)
class Verdict:
    """Whether an engine fits: its plan, and when it does not, the refusal and what would fit."""

    plan: MemoryPlan
    alternatives: tuple[Alternative, ...]
    refusal: MemoryPlanError | None


@dataclass(frozen=True)
class Planner:
    """Plans engines of one network for one memory.

    Attributes:
        network: whose weights and caches are counted.
        free: bytes that there are; None leaves the check out.
        outside: bytes of Engram tables that are not parameters and lie in the same memory when
            they are held on the host.
        drafts: tokens of a sequence that a step verifies at most.
    """

    network: Network
    free: int | None
    outside: int = 0
    drafts: int = 0

    def fitting(self, engine: EngineConfig) -> MemoryPlan:
        """The plan to run: as asked, or as long as memory holds when no length was asked for.

        Raises:
            MemoryPlanError: no such plan fits; it offers settings that do.
            ConfigError: a length beyond the model's.
        """
        verdict = self.judge(engine)
        if verdict.refusal is not None:
            raise verdict.refusal
        return verdict.plan

    def judge(self, engine: EngineConfig) -> Verdict:
        """What `fitting` answers or raises, with the plan that is refused and what fits instead.

        Raises ConfigError for a length beyond the model's.
        """
        found = self._found(engine)
        if found is not None:
            return Verdict(found, (), None)
        plan, ways = self.wanted(engine), self.alternatives(engine)
        return Verdict(plan, ways, self._refusal(engine, plan, ways))

    def wanted(self, engine: EngineConfig) -> MemoryPlan:
        """The plan as asked, whether it fits or not."""
        return self._at(engine, max_length(engine, self.network.config))

    def alternatives(self, engine: EngineConfig) -> tuple[Alternative, ...]:
        """Up to `ALTERNATIVES` other settings that fit, each planned again, or as few as exist.

        One change comes before two: fewer sequences, shorter ones, fewer pages, a smaller step;
        then the same with weights or Engram tables kept in less memory.
        """
        found: list[Alternative] = []
        for changes in self._candidates(engine):
            plan = self._found(dataclasses.replace(engine, **changes))
            if plan is not None and changes not in [a.changes for a in found]:
                found.append(Alternative(changes, plan))
            if len(found) == ALTERNATIVES:
                break
        return tuple(found)

    def most(self, engine: EngineConfig) -> dict[str, int]:
        """The longest `max_model_len` and the most `max_num_seqs` that fit, the rest as asked.

        0 where none does. Without a limit on memory there is no answer, and the result is empty.
        """
        if self.free is None:
            return {}
        limit = self.network.config.max_position_embeddings
        fixed = self._found(engine)
        length = max_length(engine, self.network.config) if fixed is None else fixed.positions
        same = dataclasses.replace(engine, max_model_len=length)
        return {
            "max_model_len": self._most(engine, "max_model_len", 1, limit),
            "max_num_seqs": self._most_slots(same),
        }

    def _found(self, engine: EngineConfig) -> MemoryPlan | None:
        """The plan to run, or None if none fits."""
        limit = max_length(engine, self.network.config)
        if self.free is None or engine.max_model_len is not None:
            wanted = self._at(engine, limit)
            return None if wanted.fits is False else wanted
        if self._roomy(engine, limit):
            return self._at(engine, limit)
        # Coarse, so that programs kept for one length serve the next start too.
        blocks = _most(limit // _GRAIN, lambda n: self._roomy(engine, n * _GRAIN))
        return self._at(engine, blocks * _GRAIN) if blocks else None

    def _roomy(self, engine: EngineConfig, positions: int) -> bool:
        """Whether a length that nobody asked for fits even if the step takes half as much again."""
        plan = self._at(engine, positions)
        return self.free is None or plan.total + plan.step // 2 <= self.free

    def _at(self, engine: EngineConfig, positions: int) -> MemoryPlan:
        return memory_plan(
            self.network,
            engine,
            positions,
            free=self.free,
            outside=self.outside,
            drafts=self.drafts,
        )

    def _most(self, engine: EngineConfig, name: str, least: int, most: int) -> int:
        """The largest value of a field from `least` to `most` with which a plan is found, or 0."""

        def found(value: int) -> bool:
            return self._found(dataclasses.replace(engine, **{name: value})) is not None

        if most < least or not found(least):
            return 0
        return least + _most(most - least, lambda more: found(least + more))

    def _most_slots(self, engine: EngineConfig) -> int:
        """As `_most`, doubling from below: the table of very many slots costs real memory."""
        top = 1
        while top < _MOST_SLOTS and self._most(engine, "max_num_seqs", top, top):
            top *= 2
        return self._most(engine, "max_num_seqs", max(top // 2, 1), top)

    def _candidates(self, engine: EngineConfig) -> Iterator[dict[str, Any]]:
        """Changes to try, those that change least first."""
        if self.free is not None and self._least(engine) > self.free:
            return
        wanted, places = self.wanted(engine), self._smaller(engine)
        yield from self._sizes(engine, wanted, {})
        yield from places
        ready = [c for c in places if self._found(dataclasses.replace(engine, **c)) is not None]
        for changes in places:
            longest = {"max_model_len": wanted.positions} if changes in ready else {}
            yield from self._sizes(engine, wanted, changes | longest)
        for changes in ({}, *places):
            yield changes | {"max_num_seqs": 1}
            yield from self._sizes(engine, wanted, changes | {"max_num_seqs": 1})

    def _least(self, engine: EngineConfig) -> int:
        """Bytes of the engine in as little memory as it can run in."""
        smallest = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, "pages": 1}
        ways = ({}, *self._smaller(engine))
        return min(
            self._at(dataclasses.replace(engine, **smallest, **way), 1).total for way in ways
        )

    def _smaller(self, engine: EngineConfig) -> list[dict[str, Any]]:
        """Ways to hold the same weights in less memory of the device, one change first."""
        packed = {"weights": "packed"} if engine.weights != "packed" else {}
        # Only a CPU's memory is the host's: there, tables on the host save nothing.
        here = self.network.ops.device.kind == "cpu"
        places = {"device": ["mmap"] if here else ["host"], "host": ["mmap"] if here else []}
        # Drafts need the tables on the device.
        others = [] if self.drafts else places.get(engine.engram, [])
        tables = [{"engram": place} for place in others]
        ways = [packed, *tables, *(packed | t for t in tables if packed)]
        return [way for way in ways if way]

    def _sizes(
        self, engine: EngineConfig, wanted: MemoryPlan, changes: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """`changes` with one more size lowered as little as fits, a size at a time."""
        one = pages_of(wanted.positions)  # so many pages the longest sequence needs by itself
        ranges = {
            "max_num_seqs": (1, wanted.slots - 1),
            "max_model_len": (1, wanted.positions - 1),
            "pages": (one, wanted.pages - 1),
            "max_num_batched_tokens": (1, engine.max_num_batched_tokens - 1),
        }
        base = dataclasses.replace(engine, **changes)
        for name, (least, most) in ranges.items():
            if name not in changes and (value := self._most(base, name, least, most)):
                yield changes | {name: value}

    def _refusal(
        self, engine: EngineConfig, plan: MemoryPlan, ways: tuple[Alternative, ...]
    ) -> MemoryPlanError:
        assert self.free is not None, "a plan is only refused where memory is known"
        free, least = size_text(self.free), size_text(self._least(engine))
        do = f"Run where there is more memory: no plan of this network takes less than {least}."
        if ways:
            do = f"Set {', or '.join(map(str, ways))}."
        return MemoryPlanError(
            f"The engine needs {size_text(plan.total)} ({plan.total:,} bytes), and {free} are "
            "available.",
            told(plan),
            do,
        )


def _most(n: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1 to n that fits, where all below one that fits do too; 0 if none does."""
    return bisect.bisect_right(range(1, n + 1), False, key=lambda i: not fits(i))
