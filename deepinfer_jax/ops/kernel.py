"""How an operation meets its kernels: what a kernel claims, and the choice among claims.

An op is a contract that its module states first; the module ends in a `KERNELS` tuple, fastest
first. The choice is made before tracing, and its result is a hashable constant of the program.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from deepinfer_jax.errors import NoKernelError
from deepinfer_jax.ops.device import KINDS, Device


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op, with the claims that its tests have to earn.

    Attributes:
        op: name of the contract it meets.
        name: its own name; a change of its numerics is a new name.
        run: the function; hashed by identity, so it must be a module-level function.
        on: device kinds it runs on; plain XLA runs on all of them.
        batch_invariant: the bits of a row never depend on the other rows of its batch.
    """

    op: str
    name: str
    run: Callable[..., Any]
    on: frozenset[str] = frozenset(KINDS)
    batch_invariant: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel inside a named scope, so that profiles and HLO carry its name."""
        with jax.named_scope(f"{self.op}.{self.name}"):
            return self.run(*args, **kwargs)

    def refusal(self, device: Device, *, batch_invariant: bool) -> str | None:
        """Why this kernel cannot serve, in a few words; None if it can."""
        if device.kind not in self.on:
            return f"runs on {', '.join(k for k in KINDS if k in self.on)} only"
        if batch_invariant and not self.batch_invariant:
            return "not batch invariant"
        return None


def choose(
    kernels: Sequence[Kernel],
    device: Device,
    *,
    batch_invariant: bool,
    wanted: str | None = None,
) -> Kernel:
    """Return the first of `kernels` that fits `device` and the promise, or exactly `wanted`.

    Args:
        kernels: those of one op, fastest first; not empty.
        device: where the program will run.
        batch_invariant: whether the bits of a row must not depend on its neighbours.
        wanted: a kernel's name; that kernel is used or the call fails, no other is tried.

    Raises:
        NoKernelError: nothing fits; the message lists each kernel with its reason.
    """
    op = kernels[0].op
    setting = f"engine.kernels.{op} or DEEPINFER_KERNEL_{op.upper()}"
    candidates = [k for k in kernels if wanted is None or k.name == wanted]
    if not candidates:
        names = [k.name for k in kernels]
        near = difflib.get_close_matches(wanted or "", names, 1) or names
        raise NoKernelError(
            f"Op {op} has no kernel named {wanted!r}.",
            f"Its kernels are {', '.join(names)}.",
            f"Set {setting} to one of them (nearest: {near[0]}) or unset it.",
        )
    refusals = []
    for kernel in candidates:
        reason = kernel.refusal(device, batch_invariant=batch_invariant)
        if reason is None:
            return kernel
        refusals.append(f"{kernel.name}: {reason}")
    promise = "with batch invariance" if batch_invariant else "without further promises"
    others = [k.name for k in kernels if k.refusal(device, batch_invariant=batch_invariant) is None]
    if wanted is not None and others:
        do = f"Unset {setting}, or set it to {others[0]}."
    elif batch_invariant and any(k.refusal(device, batch_invariant=False) is None for k in kernels):
        do = (
            "Set engine.batch_invariant=false or DEEPINFER_BATCH_INVARIANT=0, or run on a device "
            "that keeps the promise."
        )
    else:
        do = "Run on a device that one of these kernels names."
    raise NoKernelError(
        f"No kernel of op {op} fits {device.kind} {promise}.",
        f"Refusals: {'; '.join(refusals)}.",
        do,
    )
