"""Rows split over devices: what level R4 will rest on once a network can be split.

Each device of a mesh takes an equal part of the rows and all of what they read. No kernel talks to
another device, so nothing is added up across devices whose order would have to be fixed.
"""

from functools import cache

import jax
import numpy as np
import pytest
from bitwise import assert_same_bits
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from op_examples import EXAMPLES

from deepinfer_jax.ops.table import OPS

ROWS = 32
CLAIMS = [k for kernels in OPS.values() for k in kernels if k.batch_invariant and "cpu" in k.on]
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")


@cache
def split(kernel, devices):
    """Results of the first rows of an op's example, and the program that made them."""
    example = next(iter(EXAMPLES[kernel.op].values()))()
    rows = jax.tree.map(lambda a: a[:ROWS], example.rows)
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    run = jax.shard_map(
        lambda rows: example.run(kernel, rows),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,  # loops of as many turns as a device has blocks
    )
    program = jax.jit(run).lower(rows).compile()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(program(rows))], program.as_text()


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("kernel", CLAIMS, ids=lambda k: f"{k.op}.{k.name}")
def test_a_row_has_the_same_bits_on_a_mesh_of(kernel, devices):
    expected, _ = split(kernel, 1)
    made, text = split(kernel, devices)
    for a, b in zip(made, expected, strict=True):
        assert_same_bits(a, b)
    assert f"num_partitions={devices}" in text
    assert not [name for name in COLLECTIVES if name in text]
