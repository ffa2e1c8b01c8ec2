"""Proposals: which K tokens each block is scored on, and what became of them.

`trunk` = the trunk's own next tokens; `sampled` = drawn from the current drafter (arXiv 2611.02846); `recorded` = what
the drafter really proposed while rolling out; `redraft` = the current drafter's argmax, verified anew. Builds `Blocks`;
the loss is not this room's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.draws import Purpose, uniforms
from draftloop.core.host import sent
from draftloop.core.law import Law, Readout, Sampling
from draftloop.decode.rules import leading
from draftloop.drafter.draft import Draft
from draftloop.recipe import BranchPart
from draftloop.supervise.lesson import Lesson

Cells = list[tuple[int, int]] | Tensor  # (row of the batch, anchor); int64 [N, 2], on the host


def trunk_blocks(lessons: list[Lesson], cells: Cells, drafted: int, device: torch.device) -> Blocks:
    """The trunk's own next tokens; a position is valid while supervised without a gap."""
    row, anchor = columns(cells)
    place = torch.arange(1, drafted + 1)
    tokens = texts(lessons, drafted)[row.unsqueeze(1), anchor.unsqueeze(1) + place]
    there = sent(place <= _room(lessons, row, anchor).unsqueeze(1), device)
    rows, anchors = sent(torch.stack([row, anchor]), device)
    return Blocks(rows, anchors, sent(tokens, device), there, there.clone())


def recorded_blocks(
    lessons: list[Lesson], cells: Cells, drafted: int, eos: tuple[int, ...], device: torch.device
) -> Blocks:
    """What was really proposed, rejected tokens kept.

    A block whose accepted tokens were cut by end-of-sequence or length teaches only what was committed: what follows
    was never verified. What follows a proposed end-of-sequence is cut too (arXiv 2611.02846 cuts branches there).
    """
    row, anchor = columns(cells)
    steps, log_q = (torch.cat(parts) for parts in zip(*(lesson.recorded for lesson in lessons), strict=True))
    at = recorded_at(lessons, row, anchor)
    _, accepted, committed, tokens = steps[at].split([1, 1, 1, drafted], 1)
    seen = torch.where(committed <= accepted, committed, drafted)
    place = torch.arange(drafted)
    valid = (place < seen) & before_end(tokens, eos)
    kept = valid & (place < torch.minimum(accepted, committed))
    rows, anchors = sent(torch.stack([row, anchor]), device)
    told, right = sent(torch.stack([valid, kept]), device)
    return Blocks(rows, anchors, sent(tokens.contiguous(), device), told, right, sent(log_q[at], device))


def recorded_at(lessons: list[Lesson], row: Tensor, anchor: Tensor) -> Tensor:
    """int64 [N]: which verification began at each anchor, counted over those of all lessons; on the anchors' device."""
    began = [lesson.recorded[0][:, 0] for lesson in lessons]
    width = max(len(lesson.trunk) for lesson in lessons)
    keys = sent(torch.cat([at + i * width for i, at in enumerate(began)]), anchor.device)
    return torch.searchsorted(keys, row * width + anchor)  # verifications stand in the order of the text


def redraft_blocks(
    cells: Cells, draft: Draft, readout: Readout, eos: tuple[int, ...], room: Tensor
) -> tuple[Blocks, Tensor]:
    """The drafter's argmax at each anchor; `accepted` stays empty, for nothing is verified yet.

    Args:
        draft: of the N blocks.
        room: int64 [N], positions left in each trunk after the anchor; later ones are not valid.

    Returns:
        the blocks; [N, K, W] the rows that they were drawn from, with their graph.
    """

    def choose(hidden: Tensor, slots: slice) -> tuple[Tensor, Tensor]:
        law = draft.law(hidden, slots, readout, Sampling())
        tokens, scores = law.draw(hidden.new_empty(len(law.hidden)), _at_once(readout))
        return tokens.view(hidden.shape[:2]), scores.view(hidden.shape[:2])

    tokens, certain, drawn = draft.drawn(choose)
    rows, anchors = sent(torch.stack(columns(cells)), tokens.device)
    valid = torch.arange(draft.drafted, device=tokens.device) < room.unsqueeze(1)
    return Blocks(rows, anchors, tokens, valid & before_end(tokens, eos), torch.zeros_like(valid), certain), drawn


def sampled_blocks(
    lessons: list[Lesson],
    cells: Cells,
    draft: Draft,
    readout: Readout,
    branch: BranchPart,
    *,
    eos: tuple[int, ...],
    limit: int,
    seed: int,
    visits: list[int],
) -> tuple[Blocks, Tensor]:
    """One branch an anchor, drawn from the drafter's own law; `accepted` stays empty, for nothing is verified yet.

    A branch may run past its trunk's end, for the target has a law there too; it is cut behind an end-of-sequence.
    `log_q` is of the law really drawn from: at the branch temperature, 0 where the argmax was taken.

    Args:
        draft: of the N blocks.
        branch: temperature and share of greedy branches.
        limit: longest text the target can score.
        seed: of the keyed draws.
        visits: how often each lesson was seen before; part of the key.

    Returns:
        the blocks; [N, K, W] the rows that they were drawn from, with their graph.
    """
    drafted, device = draft.drafted, readout.weight.device
    row, anchor = columns(cells)  # draws are hashed on the host, which need not ask the device which branch is greedy
    key, visit = torch.tensor([lesson.key for lesson in lessons])[row], torch.tensor(visits)[row]
    place = torch.arange(1, drafted + 1)
    draws = sent(uniforms(seed, Purpose.DRAFT, key[:, None], visit[:, None], anchor[:, None], anchor[:, None] + place),
                 device)  # fmt: skip
    laws = [(torch.arange(len(row)), branch.temperature)]
    if branch.greedy_share > 0:
        greedy = uniforms(seed, Purpose.BRANCH, key, visit, anchor) < branch.greedy_share
        laws = [(mine.nonzero().squeeze(1), t) for mine, t in ((greedy, 0.0), (~greedy, branch.temperature))]
    groups = [(sent(mine, device), Sampling(temperature)) for mine, temperature in laws if len(mine)]

    rows_at_once = _at_once(readout)

    def choose(hidden: Tensor, slots: slice) -> tuple[Tensor, Tensor]:
        if len(groups) == 1:  # all alike: nothing to gather
            law = draft.law(hidden, slots, readout, groups[0][1])
            tokens, scores = law.draw(draws[:, slots].flatten(), rows_at_once)
            return tokens.view(hidden.shape[:2]), scores.view(hidden.shape[:2])
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=device)
        scores = torch.zeros(hidden.shape[:2], device=device)
        for mine, sampling in groups:
            law = draft.law(hidden, slots, readout, sampling, only=mine)
            some, certain = law.draw(draws[mine][:, slots].flatten(), rows_at_once)
            tokens[mine], scores[mine] = some.view(-1, hidden.shape[1]), certain.view(-1, hidden.shape[1])
        return tokens, scores

    tokens, log_q, drawn = draft.drawn(choose)
    within = sent(anchor.unsqueeze(1) + place < limit, device)
    rows, anchors = sent(torch.stack([row, anchor]), device)
    valid = before_end(tokens, eos) & within
    return Blocks(rows, anchors, tokens, valid, torch.zeros_like(valid), log_q), drawn


@torch.no_grad()
def ratio_run(blocks: Blocks, teacher: Law, coins: Tensor) -> Tensor:
    """How many leading tokens of each block the ratio rule accepts: u < p(y) / q(y), q as stored with the draw.

    Args:
        blocks: with the `log_q` of the law that each token was really drawn from.
        teacher: the target's laws of the [N * K] rows.
        coins: float64 [N, K] in (0, 1).

    Returns:
        int64 [N].
    """
    assert blocks.log_q is not None
    tokens = blocks.tokens.flatten()
    log_p = [
        teacher.rows(part).log_probs().gather(-1, tokens[part].unsqueeze(-1)).squeeze(-1)
        for part in torch.arange(tokens.numel(), device=tokens.device).split(_at_once(teacher.readout))
    ]
    margin = torch.cat(log_p).double().view_as(coins) - blocks.log_q.double()
    return leading((coins.log() < margin) & blocks.valid)


def before_end(tokens: Tensor, eos: tuple[int, ...]) -> Tensor:
    """Bool [N, K]: no end-of-sequence among the earlier tokens of the block."""
    ends = torch.zeros_like(tokens)
    for end in eos:  # numbers: a tensor of them would have to be sent
        ends += tokens == end
    return ends.cumsum(-1) - ends == 0


@torch.no_grad()
def greedy_run(hidden: Tensor, tokens: Tensor, readout: Readout) -> Tensor:
    """How many leading tokens equal the argmax of their law, computing no logits behind the first that does not.

    Args:
        hidden: [N, K, H].
        tokens: int64 [N, K].

    Returns:
        int64 [N].
    """
    run = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    alive = torch.arange(hidden.shape[0], device=hidden.device)
    for k in range(hidden.shape[1]):
        logits = [readout.logits(hidden[part, k]) for part in alive.split(512)]
        if not logits:
            break
        same = torch.cat([z.argmax(-1) for z in logits]) == tokens[alive, k]
        alive = alive[same]
        run[alive] += 1
    return run


@torch.no_grad()
def committed_greedily(blocks: Blocks, own: Blocks, teacher: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
    """What greedy verification commits at each position of a redraft, and behind that what the trunk holds.

    Args:
        blocks: redrafted and verified.
        own: the trunk's own blocks from the same anchors.
        teacher: [N, K, H].
        readout: the target's.

    Returns:
        int64 [N, K] labels; bool [N, K], whether a label is known: it was committed, or what was committed lies on the
        trunk, which then goes on from there.
    """
    labels = torch.where(blocks.accepted, blocks.tokens, own.tokens)
    first = blocks.first_rejected
    rows = teacher[first].split(512)
    labels[first] = torch.cat([readout.logits(part).argmax(-1) for part in rows])
    committed = blocks.accepted | first
    on_trunk = ((labels == own.tokens) | ~committed).all(-1, keepdim=True)
    return labels, committed | (own.valid & on_trunk)


def trunk_run(lessons: list[Lesson], blocks: Blocks) -> Tensor:
    """int64 [N]: how many leading valid tokens of each block are the trunk's own."""
    device, drafted = blocks.tokens.device, blocks.tokens.shape[1]
    text = sent(texts(lessons, drafted, fill=-1), device)
    own = text[blocks.row.unsqueeze(1), blocks.anchor.unsqueeze(1) + blocks.position]
    return leading((own == blocks.tokens) & blocks.valid)


def _at_once(readout: Readout) -> int:
    """Rows whose laws are read at once: a few of them fill a processor; a GPU, half a GiB of float32."""
    weight = readout.weight
    return max(256, (1 << 27) // weight.shape[0]) if weight.is_cuda else 256


def texts(lessons: list[Lesson], more: int = 0, fill: int = 0) -> Tensor:
    """int64 [b, longest + more], on the host: the tokens of the trunks, `fill` behind their ends."""
    rows = torch.nn.utils.rnn.pad_sequence([one.text for one in lessons], batch_first=True, padding_value=fill)
    return torch.nn.functional.pad(rows, (0, more), value=fill)


def columns(cells: Cells) -> tuple[Tensor, Tensor]:
    """Row and anchor of each cell; int64 [N] each, on the host."""
    row, anchor = torch.as_tensor(cells, dtype=torch.int64).view(-1, 2).unbind(1)
    return row, anchor


def room_after(lessons: list[Lesson], cells: Cells, device: Any) -> Tensor:
    """int64 [N]: supervised positions behind each anchor, without a gap."""
    return sent(_room(lessons, *columns(cells)), device)


def _room(lessons: list[Lesson], row: Tensor, anchor: Tensor) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([one.room for one in lessons], batch_first=True)[row, anchor]
