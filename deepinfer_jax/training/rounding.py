"""What the release formats cost: exact match of a run's weights, rounded and as they are."""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.training.carry import Carried
from deepinfer_jax.training.piece import Plan, compile_check, judge


@dataclass(frozen=True)
class Row:
    """Right answers of one skill among `n`: weights and caches rounded, and neither rounded."""

    skill: str
    n: int
    rounded: int
    unrounded: int


def compare(plan: Plan, start: Carried) -> list[Row]:
    """Teacher-forced exact match on the plan's held-out sets, a row per skill and one for all."""
    weights = jax.device_put(start.weights, NamedSharding(plan.mesh, P()))
    kinds = [plan.kind(shape, q) for shape in plan.held_out for q in (True, False)]
    with ThreadPoolExecutor(max(len(kinds), 1)) as pool:
        compiled = pool.map(lambda kind: compile_check(plan, kind, weights), kinds)
        checks = dict(zip(kinds, compiled, strict=True))
    rounded, counted = _by_skill(judge(plan, checks, weights, True))
    unrounded, _ = _by_skill(judge(plan, checks, weights, False))
    return [Row(skill, n, rounded[skill], unrounded[skill]) for skill, n in counted.items()]


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of a Markdown table; accuracies in per cent, their difference in points."""
    lines = [
        "| skill | n | release formats | unrounded | difference |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        rounded, unrounded = (100 * right / row.n for right in (row.rounded, row.unrounded))
        lines.append(
            f"| {row.skill} | {row.n} | {rounded:.1f} % | {unrounded:.1f} % | "
            f"{rounded - unrounded:+.1f} |"
        )
    return lines


def _by_skill(found: Mapping[str, tuple[int, int]]) -> tuple[Counter[str], Counter[str]]:
    """Right and counted answers by the part of a label before its slash, and of all together."""
    right, counted = Counter[str](), Counter[str]()
    for label, (correct, n) in found.items():
        for name in (label.partition("/")[0], "all"):
            right[name] += correct
            counted[name] += n
    last = counted.pop("all", 0)
    return right, counted | Counter({"all": last})
