"""Case C04, drafting changes what is said: here it does not, whatever is drafted and verified.

One program for each number of drafts, so that every one is a forward of another shape. The network
has layers of every ratio and an Engram, its arithmetic is batch invariant, and its caches are
compared to the last bit. `pytest --draft-lengths tests/engine/test_case_c04.py` runs every number
of drafts, with lengths that vary and without, and nano as well.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_engine import (
    committed,
    engine_with,
    lengths_with,
    sequences,
    state_of,
    write_guessable_model,
)
from short_engine import drive, few_pages
from short_llm import open_llm

from deepinfer_jax import LLM
from deepinfer_jax.engine import varlen as lengths_module
from deepinfer_jax.entrypoints import cli
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.runner import step
from deepinfer_jax.sampling.draft import draft_token
from deepinfer_jax.sampling.sampler import RowParams
from deepinfer_jax.sampling.verify import verify

SHORT = [[3 + (7 * i + 5 * j) % 250 for j in range(4 + i % 9)] for i in range(32)]
TOKENS, MANY = 16, 300
TEMPERATURES = (0.0, 0.8)
# A prompt of two chunks, then as many tokens as wrap every ring; greedy, so the seed is free to say
# which drafts are forced: all of them right, none, or so many first ones.
LONG = [[3 + (11 * j) % 250 for j in range(50)]] * 4
FORCED = 77_000
RIGHT, WRONG, SOME, OWN = range(4)


def write(llm, engine):
    """What 32 prompts get at each temperature, all of it side by side."""
    batch = [s for t in TEMPERATURES for s in sequences(llm, SHORT, TOKENS, t)]
    drive(engine, [(0, one) for one in batch])
    return [one.output for one in batch]


def write_long(llm, engine):
    """Four sequences of one prompt that differ in what is forced, and their caches at the end."""
    batch = sequences(llm, LONG, MANY, 0.0, seed=FORCED)
    drive(engine, [(0, one) for one in batch])
    state = state_of(engine)
    return batch, [committed(llm.config, state, slot) for slot in range(len(batch))]


class Expected:
    """What is written without drafts, and the caches after it."""

    def __init__(self, llm):
        engine = engine_with(llm, 0, overlap=False)
        self.short = write(llm, engine)
        batch, caches = write_long(llm, engine)
        self.long, self.cache = batch[0].output, caches[0][:2]
        assert [one.output for one in batch] == [self.long] * 4
        assert [cache[:2] for cache in caches] == [self.cache] * 4
        self.known = jnp.asarray([*LONG[0], *self.long, *[0] * 8], jnp.int32)


def forcing(known):
    """The step's own proposal, with other tokens for sequences whose seed says so."""
    own = step.propose

    def propose(params, state, plan, emitted, taps, **options):
        state = own(params, state, plan, emitted, taps, **options)
        part = plan.at[:, 0]
        mode = plan.draw.seed[part, 0].astype(jnp.int32) - FORCED
        position = state.length[jnp.minimum(plan.slot, state.length.shape[0] - 1)]
        place = jnp.arange(state.drafts.token.shape[1], dtype=jnp.int32)
        right = known[jnp.minimum(position[:, None] + 1 + place, known.shape[0] - 1)]
        first = jnp.where(mode == RIGHT, 99, jnp.where(mode == WRONG, 0, position * 5 % 7))
        token = jnp.where(place < first[:, None], right, (right + 1) % 250)
        forced = (mode >= 0) & (mode < OWN)
        at = jnp.where(forced, plan.slot, jnp.iinfo(jnp.int32).max)
        drafts = state.drafts
        token = drafts.token.at[at].set(token, mode="drop")
        return state.replace(drafts=drafts.replace(token=token))

    return propose


@pytest.fixture(scope="module")
def fast_compiles():
    """Compiling is most of what these tests wait for."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_guessable_model(tmp_path_factory.mktemp("guessable") / "model")


@pytest.fixture(scope="module", params=["tiny", "nano"])
def network(request, fast_compiles, folder, compiled):
    if request.param == "tiny":
        return open_llm(folder, compiled, nextn=5, batch_invariant=True)
    if not request.config.getoption("--draft-lengths"):
        pytest.skip("programs of nano take minutes: pass --draft-lengths")
    return LLM("nano", nextn=5, batch_invariant=True)


@pytest.fixture(scope="module")
def expected(network):
    return Expected(network)


@pytest.mark.parametrize("varlen", [False, True], ids=["fixed", "varlen"])
@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 5])
def test_no_draft_changes_a_token_or_what_the_caches_hold(
    request, network, expected, drafts, varlen, monkeypatch
):
    if drafts < 5 and not request.config.getoption("--draft-lengths"):
        pytest.skip("every number of drafts has programs of its own: pass --draft-lengths")
    monkeypatch.setattr(step, "propose", forcing(expected.known))
    engine = engine_with(network, drafts, varlen=varlen, overlap=varlen)
    assert write(network, engine) == expected.short
    some, offered = engine.meter.accepted, engine.meter.drafted
    assert 0.1 * offered < some < 0.95 * offered
    batch, caches = write_long(network, engine)
    assert [one.output for one in batch] == [expected.long] * 4
    assert [cache[:2] for cache in caches] == [expected.cache] * 4
    # The drafter's rings follow from what was kept, not from how.
    assert len({ring for _, _, ring in caches}) == 1
    right, wrong, mixed, _ = batch
    assert right.accepted == right.drafted and wrong.accepted == 0
    assert 0 < mixed.accepted < mixed.drafted
    # A sequence brings fewer only at the end of each of its pages.
    whole = drafts * (MANY - 1) - 3 * drafts * drafts
    assert (wrong.drafted < whole) == varlen
    if varlen:
        # Nothing is proposed but in every fourth step, as drafting costs nearly all of a step.
        monkeypatch.setattr(lengths_module, "PROBE", 4)
        engine._lengths = lengths_with(drafts, 20.0, 0.2, drafting=19.0)
        again, kept = write_long(network, engine)
        assert [one.output for one in again] == [expected.long] * 4
        assert kept == caches
        for few, many in zip(again, batch, strict=True):
            assert 0 < few.drafted < 0.5 * many.drafted


def test_rejection_of_all_drafts_is_the_same_alone_and_among_others(network):
    engine = engine_with(network, 5, rule="rejection")
    together = sequences(network, SHORT[:12], TOKENS, 0.8)
    drive(engine, [(i, one) for i, one in enumerate(together)])
    for i in (0, 5, 11):
        (alone,) = sequences(network, SHORT[i : i + 1], TOKENS, 0.8, seed=1000 + i)
        drive(engine, [(0, alone)])
        assert alone.output == together[i].output
        assert (alone.drafted, alone.accepted) == (together[i].drafted, together[i].accepted)
    assert 0 < engine.meter.accepted < engine.meter.drafted


def test_a_want_of_pages_changes_what_rejection_writes_and_is_refused_therefore(
    fast_compiles, folder, compiled
):
    llm = open_llm(folder, compiled, nextn=5, batch_invariant=True)
    prompts = [[3 + (7 * i + 5 * j) % 250 for j in range(60)] for i in range(4)]
    for rule in ("coupled", "rejection"):
        engine, written = engine_with(llm, 5, rule=rule), []
        for left in (None, 7):  # four sequences of three pages at their end
            batch = sequences(llm, prompts, 200, 0.8)
            drive(few_pages(engine, left) if left else engine, [(0, one) for one in batch])
            written.append([one.output for one in batch])
        assert (written[0] == written[1]) == (rule == "coupled")
    with pytest.raises(ConfigError, match="engine.pages is 7 with 5 drafts, engine.verification="):
        open_llm(folder, compiled, nextn=5, pages=7, verification="rejection", batch_invariant=True)


def test_rejection_of_a_varying_number_of_drafts_is_refused_with_what_is_missing(
    folder, compiled, monkeypatch, capsys
):
    with pytest.raises(ConfigError) as caught:
        open_llm(
            folder, compiled, nextn=5, varlen=True, verification="rejection", batch_invariant=True
        )
    assert str(caught.value) == (
        "engine.varlen is on with engine.verification=rejection and engine.batch_invariant. "
        "How many drafts are verified then depends on the other sequences, and with it the random "
        "numbers that rejection uses. "
        "Set DEEPINFER_ENABLE_MTP_VARLEN=0, or engine.verification=coupled."
    )
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "1")
    codes = {}
    for rule in ("coupled", "rejection", "block"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", "--level", "R3", "--set", f"engine.verification={rule}"])
        codes[rule] = ended.value.code, capsys.readouterr().err.splitlines()[-3:]
    assert codes["coupled"][0] == 0
    assert codes["rejection"] == codes["block"]
    assert codes["rejection"] == (
        3,
        [
            "NoKernelError: Level R3 is asked for, and R2 is the highest within reach.",
            "  R2 holds because every chosen kernel keeps rows apart.",
            "  Ask for R2 at most; R3 needs DEEPINFER_ENABLE_MTP_VARLEN=0 or "
            "engine.verification=coupled, and a seq_seed per request.",
        ],
    )


DRAWS, VOCAB = 100_000, 16


@jax.jit(static_argnums=0)
def judged(rule, target, drafter, seed):
    """The first token of steps with one draft, and whether the draft was kept."""
    one = jnp.ones(seed.shape[0], jnp.float32)
    off = jnp.full(seed.shape[0], -1, jnp.int32)
    rows = RowParams(one, one, off, seed, jnp.full(seed.shape[0], 9, jnp.int32))
    logits = jnp.broadcast_to(drafter, (seed.shape[0], VOCAB))
    draft, law = draft_token(logits, rows, rule=rule, place=0)
    laws = None if law is None else law[:, None]
    logits = jnp.broadcast_to(target, (seed.shape[0], 2, VOCAB))
    out = verify(rule, logits, draft[:, None], jnp.ones_like(draft), laws, rows)
    return out.tokens[:, 0], out.accepted


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_drafts_are_kept_as_often_as_their_law_says(rule):
    rng = np.random.default_rng(4)
    target, drafter = rng.normal(size=(2, VOCAB)).astype(np.float32)
    p, q = (
        np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum() for x in (target, drafter)
    )
    if rule == "coupled":  # two draws with one Gumbel noise agree on i with this chance
        kept = 1 / np.maximum(p / p[:, None], q / q[:, None]).sum(axis=1)
    else:
        kept = np.minimum(p, q)
    expected = DRAWS * np.concatenate([p - kept, kept])
    seed = np.stack([np.arange(DRAWS), np.full(DRAWS, 3)], axis=1).astype(np.uint32)
    token, accepted = map(np.asarray, judged(rule, target, drafter, seed))
    observed = np.bincount(token + VOCAB * accepted, minlength=2 * VOCAB)
    possible = expected > 1e-6
    assert expected[possible].min() > 5 and not observed[~possible].any()
    chi_square = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = np.float32(possible.sum() - 1)
    assert float(jax.scipy.stats.chi2.sf(np.float32(chi_square), freedom)) > 1e-3
