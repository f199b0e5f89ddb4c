"""Which determinism level a run reaches, why, and what the next one asks for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepinfer_jax.errors import NoKernelError
from deepinfer_jax.ops.kernel import Kernel
from deepinfer_jax.ops.table import OPS, Ops, select

LEVELS = {
    "R0": "no promise",
    "R1": "same batches and layout, same bits",
    "R2": "any batch, same bits",
    "R3": "any batch, same tokens",
}
# XLA's GPU compiler may otherwise pick atomics, or another algorithm by a timing race.
_GPU_FLAGS = {
    "--xla_gpu_deterministic_ops=true": r"--xla_gpu_deterministic_ops(=true|=1)?(\s|$)",
    "--xla_gpu_autotune_level=0": r"--xla_gpu_autotune_level=0(\s|$)",
}


@dataclass(frozen=True)
class Level:
    """A level of `LEVELS`, the reason that it holds, and what the next one needs.

    Both texts are one sentence without its full stop. `tokens` says whether equal bits make equal
    tokens where requests fix their seeds.
    """

    name: str
    why: str
    next_needs: str
    tokens: bool = True

    @property
    def promise(self) -> str:
        """What the level promises, in a few words."""
        return LEVELS[self.name]

    @property
    def reachable(self) -> str:
        """The highest level that requests can still bring about; R3 only takes their seeds."""
        return "R3" if self.name == "R2" and self.tokens else self.name


def level_of(
    ops: Ops,
    *,
    xla_flags: str,
    varlen: bool = False,
    rule: str = "coupled",
    table: Mapping[str, Sequence[Kernel]] = OPS,
) -> Level:
    """The level that chosen kernels keep on their device under the text of XLA_FLAGS.

    R3 is never returned: it is R2 with a fixed `seq_seed` on every request, which the kernels
    cannot know. How many drafts are verified depends with `varlen` on the other sequences, and
    under every rule but `coupled` so do the tokens. `table` is what a batch-invariant choice would
    be made from.
    """
    kind = ops.device.kind
    if kind in ("sm90", "sm100"):
        absent = [flag for flag, form in _GPU_FLAGS.items() if not re.search(form, xla_flags)]
        if absent:
            why = "XLA may choose another GPU algorithm in another process"
            return Level("R0", why, f"R1 needs XLA_FLAGS with {' '.join(absent)}")
        why = "the flags bind XLA to deterministic algorithms"
    elif kind == "cpu":
        why = "one compiled program and fixed shapes leave XLA on CPU one order of every sum"
    else:
        return Level(
            "R0", f"equal bits have not been measured on {kind}", f"R1 needs a proof on {kind}"
        )
    if ops.batch_invariant:
        why = "every chosen kernel keeps rows apart"
        if varlen and rule != "coupled":
            instead = (
                "engine.sampler=stable" if rule == "original" else "engine.verification=coupled"
            )
            needs = (
                f"R3 needs DEEPINFER_ENABLE_MTP_VARLEN=0 or {instead}, and a seq_seed per request"
            )
            return Level("R2", why, needs, tokens=False)
        return Level("R2", why, "R3 needs a seq_seed per request")
    try:
        select(ops.device, batch_invariant=True, table=table)
    except NoKernelError as error:
        absent = f"{error.what.rstrip('.')} ({error.why.rstrip('.')})"
        return Level("R1", why, f"R2 cannot be reached here: {absent}")
    return Level("R1", why, "R2 needs DEEPINFER_BATCH_INVARIANT=1")
