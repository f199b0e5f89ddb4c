"""Engram tables that stay outside the parameters: in host memory or on disk, read row by row."""

from dataclasses import dataclass

import numpy as np

from deepinfer_jax.checkpoint.formats import check_scales, decode_rows
from deepinfer_jax.errors import CheckpointError


@dataclass(frozen=True)
class EngramTable:
    """One layer's n-gram table.

    Attributes:
        name: of the stored weight, `layers.{l}.engram.embed.weight`.
        codes: [rows, width], E4M3 with scales, or BF16 without; in memory or memory-mapped.
        scales: [rows, width / 32] E8M0, or None when the checkpoint is dequantized.
        dtype: of what `rows` returns, BF16 or float32.
    """

    name: str
    codes: np.ndarray
    scales: np.ndarray | None
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, width)."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Rows `indices` (integers, any shape) -> [*indices.shape, width]; only those are read.

        Raises CheckpointError for an index outside the table, or a row whose codes or scales are
        not numbers (a memory-mapped table is not read through when it is opened).
        """
        self._check(indices)
        flat = indices.reshape(-1)
        codes = self.codes[flat]
        if self.scales is None:
            rows = codes.astype(self.dtype)
        else:
            scales = self.scales[flat]
            check_scales(self.name.removesuffix("weight") + "scale", scales, flat)
            rows = decode_rows(f"{self.name} (rows as asked for)", codes, scales, self.dtype)
        return rows.reshape(*indices.shape, self.shape[1])

    def _check(self, indices: np.ndarray) -> None:
        if not np.issubdtype(indices.dtype, np.integer):
            raise CheckpointError(
                f"Rows of {self.name} were asked for by {indices.dtype} indices.",
                "A row number is an integer.",
                "Pass an integer array.",
            )
        wrong = indices[(indices < 0) | (indices >= self.shape[0])]
        if wrong.size:
            raise CheckpointError(
                f"Row {int(wrong[0])} of {self.name} was asked for; "
                f"it has rows 0 to {self.shape[0] - 1}.",
                "A row outside the table belongs to no n-gram.",
                "Check that the config belongs to this checkpoint.",
            )
