"""Networks of random weights, and the loop that measures the gap between the steps of one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_llm import short_config

from deepinfer_jax import settings
from deepinfer_jax.bench.random_network import random_network
from deepinfer_jax.bench.step_gap import Opened, main, measure, open_engine, open_network
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.programs import Programs
from deepinfer_jax.errors import ConfigError, RequestError
from deepinfer_jax.model.engram_hash import engram_hash
from deepinfer_jax.model.params import ParamSpec, param_specs
from deepinfer_jax.runner.compile import compiled
from deepinfer_jax.runner.step import StepOutput
from deepinfer_jax.sampling.sampler import Draw
from deepinfer_jax.settings import EngineConfig

ENGINE = EngineConfig(max_num_seqs=2, max_model_len=64)


def one_layer() -> ModelConfig:
    """A window layer with Engram: what is measured here is the loop."""
    none = "kv_source index_source dspark_target"
    return ModelConfig.from_dict(
        short_config(
            num_hidden_layers=1,
            num_nextn_predict_layers=0,
            compress_ratios=[0],
            candidate_source_layer_id=None,
            engram_layer_ids=[0],
            engram_num_embeddings=[630],
            **{f"{name}_layer_ids": [] for name in none.split()},
        )
    )


@pytest.fixture(scope="module")
def net():
    return random_network(one_layer(), ENGINE)


def test_every_weight_has_its_shape_and_type_and_finite_values(net):
    specs = param_specs(one_layer())
    filled = jax.tree.map(
        lambda spec, leaf: (spec.full_shape, leaf.shape, leaf.dtype, bool(np.isfinite(leaf).all())),
        specs,
        replace(net.params, token_map=None, rope_plain=None, rope_compressed=None),
        is_leaf=lambda x: isinstance(x, ParamSpec),
    )
    rows = jax.tree.leaves(filled, is_leaf=lambda x: isinstance(x, tuple) and len(x) == 4)
    assert len(rows) == len(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec)))
    for row in rows:
        assert row[0] == row[1] and row[2:] == (np.float32, True)
    layer = net.params.runs[0]
    assert abs(float(layer.attn_norm.mean()) - 1) < 0.1
    assert np.isclose(float(layer.moe.experts.w1.std()), 128**-0.5, rtol=0.05)


def test_what_random_weights_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"engine.weights=packed and engine.engram=device"):
        random_network(one_layer(), EngineConfig(weights="packed"))
    raw = short_config(engram_num_embeddings=[630, 835])
    with pytest.raises(ConfigError, match=r"\[630, 835\], but the hash .* \[630, 834\] rows"):
        random_network(ModelConfig.from_dict(raw), ENGINE)


class Trivial(Programs):
    """Programs that draw token 5 everywhere: the loop is measured, not the network."""

    def _compile(self, key):
        p = key[0].parts

        def drawn(token, ints):
            work = jnp.tanh(ints.astype(jnp.float32)[:, None] * jnp.ones((1, 500))).sum()
            kept = (token + work.astype(jnp.int32) * 0).at[0].add(1)
            ids, odds, no = jnp.full((p, 1), 5, jnp.int32), jnp.zeros((p, 1)), jnp.zeros(p, bool)
            draw = Draw(ids, odds, odds, ids, no[:, None])
            top, none = jnp.zeros((p, 1, 0)), jnp.zeros(p, jnp.int32)
            return kept, StepOutput(
                draw, top.astype(jnp.int32), top, none + 1, top[:, 0], none, none, no
            )

        program = compiled(drawn)

        def run(params, state, inputs):
            del params
            token, out = program(state.token, inputs.ints)
            return state.replace(token=token), out

        return run, 0.0


def test_both_loops_are_measured_and_their_time_is_accounted_for(net, tmp_path, monkeypatch):
    monkeypatch.setattr("deepinfer_jax.engine.engine.Programs", Trivial)
    opened, engine = Opened(net, None), open_engine(net, 2, 40)
    for overlap in (False, True):
        engine.choose(overlap)
        samples = opened.samples(2, 24)
        row = measure(engine, samples, 4, tmp_path / str(overlap), "")
        assert row["steps"] == 4 and 0 < row["share"] < 1
        assert row["step_us"] > row["device_us"] > 0 and row["copy_us"] is None
        parts = row["host_parts_us"]
        # The call has a thread of its own.
        assert np.isclose(sum(parts.values()) - parts["call"], row["untraced_step_us"])
        assert all(parts[name] > 0 for name in ("plan", "settle", "pack", "call", "collect"))
        assert row["host_us"] == row["untraced_step_us"] - parts["wait"]
        assert all(len(sample.output) >= 16 for sample in samples) and not engine.has_work
    assert engine.programs.count == 1
    with pytest.raises(RequestError, match="In one step 1 of 1 sequences got a token, and 1 ended"):
        measure(engine, opened.samples(1, 5), 4, tmp_path / "short", "")


def test_sequences_that_would_end_before_the_last_step_are_refused(net):
    with pytest.raises(ConfigError, match="grow to 65 tokens; the engine holds 64"):
        open_engine(net, 2, 65)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "2"], "argument --steps: 2 is below 3"),
        (["--sequences", "0"], "argument --sequences: 0 is below 1"),
        (["--model", "nano", "--config", "slice"], "not allowed with argument"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_config_without_a_network_opens_its_model():
    with pytest.raises(ConfigError, match="There is no config 'slise'"):
        open_network(None, "slise", [])


def test_the_slice_has_every_kind_of_layer_in_the_widths_of_the_release():
    asked, release = settings.load("slice"), settings.load("v41_flash").model_config()
    config = asked.model_config()
    assert [plan.ratio for plan in config.layers] == [0, 0, 2, 2, 2, 1, 1, 1]
    assert engram_hash(config).num_embeddings == config.engram_num_embeddings

    def kinds(c: ModelConfig) -> set[tuple]:
        return {
            (p.ratio, p.owns_kv, p.owns_index, p.writes_candidates, p.uses_candidates)
            for p in c.layers
        }

    assert kinds(config) == kinds(release)
    changed = {k for k, v in config.digest_dict().items() if v != release.digest_dict()[k]}
    assert changed == {
        "num_hidden_layers", "n_routed_experts", "compress_ratios", "kv_source_layer_ids",
        "index_source_layer_ids", "candidate_source_layer_id", "engram_layer_ids",
        "engram_num_embeddings", "engram_vocab_size", "num_nextn_predict_layers",
        "dspark_target_layer_ids",
    }  # fmt: skip
