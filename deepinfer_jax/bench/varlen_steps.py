"""Steps with variable and with fixed verification lengths, on made-up confidences and times.

Lengths come from the engine's own scheduler (`sampling.lengths`). Times are in units of what one
more row takes.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from deepinfer_jax.sampling.lengths import budget, calibrated, split, survival

DRAFTS, LAG = 5, 2
SIZES_EVERY = 8  # rows from one compiled size to the next, as the original engine's graphs


@dataclass(frozen=True)
class World:
    """What is simulated.

    The confidence logit of a draft is mu + N(0, between^2), the same for all drafts of a request,
    + N(0, within^2), anew for each; it is accepted with the logistic of that.

    Attributes:
        mu, between, within: of the logits.
        t0: what a step takes beside its rows, in units of a row.
        overhead: by which share a step of variable lengths is slower than a fixed one of equal
            rows: further kernels, padding, the host.
    """

    mu: float
    between: float
    within: float
    t0: float
    overhead: float


@dataclass(frozen=True, eq=False)
class Draws:
    """The chances of one load, which every variant shares, so that their differences mean more.

    Attributes:
        load: sequences.
        request: standard normal [rounds, 1, load, 1].
        draft: standard normal [rounds, steps, load, DRAFTS].
        luck: uniform [rounds, steps, load, DRAFTS].
    """

    load: int
    request: np.ndarray
    draft: np.ndarray
    luck: np.ndarray


@dataclass(frozen=True)
class Run:
    """Figures of one load, over all rounds.

    Attributes:
        load: sequences.
        fixed_accept_length: tokens emitted per step and sequence when every draft is verified.
        accept_length: the same with variable lengths, from the same chances.
        verified: drafts verified per step and sequence.
        gain: tokens per time, relative to verifying every draft.
        errors: standard errors of the four, by name, from the spread of rounds.
    """

    load: int
    fixed_accept_length: float
    accept_length: float
    verified: float
    gain: float
    errors: Mapping[str, float]


def centre(accept_length: float, between: float, within: float) -> float:
    """The `mu` at which verifying every draft emits `accept_length` tokens, by bisection.

    Expectations are taken by Gauss-Hermite quadrature: given its request, drafts are independent.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / weights.sum()
    offset = between * nodes[:, None] + within * nodes[None, :]

    def emitted(mu: float) -> float:
        rate = (1 / (1 + np.exp(-(mu + offset)))) @ weights
        return float(weights @ sum(rate**k for k in range(DRAFTS + 1)))

    return bisect(lambda mu: emitted(mu) < accept_length, -30.0, 30.0, 60)


def draw(load: int, *, seed: int, rounds: int, steps: int) -> Draws:
    """Chances of `steps` steps in each of `rounds` rounds; requests differ between rounds.

    Requests are drawn by strata, one of each of equally likely ones, so that a few rounds already
    hold the whole range of them.
    """
    rng = np.random.default_rng((seed, load))
    count = rounds * load
    stratum = (rng.permutation(count) + rng.random(count)) / count
    request = np.array([statistics.NormalDist().inv_cdf(x) for x in stratum])
    shape = (rounds, steps, load, DRAFTS)
    return Draws(
        load,
        request.reshape(rounds, 1, load, 1),
        rng.standard_normal(shape),
        rng.random(shape),
    )


def run(
    draws: Draws,
    world: World,
    *,
    lag: int = LAG,
    sharpness: float = 1.0,
    temperatures: np.ndarray | None = None,
) -> Run:
    """Verify one load both ways.

    Args:
        draws: the chances.
        world: what they mean.
        lag: how many steps old the survivals are that decide the total.
        sharpness: factor of the logits that the scheduler sees; 1 is perfectly calibrated.
        temperatures: [DRAFTS], by which it divides them; None for 1.
    """
    logits, accepted = outcome(draws, world)
    divisor = np.ones(DRAFTS) if temperatures is None else temperatures
    seen = calibrated((sharpness * logits).astype(np.float32), divisor.astype(np.float32))
    values, n = survival(seen), draws.load
    drafts = np.full(n, DRAFTS, np.int32)
    most = n * (1 + DRAFTS)
    sizes = np.array(sorted({1, 2, 4, *range(SIZES_EVERY, most, SIZES_EVERY), most}))
    cost = world.t0 + sizes.astype(np.float64)
    rows = []
    # The first steps of a round have no older survivals, and are not counted.
    for round_values in values:
        for step in range(LAG, len(round_values)):
            total = budget(round_values[step - lag], drafts, sizes, cost)
            rows.append(split(round_values[step], drafts, total))
    rounds = len(values)
    lengths = np.array(rows).reshape(rounds, -1, n) - 1
    accepted = accepted[:, LAG:]
    time = cost[np.searchsorted(sizes, (1 + lengths).sum(-1))] * (1 + world.overhead)
    # [rounds, 4]: fixed and variable tokens per step and sequence, drafts, and time per step
    per_round = np.stack(
        [
            1 + accepted.mean((1, 2)),
            1 + np.minimum(accepted, lengths).mean((1, 2)),
            lengths.mean((1, 2)),
            time.mean(1) / cost[-1],
        ],
        axis=1,
    )

    def figures(mean: np.ndarray) -> np.ndarray:
        fixed, variable, verified, slower = mean
        return np.array([fixed, variable, verified, variable / slower / fixed - 1])

    spread = np.std([figures(mean) for mean in per_round], axis=0, ddof=1) / np.sqrt(rounds)
    names = ("fixed_accept_length", "accept_length", "verified", "gain")
    found = dict(zip(names, figures(per_round.mean(0)).tolist(), strict=True))
    return Run(load=n, errors=dict(zip(names, spread.tolist(), strict=True)), **found)


def outcome(draws: Draws, world: World) -> tuple[np.ndarray, np.ndarray]:
    """Logits [rounds, steps, load, DRAFTS], and how many drafts are accepted [rounds, steps, load].

    These are the accepted ones when all are verified.
    """
    logits = world.mu + world.between * draws.request + world.within * draws.draft
    kept = draws.luck < 1 / (1 + np.exp(-logits))
    return logits, np.cumprod(kept, axis=-1).sum(-1)


def bisect(too_small: Callable[[float], bool], low: float, high: float, halvings: int) -> float:
    """Where a rising function is large enough, between `low` and `high`, by `halvings`."""
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if too_small(middle) else (low, middle)
    return (low + high) / 2
