"""The offline judge: what it counts is what the engine counts, and its walk is greedy decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_llm import fewer_sizes, largest, open_llm, shorter_config, write_short_model

from deepinfer_jax import SamplingParams
from deepinfer_jax.checkpoint.load import load
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.cache import PAGE
from deepinfer_jax.model.layers import rope_table
from deepinfer_jax.sampling.verified import VerifiedBlock
from deepinfer_jax.text.compressed_ids import compressed_token_map
from deepinfer_jax.training import drafter_state
from deepinfer_jax.training.draft import smoke_drafter_config
from deepinfer_jax.training.drafter_attention import latents, output, queries, with_sink
from deepinfer_jax.training.drafter_evaluate import (
    Answered,
    Drafted,
    Drafter,
    Target,
    judge,
    replay,
)
from deepinfer_jax.training.drafter_step import DrafterSettings, begin, initial_weights
from deepinfer_jax.training.eagle3 import eagle3_initial_values
from deepinfer_jax.training.experts import moe
from deepinfer_jax.training.linear import project, rms_norm
from deepinfer_jax.training.parameters import from_checkpoint

PROMPTS = [[3 + (7 * i + j) % 250 for j in range(n)] for i, n in enumerate((20, 100, 140))]
TOKENS = 50


def open_plain(folder, compiled, **changes):
    """One sequence at a time, in steps of one size, so that one program is compiled."""
    how = {"max_num_seqs": 1, "nextn": 5, "overlap": False, "confidence_temperature": "10"}
    with fewer_sizes(largest):
        return open_llm(folder, compiled, late_compile="warn", **(how | changes))


def watched(llm, prompts):
    """The blocks of each prompt, and the outputs."""
    blocks = [[] for _ in prompts]
    llm.watch_drafts(lambda prompt, _, block: blocks[prompt].append(block))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(None, params, prompts)
    llm.watch_drafts(None)
    return blocks, outputs


@pytest.fixture(scope="module")
def engine(tmp_path_factory, compiled):
    """A random model's engine, its greedy answers, and the blocks that it verified for them."""
    one_stage = {"num_nextn_predict_layers": 1, "compress_ratios": [2, 1, 0]}
    folder = tmp_path_factory.mktemp("drafter") / "model"
    write_short_model(folder, shorter_config() | one_stage, drafter=True)
    llm = open_plain(folder, compiled)
    blocks, outputs = watched(llm, PROMPTS)
    answers = [
        Answered(prompt, output.outputs[0].token_ids, len(prompt) + TOKENS)
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    drafted = [output.outputs[0] for output in outputs]
    return llm, answers, blocks, drafted


def test_the_engine_tells_of_every_block_that_it_verified(engine):
    llm, _, blocks, outputs = engine
    for told, made in zip(blocks, outputs, strict=True):
        assert sum(block.offered for block in told) == made.drafted
        assert sum(block.accepted for block in told) == made.accepted
        assert [block.ended for block in told[:-1]] == [False] * (len(told) - 1)
    before = [len(told) for told in blocks]
    llm.generate(None, SamplingParams(temperature=0, max_tokens=5), PROMPTS[:1])
    assert [len(told) for told in blocks] == before  # nobody watches any more


def test_steps_that_overlap_are_told_of_with_their_own_confidences(engine, compiled):
    llm, _, blocks, _ = engine
    other = open_plain(llm.folder, compiled, overlap=True)
    found, outputs = watched(other, PROMPTS)
    assert found[0] == blocks[0]  # one page: what is offered does not hang on what is under way
    for told, made in zip(found, outputs, strict=True):
        assert sum(block.accepted for block in told) == made.outputs[0].accepted


def test_a_replay_keeps_what_the_engine_keeps_with_the_same_confidence(engine):
    llm, answers, blocks, _ = engine
    loaded = load(llm.folder, llm.config, drafter=True, dtype="float32", digest=False)
    weights = from_checkpoint(loaded.tensors, llm.config, drafter=True)
    token_map = compressed_token_map(llm.tokenizer)
    target = Target.from_folder(llm.folder, llm.config, token_map, quantize=False)
    drafter = Drafter("dspark", weights, llm.config, quantize=False)
    told = []
    taps = target.taps(answers, lambda done, total: told.append((done, total)))
    assert told[-1] == (3, 3)
    found = judge(target, drafter, answers, taps)
    assert sum(block.accepted for each in found for block in each) > 0
    assert any(block.offered < 5 for each in found for block in each)
    for ours, theirs in zip(found, blocks, strict=True):
        counted = [(b.offered, b.accepted, b.ended) for b in ours]
        assert counted == [(b.offered, b.accepted, b.ended) for b in theirs]
        np.testing.assert_allclose(
            [b.logits for b in ours], [b.logits for b in theirs], rtol=1e-3, atol=1e-3
        )


def test_a_walk_keeps_equal_drafts_and_goes_on_after_the_token_behind_them():
    # Places 0, 1, ... of the answer 5 6 7 8 9 1, where 1 ends it.
    answer = [5, 6, 7, 8, 9, 1]
    tokens = np.array([[6, 7, 0], [0, 0, 0], [0, 0, 0], [9, 1, 4], [0, 0, 0]], np.int32)
    logits = np.arange(15, dtype=np.float32).reshape(5, 3)
    found = replay(Drafted(tokens, logits), Answered([2] * 4, answer, 100))
    assert found == [
        VerifiedBlock(3, 2, (0.0, 1.0, 2.0)),
        # The end was drafted right, and stands for the token behind the kept drafts.
        VerifiedBlock(3, 1, (9.0, 10.0, 11.0), ended=True),
    ]
    right = np.array([[6, 7, 8], [0] * 3, [0] * 3, [0] * 3, [1, 0, 0]], np.int32)
    last = replay(Drafted(right, None), Answered([2] * 4, answer, 100))[-1]
    assert last == VerifiedBlock(3, 0, None, ended=True)
    assert replay(Drafted(tokens[:0], None), Answered([2], [5], 100)) == []


@pytest.mark.parametrize(
    ("prompt", "limit", "offered"),
    [
        (4, 100, [3, 3, 3, 3]),
        (4, 10, [3, 2, 1]),
        (4, 9, [3, 1]),
        (PAGE - 2, 1000, [1, 3, 3, 3]),
        (PAGE - 1, 1000, [3, 3, 3, 3]),
    ],
)
def test_a_step_offers_what_the_sequence_and_its_page_have_room_for(prompt, limit, offered):
    """The first draft is kept and no other. A step from the last place of a page offers none."""
    tokens = np.zeros((5, 3), np.int32)
    tokens[0, 0] = 6
    answer = [5, 6, 7, 8, 9, 4][: limit - prompt]
    found = replay(Drafted(tokens, None), Answered([2] * prompt, answer, limit))
    assert [block.offered for block in found] == offered
    assert [block.accepted for block in found] == [int(prompt < PAGE - 1)] + [0] * (len(found) - 1)


CONFIG = dataclasses.replace(smoke_drafter_config(), dspark_block_size=3)


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    frozen = {
        name: jnp.asarray(rng.normal(0, 0.5, (CONFIG.vocab_size, CONFIG.hidden_size)), jnp.float32)
        for name in ("embed.weight", "head.weight")
    }
    answers = [
        Answered(rng.integers(4, 64, 9).tolist(), rng.integers(4, 64, 40).tolist(), 60),
        Answered(rng.integers(4, 64, 30).tolist(), rng.integers(4, 64, 4).tolist(), 60),
    ]
    taps = [
        rng.normal(size=(len(a.known), 2 * CONFIG.hidden_size)).astype(np.float32) for a in answers
    ]
    return frozen, answers, taps


def chain(weights, frozen, taps, ids, anchor):
    """One greedy chain, token by token over a list of keys, as decoding would run it."""
    experts = dataclasses.replace(CONFIG, num_experts_per_tok=CONFIG.dspark_num_experts_per_tok)
    eps, name = CONFIG.rms_norm_eps, "eagle3.attn"
    table = jnp.asarray(rope_table(CONFIG, 100, compressed=False))

    def entering(token, hidden):
        embedded = frozen["embed.weight"][token]
        e = rms_norm(embedded, weights["eagle3.embed_norm.weight"], eps)
        h = rms_norm(hidden, weights["eagle3.hidden_norm.weight"], eps)
        return jnp.concatenate([e, h], axis=-1)

    def keys_of(u, angles):
        return latents(u[None], weights, name, angles[None], CONFIG, quantize=False)[0]

    states = project(jnp.asarray(taps[:anchor]), weights["eagle3.fc.weight"], jnp.float32)
    keys = [*keys_of(entering(ids[1:anchor], states[:-1]), table[: anchor - 1])]
    hidden = states[-1]
    token, drafts = int(ids[anchor]), []
    for place in range(anchor - 1, anchor - 1 + CONFIG.dspark_block_size):
        u = entering(token, hidden)
        keys += [*keys_of(u[None], table[place : place + 1])]
        angles = table[place][None, None]
        q = queries(u[None, None], weights, name, angles, CONFIG)[0, 0]
        scores = q @ jnp.stack(keys).T
        (p,) = with_sink([scores], [jnp.ones((1, 1), bool)], weights[f"{name}.attn_sink"])
        o = (p @ jnp.stack(keys))[None, None]
        hidden = hidden + output(o, weights, name, angles, CONFIG)[0, 0]
        v = rms_norm(hidden, weights["eagle3.ffn_norm.weight"], eps)[None, None]
        hidden = hidden + moe(v, weights, "eagle3.ffn", experts)[0][0, 0]
        normed = rms_norm(hidden, weights["eagle3.norm.weight"], eps)
        token = int(jnp.argmax(frozen["head.weight"] @ normed))
        drafts.append(token)
    return drafts


def test_eagle3_drafts_what_a_chain_run_token_by_token_drafts(case, tmp_path):
    frozen, answers, taps = case
    state = begin("eagle3", CONFIG, DrafterSettings())
    values = eagle3_initial_values(CONFIG, 3)
    state = dataclasses.replace(state, weights=jax.tree.map(jnp.asarray, values))
    drafter_state.save(tmp_path, state, "eagle3", {})
    drafter = Drafter.from_folder(tmp_path, CONFIG, quantize=False)
    assert (drafter.method, drafter.step) == ("eagle3", 0)
    found = drafter.draft(frozen, answers, taps)
    assert [d.logits for d in found] == [None, None]
    assert len({tuple(row) for row in found[0].tokens.tolist()}) > 5
    place = 35  # in the second row of this answer's anchors
    at = len(answers[0].prompt) + place
    expected = chain(drafter._weights, frozen, taps[0], answers[0].known, at)
    assert found[0].tokens[place].tolist() == expected


def test_dflash_drafts_what_dspark_drafts_without_its_heads(case):
    frozen, answers, taps = case
    weights = initial_weights("dspark", CONFIG, 1)  # its Markov bias starts at zero
    plain = {n: w for n, w in weights.items() if "_head." not in n}
    dspark = Drafter("dspark", weights, CONFIG, quantize=False).draft(frozen, answers, taps)
    dflash = Drafter("dflash", plain, CONFIG, quantize=False).draft(frozen, answers, taps)
    for one, other in zip(dspark, dflash, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert other.logits is None
        assert one.logits is not None and not one.logits.any()
    rng = np.random.default_rng(0)
    heads = {n: w for n, w in weights.items() if n.endswith("markov_head.head.weight")}
    biased = weights | {n: rng.normal(0, 2, w.shape).astype(np.float32) for n, w in heads.items()}
    other = Drafter("dspark", biased, CONFIG, quantize=False).draft(frozen, answers, taps)
    assert (other[0].tokens != dspark[0].tokens).any()


def test_an_unknown_method_is_refused(tmp_path):
    drafter_state.save(tmp_path, begin("dflash", CONFIG, DrafterSettings()), "medusa", {})
    with pytest.raises(CheckpointError) as refusal:
        Drafter.from_folder(tmp_path, CONFIG, quantize=False)
    assert refusal.value.what == f"{tmp_path} holds a drafter of method 'medusa'."
    assert refusal.value.why == "Methods that can be judged are dspark, dflash, eagle3."
