"""The command line: a thin layer over the typed API (`draftloop.api`).

Exit status: 0 done, 1 our fault, 2 your input, 3 the environment. PyTorch is imported inside the commands, so that
`--help` answers at once.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from draftloop.core.errors import DraftloopError, EnvironmentFault, InputError
from draftloop.core.version import VERSION

app = typer.Typer(
    name="draftloop",
    help="Train the draft model behind speculative decoding on its own mistakes; prove that decoding stays lossless.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done, 1 our fault, 2 your input, 3 the environment. Recipes: docs/recipe.md.",
)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the recipe, e.g. stages.0.optimiser.lr=3e-4 or data.limit=100.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Run directory (default: the recipe's, else runs/NAME).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output, and nothing else.")]
TargetName = Annotated[str, typer.Option("--target", "-t", help="Checkpoint folder, hub id, or smollm2 (embedded).")]
Files = Annotated[list[str], typer.Option("--prompts", "-p", help="Prompt file, or builtin:test; may be repeated.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python that comes with the checkpoint.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"draftloop {VERSION}")
        raise typer.Exit()


@app.callback()
def _settings(
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option("--log-level", help="debug also shows tracebacks.")
    ] = "warning",
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("draftloop").setLevel(log_level.upper())
    if log_level != "debug":
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe (YAML); see docs/recipe.md.")],
    overrides: Overrides = None,
    out: Out = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew in a directory that holds a run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe: answer the prompts, train stage by stage, evaluate, audit, report.

    Killed or stopped, the same command goes on where it was. Example:

        draftloop train recipes/draft-opd.yaml target.model=./my-model data.limit=500 --out runs/mine
    """
    from draftloop.recipe_file import load_recipe
    from draftloop.train.job import train as run

    _finish(run(load_recipe(recipe, overrides or []), out=out, fresh=fresh, quiet=as_json, say=_say(as_json)), as_json)


@app.command()
def quickstart(
    overrides: Overrides = None,
    out: Out = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Train a new drafter (the only path while no drafter is bundled).")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew in a directory that holds a run.")] = False,
    as_json: AsJson = False,
) -> None:
    """The main job on a real model, in minutes: SFT, then Draft-OPD, measured and audited."""
    from draftloop.quickstart import quickstart as run

    _finish(run(overrides or [], out=out, fresh=fresh, quiet=as_json, say=_say(as_json)), as_json)


@app.command()
def prepare(
    recipe: Annotated[Path, typer.Argument(help="The recipe (YAML).")],
    overrides: Overrides = None,
    out: Out = None,
    show: Annotated[
        int, typer.Option("--show", min=0, help="Print so many sequences, supervised tokens coloured.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Answer a recipe's prompts by its target and check the loss mask; `train` takes up the result."""
    from draftloop import api
    from draftloop.data.show import show as shown

    loaded = api.load_recipe(recipe, overrides or [])
    parts = api.prepare(loaded, out=out, quiet=as_json)
    facts = {
        name: {
            "responses": len(part.trunks),
            "tokens": sum(len(t) for t in part.trunks),
            "supervised": sum(t.supervised for t in part.trunks),
            "too_long": part.too_long,
            "too_short": part.too_short,
        }
        for name, part in parts.items()
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    if show:
        Console().print(shown(parts["train"].trunks, _tokenizer(loaded.target), show))
    for name, fact in facts.items():
        left_out = len(fact["too_long"]) + len(fact["too_short"])  # type: ignore[arg-type]
        told = (
            f"{name}: {fact['responses']} responses, {fact['tokens']} tokens, {fact['supervised']} of them supervised"
        )
        print(told + (f"; {left_out} prompts left out" if left_out else ""))


@app.command()
def evaluate(
    drafter: Annotated[Path, typer.Argument(help="A drafter folder, or a run directory.")],
    prompts: Files = ["builtin:test"],  # noqa: B006  (typer reads the default, nothing writes to it)
    target: TargetName = "smollm2",
    decode: Annotated[bool, typer.Option("--decode", help="Decode for real, timed, not the exact walk.")] = False,
    temperature: Annotated[float, typer.Option(min=0, help="Of real decoding; 0 = greedy.")] = 0.0,
    rule: Annotated[
        Literal["match", "ratio"], typer.Option(help="Verification rule at a temperature above 0.")
    ] = "match",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most this many prompts.")] = None,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Of the target.")] = "auto",
    cache: Annotated[Path, typer.Option(help="Where the target's greedy answers are kept.")] = Path("runs/evaluate"),
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Acceptance length, per-position acceptance and (with --decode) speed of a drafter on prompt files."""
    from draftloop import api
    from draftloop.evaluate.table import evaluation_table
    from draftloop.train.progress import reporting

    if temperature and not decode:
        raise InputError("the exact walk is for temperature 0", where="--temperature", fix="Add --decode.")
    loaded = api.load_target(target, dtype=dtype, trust_remote_code=trust_remote_code)
    model = api.load_drafter(_drafter_folder(drafter), loaded)
    with reporting("evaluate", unit="responses", silent=as_json) as advance:
        found = api.evaluate(
            loaded,
            model,
            prompts,
            folder=cache,
            how="decode" if decode else "walk",
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            rule=rule,
            batch_size=batch_size,
            limit=limit,
            advance=advance,
        )
    if as_json:
        print(json.dumps({"how": found.how, "acceptance": found.acceptance.to_json(), "speed": found.speed}, indent=2))
        return
    console = Console()
    console.print(evaluation_table(found.acceptance, name=str(drafter)))
    if found.speed:
        plain, arm = found.speed["plain"], found.speed["arms"][0]
        verdict = "faster" if arm["speedup"] > 1 else "SLOWER"
        console.print(
            f"plain {plain['tokens_per_s']:.1f} tokens/s, speculative {arm['tokens_per_s']:.1f} tokens/s:"
            f" {arm['speedup']:.2f}x ({verdict}); a round costs {arm['round_cost']:.2f} plain steps,"
            f" so it pays above tau {arm['break_even_tau']:.2f}.",
            highlight=False,
        )


@app.command()
def audit(
    drafter: Annotated[Path, typer.Argument(help="A drafter folder, or a run directory.")],
    prompts: Files = ["builtin:test"],  # noqa: B006
    target: TargetName = "smollm2",
    count: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 64,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Losslessness: greedy speculative against plain output, token for token, in float32. Exit 1 if not equal."""
    from draftloop import api
    from draftloop.data.prompts import read_prompts

    asked = [list(p.question) for p in read_prompts(prompts, Path("."), count)]
    loaded = api.load_target(target, dtype="float32", trust_remote_code=trust_remote_code)
    found = api.audit(loaded, api.load_drafter(_drafter_folder(drafter), loaded), asked, max_new_tokens=max_new_tokens)
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


def _say(as_json: bool) -> Any:
    """Sentences go to standard error when standard output is for JSON."""
    return lambda text: print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def _finish(folder: Path, as_json: bool) -> None:
    from draftloop.evaluate.summary import read_summary
    from draftloop.evaluate.table import summary_tables

    if as_json:
        print((folder / "summary.json").read_text(encoding="utf-8"))
        return
    Console().print(summary_tables(read_summary(folder)))
    print(f"\nDrafter: {folder / 'drafter'}   report: {folder / 'report.html'}   figures: {folder / 'summary.json'}")


def _drafter_folder(path: Path) -> Path:
    """A run directory stands for its drafter."""
    return path / "drafter" if (path / "drafter" / "config.json").is_file() else path


def _tokenizer(part: Any) -> Any:
    from transformers import AutoTokenizer

    from draftloop.target.embedded import embedded_target
    from draftloop.target.load import EMBEDDED

    source = embedded_target() if part.model == EMBEDDED else Path(part.model).expanduser()
    return AutoTokenizer.from_pretrained(
        source if source.exists() else part.model, revision=part.revision, trust_remote_code=part.trust_remote_code
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; every error that we can name becomes one sentence and an exit status."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            app(args=list(arguments) if arguments is not None else None)
    except SystemExit as done:
        if done.code == 130:
            print("draftloop: stopped; the same command goes on where it was.", file=sys.stderr)
        raise
    except Exception as error:
        if logging.getLogger("draftloop").level == logging.DEBUG:
            raise
        sentence, code = _explain(error)
        print(f"draftloop: {' '.join(sentence.split())}", file=sys.stderr)
        sys.exit(code)


def _explain(error: Exception) -> tuple[str, int]:
    """One sentence on what happened, and the exit status."""
    if isinstance(error, DraftloopError):
        return str(error), error.exit_code
    short = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    if isinstance(error, MemoryError) or short:
        return "out of memory. Lower batch_size, or use a smaller target.", EnvironmentFault.exit_code
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full. Free some space and run the same command again.", EnvironmentFault.exit_code
    if isinstance(error, OSError) and error.filename is not None:
        reason = f"{error.filename}: {error.strerror}. Check the path, and that it can be read and written."
        return reason, EnvironmentFault.exit_code
    told = f"{type(error).__name__}: {error}"
    return f"our fault: {told}. `draftloop --log-level debug ...` shows where; please report it.", 1


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"draftloop: warning: {' '.join(str(message).split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
