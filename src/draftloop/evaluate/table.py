"""What a run or an evaluation found, for the terminal: plain sentences and tables.

Knows only the summary record and acceptance results. Everything is legible at 80 columns, without colour and through
a pipe; names from outside are set as text, never as markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftloop.evaluate import PLAIN
from draftloop.evaluate.compare import ALL, Comparison, Contest, tail
from draftloop.evaluate.speed import cost_text, doubt
from draftloop.evaluate.summary import Arm, BlockSplit, Decoding, Summary
from draftloop.evaluate.tau import Acceptance, Interval, Paired, shown

_POSITIONS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)  # shown of a block too long for 80 columns


def evaluation_table(acceptance: Acceptance, *, name: str = "drafter") -> RenderableType:
    """Lay out the acceptance of one drafter: over all prompts, by prompt set and by position.

    Args:
        acceptance: what `draftloop.evaluate.tau.acceptance` found.
        name: what to call the drafter.
    """
    table = _table("set", "tau\npooled", "95 %", "tau\nmean", "95 %", "responses", "verifications")
    rows = {"all": acceptance, **acceptance.sets} if len(acceptance.sets) != 1 else acceptance.sets
    for title, part in rows.items():
        pooled, mean = f"{part.tau_pooled:.2f}", f"{part.tau_mean:.2f}"
        of_pooled, of_mean = (interval_text(shown(one, part.responses)) for one in (part.interval, part.interval_mean))
        _row(table, title, pooled, of_pooled, mean, of_mean, count(part.responses), count(part.steps))
    shares = {"accepted": acceptance.per_position, "given the ones before": acceptance.conditional}
    title = f"Acceptance length (tau) of {name}, tokens per verification"
    return Group(_section(title, table), Text(), _position_section(shares))


def saving_sentence(acceptance: Acceptance, drafted: int) -> str:
    """Say how many drafts confidence kept from being verified, beside the tau that was had with the others.

    Args:
        acceptance: of steps that it shortened.
        drafted: K.
    """
    saved, verified = acceptance.saved(drafted), acceptance.verified
    text = f"tau {acceptance.tau_pooled:.2f} with {verified:.2f} of {drafted} drafts verified a step"
    return f"{text}: {saved:.2f} fewer for each token committed."


def gain_sentence(gain: Paired, name: str, first: str) -> str:
    """Say how a drafter differs from the first one on the same answers."""
    difference, ratio = (shown(one, gain.responses) for one in (gain.difference_interval, gain.interval))
    text = f"{name} against {first}: tau {gain.difference:+.3f}"
    if difference is None or ratio is None:
        return f"{text}, {gain.ratio:.3f}x, on one response: that cannot tell the two apart."
    (low, high), (least, most) = difference, ratio
    text += f" [{low:+.3f}, {high:+.3f}], {gain.ratio:.3f}x [{least:.3f}, {most:.3f}]"
    text += f", paired over {gain.responses} responses"
    return f"{text}." if low > 0 or high < 0 else f"{text}: these prompts cannot tell the two apart."


def comparison_tables(comparison: Comparison) -> RenderableType:
    """Lay out drafters side by side: who they are, tau by prompt set and speed at each temperature."""
    several = len(comparison.contests) > 1
    parts: list[RenderableType] = []
    for contest in comparison.contests:
        at = f" at temperature {contest.temperature:g}" if several or contest.temperature else ""
        parts += [_contest_section(contest, at), Text()]
        first = contest.standings[0].name
        others = [one for one in contest.standings if one.gains]
        parts += [Text("\n".join(gain_sentence(one.gains[ALL], one.name, first) for one in others)), Text()]
    parts += [_entrant_section(comparison), Text()]
    for one in comparison.entrants:
        made = one.made_for.get("target_fingerprint")
        if made not in (None, comparison.target["fingerprint"]):
            line = f"{one.name} was made for {one.made_for.get('target')} ({made}), not for this target."
            parts += [Text(f"{line} `draftloop adapt` would let it learn this one.")]
    return Group(*parts)


def _contest_section(contest: Contest, at: str) -> RenderableType:
    """A row per prompt set and drafter, as many of either as there are."""
    first = contest.standings[0]
    cut = [tail(one.name, 16) for one in contest.standings]
    names = cut if len(set(cut)) == len(cut) else [one.name for one in contest.standings]
    table = _table("set", "drafter", "tau\npooled", "95 %", "tau\nmean", "to the\nfirst", "95 %", names=2)
    for name in [ALL, *first.acceptance.sets] if len(first.acceptance.sets) > 1 else [ALL]:
        title = name
        for known_as, one in zip(names, contest.standings, strict=True):
            part = one.acceptance if name == ALL else one.acceptance.sets.get(name)
            if part is None:
                continue
            gain = one.gains.get(name)
            change = f"{gain.difference:+.2f}" if gain else ""
            sure = interval_text(shown(gain.difference_interval, gain.responses), "+.2f") if gain else ""
            wide = interval_text(shown(part.interval, part.responses))
            cells = (f"{part.tau_pooled:.2f}", wide, f"{part.tau_mean:.2f}", change, sure)
            _row(table, title, known_as, *cells)
            title = ""
    return _section(f"Acceptance length (tau){at}, tokens per verification", table)


def _entrant_section(comparison: Comparison) -> RenderableType:
    """Parameters, block and speed of each drafter; where speed was measured, beside plain decoding."""
    decoded = [one.plain["prompts"] for one in comparison.contests if one.plain is not None]
    table = _table("drafter", "parameters", "block", "T", "tau", "tokens/s", "round\ncost", "against\nplain")
    named = {one.name: one for one in comparison.entrants}
    for contest in comparison.contests:
        rows = [(one.name, one.speed) for one in contest.standings]
        if contest.plain is not None and PLAIN not in named:
            rows.insert(0, (PLAIN, contest.plain))
        for name, speed in rows:
            one = named.get(name)
            drafts = one is not None and one.drafter is not None
            facts = (short(one.parameters), str(one.block_size)) if one is not None and drafts else ("", "")
            cells = ("", "", "", "")
            if speed is not None:
                verdict = f"{speed['speedup']:.2f}x{' SLOWER' if speed['speedup'] < 1.0 else ''}" if drafts else ""
                cells = (
                    f"{speed['tau_pooled']:.2f}",
                    f"{speed['tokens_per_s']:.1f}",
                    cost_text(speed["round_cost"]),
                    verdict,
                )
            _row(table, "none (plain)" if name == PLAIN else name, *facts, f"{contest.temperature:g}", *cells)
    if not decoded:
        return _section("Drafters; nothing was decoded for speed", table)
    many = f"{decoded[0]} prompt{'s' if decoded[0] > 1 else ''}"
    how = f"speed of {many}, batch size {comparison.settings['batch_size']}, {comparison.target['dtype']}"
    note = "tau here is that of the prompts decoded; a drafter pays where it is above its round cost"
    speeds = [one.speed for contest in comparison.contests for one in contest.standings if one.speed is not None]
    doubts = doubt(min(decoded), [speed["round_cost"] for speed in speeds])
    return _section(f"Decoding for real ({how})", table, f"{note}\n{doubts}" if doubts else note)


def summary_tables(summary: Summary) -> RenderableType:
    """Lay out a whole run for the screen: sentences, stages, positions, prompt sets, block split, decoding speed."""
    sections: list[RenderableType] = [Text("\n".join(sentences(summary))), _stage_section(summary)]
    sections.append(_position_section({stage.name: stage.per_position for stage in summary.stages}))
    if len({name for stage in summary.stages for name in stage.sets}) > 1:
        sections.append(_set_section(summary))
    splits = {stage.name: stage.split for stage in summary.stages if stage.split is not None}
    if splits:
        sections.append(_split_section(splits))
    if summary.decoding is not None:
        sections.append(_decoding_section(summary.decoding))
    return Group(*(part for section in sections for part in (section, Text())))


def sentences(summary: Summary) -> list[str]:
    """Say what the run found: acceptance length, alone and beside n-gram lookup's, decoding speed, losslessness."""
    said = [tau_sentence(summary), ngram_sentence(summary), speed_sentence(summary), lossless_sentence(summary)]
    return [sentence for sentence in said if sentence]


def tau_sentence(summary: Summary) -> str:
    """Say what training did to the acceptance length."""
    first, best = summary.first, summary.best
    after = f"{best.tau_pooled:.2f} {interval_text(best.interval)}"
    if best is first:
        which = "untrained drafter" if first.name == "untrained" else "drafter that the run began with"
        return f"The {which} is delivered: acceptance length {after} tokens per verification."
    text = f"Acceptance length {first.tau_pooled:.2f} -> {after} tokens per verification"
    if summary.gain is None:
        return f"{text}."
    text += f", {summary.gain.ratio:.2f}x {interval_text(summary.gain.interval)}"
    verdict = _above_one(summary.gain.interval)
    if verdict is None:
        return f"{text}: these prompts cannot tell that from no change."
    return f"{text}." if verdict else f"{text}: training made it WORSE."


def ngram_sentence(summary: Summary) -> str:
    """Say what n-gram lookup has without training; empty where it was not walked."""
    lookup = summary.ngram
    if lookup is None:
        return ""
    tau = f"{lookup.tau_pooled:.2f} {interval_text(lookup.interval)}"
    word = {True: "more", False: "LESS", None: "no clear difference"}[_above_one(lookup.gain.interval)]
    ratio = f"{lookup.gain.ratio:.2f}x {interval_text(lookup.gain.interval)}"
    return f"N-gram lookup ({lookup.name}), which needs no training, has {tau}; the delivered drafter {ratio}: {word}."


def _above_one(ratio: Interval | None) -> bool | None:
    """Whether a ratio with this interval is above 1; None where that cannot be told."""
    if ratio is None or ratio[0] <= 1.0 <= ratio[1]:
        return None
    return ratio[0] > 1.0


def speed_sentence(summary: Summary) -> str:
    """Say what the delivered drafter does to decoding speed, a slowdown called a slowdown."""
    if summary.decoding is None or summary.arm is None:
        return "Decoding speed with the delivered drafter was not measured."
    return _arm_sentence(summary.arm, summary.decoding)


def lossless_sentence(summary: Summary) -> str:
    """Say what the losslessness audit found."""
    audit = summary.audit
    if audit is None:
        return "Losslessness was not audited in this run."
    gap = "" if audit.gap is None else f" (top-2 gap below {audit.gap:g})"
    size = f"{count(audit.prompts)} prompts, {count(audit.tokens)} tokens, {audit.dtype}"
    size = f"({size}; near-ties{gap}: {count(audit.near_ties)})"
    if summary.lossless:
        parted = sum(arm.at_ties for arm in audit.arms)
        aside = f", but for {count(parted)} responses that part from it at a near-tie" if parted else ""
        return f"Lossless: speculative output equals plain greedy decoding token for token{aside} {size}."
    differing = [f"{arm.name}, first at {place(arm.first_difference)}" for arm in audit.arms if not arm.equal]
    where = f": {'; '.join(differing)}" if differing else ""
    return f"NOT LOSSLESS: speculative output differs from plain greedy decoding{where} {size}."


def cost_sentence(summary: Summary) -> str:
    """Say what a run cost: its time, and how much of it went into training."""
    trained = summary.stages[1:]
    steps, labels = sum(stage.steps for stage in trained), sum(stage.labels for stage in trained)
    spent = duration(sum(stage.seconds for stage in trained))
    return (
        f"It cost {duration(summary.seconds)} in all: {spent} of training ({count(steps)} steps,"
        f" {short(labels)} supervised positions), the rest answers, measuring and the audit."
    )


def _arm_sentence(arm: Arm, decoding: Decoding) -> str:
    rates = f"{arm.tokens_per_s:.1f} against {decoding.plain.tokens_per_s:.1f} tokens/s"
    rates += f", batch size {decoding.batch_size}, {decoding.dtype}"
    cost = f"a round costs {arm.round_cost:.2f} plain steps and pays above tau {arm.break_even_tau:.2f}"
    but = f"tau is {arm.tau_pooled:.2f} on the {count(decoding.prompts)} prompts decoded"
    if arm.speedup < 1.0:
        slower = f"SLOWDOWN: speculative decoding with {arm.name} is slower than plain decoding"
        return f"{slower}, {arm.speedup:.2f}x ({rates}): {cost}, but {but}."
    faster = f"Speculative decoding with {arm.name} runs at {arm.speedup:.2f}x the speed of plain"
    return f"{faster} ({rates}): {cost}, and {but}."


def _stage_section(summary: Summary) -> RenderableType:
    table = _table("stage", "tau\npooled", "95 %", "tau\nmean", "gain", "steps", "labels", "time")
    for stage in summary.stages:
        gain = "" if stage is summary.first else percent_change(stage.tau_pooled, summary.first.tau_pooled)
        name = f"{stage.name} *" if stage.delivered else stage.name
        tau, mean = f"{stage.tau_pooled:.2f}", f"{stage.tau_mean:.2f}"
        effort = (count(stage.steps), short(stage.labels), duration(stage.seconds)) if stage.steps else ("", "", "")
        _row(table, name, tau, interval_text(stage.interval), mean, gain, *effort, bold=stage.delivered)
    if (lookup := summary.ngram) is not None:
        tau, mean = f"{lookup.tau_pooled:.2f}", f"{lookup.tau_mean:.2f}"
        _row(table, lookup.name, tau, interval_text(lookup.interval), mean, "", "", "", "")
    title = "Stages: acceptance length (tau) on the test prompts, tokens per verification"
    return _section(title, table, "* delivered; gain = tau pooled over the first row")


def _set_section(summary: Summary) -> RenderableType:
    """Lay out a row per prompt set and stage, so that any number of either fits."""
    table = _table("set", "stage", "tau\npooled", "95 %", "tau\nmean", "gain", names=2)
    for name in sorted({name for stage in summary.stages for name in stage.sets}):
        title, before = name, summary.first.sets.get(name)
        for stage in summary.stages:
            part = stage.sets.get(name)
            if part is None:
                continue
            known = before is not None and stage is not summary.first
            gain = percent_change(part.tau_pooled, before.tau_pooled) if known and before else ""
            tau, mean = f"{part.tau_pooled:.2f}", f"{part.tau_mean:.2f}"
            _row(table, title, stage.name, tau, interval_text(part.interval), mean, gain, bold=stage.delivered)
            title = ""
        if summary.ngram is not None and (own := summary.ngram.sets.get(name)) is not None:
            tau, mean = f"{own.tau_pooled:.2f}", f"{own.tau_mean:.2f}"
            _row(table, title, summary.ngram.name, tau, interval_text(own.interval), mean, "")
    return _section("By prompt set", table)


def _split_section(splits: Mapping[str, BlockSplit]) -> RenderableType:
    table = _table("stage", "blocks", "wholly\naccepted", "accepted", "first\nrejected", "later\nrejected")
    for name, split in splits.items():
        total = split.accepted + split.first_rejected + split.later_rejected
        full = share(split.full_blocks, split.blocks)
        tokens = (split.accepted, split.first_rejected, split.later_rejected)
        _row(table, name, count(split.blocks), full, *(f"{short(n)} ({share(n, total)})" for n in tokens))
    return _section("Drafted tokens that a stage was trained on", table)


def _decoding_section(decoding: Decoding) -> RenderableType:
    table = _table("arm", "tau", "tokens/s", "ms/round", "round\ncost", "pays\nabove", "against\nplain")
    plain = decoding.plain
    _row(table, "plain", "1.00", f"{plain.tokens_per_s:.1f}", f"{plain.ms_per_token:.2f}", "1.00", "", "")
    for arm in decoding.arms:
        verdict = f"{arm.speedup:.2f}x {'SLOWER' if arm.speedup < 1.0 else 'faster' if arm.speedup > 1.0 else 'equal'}"
        speed = (f"{arm.tokens_per_s:.1f}", f"{arm.ms_per_round:.2f}")
        costs = (cost_text(arm.round_cost), f"tau {arm.break_even_tau:.2f}", verdict)
        _row(table, arm.name, f"{arm.tau_pooled:.2f}", *speed, *costs)
    where = f"batch size {decoding.batch_size}, {decoding.dtype}, {count(decoding.prompts)} prompts"
    title = f"Decoding: {where}, at most {count(decoding.max_new_tokens)} new tokens"
    note = "round cost = time of a round over that of a plain step"
    doubts = doubt(decoding.prompts, [arm.round_cost for arm in decoding.arms])
    return _section(title, table, f"{note}\n{doubts}" if doubts else note)


def _position_section(shares: Mapping[str, Sequence[float | None]]) -> RenderableType:
    """Lay out a row per name, a column per position; of long blocks only some, for 80 columns."""
    longest = max(map(len, shares.values()), default=0)
    shown = range(1, longest + 1) if longest <= 13 else [k for k in _POSITIONS if k <= longest]
    table = _table("k", *(str(k) for k in shown))
    for name, values in shares.items():
        cells = [values[k - 1] if k <= len(values) else None for k in shown]
        _row(table, name, *("-" if cell is None else f"{100 * cell:.0f}" for cell in cells))
    note = "a step that ended before k (cut, or fewer drafts verified) counts neither way"
    return _section("Drafted tokens accepted, %, by position k", table, note)


def _section(title: str, table: Table, note: str = "") -> RenderableType:
    """Put a title over a table (rich would wrap its own to the table's width) and a note under it."""
    return Group(Text(title, style="bold"), table, *([Text(note)] if note else []))


def _table(*headers: str, names: int = 1) -> Table:
    """Make a table whose first `names` columns hold names, which fold, and the others numbers, which never do."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, header in enumerate(headers):
        if index < names:
            table.add_column(Text(header), overflow="fold", min_width=6)
        else:
            table.add_column(Text(header), justify="right", no_wrap=True)
    return table


def _row(table: Table, *cells: str, bold: bool = False) -> None:
    table.add_row(*map(Text, cells), style="bold" if bold else None)


def interval_text(interval: Interval | None, form: str = ".2f") -> str:
    """`[1.98, 2.31]`; of a single response, which has none, `n=1`."""
    return "n=1" if interval is None else f"[{interval[0]:{form}}, {interval[1]:{form}}]"


def percent_change(after: float, before: float) -> str:
    """`+12 %`, or with one digit where it is small."""
    change = 100 * (after / before - 1)
    return f"{change:+.0f} %" if abs(change) >= 10 else f"{change:+.1f} %"


def share(part: int, whole: int) -> str:
    """Write per cent of a whole; a dash where there is none."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def count(value: int) -> str:
    """1234567 as `1,234,567`."""
    return f"{value:,}"


def short(value: int) -> str:
    """1234567 as `1.23M`; numbers below ten thousand as they are."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= size and value >= 10_000:
            return f"{value / size:.3g}{letter}"
    return str(value)


def duration(seconds: float) -> str:
    """Seconds as `4.2 s`, `45 s`, `3 min 12 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def place(difference: Any) -> str:
    """Where two outputs first differ, whatever the audit recorded about it."""
    if isinstance(difference, Mapping):
        return ", ".join(f"{key} {value}" for key, value in difference.items())
    return "an unrecorded place" if difference is None else str(difference)
