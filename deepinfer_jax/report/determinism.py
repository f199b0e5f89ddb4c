"""Which determinism level a run reaches, why, and what the next one asks for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from deepinfer_jax.errors import NoKernelError
from deepinfer_jax.ops.kernel import Kernel
from deepinfer_jax.ops.table import OPS, Ops, select
from deepinfer_jax.settings import EngineConfig

LEVELS = {
    "R0": "no promise",
    "R1": "same batches and layout, same bits",
    "R2": "any batch, same bits",
    "R3": "any batch, same tokens",
    "R4": "any layout, same tokens",
}
# A network is not split over devices yet, so there are no layouts that could be held together.
_R4_NEEDS = (
    "R4 needs a network that is split over devices, and every program here runs whole on one of "
    "them, however many there are"
)
# XLA's GPU compiler may otherwise pick atomics, or another algorithm by a timing race.
_GPU_FLAGS = {
    "--xla_gpu_deterministic_ops=true": r"--xla_gpu_deterministic_ops(=true|=1)?(\s|$)",
    "--xla_gpu_autotune_level=0": r"--xla_gpu_autotune_level=0(\s|$)",
}


@dataclass(frozen=True)
class Level:
    """A level of `LEVELS`, the reason that it holds, and what the next one needs.

    Both texts are one sentence without its full stop. `tokens` says whether equal bits make equal
    tokens where requests fix their seeds; `then` is the level that `next_needs` leads to, None
    where it is not known or R3.
    """

    name: str
    why: str
    next_needs: str
    tokens: bool = True
    then: "Level | None" = None

    @property
    def promise(self) -> str:
        """What the level promises, in a few words."""
        return LEVELS[self.name]

    @property
    def reachable(self) -> str:
        """The highest level that requests can still bring about; R3 only takes their seeds."""
        return "R3" if self.name == "R2" and self.tokens else self.name

    def steps(self) -> dict[str, str]:
        """Each level above this one with what it takes on top of the one below it, R4 included.

        Texts are sentences without their full stop.
        """
        found, level = {}, self
        for below, name in pairwise(LEVELS):
            if below < self.name:
                continue
            if name == "R4":
                found[name] = _R4_NEEDS
            elif level is not None and level.name == below:
                found[name], level = level.next_needs, level.then
            else:
                found[name] = f"{name} needs {below}"
        return found

    def missing(self, wanted: str) -> str:
        """All that stands between this level and `wanted`, without a full stop."""
        return "; ".join(text for name, text in self.steps().items() if name <= wanted)


def level_of(
    ops: Ops,
    *,
    xla_flags: str,
    varlen: bool = False,
    few_pages: bool = False,
    rule: str = "coupled",
    table: Mapping[str, Sequence[Kernel]] = OPS,
) -> Level:
    """The level that chosen kernels keep on their device under the text of XLA_FLAGS.

    R3 is never returned: it is R2 with a fixed `seq_seed` on every request, which the kernels
    cannot know; nor is R4, which has nothing to hold for yet (`Level.steps`). How
    many drafts are verified depends with `varlen` on the other sequences, and with `few_pages`,
    where sequences may wait for pages; under every rule but `coupled` so do the tokens. `table` is
    what a batch-invariant choice would be made from.
    """
    kind = ops.device.kind
    drafted: Any = {"varlen": varlen, "few_pages": few_pages, "rule": rule}
    if kind in ("sm90", "sm100"):
        absent = [flag for flag, form in _GPU_FLAGS.items() if not re.search(form, xla_flags)]
        if absent:
            why = "XLA may choose another GPU algorithm in another process"
            flags = f"{xla_flags} {' '.join(absent)}"
            then = level_of(ops, xla_flags=flags, table=table, **drafted)
            return Level("R0", why, f"R1 needs XLA_FLAGS with {' '.join(absent)}", then=then)
        why = "the flags bind XLA to deterministic algorithms"
    elif kind == "cpu":
        why = "one compiled program and fixed shapes leave XLA on CPU one order of every sum"
    else:
        return Level(
            "R0", f"equal bits have not been measured on {kind}", f"R1 needs a proof on {kind}"
        )
    if ops.batch_invariant:
        why = "every chosen kernel keeps rows apart"
        causes = {"DEEPINFER_ENABLE_MTP_VARLEN=0": varlen, "engine.pages left out": few_pages}
        without = " and ".join(text for text, present in causes.items() if present)
        if without and rule != "coupled":
            own = rule == "original"
            instead = "engine.sampler=stable" if own else "engine.verification=coupled"
            needs = f"R3 needs {without} or {instead}, and a seq_seed per request"
            return Level("R2", why, needs, tokens=False)
        return Level("R2", why, "R3 needs a seq_seed per request")
    try:
        steady = select(ops.device, batch_invariant=True, table=table)
    except NoKernelError as error:
        absent = f"{error.what.rstrip('.')} ({error.why.rstrip('.')})"
        return Level("R1", why, f"R2 cannot be reached here: {absent}")
    then = level_of(steady, xla_flags=xla_flags, table=table, **drafted)
    return Level("R1", why, "R2 needs DEEPINFER_BATCH_INVARIANT=1", then=then)


def engine_level(ops: Ops, engine: EngineConfig, *, xla_flags: str) -> Level:
    """`level_of` under an engine's settings; of drafts left to the checkpoint it expects some."""
    return level_of(
        ops,
        xla_flags=xla_flags,
        varlen=engine.varlen,
        few_pages=engine.pages is not None and engine.nextn != 0,
        rule=engine.rule,
    )
