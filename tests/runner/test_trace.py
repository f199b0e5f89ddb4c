import numpy as np
import pytest
from golden_network import golden_network, load

from deepinfer_jax.assembly import host_memory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import RequestError
from deepinfer_jax.report.compare import compare
from deepinfer_jax.runner.trace import TraceInput, run_trace

VOCAB = 512
IDS = np.zeros((1, 3), np.int32)
STREAM, PRE = np.zeros((1, 3, 4, 128)), np.zeros((1, 3, 4))
DECODES = ("decode_p3_t24", "decode_p40_t64", "decode_p280_t300")


def trace(network, arrays):
    given = TraceInput.from_arrays(arrays, VOCAB)
    return run_trace(network.params, given, network.network, network.mesh)


def ids_of(arrays):
    return {k: arrays[k] for k in ("token_ids", "prefill_len") if k in arrays}


def residuals_of(arrays):
    return {k: v for k, v in arrays.items() if k.endswith((".stream", ".pre_next"))}


@pytest.fixture(scope="module")
def f32(golden):
    return golden_network(golden, "f32")


@pytest.fixture(scope="module")
def short(golden, f32):
    """16 tokens, and their trace with dequantized weights on the device."""
    arrays = {"token_ids": load(golden / "p40_f32.npz")["token_ids"][:, :16]}
    return arrays, trace(f32, arrays)


def test_f32_equals_the_reference_in_every_array(f32, golden):
    expected = load(golden / "p40_f32.npz")
    made = trace(f32, ids_of(expected))
    assert set(expected) == set(made)
    assert compare(made, expected, tolerance=1e-4) == []


@pytest.mark.parametrize("name", ["p3_t24", "p40_t64", "p280_t300"])
def test_f32_decodes_token_by_token_as_the_reference(f32, golden, name):
    expected = load(golden / f"decode_{name}_f32.npz")
    expected = {k: v for k, v in expected.items() if not k.startswith("spec_")}
    made = trace(f32, ids_of(expected))
    assert set(expected) == set(made)
    assert compare(made, expected, tolerance=1e-4) == []


def test_f32qdq_equals_the_reference_end_to_end_and_layer_by_layer(golden):
    network = golden_network(golden, "f32qdq")
    expected = load(golden / "p40_f32qdq.npz")
    made = trace(network, ids_of(expected))
    assert np.abs(made["logits"] - expected["logits"]).max() < 2e-2
    layered = trace(network, ids_of(expected) | residuals_of(expected))
    rows = compare(layered, expected, tolerance=1e-5)
    # A rounding that falls the other way moves a value by one code; the reference allows 5e-3.
    assert sum(row.differing for row in rows) <= 20, rows
    assert all(row.max_abs < 5e-3 for row in rows), rows


def test_release_equals_the_reference_layer_by_layer(golden):
    network = golden_network(golden, "release")
    expected = load(golden / "p40_release.npz")
    made = trace(network, ids_of(expected) | residuals_of(expected))
    for layer in range(10):
        x, y = made[f"L{layer}.stream"], expected[f"L{layer}.stream"]
        relative = np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2))
        assert relative < 1e-2, (layer, relative)
    np.testing.assert_array_equal(made["engram_hash"], expected["engram_hash"])
    np.testing.assert_array_equal(made["L2.topk"], expected["L2.topk"])


def test_packed_weights_differ_from_dequantized_ones_by_the_order_of_sums_alone(golden, short):
    arrays, expected = short
    packed = trace(golden_network(golden, "f32", weights="packed"), arrays)
    assert all(row.max_abs < 3e-5 for row in compare(packed, expected))


def test_engram_tables_on_disk_give_the_bits_of_tables_on_the_device(golden, short):
    arrays, expected = short
    outside = golden_network(golden, "f32", engram="mmap")
    memory = host_memory(outside, np.load(golden / "engram.npz")["tiny_token_map"])
    given = TraceInput.from_arrays(arrays, VOCAB)
    made = run_trace(outside.params, given, outside.network, outside.mesh, memory)
    assert compare(made, expected) == []


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "no array token_ids"),
        ({"token_ids": np.zeros((2, 3), np.int32)}, "shape [2, 3]"),
        ({"token_ids": np.full((1, 3), 512)}, "512 to 512"),
        ({"token_ids": np.zeros((1, 0), np.int32)}, "shape [1, 0]"),
        ({"token_ids": np.zeros((1, 3))}, "token_ids is float64"),
        ({"token_ids": IDS - 1}, "-1 to -1"),
        ({"token_ids": IDS, "prefill_len": 4}, "prefill_len is 4"),
        ({"token_ids": IDS, "prefill_len": 0}, "prefill_len is 0"),
        ({"token_ids": IDS, "prefill_len": np.array([2])}, "prefill_len is int64 of shape [1]"),
        ({"token_ids": IDS, "prefill_len": 1.5}, "prefill_len is float64 of shape []"),
        (
            {"token_ids": IDS, "prefill_len": 2, "L0.stream": STREAM, "L0.pre_next": PRE},
            "The input has residuals of 1 layers and prefill_len 2.",
        ),
    ],
)
def test_bad_input_is_refused_in_words(arrays, words):
    with pytest.raises(RequestError) as caught:
        TraceInput.from_arrays(arrays, VOCAB)
    assert words in str(caught.value)
    assert all((caught.value.what, caught.value.why, caught.value.do))


def test_the_residual_that_leaves_the_last_layer_is_read_and_not_used(golden):
    arrays = {"token_ids": IDS, "L9.stream": STREAM, "L9.pre_next": PRE}
    TraceInput.from_arrays(arrays, VOCAB).check(ModelConfig.from_file(golden), 3)


@pytest.mark.parametrize(
    ("arrays", "sentences"),
    [
        (
            {"token_ids": np.zeros((1, 1025), np.int32)},
            "The input has 1025 tokens; the network was built for 1024 positions. Nothing is "
            "truncated. Shorten token_ids to 1024, or raise engine.max_model_len.",
        ),
        (
            {"L10.stream": STREAM, "L10.pre_next": PRE},
            "The input has L10.stream, and the network 10 layers. Its layers are L0 to L9. Leave "
            "out L10.stream and L10.pre_next.",
        ),
        (
            {"L0.stream": STREAM[..., :8], "L0.pre_next": PRE},
            "L0.stream is float64 of shape [1, 3, 4, 8]. For 3 tokens this network's is of shape "
            "[1, 3, 4, 128]. Give floats of that shape.",
        ),
        (
            {"L0.stream": STREAM, "L0.pre_next": PRE[:, :2]},
            "L0.pre_next is float64 of shape [1, 2, 4]. For 3 tokens this network's is of shape "
            "[1, 3, 4]. Give floats of that shape.",
        ),
        (
            {"L0.stream": STREAM, "L0.pre_next": np.full(PRE.shape, "a")},
            "L0.pre_next is <U1 of shape [1, 3, 4]. For 3 tokens this network's is of shape "
            "[1, 3, 4]. Give floats of that shape.",
        ),
    ],
)
def test_what_a_network_cannot_run_on_is_refused_in_words(golden, arrays, sentences):
    given = TraceInput.from_arrays({"token_ids": IDS} | arrays, VOCAB)
    with pytest.raises(RequestError) as caught:
        given.check(ModelConfig.from_file(golden), 1024)
    assert str(caught.value) == sentences


def test_a_trace_checks_its_input_against_its_network(f32):
    with pytest.raises(RequestError, match="1025 tokens; the network was built for 1024"):
        trace(f32, {"token_ids": np.zeros((1, 1025), np.int32)})


def test_all_selections_of_300_tokens_equal_the_reference(f32, golden_dir):
    expected = load(golden_dir / "p300_f32.npz")
    assert compare(trace(f32, ids_of(expected)), expected, tolerance=1e-4) == []


def identical_share(made, expected):
    """Of the selections that either side made, the share that both made; -1 is none."""
    rows = [(x[x >= 0], y[y >= 0]) for x, y in zip(made, expected, strict=True)]
    both = sum(len(np.intersect1d(x, y)) for x, y in rows)
    return both / sum(max(len(x), len(y)) for x, y in rows)


def test_padding_is_no_selection():
    assert identical_share(np.array([[3, 5, -1, -1]]), np.array([[3, 6, -1, -1]])) == 0.5
    assert identical_share(np.array([[3, -1]]), np.array([[3, 4]])) == 0.5


@pytest.mark.parametrize("name", ["p300", *DECODES])
def test_f32qdq_selects_as_the_reference(golden, golden_dir, name):
    expected = load(golden_dir / f"{name}_f32qdq.npz")
    made = trace(golden_network(golden, "f32qdq"), ids_of(expected))
    for layer, share in ((2, 0.95), (4, 0.95), (6, 0.85), (8, 0.85)):
        same = identical_share(made[f"L{layer}.topk"][0], expected[f"L{layer}.topk"][0])
        assert same >= share, (layer, same)
    assert np.sqrt(np.mean((made["logits"] - expected["logits"]) ** 2)) < 0.15


@pytest.mark.parametrize("name", ["p300", *DECODES])
def test_release_is_sane_end_to_end(golden, golden_dir, name):
    made = trace(golden_network(golden, "release"), ids_of(load(golden_dir / f"{name}_f32.npz")))
    reference = load(golden_dir / f"{name}_f32.npz")["logits"]
    agree = np.mean(made["logits"].argmax(-1) == reference.argmax(-1))
    assert agree > 0.65, agree


def test_half_a_residual_is_named_and_not_injected():
    arrays = {"token_ids": IDS, "L7.stream": STREAM, "L3.pre_next": PRE, "L2.stream": STREAM}
    given = TraceInput.from_arrays(arrays | {"L2.pre_next": PRE, "logits": STREAM}, 512)
    assert list(given.injected) == [2]
    assert given.alone == ("L7.stream", "L3.pre_next")
