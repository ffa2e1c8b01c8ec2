"""Make a small hybrid target: a Qwen3.5-class language model, trained on text that another target wrote.

    draftloop prepare recipes/bundled.yaml data.dir=my-prompts --out runs/answers
    python benchmarks/small_hybrid.py --answers runs/answers --out runs/small-hybrid
    draftloop train recipes/hybrid.yaml data.dir=my-prompts

Three layers of Gated DeltaNet, one of full attention, and so on; tokenizer and chat template of the target that wrote
the answers (the embedded one). Plain next-token cross-entropy on prompts and answers: one text a row, texts of like
length in a batch, so that every text begins at an empty state, as it will when it is decoded. One text in fifty, told
by its prompt's id, is held out; the weights with the best held-out loss are kept. On a GPU the weights are bfloat16
with float32 masters and the recurrence runs in float32, as it will be served. What is left is a Hugging Face folder in
bfloat16, loaded again as a target before its figures are written down. For what is published, `--rows
results/raw/hybrid-target-NAME.jsonl`; see `small_hybrid_results.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad
from torch.utils.checkpoint import checkpoint

from draftloop.core.draws import Purpose, key_of, permutation
from draftloop.core.errors import DraftloopError, InputError
from draftloop.core.files import write_text
from draftloop.data.chat import answer_text
from draftloop.data.trunk import Trunk
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.recipe import OptimiserPart
from draftloop.supervise.responses import read_trunks
from draftloop.target.load import load_target, load_tokenizer, pick_device
from draftloop.train.material import command, hardware, versions
from draftloop.train.optimiser import DrafterOptimiser
from draftloop.train.progress import Progress
from draftloop.train.schedule import learning_rate_factor

Row = dict[str, Any]
SIZES: dict[str, dict[str, Any]] = {
    "20m": dict(  # noqa: C408
        hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "tiny": dict(  # noqa: C408
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32,
    ),
}  # fmt: skip
POSITIONS = 2048
HELD = 50  # one text in so many is held out
POOL = 1024  # texts among which those of like length are put together
CHUNK = 4096  # rows whose logits exist at a time
LOOKS = 8  # at the held-out texts, while training
ANSWERS, LENGTH = 32, 128  # how many held-out prompts are answered in the end, and how long the answers may be
GRAM = 8  # tokens; how often so many in a row come again tells loops from text


def split_texts(files: Sequence[Path], longest: int) -> tuple[list[Trunk], list[Trunk]]:
    """The texts to train on and those held out, by the ids of their prompts.

    Raises:
        InputError: a file holds no answers, or either part is empty.
    """
    found = [trunk for file in files for trunk in read_trunks(file) if len(trunk) <= longest]
    parts: tuple[list[Trunk], list[Trunk]] = ([], [])
    for trunk in found:  # all turns and samples of a prompt fall into one part
        parts[key_of(trunk.id.split("/turn")[0]) % HELD == 0].append(trunk)
    if not all(parts):
        where = ", ".join(map(str, files))
        fix = f"Prepare more of them, or raise --longest (now {longest} tokens)."
        raise InputError(f"{len(found)} texts are too few to hold some out", where=where, fix=fix)
    return parts


def new_model(size: str, tokenizer: Any, seed: int) -> Any:
    """A hybrid of the tokenizer's vocabulary, embeddings tied, in float32."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(SIZES[size]["num_hidden_layers"])]
    pads = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    config = Qwen3_5TextConfig(
        **SIZES[size], vocab_size=len(tokenizer), layer_types=kinds, tie_word_embeddings=True,
        max_position_embeddings=POSITIONS, attn_implementation="sdpa", eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pads, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("dt_bias"):  # steps of 0.001 to 0.1, as Mamba-2 begins (arXiv 2405.21060): a long memory
                step = torch.empty_like(weight).uniform_(math.log(1e-3), math.log(0.1)).exp()
                weight.copy_(step + torch.log(-torch.expm1(-step)))
    return model


@dataclass(frozen=True)
class Batch:
    """Texts side by side.

    Attributes:
        ids: int64 [n, t], filled up behind the ends.
        at: int64 [m], flat slots that have a next token.
        wanted: int64 [m], that token.
        answer: bool [m], whether it is of the answer.
    """

    ids: Tensor
    at: Tensor
    wanted: Tensor
    answer: Tensor

    @classmethod
    def of(cls, trunks: Sequence[Trunk]) -> Batch:
        """On the CPU."""
        longest = _length(trunks)
        ids, answer = (
            torch.stack([pad(torch.tensor(line), (0, longest - len(line))) for line in lines])
            for lines in ([trunk.tokens for trunk in trunks], [trunk.mask for trunk in trunks])
        )
        follows = torch.arange(1, longest) < torch.tensor([[len(trunk)] for trunk in trunks])
        at = pad(follows, (0, 1)).flatten().nonzero().squeeze(1)
        return cls(ids, at, ids[:, 1:][follows], answer[:, 1:][follows])

    def to(self, device: torch.device) -> Batch:
        """The same there."""
        return Batch(*(part.to(device) for part in (self.ids, self.at, self.wanted, self.answer)))


def batched(trunks: Sequence[Trunk], tokens: int) -> Iterator[Batch]:
    """Batches of at most `tokens` slots, cut from the trunks as they come."""
    taken: list[Trunk] = []
    for trunk in trunks:
        if taken and _length([*taken, trunk]) * (len(taken) + 1) > tokens:
            yield Batch.of(taken)
            taken = []
        taken.append(trunk)
    if taken:
        yield Batch.of(taken)


def _length(trunks: Sequence[Trunk]) -> int:
    return -(-max(map(len, trunks)) // 64) * 64  # whole chunks of the delta rule


def epoch_of(trunks: Sequence[Trunk], tokens: int, seed: int, epoch: int) -> list[Batch]:
    """One pass over the trunks in a keyed order, those of like length together within pools."""
    order, batches = permutation(seed, Purpose.ORDER, len(trunks), epoch).tolist(), []
    for start in range(0, len(order), POOL):
        batches += batched(sorted((trunks[i] for i in order[start : start + POOL]), key=len), tokens)
    return [batches[i] for i in permutation(seed, Purpose.ORDER, len(batches), epoch, -1).tolist()]


def losses(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of the next token where there is one: float32 [m]."""
    weight = model.get_output_embeddings().weight

    def some(rows: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(linear(rows, weight).float(), wanted, reduction="none")

    hidden = model.get_decoder()(input_ids=batch.ids, use_cache=False).last_hidden_state
    parts = zip(hidden.flatten(0, 1)[batch.at].split(CHUNK), batch.wanted.split(CHUNK), strict=True)
    return torch.cat([checkpoint(some, *part, use_reentrant=False) for part in parts])


@torch.no_grad()
def held_out(model: Any, batches: Sequence[Batch]) -> tuple[float, float]:
    """Mean cross-entropy of the held-out texts' answers and of their prompts, in nats a token."""
    sums = torch.zeros(2, 2, dtype=torch.float64)
    for batch in batches:
        found, answer = losses(model, batch).double().cpu(), batch.answer.cpu()
        for row, mask in enumerate((answer, ~answer)):
            sums[row] += torch.stack([found[mask].sum(), mask.sum()])
    answers, prompts = (sums[:, 0] / sums[:, 1]).tolist()
    return answers, prompts


def seconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def train(model: Any, parts: tuple[list[Trunk], list[Trunk]], options: argparse.Namespace) -> tuple[list[Row], int]:
    """Train within the time; leaves the best weights in the model. A row a look, and the number of steps."""
    device, began = next(model.parameters()).device, time.perf_counter()
    settings = OptimiserPart(lr=options.lr, weight_decay=0.1, warmup=0.04, final=0.05)
    optimiser = DrafterOptimiser(model.named_parameters(), settings)
    kept = [batch.to(device) for batch in batched(sorted(parts[1], key=len), options.tokens)]
    first = epoch_of(parts[0], options.tokens, options.seed, 0)
    later = (batch for epoch in count(1) for batch in epoch_of(parts[0], options.tokens, options.seed, epoch))
    largest = max(first, key=lambda one: one.ids.numel()).to(device)

    def gradient() -> None:
        losses(model, largest).mean().backward()

    seconds(gradient, device)  # the first forwards allocate
    each = 1.05 * min(seconds(gradient, device) for _ in range(3))  # and the optimiser's share
    look = min(seconds(lambda: held_out(model, kept), device) for _ in range(2))
    model.zero_grad()
    left = 60 * options.minutes - (time.perf_counter() - began) - LOOKS * look
    steps = max(LOOKS, min(int(left / each), options.epochs * len(first)))
    looks = {round(steps * (i + 1) / LOOKS) for i in range(LOOKS)}
    best, rows, recent = math.inf, [], []
    weights: dict[str, Tensor] = {}
    with Progress(f"train the hybrid ({len(first)} steps an epoch)", steps) as progress:
        for step, batch in zip(range(1, steps + 1), chain(first, later), strict=False):
            loss = losses(model, batch.to(device)).mean()
            loss.backward()
            optimiser.step(loss, learning_rate_factor(settings, step - 1, steps), step)
            recent.append(loss.detach())
            if step in looks:
                answers, prompts = held_out(model, kept)
                told = {"train": float(torch.stack(recent).mean()), "held_out": answers, "held_out_prompts": prompts}
                rows.append({"kind": "look", "step": step, "seconds": time.perf_counter() - began, **told})
                recent.clear()
                if answers < best:
                    best = answers
                    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            progress.update(step, **{k: v for k, v in (rows[-1] if rows else {}).items() if k in ("train", "held_out")})
    model.load_state_dict(weights)
    return rows, steps


def written(target: Any, trunks: Sequence[Trunk]) -> list[Row]:
    """What the target answers greedily to prompts that it was not trained on, and how much of that is repetition."""
    requests = [Request(trunk.prompt, key_of(trunk.id)) for trunk in trunks]
    rows = []
    for trunk, made in zip(trunks, decode(target, None, requests, Options(LENGTH, batch_size=ANSWERS)), strict=True):
        grams = [tuple(made.tokens[i : i + GRAM]) for i in range(len(made.tokens) - GRAM + 1)]
        rows.append({
            "kind": "answer", "id": trunk.id, "tokens": len(made.tokens), "finished": made.finished,
            "repeated": len(grams) - len(set(grams)), "grams": len(grams),
            "text": answer_text(target.tokenizer, made.tokens, target.eos_ids),
        })  # fmt: skip
    return rows


def make(options: argparse.Namespace) -> None:
    """Everything, in order."""
    from transformers.utils import logging

    began = time.perf_counter()
    if options.out.is_dir() and any(options.out.iterdir()):
        raise InputError("the folder is not empty", where=str(options.out), fix="Give another --out.")
    files = [path / "trunks" / "train.jsonl" if path.is_dir() else path for path in options.answers]
    device, tokenizer = pick_device(options.device), load_tokenizer(options.tokenizer)
    parts = split_texts(files, options.longest)
    precision = torch.bfloat16 if device.type == "cuda" else torch.float32  # masters are float32 in any case
    model = new_model(options.size, tokenizer, options.seed).to(device, precision).train()
    size, embedded = (sum(p.numel() for p in one.parameters()) for one in (model, model.get_input_embeddings()))
    texts = [{"texts": len(p), "tokens": sum(map(len, p)), "answered": sum(t.supervised for t in p)} for p in parts]
    print(f"{size / 1e6:.2f} M parameters, {embedded / 1e6:.2f} M of them embeddings; {texts[0]['texts']:,} texts of"
          f" {texts[0]['tokens']:,} tokens, {texts[1]['texts']} held out; on {device}.")  # fmt: skip
    looks, steps = train(model, parts, options)
    logging.disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    target = load_target(options.out, device=device)
    served = held_out(target.model, [batch.to(device) for batch in batched(parts[1], options.tokens)])
    answers = written(target, parts[1][:ANSWERS])
    head = {
        "kind": "small-hybrid", "command": command(), "versions": versions(), "hardware": hardware(),
        "size": options.size, "shapes": SIZES[options.size], "parameters": size, "embedding_parameters": embedded,
        "train": texts[0], "held_out": texts[1], "steps": steps, "tokens_a_step": options.tokens, "lr": options.lr,
        "answer_length": LENGTH,
        "seconds": time.perf_counter() - began, "fingerprint": target.fingerprint,
        "loss": {"answers": served[0], "prompts": served[1], "dtype": str(target.dtype).removeprefix("torch.")},
    }  # fmt: skip
    if options.rows is not None:
        rows = [head, *looks, *answers]
        write_text(options.rows, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    for row in answers[:3]:
        print(f"--- {row['id']}\n{row['text']}")
    ended = sum(row["finished"] for row in answers)
    again = sum(row["repeated"] for row in answers) / max(1, sum(row["grams"] for row in answers))
    print(f"--- {steps} steps; held-out loss {served[0]:.3f} on answers, {served[1]:.3f} on prompts (nats a token, in"
          f" bfloat16); {ended} of {len(answers)} greedy answers end by themselves, {again:.0%} of their {GRAM}-grams"
          f" are repetitions. {options.out} is the target {target.fingerprint}.")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--answers", type=Path, nargs="+", required=True, help="run directories, or trunks/train.jsonl of them"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the model that is made")
    parser.add_argument("--rows", type=Path, help="write raw rows as JSON lines")
    parser.add_argument("--size", choices=tuple(SIZES), default="20m")
    parser.add_argument("--minutes", type=float, default=2.0, help="of training, turned into steps once (default 2)")
    parser.add_argument("--epochs", type=int, default=12, help="at most so many passes over the texts (default 12)")
    parser.add_argument("--tokens", type=int, default=16384, help="slots a step (default 16384)")
    parser.add_argument("--longest", type=int, default=512, help="longer texts are left out (default 512 tokens)")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="largest learning rate (default 1.5e-3)")
    parser.add_argument("--tokenizer", default="smollm2", help="of the target that wrote the answers (default smollm2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    try:
        make(parser.parse_args(arguments))
    except DraftloopError as error:
        print(f"small_hybrid: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
