"""A fine-tuned target in minutes, so that there is a drafter gone stale to try `draftloop adapt` on.

    python benchmarks/fine_tune.py --out my-fine-tune
    draftloop evaluate bundled --target my-fine-tune            # tau has fallen
    draftloop adapt --target my-fine-tune --drafter bundled --prompts builtin:train

The target answers a prompt file greedily; each answer is written again in a house style (numbered lines in capitals),
and the upper layers learn to answer so by cross-entropy. Nothing is downloaded but the embedded target. Measures
nothing: what it leaves is a checkpoint folder like any fine-tune's, and fine_tune.json, which says how it was made.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from draftloop.api import generate
from draftloop.core.draws import Purpose, permutation
from draftloop.core.errors import DraftloopError, InputError
from draftloop.core.files import write_json
from draftloop.data.chat import encode_conversation
from draftloop.data.prompts import Prompt, read_prompts
from draftloop.data.trunk import Trunk
from draftloop.target.load import load_target
from draftloop.train.material import command, hardware, versions

IGNORED = -100  # a label that cross-entropy leaves out


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    try:
        fine_tune(options)
    except DraftloopError as error:
        print(f"fine_tune: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the fine-tuned target; must not exist")
    parser.add_argument("--target", default="smollm2", help="checkpoint folder, hub id, or smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", nargs="+", default=["builtin:train"], help="prompt files")
    parser.add_argument("--limit", type=int, default=None, help="use at most this many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="of the answers that are written again")
    parser.add_argument("--layers", type=int, default=10, help="upper layers that learn; the others stay as they are")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def fine_tune(options: argparse.Namespace) -> None:
    """Answer, write the answers again, train, save."""
    if options.out.exists():
        raise InputError("there is such a folder already", where=str(options.out), fix="Name another --out.")
    prompts = read_prompts(options.prompts, Path("."), options.limit)
    target = load_target(options.target, dtype="float32", device=options.device)
    began = time.perf_counter()
    trunks = styled_trunks(target, prompts, options.max_new_tokens)
    print(f"{len(trunks)} answers in the new style ({time.perf_counter() - began:.0f} s), e.g.:")
    shown = trunks[0]
    print("    " + target.tokenizer.decode(list(shown.tokens[shown.first :])).replace("\n", "\n    "))
    began = time.perf_counter()
    losses = train(target.model, trunks, options)
    spent = time.perf_counter() - began
    print(f"{options.steps} steps: loss {losses[0]:.3f} -> {losses[-1]:.3f} ({spent:.0f} s)")
    target.model.to(torch.bfloat16).save_pretrained(options.out)
    target.tokenizer.save_pretrained(options.out)
    said = {"command": command(), "versions": versions(), "hardware": hardware(), "target": target.name}
    said |= {"target_fingerprint": target.fingerprint, "losses": losses, "seconds": spent}
    write_json(options.out / "fine_tune.json", said)
    print(f"fine-tuned target: {options.out}")


def styled_trunks(target: Any, prompts: Sequence[Prompt], longest: int) -> list[Trunk]:
    """The target's own greedy answers, written again, as trunks with the answer supervised."""
    answers = generate(target, [list(p.question) for p in prompts], max_new_tokens=longest, batch_size=64)
    out = []
    for prompt, answer in zip(prompts, answers, strict=True):
        told = styled(answer.text, whole=answer.finished)
        if told:
            said = {"role": "assistant", "content": told}
            one = replace(prompt, messages=(*prompt.question, said), turns=())
            out += encode_conversation(target.tokenizer, one, template_kwargs={}, eos_ids=target.eos_ids)
    if not out:
        raise InputError("no answer has a whole sentence", where="--max-new-tokens", fix="Raise it.")
    return out


def styled(text: str, *, whole: bool) -> str:
    """Numbered lines in capitals, a sentence each; headings, and a sentence that the length limit cut, are left out."""
    sentences = re.split(r"(?<=[^\d\s][.!?])\s+|\n+", text)
    if not whole:
        sentences = sentences[:-1]
    bare = [re.sub(r"^[\s*#-]*(\d+\.)?[\s*]*", "", part).strip() for part in sentences]
    long = [part for part in bare if len(part.split()) >= 4]
    return "\n".join(f"({number}) {part.upper()}" for number, part in enumerate(long, start=1))


def train(model: Any, trunks: Sequence[Trunk], options: argparse.Namespace) -> list[float]:
    """Cross-entropy on the answers, AdamW, linear fall of the learning rate; the loss of every step."""
    model.requires_grad_(False)
    for layer in model.model.layers[-options.layers :]:
        layer.requires_grad_(True)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=options.lr, weight_decay=0.0)
    losses = []
    for step in range(options.steps):
        optimiser.param_groups[0]["lr"] = options.lr * (1 - step / options.steps)
        ids, labels = batch(trunks, step, options)
        logits = model(ids.to(model.device)).logits[:, :-1]  # padding stands behind the texts, where no text sees it
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten().to(model.device), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
        print(f"step {step + 1}/{options.steps}  loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    return losses


def batch(trunks: Sequence[Trunk], step: int, options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [b, T] tokens and labels of one step; epochs are keyed permutations, end to end."""
    places = range(step * options.batch_size, (step + 1) * options.batch_size)
    orders = {e: permutation(options.seed, Purpose.ORDER, len(trunks), e) for e in {p // len(trunks) for p in places}}
    chosen = [trunks[int(orders[p // len(trunks)][p % len(trunks)])] for p in places]
    ids = torch.zeros(len(chosen), max(map(len, chosen)), dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for row, trunk in enumerate(chosen):
        ids[row, : len(trunk)] = torch.tensor(trunk.tokens)
        supervised = torch.tensor([t if m else IGNORED for t, m in zip(trunk.tokens, trunk.mask, strict=True)])
        labels[row, : len(trunk)] = supervised
    return ids, labels


if __name__ == "__main__":
    main()
