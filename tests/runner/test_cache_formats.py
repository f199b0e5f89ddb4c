"""The whole step over caches of numbers and over records: the same bits, and no cache is copied."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from bitwise import assert_same_bits
from short_llm import short_config
from tiny_model import write_tiny_model

from deepinfer_jax.assembly import assemble
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.report.plan import nbytes
from deepinfer_jax.runner.compile import lower_step
from deepinfer_jax.runner.layout import Bucket, Flag, Part
from deepinfer_jax.runner.schedule import StepInput
from deepinfer_jax.runner.step import StepOptions, init_state
from deepinfer_jax.settings import EngineConfig

FORMATS = "f32", "release"
BUCKET = Bucket(rows=12, decoder_rows=12, parts=2, updates=3)
NAMES = {"float32": "f32", "int32": "s32", "uint8": "u8", "bool": "pred"}
# Two layers, one of each kind of kv source, and one Engram: the test waits for two compilations.
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "compress_ratios": [2, 1, 0],
    "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1],
    "candidate_source_layer_id": 1,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [630],
    "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": [0, 1],
    "hc_sinkhorn_iters": 1,
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The compiled step of two cache formats under f32qdq, and what it was compiled for."""
    raw = short_config(**TWO_LAYERS)
    config = ModelConfig.from_dict(raw)
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "two", config, raw)
    token_map = np.arange(config.vocab_size, dtype=np.int32)

    def build(cache_format):
        engine = EngineConfig(model=str(folder), arithmetic="f32qdq", cache_format=cache_format)
        net = assemble(folder, config, engine, token_map)
        state = init_state(net.network, slots=2, positions=256)
        arguments = (net.params, state, StepInput(*map(jax.device_put, BUCKET.empty())))
        lowered = lower_step(net.network, net.mesh, arguments, bucket=BUCKET, options=StepOptions())
        compiled = lowered.compile({"xla_backend_optimization_level": 0})
        return SimpleNamespace(params=net.params, state=state, compiled=compiled)

    return {name: build(name) for name in FORMATS}


@pytest.mark.parametrize("name", FORMATS)
def test_the_compiled_step_takes_over_every_byte_of_the_state(built, name):
    memory = built[name].compiled.memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(built[name].state)


@pytest.mark.parametrize("name", FORMATS)
def test_no_cache_is_copied_inside_the_step(built, name):
    """Also a donated array is copied if something reads it after it was written."""
    leaves = [x for x in jax.tree.leaves(built[name].state.cache) if x.ndim > 1]
    shapes = {f"{NAMES[x.dtype.name]}[{','.join(map(str, x.shape))}]" for x in leaves}
    assert len(shapes) > 4
    text = built[name].compiled.as_text()
    assert all(shape in text for shape in shapes)
    copied = re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", text)
    assert copied and not shapes & set(copied)


def plan(parts, at, ids):
    """The step's arrays for (slot, rows, whether they are of the prompt); moves `at` on."""
    ints, floats = BUCKET.empty()
    given, columns, *_ = BUCKET.split(ints)
    offset = 0
    for i, (slot, count, prompt) in enumerate(parts):
        flags = Flag.DRAWS | (Flag.PROMPT if prompt else Flag(0))
        columns[i, [Part.SLOT, Part.OFFSET, Part.COUNT]] = slot, offset, count
        columns[i, [Part.START, Part.FLAGS, Part.LIMIT]] = at[slot], flags, 10_000
        if prompt:
            given[offset : offset + count] = ids[at[slot] : at[slot] + count]
        offset, at[slot] = offset + count, at[slot] + count
    return ints, floats


def generated(built):
    """Every output of prompts in chunks across a page, and of decoding beside them."""
    ids = np.random.default_rng(0).integers(3, 250, 200)
    params, leaves, made, at = (
        jax.tree.leaves(built.params),
        jax.tree.leaves(built.state),
        [],
        [0, 0],
    )
    leaves = [leaf.copy() for leaf in leaves]
    steps = [[(0, 12, True)]] * 10 + [[(0, 7, True), (1, 5, True)], [(0, 1, False), (1, 9, True)]]
    for parts in steps + [[(1, 1, False), (0, 1, False)]] * 8:
        out = built.compiled(*params, *leaves, *jax.device_put(plan(parts, at, ids)))
        leaves, results = list(out[: len(leaves)]), out[len(leaves) :]
        made.append([np.asarray(x)[: len(parts)] for x in results])
    return made


def test_records_generate_the_bits_of_caches_of_float32(built):
    expected, made = (generated(built[name]) for name in FORMATS)
    assert len({int(step[0][0, 0]) for step in expected}) > 3
    for wanted, found in zip(expected, made, strict=True):
        for x, y in zip(wanted, found, strict=True):
            assert_same_bits(y, x)
