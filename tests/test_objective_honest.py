"""Honest expectations: exact by enumeration, refused where the stored law has holes, alarming where something is wrong."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.law import Sampling
from draftloop.objective.honest import Expectation, Moments, agreement, covers, expectation
from draftloop.objective.rows import Overlap

pytestmark = pytest.mark.specopd

V, W = 3, 4
PATHS = torch.tensor(list(product(range(V), repeat=W)))
PLAIN = Sampling(1.0)


def law(seed: int, heat: float = 1.0) -> Tensor:
    """[3^4 paths, W, V]: conditional laws given the path so far."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.empty(len(PATHS), W, V, dtype=torch.float64)
    for k in range(W):
        logits = 1.3 * torch.randn(V**k, V, generator=generator, dtype=torch.float64)
        out[:, k] = (logits / heat).softmax(-1).repeat_interleave(V ** (W - k), 0)
    return out


def at(table: Tensor) -> Tensor:
    """[81, W] log-probability of each path's tokens."""
    return table.log().gather(-1, PATHS.unsqueeze(-1)).squeeze(-1)


P, Q = law(0), law(1)
ROWS = Overlap(torch.minimum(P, Q).sum(-1), at(P), at(Q))
EXACT = sum(torch.minimum(at(P), at(Q))[:, : k + 1].sum(-1).exp().sum().item() / V ** (W - k - 1) for k in range(W))


def blocks_of(log_q: Tensor | None, valid: Tensor | None = None, count: int = len(PATHS)) -> Blocks:
    valid = torch.ones(count, W, dtype=torch.bool) if valid is None else valid
    place = torch.arange(valid.shape[0])
    return Blocks(place * 0, place, torch.zeros(valid.shape, dtype=torch.int64), valid, valid, log_q)


def taken(rows: Overlap, index: Tensor | slice) -> Overlap:
    return Overlap(*(grid[index] for grid in rows))


def judged(rows: Overlap, log_q: Tensor | None, valid: Tensor | None = None, **options: Any) -> Expectation:
    given = {"temperature": 1.0, "drawn": PLAIN, "trunk": PLAIN, **options}
    return expectation(rows, blocks_of(log_q, valid, rows.alpha.shape[0]), **given)


def averaged(stored: Tensor | None, chance: Tensor, **options: Any) -> tuple[float, float]:
    """Unbiased and product estimate, averaged exactly over all paths of that chance."""
    unbiased = plain = 0.0
    for i, weight in enumerate(chance.tolist()):
        found = judged(taken(ROWS, slice(i, i + 1)), None if stored is None else stored[i : i + 1], **options)
        unbiased += weight * (found.unbiased.mean or 0.0)
        plain += weight * (found.product.mean or 0.0)
    return unbiased, plain


def test_every_path_that_covers_gives_the_exact_length() -> None:
    warm = at(law(1, heat=1.7))
    for stored, chance, options in (
        (at(Q), at(Q).sum(-1).exp(), {}),
        (None, at(P).sum(-1).exp(), {}),
        (warm, warm.sum(-1).exp(), {"drawn": Sampling(1.7)}),  # drawn hotter than the loss: the stored law knows
    ):
        unbiased, plain = averaged(stored, chance, **options)
        assert unbiased == pytest.approx(EXACT, abs=1e-9)
        assert abs(plain - EXACT) > 1e-3


def drawn(count: int, seed: int = 0, rows: Overlap = ROWS) -> tuple[Overlap, Tensor]:
    """Sampled branches and their coins."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.multinomial(at(Q).sum(-1).exp(), count, replacement=True, generator=generator)
    return taken(rows, index), torch.rand(count, W, generator=generator, dtype=torch.float64)


def test_sampled_length_and_estimate_agree_and_the_product_does_not() -> None:
    rows, coins = drawn(20_000)
    found = judged(rows, rows.log_q, coins=coins)
    assert not found.alarm
    for estimate in (found.sampled, found.unbiased):
        assert estimate.mean is not None
        assert estimate.standard_error is not None
        assert abs(estimate.mean - EXACT) < 4 * estimate.standard_error
    assert found.product.mean is not None
    assert abs(found.product.mean - EXACT) > 4 * (found.product.standard_error or 0)
    told = found.to_metrics()
    assert told["fail_at_once/expected"] == pytest.approx(1 - ROWS.alpha[0, 0].item())
    assert told["fail_at_once/sampled"] == pytest.approx(told["fail_at_once/expected"], abs=0.02)
    assert all(math.isfinite(number) for number in told.values())


def test_the_alarm_fires_on_what_is_wrong() -> None:
    rows, coins = drawn(20_000)
    swapped = Overlap(rows.alpha, rows.log_q, rows.log_p)
    wrong = {
        "the drafter has learnt since": judged(rows, rows.log_q - 0.1, coins=coins),
        "an undeclared filter": judged(rows, rows.log_q + 0.2, coins=coins),
        "p and q swapped": judged(swapped, rows.log_q, coins=coins),
        "one coin for all positions": judged(rows, rows.log_q, coins=coins[:, :1].expand(-1, W)),
        "coins of the draw": judged(rows, rows.log_q, coins=coins.square()),
        "overlaps of other rows": judged(
            Overlap(rows.alpha.roll(1, -1), rows.log_p, rows.log_q), rows.log_q, coins=coins
        ),
    }
    for name, found in wrong.items():
        assert found.alarm, name


def test_the_product_itself_disagrees_with_what_is_sampled() -> None:
    rows, coins = drawn(20_000)
    reached = torch.cat([torch.ones_like(rows.alpha[:, :1]), rows.alpha[:, :-1].cumprod(-1)], -1)
    length = (rows.log_p - rows.log_q > coins.log()).cumprod(-1).sum(-1)
    biased = Moments.of(length - (reached * rows.alpha).sum(-1), torch.ones(20_000, dtype=torch.bool))
    assert abs(agreement(biased) or 0) > 4


def test_coins_of_another_temperature_are_not_compared() -> None:
    rows, coins = drawn(60)
    found = judged(rows, rows.log_q, drawn=Sampling(0.7), coins=coins)
    assert (found.sampled.count, found.unbiased.count) == (0, 60)
    assert not found.alarm


def test_blocks_whose_stored_law_has_holes_are_refused() -> None:
    rows, coins = drawn(200)
    for sampling in (Sampling(), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.9), None):
        assert not covers(sampling)
        found = judged(rows, rows.log_q, drawn=sampling, coins=coins)
        assert (found.refused.item(), found.unbiased.count.item(), found.sampled.count.item()) == (200, 0, 0)
        told = found.to_metrics()
        assert told["blocks/refused"] == 200
        assert not {"accepted/unbiased", "accepted/sampled", "accepted/disagreement"} & set(told)
        assert "accepted/product" in told
    assert judged(rows, None, trunk=Sampling()).refused == 200
    assert judged(rows, None, trunk=Sampling(0.7)).refused == 200  # no probability is stored for a trunk
    assert judged(rows, None, trunk=None).refused == 200
    assert judged(rows, None).refused == 0


def test_greedy_branches_among_sampled_ones_are_found() -> None:
    rows, coins = drawn(400)
    stored = rows.log_q.clone()
    stored[::4] = 0.0
    found = judged(rows, stored, coins=coins)
    kept = torch.arange(400) % 4 != 0
    assert found.refused == 100
    alone = judged(taken(rows, kept), rows.log_q[kept], coins=coins[kept])
    assert found.unbiased.mean == pytest.approx(alone.unbiased.mean)
    assert found.sampled.mean == pytest.approx(alone.sampled.mean)
    sure = Overlap(rows.alpha, rows.log_p, torch.zeros_like(stored))
    assert judged(sure, torch.zeros_like(stored)).refused == 0  # a drafter that is sure draws with log q = 0


def test_a_greedy_target_covers_its_own_trunk() -> None:
    """p is a point mass, the trunk its argmax: the estimate is the product, and is exact."""
    log_q = torch.tensor([[0.5, 0.25, 0.8, 0.1]], dtype=torch.float64).log()
    rows = Overlap(log_q.exp(), torch.zeros(1, 4, dtype=torch.float64), log_q)
    found = judged(rows, None, temperature=0.0, trunk=Sampling())
    assert found.unbiased.mean == pytest.approx(0.5 + 0.125 + 0.1 + 0.01)
    assert found.product.mean == pytest.approx(found.unbiased.mean)


def test_tokens_that_a_law_lacks_end_the_chain_without_nan() -> None:
    none = torch.full((2, W), float("-inf"), dtype=torch.float64)
    rows = Overlap(torch.full((2, W), 0.5, dtype=torch.float64), none, none)
    found = judged(rows, None)
    assert found.unbiased.mean == pytest.approx(0.5)
    assert judged(rows, torch.zeros(2, W), coins=torch.full((2, W), 0.5)).sampled.total == 0


def test_masks_sums_and_micro_batches() -> None:
    rows, coins = drawn(90)
    valid = (torch.arange(90) % (W + 1)).unsqueeze(1) > torch.arange(W)
    junk = Overlap(*(torch.where(valid, grid, float("nan")) for grid in rows))
    whole = judged(junk, rows.log_q, valid, coins=coins)
    parts = [
        judged(taken(junk, part), rows.log_q[part], valid[part], coins=coins[part])
        for part in (slice(40), slice(40, 40), slice(40, 90))
    ]
    added = parts[0] + parts[1] + parts[2]
    assert added.to_metrics() == pytest.approx(whole.to_metrics())
    assert whole.product.count == 72  # a fifth has no position
    assert whole.rows.tolist() == [72, 54, 36, 18]
    alpha = torch.where(valid, rows.alpha, 0.0)
    assert whole.alpha.tolist() == pytest.approx(alpha.sum(0).tolist())


def test_pull_is_the_weight_of_the_gradient() -> None:
    alpha = torch.tensor([[0.9, 0.0, 0.8, 0.7]], dtype=torch.float64)
    log_p, log_q = torch.tensor([[[0.2] * 4], [[0.8] * 4]], dtype=torch.float64).log()
    rows = Overlap(alpha, log_p, log_q)
    found = judged(rows, log_q)
    assert found.pull.tolist() == pytest.approx([0.25, 0.531, 0.0, 0.0])
    assert found.dead == 1
    weighted = judged(rows, log_q, accept_weighted=True).pull.tolist()
    assert weighted == pytest.approx([0.25 * 1.0, 0.25 * (1 + 0.8 * 1.7) / 4, (1 + 0.7) / 64, 1 / 256])


def test_rare_events_raise_no_false_alarm() -> None:
    """Where all of 40 blocks fail, or none does, their spread is next to nothing, and the difference is not."""
    for chance in (1e-3, 1 - 1e-3):
        alpha = torch.full((40, W), chance, dtype=torch.float64)
        log_p = torch.full_like(alpha, -2.0)
        log_q = log_p + (0.0 if chance > 0.5 else 20.0)
        rows = Overlap(alpha, log_p, log_q)
        coins = torch.full((40, W), 0.5, dtype=torch.float64)
        found = judged(rows, log_q, coins=coins)
        z = found.agreement()
        assert z is not None
        assert abs(z) < 2
        assert abs(agreement(found.difference) or math.inf) > 4  # by the spread alone it would


def test_agreement_needs_blocks() -> None:
    few = Moments.of(torch.ones(29), torch.ones(29, dtype=torch.bool))
    assert agreement(few) is None
    same = Moments.of(torch.zeros(30), torch.ones(30, dtype=torch.bool))
    assert agreement(same) == 0
    off = Moments.of(torch.ones(30), torch.ones(30, dtype=torch.bool))
    assert agreement(off) == math.inf
    spread = Moments.of(torch.arange(100.0), torch.ones(100, dtype=torch.bool))
    values = torch.arange(100.0)
    assert agreement(spread) == pytest.approx((values.mean() / (values.std() / 10)).item())


def test_false_alarms_are_rare() -> None:
    """Over many small reports the disagreement is a standard normal number, or a little less."""
    found = []
    for seed in range(60):
        rows, coins = drawn(200, seed)
        found.append(judged(rows, rows.log_q, coins=coins).agreement() or 0.0)
    z = torch.tensor(found)
    assert z.abs().max() < 4
    assert abs(z.mean().item()) < 0.5
    assert 0.6 < z.std().item() < 1.3
