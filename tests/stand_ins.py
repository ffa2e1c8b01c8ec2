"""Stand-ins for decoding: the toy as a target with its drafter, drafters that read from a script, and a trained one."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from draftloop.core.law import Law, Readout, Sampling
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.drafter.draft import Draft, ParallelDrafter
from draftloop.target.model import Rows
from tests.tiny import tiny_drafter
from tests.toy import Toy

EOS = tuple(range(50, 54))  # often enough that some rows end early
WAYS = {
    "greedy": {"sampling": Sampling()},
    "match": {"sampling": Sampling(1.0), "rule": "match"},
    "ratio": {"sampling": Sampling(1.0), "rule": "ratio"},
    "filtered match": {"sampling": Sampling(0.7, 20, 0.9), "rule": "match"},
    "filtered ratio": {"sampling": Sampling(0.7, 20, 0.9), "rule": "ratio", "draft_sampling": Sampling(1.2, top_k=9)},
    "ratio with greedy drafts": {"sampling": Sampling(1.0), "rule": "ratio", "draft_sampling": Sampling(0.0)},
}


class TextCache:
    """What the toy's target or drafter remembers: one number a position, in every row."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.store: torch.Tensor | None = None

    def write(self, value: torch.Tensor, positions: torch.Tensor) -> None:
        if self.store is None:
            self.store = torch.full((len(value), self.capacity), -1)
        self.store.scatter_(1, positions, value)

    def select(self, rows: torch.Tensor) -> None:
        self.store = self.store[rows]


class ToyTarget:
    """A toy as a target. Position 0 holds the prompt's only token, which says nothing; the text begins at 1."""

    device = torch.device("cpu")
    context_limit = 1 << 20
    name = "toy"

    def __init__(self, toy: Toy, eos: tuple[int, ...] = ()) -> None:
        self.toy, self.eos_ids, self.readout, self.vocab_size = toy, eos, toy.readout, toy.vocab

    def check_length(self, tokens: int) -> None:
        assert tokens <= self.context_limit

    def new_cache(self, capacity: int) -> TextCache:
        return TextCache(capacity)

    def law(self, hidden, sampling) -> Law:
        return Law(hidden, self.readout, sampling)

    def extend(self, cache: TextCache, ids, positions, taps=()) -> Rows:
        cache.write(ids, positions)
        node = [torch.zeros(len(ids), dtype=torch.int64)]
        for t in range(1, int(positions.max()) + 1):
            node.append(self.toy.child(node[-1], cache.store[:, t]))
        at = torch.stack(node, 1).gather(1, positions)
        hidden = self.toy.p_logits[at.clamp(max=self.toy.nodes - 1)]  # what lies deeper is beyond every limit
        return Rows(hidden, at.unsqueeze(-1) if taps else None)


class ToyDraft(Draft):
    """A toy's q slot by slot, behind known texts: of the drafts before it where the toy says so."""

    def __init__(self, toy: Toy, anchor: torch.Tensor) -> None:
        self.toy, self.anchor, self.own, self.drafted = toy, anchor, anchor, toy.drafted

    def step(self, slot: int, previous) -> torch.Tensor:
        self.own = self.anchor if slot == 0 else self.toy.child(self.own, previous)
        node, column = self.toy.slot(self.anchor, self.own, slot)
        return self.toy.q_logits[node.clamp(max=self.toy.nodes - 1), column]


class ToyDrafter:
    """A toy's q: the anchor's text is known from the feature below the anchor and the anchor's own token."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self.readout = toy, toy.draft_readout
        self.spec = SimpleNamespace(target_layers=(0,), drafted=toy.drafted, block_size=toy.drafted + 1)

    def new_cache(self, capacity: int) -> TextCache:
        return TextCache(capacity)

    def extend(self, cache: TextCache, features, positions, tokens) -> None:
        cache.write(features.squeeze(-1), positions)

    def draft(self, cache: TextCache, anchor, tokens) -> Draft:
        below = cache.store.gather(1, (anchor - 1).unsqueeze(1)).squeeze(1)
        return ToyDraft(self.toy, self.toy.child(below, tokens))

    def pack(self, features, anchor, text) -> Draft:
        """On texts that stand already, as training and walks call it."""
        below = features.squeeze(-1).gather(1, anchor - 1)
        return ToyDraft(self.toy, self.toy.child(below, text.gather(1, anchor)))


class Scripted(ParallelDrafter):
    """A drafter that proposes what a script says for each position of each request, whatever was committed.

    Args:
        target: for its vocabulary.
        scripts: one list of tokens by position for each request, in the order in which they are decoded.
        drafted: K.
        loud: logit of the scripted token; the others have 0, so that under `ratio` every token can be drawn.
    """

    def __init__(self, target, scripts: list[list[int]], drafted: int, loud: float = 4.0) -> None:
        self.spec = SimpleNamespace(target_layers=(0,), drafted=drafted, block_size=drafted + 1)
        self.readout = Readout(torch.eye(target.vocab_size) * loud)
        self.scripts, self.next = scripts, 0

    def new_cache(self, capacity: int) -> TextCache:
        return TextCache(capacity)

    def extend(self, cache: TextCache, features, positions, tokens) -> None:
        if cache.store is None:  # the prefill of a new batch: its rows are the next requests
            cache.store = torch.arange(self.next, self.next + len(features)).unsqueeze(1)
            self.next += len(features)

    def begin(self, cache: TextCache, anchor, tokens) -> torch.Tensor:
        lines = []
        for row, start in zip(cache.store[:, 0].tolist(), anchor.tolist(), strict=True):
            line = self.scripts[row][start + 1 : start + 1 + self.spec.drafted]
            lines.append(line + [0] * (self.spec.drafted - len(line)))
        return F.one_hot(torch.tensor(lines), len(self.readout.weight)).float()


def with_eos(target, *eos: int):
    """The same target with other end-of-sequence tokens."""
    twin = copy.copy(target)
    twin.eos_ids = eos
    return twin


def by_length(requests: list[Request]) -> list[Request]:
    """The order in which `decode` takes them."""
    return sorted(requests, key=lambda r: len(r.ids))


def requests_of(lengths, vocab: int, seed: int = 0) -> list[Request]:
    draw = torch.Generator().manual_seed(seed)
    lines = [torch.randint(6, vocab, (n,), generator=draw).tolist() for n in lengths]
    return by_length([Request(tuple(line), key=1000 + i) for i, line in enumerate(lines)])


def scripts_of(target, requests: list[Request], options: Options) -> list[list[int]]:
    """The text of each request by plain decoding, end-of-sequence ignored: what an oracle proposes."""
    return [[*g.prompt, *g.tokens] for g in decode(with_eos(target), None, requests, options)]


def garbled(scripts: list[list[int]], vocab: int, share: float = 0.25, seed: int = 0) -> list[list[int]]:
    """Scripts with a share of their tokens replaced."""
    draw = torch.Generator().manual_seed(seed)
    lines = []
    for script in scripts:
        wrong = (torch.rand(len(script), generator=draw) < share).tolist()
        lines.append([(t + 1) % vocab if w else t for t, w in zip(script, wrong, strict=True)])
    return lines


@torch.no_grad()
def unlikely(target, scripts: list[list[int]]) -> list[list[int]]:
    """At each position the target's least likely token given the text of the script."""
    lines = []
    for script in scripts:
        logits = target.model(torch.tensor([script])).logits[0]
        lines.append([0, *logits.argmin(-1).tolist()])
    return lines


def trained_drafter(target, scripts: list[list[int]], steps: int = 60, **changes):
    """A drafter that has learned a few texts by heart: packed forward, cross-entropy at every anchor."""
    drafter = tiny_drafter(target, **changes)
    drafter.requires_grad_(True)
    drafted = drafter.spec.drafted
    width = min(len(s) for s in scripts)
    ids = torch.tensor([s[:width] for s in scripts])
    place = torch.arange(width).expand_as(ids)
    features = target.extend(target.new_cache(width), ids, place, drafter.spec.target_layers).features
    anchor = torch.arange(1, width - drafted).expand(len(ids), -1)
    labels = ids.unfold(1, drafted, 1)[:, 2:]  # labels of anchor a: a + 1 .. a + K
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = drafter(features, anchor, ids.gather(1, anchor))
        loss = F.cross_entropy(drafter.readout.logits(rows).flatten(0, 2), labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return drafter.requires_grad_(False).eval()


def p_value(generations, law: torch.Tensor) -> float:
    """Chi-square of the joint law of three tokens; cells with fewer than five expected are pooled."""
    v = round(len(law) ** (1 / 3))
    place = torch.tensor([[v * v * g.tokens[0] + v * g.tokens[1] + g.tokens[2]] for g in generations]).squeeze(1)
    seen, expected = torch.bincount(place, minlength=len(law)).double(), law * len(generations)
    if bool((seen[law == 0] > 0).any()):
        return 0.0  # a text that the target never writes
    rare = expected < 5
    seen = torch.cat([seen[~rare], seen[rare].sum(0, keepdim=True)])
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    statistic = ((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    assert len(seen) > 20
    return float(torch.special.gammaincc(freedom, statistic / 2))


def replies(generations) -> list[tuple[list[int], bool]]:
    """What a caller sees of each: the tokens, and whether the text ended."""
    return [(g.tokens, g.finished) for g in generations]
