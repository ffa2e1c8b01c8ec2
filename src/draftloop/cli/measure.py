"""The commands that measure: `evaluate`, `audit`, `doctor`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from draftloop.cli.app import AsJson, EngineName, Files, TargetName, Trust, above_zero, app, drafter_folder
from draftloop.cli.compare import compare as side_by_side
from draftloop.cli.early import check_inputs, note_idle
from draftloop.cli.rows import head_of, row_writer
from draftloop.core.errors import EnvironmentFault, InputError

Confidence = Annotated[
    float | None,
    typer.Option(
        help="Verify drafts while the product of the drafter's confidences is at least this (above 0, at most 1);"
        " default: all.",
        callback=above_zero,
    ),
]


@app.command()
def evaluate(
    context: typer.Context,
    drafters: Annotated[
        list[str],
        typer.Argument(help="A drafter folder, or a run directory; several with --compare or --offline."),
    ],
    prompts: Files = ["builtin:test"],  # noqa: B006  (typer reads the default, nothing writes to it)
    target: TargetName = "smollm2",
    decode: Annotated[bool, typer.Option("--decode", help="Decode for real, timed, not the exact walk.")] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Average over decoding, on answers drawn once: exact at any temperature.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Drafters side by side: tau, speed, a picture; none = plain decoding.")
    ] = False,
    temperature: Annotated[
        list[float],
        typer.Option(min=0, help="With --offline, --decode or --compare, which takes several; 0 = greedy."),
    ] = [0.0],  # noqa: B006
    top_k: Annotated[int, typer.Option(min=0, help="The target draws from so many likely tokens; 0 = all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Or from the likely tokens of this mass (above 0); 1 = all.", callback=above_zero)
    ] = 1.0,
    rule: Annotated[
        Literal["match", "ratio"], typer.Option(help="Verification rule at a temperature above 0.")
    ] = "match",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    confidence: Confidence = None,
    decode_prompts: Annotated[
        int, typer.Option(min=0, help="With --compare: prompts decoded for real, for speed; 0 = none.")
    ] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most this many prompts.")] = None,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Of the target.")] = "auto",
    cache: Annotated[Path, typer.Option(help="Where the target's answers are kept.")] = Path("runs/evaluate"),
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the raw rows there, as JSON lines.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With --compare: the picture, a PNG (default: beside the rows or the answers).")
    ] = None,
    engine: EngineName = "auto",
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Acceptance length, per-position acceptance and (with --decode) speed of a drafter on prompt files.

    Answers are kept, so the next drafter takes seconds. Two drafters paired at
    temperature 1; three side by side, with their speeds beside plain decoding:

        draftloop evaluate runs/a runs/b --offline --temperature 1 --rule ratio
        draftloop evaluate --compare bundled runs/a none -p heldout.jsonl
    """
    if compare:
        if offline or decode:
            what = "--compare already takes tau offline and speed by decoding"
            raise InputError(what, where="--offline" if offline else "--decode", fix="Leave it out.")
        if confidence is not None:
            what = "in a comparison every draft is verified"
            raise InputError(what, where="--confidence", fix="Leave it out, or evaluate that drafter alone.")
        _note_idle(context, temperature, decodes=decode_prompts > 0)
        return side_by_side(
            drafters,
            prompts,
            target=target,
            dtype=dtype,
            engine=engine,
            trust_remote_code=trust_remote_code,
            cache=cache,
            out=out,
            plot=plot,
            as_json=as_json,
            temperatures=list(dict.fromkeys(temperature)),
            top_k=top_k,
            top_p=top_p,
            rule=rule,
            max_new_tokens=max_new_tokens,
            decode_prompts=decode_prompts,
            batch_size=batch_size,
            limit=limit,
        )
    if offline and decode:
        raise InputError("--offline decodes nothing and --decode does", where="--decode", fix="Give one of them.")
    if len(temperature) > 1:
        fix = "Add --compare, or give one temperature."
        raise InputError("several temperatures are compared side by side only", where="--temperature", fix=fix)
    if temperature[0] and not (decode or offline):
        fix = "Add --offline or --decode."
        raise InputError("the exact walk is for temperature 0", where="--temperature", fix=fix)
    if len(drafters) > 1 and not offline:
        raise InputError("several drafters are compared", where=drafters[1], fix="Add --compare (or --offline).")
    _note_idle(context, temperature, decodes=decode)
    note_idle(context, "without --compare", "decode_prompts", "plot")
    if decode:
        note_idle(context, "with --decode, which keeps no answers", "cache")
    check_inputs(drafters, prompts, limit, out=out, folders=[] if decode else [cache])
    from draftloop import api  # here, for it takes long to import and what is wrong should be told at once
    from draftloop.evaluate.speed import cost_text, doubt
    from draftloop.evaluate.table import evaluation_table, gain_sentence, saving_sentence
    from draftloop.train.progress import reporting

    loaded = api.load_target(target, dtype=dtype, trust_remote_code=trust_remote_code)
    loaded.engine = engine
    model, *others = [api.load_drafter(drafter_folder(Path(one)), loaded) for one in drafters]
    with reporting("evaluate", unit="responses", silent=as_json) as advance:
        found = api.evaluate(
            loaded,
            model,
            prompts,
            folder=cache,
            how="decode" if decode else "offline" if offline else "walk",
            against=others,
            max_new_tokens=max_new_tokens,
            temperature=temperature[0],
            top_k=top_k,
            top_p=top_p,
            rule=rule,
            batch_size=batch_size,
            confidence=confidence,
            limit=limit,
            advance=advance,
        )
    with ExitStack() as stack:
        write = row_writer(stack, out, head_of("evaluate", loaded))
        for name, rows in zip(drafters, found.rows, strict=True):
            for row in rows:
                write({**row, "drafter": name, "temperature": temperature[0]})
    if as_json:
        facts: dict[str, Any] = {"how": found.how, "acceptance": found.acceptance.to_json(), "speed": found.speed}
        if offline:
            arms = zip(drafters[1:], found.against, strict=True)
            facts["against"] = [
                {"drafter": str(name), "acceptance": part.to_json(), "gain": gain.to_json()}
                for name, (part, gain) in arms
            ]
        print(json.dumps(facts, indent=2))
        return
    console = Console()
    console.print(evaluation_table(found.acceptance, name=str(drafters[0])))
    if confidence is not None:
        console.print("\n" + saving_sentence(found.acceptance, model.spec.drafted), highlight=False, markup=False)
    for name, (part, _) in zip(drafters[1:], found.against, strict=True):
        console.print()
        console.print(evaluation_table(part, name=str(name)))
    for name, (_, gain) in zip(drafters[1:], found.against, strict=True):
        console.print("\n" + gain_sentence(gain, str(name), str(drafters[0])), highlight=False, markup=False)
    if found.speed:
        plain, arm = found.speed["plain"], found.speed["arms"][0]
        verdict = "faster" if arm["speedup"] > 1 else "SLOWER"
        console.print(
            f"plain {plain['tokens_per_s']:.1f} tokens/s, speculative {arm['tokens_per_s']:.1f} tokens/s:"
            f" {arm['speedup']:.2f}x ({verdict}); a round costs {cost_text(arm['round_cost'])} plain steps,"
            f" so it pays above tau {arm['break_even_tau']:.2f}.",
            highlight=False,
        )
        if doubts := doubt(found.speed["prompts"], [arm["round_cost"]]):
            console.print(doubts, highlight=False)


def _note_idle(context: typer.Context, temperature: list[float], *, decodes: bool) -> None:
    if not any(temperature):
        note_idle(context, "at temperature 0", "rule", "top_k", "top_p")
    if not decodes:
        note_idle(context, "where nothing is decoded for real", "batch_size")
        note_idle(context, "where nothing is decoded but answers that are not kept yet", "engine")


@app.command()
def audit(
    drafter: Annotated[Path, typer.Argument(help="A drafter folder, or a run directory.")],
    prompts: Files = ["builtin:test"],  # noqa: B006
    target: TargetName = "smollm2",
    count: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 64,
    confidence: Confidence = None,
    engine: EngineName = "auto",
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Losslessness: greedy speculative against plain output, token for token, in float32. Exit 1 if not equal."""
    check_inputs([drafter], prompts, count)
    from draftloop import api
    from draftloop.data.prompts import read_prompts

    asked = [list(p.question) for p in read_prompts(prompts, Path("."), count)]
    loaded = api.load_target(target, dtype="float32", trust_remote_code=trust_remote_code)
    loaded.engine = engine
    model = api.load_drafter(drafter_folder(drafter), loaded)
    found = api.audit(loaded, model, asked, max_new_tokens=max_new_tokens, confidence=confidence)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        arm = found.arms[0]
        verdict = "lossless" if found.equal else "NOT LOSSLESS"
        print(
            f"{verdict}: {found.prompts} prompts, {found.tokens} tokens, {arm.steps} verifications, "
            f"{arm.accepted} drafts accepted; {found.near_ties} near-ties (gap below {found.gap:g}), "
            f"{arm.at_ties} responses parted at one."
        )
        if arm.first_difference:
            print(f"first difference: {arm.first_difference}")
    if not found.equal:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: versions, device, memory, cache, attention. Exit 3 if something is missing."""
    from draftloop.doctor import diagnose, healthy, render

    findings = diagnose()
    print(json.dumps([asdict(finding) for finding in findings], indent=2) if as_json else render(findings))
    if not healthy(findings):
        raise typer.Exit(EnvironmentFault.exit_code)
