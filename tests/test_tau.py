"""tau against a slow pure-Python definition, cut steps, bootstrap intervals, pairing, JSON."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from draftloop.core.errors import DraftloopError, InputError
from draftloop.evaluate.table import evaluation_table, gain_sentence
from draftloop.evaluate.tau import Acceptance, Paired, Response, acceptance, paired


def response(*steps: tuple[int, int], id: str = "a", set: str = "s", drafted: int = 3) -> Response:
    """Steps as (committed, accepted)."""
    return Response(id, set, tuple(c for c, _ in steps), tuple(a for _, a in steps), drafted)


@st.composite
def any_responses(draw: st.DrawFn, stepless: bool = True) -> list[Response]:
    out = []
    for number in range(draw(st.integers(1, 6))):
        drafted = draw(st.integers(1, 5))
        steps = []
        for accepted in draw(st.lists(st.integers(0, drafted), min_size=0 if stepless else 1, max_size=5)):
            cut = accepted > 0 and draw(st.booleans())
            steps.append((accepted + (not cut), accepted))
        name = draw(st.sampled_from(["math", "code"]))
        out.append(response(*steps, id=str(number), set=name, drafted=drafted))
    return out


def slow_taus(responses: list[Response]) -> tuple[Fraction, Fraction]:
    """The definition: pooled over steps, and the mean over responses with a step of their own mean."""
    per_step: list[int] = []
    per_response: list[Fraction] = []
    for r in responses:
        if not r.committed:
            continue
        per_step.extend(r.committed)
        per_response.append(Fraction(sum(r.committed), len(r.committed)))
    return Fraction(sum(per_step), len(per_step)), sum(per_response, Fraction(0)) / len(per_response)


def slow_conditional(responses: list[Response], k: int) -> Fraction | None:
    """alpha_k: of the steps that reached draft k and could see what became of it, the share that accepted it."""
    yes = no = 0
    for r in responses:
        for committed, accepted in zip(r.committed, r.accepted, strict=True):
            outcomes = [True] * accepted
            if committed == accepted + 1 and accepted < r.drafted:
                outcomes.append(False)  # the correction token says that the next draft was rejected
            if len(outcomes) >= k:
                yes, no = yes + outcomes[k - 1], no + (not outcomes[k - 1])
    return Fraction(yes, yes + no) if yes + no else None


@settings(deadline=None)
@given(any_responses())
def test_equals_the_definition(responses: list[Response]) -> None:
    if not any(r.committed for r in responses):
        with pytest.raises(InputError, match="verify step"):
            acceptance(responses, resamples=5)
        return
    got = acceptance(responses, resamples=20)
    pooled, mean = slow_taus(responses)
    assert got.tau_pooled == pytest.approx(float(pooled), rel=1e-12)
    assert got.tau_mean == pytest.approx(float(mean), rel=1e-12)
    assert got.steps == sum(len(r.committed) for r in responses)
    assert got.responses == sum(bool(r.committed) for r in responses)
    walked = [r for r in responses if r.committed]
    assert len(got.conditional) == len(got.per_position) == max(r.drafted for r in walked)
    survival: Fraction | None = Fraction(1)
    for k in range(1, len(got.conditional) + 1):
        alpha = slow_conditional(walked, k)
        assert got.conditional[k - 1] == (None if alpha is None else pytest.approx(float(alpha)))
        if survival is not None and survival > 0:
            survival = None if alpha is None else survival * alpha
        assert got.per_position[k - 1] == (None if survival is None else pytest.approx(float(survival)))
    by_set = {r.set for r in walked}
    assert list(got.sets) == sorted(by_set)
    for name in by_set:
        part = acceptance([r for r in responses if r.set == name], resamples=20)
        assert part.sets == {name: got.sets[name]}  # a set's figures do not depend on the other sets
        assert got.sets[name].tau_pooled == part.tau_pooled
        assert got.sets[name].interval == part.interval


@settings(deadline=None)
@given(any_responses(stepless=False), st.randoms(use_true_random=False))
def test_intervals_are_ordered_bounded_and_free_of_order(responses: list[Response], rng: random.Random) -> None:
    got = acceptance(responses, resamples=50)
    means = [sum(r.committed) / len(r.committed) for r in responses]
    for low, high in (got.interval, got.interval_mean):
        assert min(means) - 1e-9 <= low <= high <= max(means) + 1e-9
    shuffled = list(responses)
    rng.shuffle(shuffled)
    assert acceptance(shuffled, resamples=50) == got
    assert Acceptance.from_json(json.loads(json.dumps(got.to_json(), allow_nan=False))) == got


def test_pooled_and_mean_differ_by_length() -> None:
    long, short = response(*[(2, 1)] * 9, id="long"), response((4, 3), id="short")
    got = acceptance([long, short])
    assert got.tau_pooled == pytest.approx(22 / 10)
    assert got.tau_mean == pytest.approx(3.0)


def test_responses_without_a_step_are_left_out() -> None:
    got = acceptance([response((2, 1)), response(id="b", set="empty")])
    assert (got.responses, got.tau_mean, got.tau_pooled) == (1, 2.0, 2.0)
    assert list(got.sets) == ["s"]


def test_without_cut_steps_per_position_is_the_plain_share() -> None:
    got = acceptance([response((1, 0), (3, 2), (4, 3), (3, 2))])
    assert got.per_position == pytest.approx((3 / 4, 3 / 4, 1 / 4))
    assert got.conditional == pytest.approx((3 / 4, 1.0, 1 / 3))
    # tau without cuts is one plus the expected accepted length
    assert got.tau_pooled == pytest.approx(1 + sum(x for x in got.per_position if x is not None))


def test_cut_positions_are_neither_accepted_nor_rejected() -> None:
    # one step is cut after its first draft; 2 and 3 are unknown there, so only the full step speaks of them
    got = acceptance([response((4, 3), (1, 1))])
    assert got.per_position == (1.0, 1.0, 1.0)
    # cut on the accepted draft that is end-of-sequence, against a step whose correction is end-of-sequence
    assert acceptance([response((2, 2))]).conditional == (1.0, 1.0, None)
    assert acceptance([response((2, 2))]).per_position == (1.0, 1.0, None)
    assert acceptance([response((3, 2))]).conditional == (1.0, 1.0, 0.0)
    # the cut tokens are not counted in tau
    assert acceptance([response((4, 3), (1, 1))]).tau_pooled == 2.5


def test_where_no_step_got_there_alpha_is_none_and_the_share_zero() -> None:
    got = acceptance([response((1, 0), (1, 0))])
    assert got.conditional == (0.0, None, None)
    assert got.per_position == (0.0, 0.0, 0.0)


def test_the_length_limit_does_not_bias_acceptance_by_position() -> None:
    alphas, rng = (0.8, 0.7, 0.6, 0.5), random.Random(1)
    responses, naive = [], [0] * 4
    for number in range(3000):
        left, steps = rng.randint(3, 6), []
        while left:
            accepted = next((k for k, alpha in enumerate(alphas) if rng.random() >= alpha), 4)
            committed = min(accepted + 1, left)
            steps.append((committed, min(accepted, committed)))
            left -= committed
        responses.append(response(*steps, id=str(number), drafted=4))
    got = acceptance(responses, resamples=10)
    total = got.steps
    for k, alpha in enumerate(alphas):
        assert got.conditional[k] == pytest.approx(alpha, abs=0.03)
        assert got.per_position[k] == pytest.approx(math.prod(alphas[: k + 1]), abs=0.03)
        naive[k] = sum(a > k for r in responses for a in r.accepted)
    assert naive[3] / total < math.prod(alphas) - 0.08  # counting the unseen as rejected would fail this test


def test_one_response_has_its_point_as_interval() -> None:
    got = acceptance([response((4, 3), (1, 0))])
    assert got.interval == got.interval_mean == (2.5, 2.5)


def test_of_one_response_no_interval_is_shown() -> None:
    # a point would be read as certain: without `shown` in the two to_json, the first three lines fail
    one = acceptance([response((4, 3), (1, 0), id="a"), response((2, 1), id="b", set="other")])
    assert {name: part["interval"] for name, part in one.to_json()["sets"].items()} == {"other": None, "s": None}
    assert paired([response((2, 1))], [response((4, 3))]).to_json()["difference_interval"] is None
    assert acceptance([response((2, 1))]).to_json()["interval_mean"] is None
    assert one.to_json()["interval"] == list(one.interval)  # two responses have one
    assert Acceptance.from_json(one.to_json()) == one
    assert "n=1" in rendered(evaluation_table(one))
    sentence = gain_sentence(paired([response((2, 1))], [response((4, 3))]), "b", "a")
    assert sentence == "b against a: tau +2.000, 2.000x, on one response: that cannot tell the two apart."


def rendered(table: RenderableType) -> str:
    console = Console(width=80, file=StringIO())
    console.print(table)
    return console.file.getvalue()


def test_the_interval_covers_and_resamples_responses_not_steps() -> None:
    # 20 responses of 50 equal steps each: steps within a response are no independent evidence
    rng = random.Random(3)
    tau = [rng.choice([1, 4]) for _ in range(20)]
    got = acceptance([response(*[(t, t - 1)] * 50, id=str(i)) for i, t in enumerate(tau)])
    spread = math.sqrt(sum((t - got.tau_mean) ** 2 for t in tau) / 20 / 20)
    low, high = got.interval
    assert high - low == pytest.approx(2 * 1.96 * spread, rel=0.15)
    assert low < got.tau_pooled < high


def test_each_definition_has_its_own_interval() -> None:
    long = [response(*[(1, 0)] * 50, id=f"long{i}") for i in range(15)]
    got = acceptance([*long, *(response((4, 3), id=f"short{i}") for i in range(15))])
    assert 1.0 < got.interval[0] < got.tau_pooled < got.interval[1] < 1.3
    assert 1.5 < got.interval_mean[0] < got.tau_mean < got.interval_mean[1] < 3.5


def test_the_bootstrap_is_deterministic_by_seed() -> None:
    responses = [response((1 + i % 4, i % 4), id=str(i)) for i in range(9)]
    assert acceptance(responses, seed=1) == acceptance(responses, seed=1)
    assert acceptance(responses, seed=1).interval_mean != acceptance(responses, seed=5, resamples=30).interval_mean


@pytest.mark.parametrize(
    ("committed", "accepted", "drafted"),
    [((1,), (0, 0), 3), ((0,), (0,), 3), ((5,), (4,), 3), ((3,), (1,), 3), ((1,), (2,), 3), ((1,), (-1,), 3)],
)
def test_contradictory_counts_are_refused(committed: tuple[int, ...], accepted: tuple[int, ...], drafted: int) -> None:
    with pytest.raises(DraftloopError, match="'a'"):
        Response("a", "s", committed, accepted, drafted)


def test_no_response_with_a_step_is_a_clear_error() -> None:
    for none in ([], [response()]):
        with pytest.raises(InputError, match="no acceptance length"):
            acceptance(none)


def test_a_broken_record_is_a_clear_error() -> None:
    record = acceptance([response((2, 1))]).to_json()
    assert Acceptance.from_json(record).steps == 1
    with pytest.raises(InputError, match="'interval'"):
        Acceptance.from_json({key: value for key, value in record.items() if key != "interval"})
    with pytest.raises(InputError, match="wrong shape"):
        Acceptance.from_json({**record, "interval": [1.0]})


def test_paired_is_exact_where_the_gain_is_constant() -> None:
    # prompts differ wildly, the gain never: an unpaired bootstrap could not give a zero-width interval
    before = [response(*[(1 + i % 2, i % 2)] * (1 + i), id=str(i)) for i in range(8)]
    after = [response(*[(2 + 2 * (i % 2), 1 + 2 * (i % 2))] * (1 + i), id=str(i)) for i in reversed(range(8))]
    got = paired(before, after)
    assert got.ratio == pytest.approx(2.0)
    assert got.interval == pytest.approx((2.0, 2.0))
    assert got.difference == pytest.approx(acceptance(after).tau_pooled - acceptance(before).tau_pooled)
    assert got.difference_interval[0] < got.difference < got.difference_interval[1]
    assert paired(after, before).ratio == pytest.approx(0.5)
    assert set(got.to_json()) == set(Paired.__dataclass_fields__)


def test_paired_leaves_out_pairs_without_steps_and_counts_them() -> None:
    a = [response((2, 1)), response((4, 3), id="b")]
    b = [response((3, 2)), response(id="b")]
    got = paired(a, b)
    assert (got.responses, got.left_out, got.ratio) == (1, 1, 1.5)


def test_paired_refuses_different_prompts_and_repeated_ids() -> None:
    a, b = response((2, 1)), response((2, 1), id="b")
    with pytest.raises(InputError, match="one arm only"):
        paired([a], [a, b])
    with pytest.raises(InputError, match="one arm only"):
        paired([a], [response((2, 1), set="other")])
    with pytest.raises(InputError, match="twice"):
        paired([a, a], [a, b])
    with pytest.raises(InputError, match="verify step in both"):
        paired([a], [response()])
