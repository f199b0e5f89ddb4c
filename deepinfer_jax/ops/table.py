"""The table of chosen kernels: one per op, settled before tracing, printed and recorded."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepinfer_jax.errors import NoKernelError
from deepinfer_jax.ops import experts, index_scores, linear, mhc, rowwise, sparse_mla, topk
from deepinfer_jax.ops.device import Device
from deepinfer_jax.ops.kernel import Kernel, choose

# Op name -> its kernels, fastest first, in the order in which a token meets the ops.
OPS: dict[str, tuple[Kernel, ...]] = {
    "rowwise": rowwise.KERNELS,
    "mhc": mhc.KERNELS,
    "linear": linear.KERNELS,
    "index_scores": index_scores.KERNELS,
    "topk": topk.KERNELS,
    "sparse_mla": sparse_mla.KERNELS,
    "experts": experts.KERNELS,
}


@dataclass(frozen=True)
class Row:
    """One line of the table; `why` says which faster kernels were passed over and for what."""

    op: str
    kernel: str
    batch_invariant: bool
    why: str


@dataclass(frozen=True)
class Ops:
    """The kernels that a program calls: `ops.linear(x, w)`; hashable, so a static argument.

    Attributes:
        device: where these kernels run.
        batch_invariant: whether every one of them keeps a row's bits apart from its neighbours.
        kernels: one per op, in table order; each is also an attribute under its op's name.
    """

    device: Device
    batch_invariant: bool
    kernels: tuple[Kernel, ...]
    reasons: tuple[str, ...] = field(compare=False, repr=False)

    def __getattr__(self, op: str) -> Kernel:
        for kernel in self.__dict__.get("kernels", ()):
            if kernel.op == op:
                return kernel
        raise AttributeError(f"The kernel table has no op {op!r}.")

    def rows(self) -> tuple[Row, ...]:
        """One row per op, in table order, for printing and for the run's record."""
        return tuple(
            Row(k.op, k.name, k.batch_invariant, why)
            for k, why in zip(self.kernels, self.reasons, strict=True)
        )


def select(
    device: Device,
    *,
    batch_invariant: bool = False,
    overrides: Mapping[str, str] | None = None,
    table: Mapping[str, Sequence[Kernel]] = OPS,
) -> Ops:
    """Choose a kernel for every op of `table`.

    Args:
        device: where the program will run.
        batch_invariant: whether every kernel must keep rows apart.
        overrides: op -> kernel name; such a kernel is used or the call fails.
        table: op -> kernels, fastest first.

    Raises:
        NoKernelError: an op without a fitting kernel, or an override that names no op or kernel.
            Where rows must be kept apart, it lists the kernels of all ops that do so.
    """
    overrides = dict(overrides or {})
    unknown = sorted(set(overrides) - set(table))
    if unknown:
        near = difflib.get_close_matches(unknown[0], table, 1)
        raise NoKernelError(
            f"A kernel is named for {len(unknown)} unknown ops: {', '.join(unknown)}.",
            f"The ops are {', '.join(table) or 'none'}.",
            f"Correct DEEPINFER_KERNEL_{unknown[0].upper()} or engine.kernels.{unknown[0]}"
            + (f" (nearest: {near[0]})." if near else "."),
        )
    chosen, reasons = [], []
    for op, kernels in table.items():
        wanted = overrides.get(op)
        try:
            kernel = choose(kernels, device, batch_invariant=batch_invariant, wanted=wanted)
        except NoKernelError as error:
            if not batch_invariant or (wanted and all(k.name != wanted for k in kernels)):
                raise
            why = f"{error.why.rstrip('.')}; {_keeping_apart(table, device)}."
            raise NoKernelError(error.what, why, error.do) from None
        chosen.append(kernel)
        reasons.append(_reason(kernels, kernel, device, batch_invariant, wanted))
    return Ops(device, batch_invariant, tuple(chosen), tuple(reasons))


def _keeping_apart(table: Mapping[str, Sequence[Kernel]], device: Device) -> str:
    """Every op with its kernels that keep rows apart on `device`, in table order."""
    lines = []
    for op, kernels in table.items():
        names = [k.name for k in kernels if k.refusal(device, batch_invariant=True) is None]
        lines.append(f"{op} {' or '.join(names) or 'none'}")
    return f"batch invariant on {device.kind} are: {', '.join(lines)}"


def _reason(
    kernels: Sequence[Kernel],
    chosen: Kernel,
    device: Device,
    batch_invariant: bool,
    wanted: str | None,
) -> str:
    if wanted is not None:
        return "asked for by name"
    passed = [
        f"{k.name}: {k.refusal(device, batch_invariant=batch_invariant)}"
        for k in kernels[: list(kernels).index(chosen)]
    ]
    return "; ".join(passed) or "first in order"
