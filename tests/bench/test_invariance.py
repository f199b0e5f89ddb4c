"""The benchmark of batch invariance: a small run of its ops, and fake engines for the rest."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from short_llm import shorter_config

from deepinfer_jax.bench.invariance import Cost, engine_costs, in_turn, main, op_costs, table
from deepinfer_jax.bench.op_inputs import INPUTS
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.meter import Meter
from deepinfer_jax.errors import RequestError
from deepinfer_jax.ops.device import Device
from deepinfer_jax.ops.table import OPS, select
from deepinfer_jax.request import RequestOutput

CONFIG = ModelConfig.from_dict(shorter_config())


def test_every_op_is_timed_with_the_kernels_that_are_chosen():
    costs = op_costs(CONFIG, [1], repeats=1, window_s=0.0)
    assert [(c.what, c.size) for c in costs] == [(op, 1) for op in OPS]
    cpu = Device.described("cpu")
    for cost, *rows in zip(
        costs, select(cpu).rows(), select(cpu, batch_invariant=True).rows(), strict=True
    ):
        assert [cost.fast, cost.steady] == [row.kernel for row in rows]
        assert cost.fast_s > 0 and cost.steady_s > 0


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("op", OPS)
def test_both_kernels_do_the_same_work_row_by_row(op, rows):
    call, made = INPUTS[op](CONFIG, rows), []
    for invariant in (False, True):
        ops = select(Device.described("cpu"), batch_invariant=invariant)
        made.append(jax.tree.leaves(jax.jit(lambda g, ops=ops: call.run(ops, g))(call.given)))
    for a, b in zip(*made, strict=True):
        assert a.shape[0] == rows and np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


class Timed:
    """An engine whose decode steps and prefills take what it is told, and that may fail."""

    def __init__(self, step_s, fails=False):
        self.meter, self.step_s, self.fails, self.calls = Meter(), list(step_s), fails, []

    def generate(self, prompts, params):
        spent = self.step_s.pop(0)
        self.calls.append((len(prompts), len(prompts[0]), params.max_tokens))
        before = dataclasses.replace(self.meter)
        self.meter.decode_s = before.decode_s + spent * (params.max_tokens - 1)
        self.meter.prefill_s = before.prefill_s + spent
        error = RequestError("It failed.", "It had to.", "Do not.") if self.fails else None
        return [
            RequestOutput(request_id="r", prompt=None, prompt_token_ids=(1,), error=error)
            for _ in prompts
        ]


def test_engines_take_turns_and_their_medians_make_the_speed():
    fast, steady = Timed([9, 1, 3, 2, 9, 4, 4, 4]), Timed([9, 4, 5, 4, 9, 5, 5, 5])
    costs = engine_costs((fast, steady), [16], [512], tokens=5, repeats=3)
    assert [(c.what, c.size, c.fast_s, c.steady_s) for c in costs] == [
        ("decode", 16, 2, 4),
        ("prefill", 512, 4, 5),
    ]
    assert [c.speed for c in costs] == [0.5, 0.8]
    assert fast.calls == steady.calls == [(16, 5, 5)] * 4 + [(1, 512, 1)] * 4


def test_a_request_that_failed_is_raised_and_not_timed():
    with pytest.raises(RequestError, match="It failed"):
        engine_costs((Timed([1], fails=True), Timed([1])), [1], [], tokens=2, repeats=1)


def test_measurements_alternate():
    order = []
    seconds = iter(range(4))

    def measured(name):
        order.append(name)
        return float(next(seconds))

    assert in_turn(lambda: measured("fast"), lambda: measured("steady"), 2) == (1.0, 2.0)
    assert order == ["fast", "steady"] * 2


def test_the_table_shows_kernels_times_and_speed():
    costs = [Cost("linear", 16, "xla", "row_tiles", 1e-3, 2e-3), Cost("decode", 1, "", "", 2, 2.5)]
    assert table(costs)[2:] == [
        "| linear | 16 | xla 1.000 ms | row_tiles 2.000 ms | 0.50 |",
        "| decode | 1 | 2000.000 ms | 2500.000 ms | 0.80 |",
    ]


def test_the_command_opens_both_engines_without_drafts_and_logs_what_it_returns(
    monkeypatch, caplog
):
    opened = []

    def open_engine(model, **engine):
        opened.append((model, engine))
        made = Timed([2.0 if engine["batch_invariant"] else 1.0] * 4)
        made.config = CONFIG
        return made

    monkeypatch.setattr("deepinfer_jax.bench.invariance.LLM", open_engine)
    caplog.set_level("INFO", logger="deepinfer_jax.bench")
    arguments = "--model m --rows= --sequences 2 --prefill 8 --tokens 3 --repeats 1"
    figures = main(arguments.split())
    common = {"max_num_seqs": 2, "nextn": 0, "prefix_reuse": "off"}
    assert opened == [("m", {"batch_invariant": kept} | common) for kept in (False, True)]
    assert [(c["what"], c["size"], c["speed"]) for c in figures["costs"]] == [
        ("decode", 2, 0.5),
        ("prefill", 8, 0.5),
    ]
    assert json.loads(caplog.messages[-1]) == figures
    assert "| decode | 2 | 1000.000 ms | 2000.000 ms | 0.50 |" in caplog.messages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1"], "--tokens is at least 2"),
        (["--repeats", "0"], "--repeats at least 1"),
        (["--rows", "4,0"], "argument --rows: 0 is below 1"),
        (["--sequences", "4,x"], "argument --sequences: invalid"),
    ],
)
def test_sizes_that_cannot_be_timed_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
