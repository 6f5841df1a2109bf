"""Trains the demo model on invented handbooks and writes a Hugging Face model directory.

The text is generated as it is needed (corpus.py); no handbook is seen twice. Stages grow from a few facts without
prose to whole handbooks of more than a thousand tokens; a stage ends when almost every answer of the fresh batches is
right. Most of the loss lies on the answers. Accuracy is exact match: a greedy answer equals the expected one, token
by token, to its end. With the right answers of earlier turns as context this is the same as "the most likely token is
the right one at every position of the answer", which one forward pass tells.
"""

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import corpus
from model import Llama, Shape, initialize

LEARNING_RATE = 1.5e-3
LEARNING_RATE_END = 0.05
# The learning rate of a run that goes on from finished weights, as a share of the usual one.
START_RATE = 0.3
WARMUP_STEPS = 50
BETAS = (0.9, 0.97)
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0
PROSE_SHARE = 0.1
PROSE_WEIGHT = 0.2
SCRAMBLED_SHARE = 0.3
# How often a row of a batch has no handbook, and how often small talk is added to a conversation that has one.
PLAIN_SHARE = 0.2
SMALL_TALK_SHARE = 0.4
GAP_SHARE = 0.5
GAP_MAX = 1400
ADVANCE_AT = 0.94
EMA_KEEP = 0.9
LOG_STEPS = 20
CHECKPOINT_SECONDS = 180
EVAL_SECONDS = 240
HELDOUT_SEED = 1_000_003
HELDOUT_HANDBOOKS = 25
HELDOUT_QUESTIONS = 8


@dataclass(frozen=True)
class Stage:
    """How large the handbooks of one part of the training are; ranges are inclusive."""

    facts: tuple[int, int]
    fillers: tuple[int, int]
    turns: int
    batch: int


STAGES = [
    Stage((3, 4), (0, 1), 4, 32),
    Stage((4, 8), (0, 6), 6, 16),
    Stage((8, 14), (4, 20), 10, 8),
    Stage((12, 20), (20, 40), 14, 5),
    Stage((16, 24), (40, 68), 16, 4),
]
HELDOUT_STAGE = Stage((20, 24), (62, 68), HELDOUT_QUESTIONS, 1)
SHORT_HELDOUT_STAGE = Stage((4, 6), (4, 8), 4, 1)


@dataclass
class Batch:
    """Padded sequences; `targets` and `weights` belong to the prediction made at the same index."""

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    answers: torch.Tensor
    tokens: int


class Encoder:
    """Turns handbooks into token ids exactly as the chat template and the tokenizer would."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.role = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("system", "user", "assistant")}
        self.end = tokenizer.token_to_id(corpus.END)
        self.pad = tokenizer.token_to_id(corpus.PAD)
        self.newline = tokenizer.encode("\n").ids

    def conversation(self, book: corpus.Handbook, qa: list[tuple[str, str]]) -> tuple[list[int], list[int], int]:
        """The ids, a number for each id (0, or n for the tokens of the nth answer), and the handbook's length. Without
        a handbook there is no system message."""
        turns = [text for q, a in qa for text in (q, a)]
        encoded = self.tokenizer.encode_batch(["\n" + text for text in (book.system, *turns)])
        ids = [self.role["system"], *encoded[0].ids, self.end, *self.newline] if book.system else []
        answers = [0] * len(ids)
        handbook_length = len(ids)
        for turn, text in enumerate(encoded[1:]):
            is_answer = turn % 2 == 1
            ids += [self.role["assistant" if is_answer else "user"], *text.ids, self.end, *self.newline]
            prompt = 1 + len(self.newline)
            content = len(text.ids) - len(self.newline) + 1
            number = turn // 2 + 1 if is_answer else 0
            answers += [0] * prompt + [number] * content + [0] * len(self.newline)
        return ids, answers, handbook_length


def draw_book(rng: random.Random, stage: Stage, any_words: list[str] | None) -> corpus.Handbook:
    """One handbook of the stage's size."""
    return corpus.make_handbook(rng, rng.randint(*stage.facts), rng.randint(*stage.fillers), any_words)


def draw_conversation(rng: random.Random, stage: Stage, words: list[str]) -> tuple[corpus.Handbook, list[tuple[str, str]]]:
    """A handbook with the questions that are asked about it, small talk among them; or no handbook, so that all
    there is to say is what the model is for."""
    book = draw_book(rng, stage, words if rng.random() < SCRAMBLED_SHARE else None)
    qa = rng.sample(book.qa, min(stage.turns, len(book.qa)))
    if rng.random() < PLAIN_SHARE:
        system = rng.choice(corpus.PLAIN_SYSTEMS) if rng.random() < 0.5 else ""
        questions = [q if rng.random() < 0.2 else corpus.small_talk(rng) for q, _ in qa[:rng.randint(1, 3)]]
        return corpus.Handbook(system), [(question, corpus.ABOUT) for question in questions]
    while rng.random() < SMALL_TALK_SHARE:
        place = 0 if rng.random() < 0.5 else rng.randint(0, len(qa))
        qa.insert(place, (corpus.small_talk(rng), corpus.ABOUT))
    return book, qa


def make_batch(rng: random.Random, encoder: Encoder, stage: Stage, words: list[str]) -> Batch:
    """Fresh handbooks of one stage. Some have random words for subjects and values; some have a gap in their
    positions between handbook and questions, which shows short sequences the long distances of RoPE."""
    rows = []
    for _ in range(stage.batch):
        ids, answers, handbook_length = encoder.conversation(*draw_conversation(rng, stage, words))
        gap = rng.randrange(GAP_MAX) if rng.random() < GAP_SHARE else 0
        rows.append((ids, answers, handbook_length, gap))
    width = max(len(ids) for ids, _, _, _ in rows) - 1
    shape = (len(rows), width)
    batch = Batch(torch.full(shape, encoder.pad), torch.arange(width).repeat(len(rows), 1),
                  torch.full(shape, encoder.pad), torch.zeros(shape), torch.zeros(shape, dtype=torch.long),
                  sum(len(ids) - 1 for ids, _, _, _ in rows))
    prose = torch.tensor([rng.random() < PROSE_SHARE for _ in range(len(rows) * width)]).view(shape)
    for row, (ids, answers, handbook_length, gap) in enumerate(rows):
        length = len(ids) - 1
        batch.ids[row, :length] = torch.tensor(ids[:-1])
        batch.targets[row, :length] = torch.tensor(ids[1:])
        batch.answers[row, :length] = torch.tensor(answers[1:])
        batch.positions[row, handbook_length:] += gap
        batch.weights[row, :length] = torch.where(prose[row, :length], PROSE_WEIGHT, 0.0)
    batch.weights[batch.answers > 0] = 1.0
    return batch


def exact_matches(batch: Batch, chosen: torch.Tensor, predictions: torch.Tensor) -> tuple[int, int]:
    """How many answers are wholly right, and how many there are. `chosen` are flat indices into the batch."""
    sequence = chosen // batch.ids.shape[1]
    answer = batch.answers.view(-1)[chosen]
    inside = answer > 0
    key = (sequence * (int(batch.answers.max()) + 1) + answer)[inside]
    wrong = (predictions != batch.targets.view(-1)[chosen])[inside]
    total = key.unique().numel()
    return total - key[wrong].unique().numel(), total


@torch.no_grad()
def evaluate(model: Llama, encoder: Encoder, books: list[corpus.Handbook], questions: int, apart: bool) -> float:
    """Exact match over `books`, asked in one conversation or, with `apart`, each question in its own."""
    right = total = 0
    for book in books:
        asked = [[pair] for pair in book.qa[:questions]] if apart else [book.qa[:questions]]
        for qa in asked:
            ids, answers, _ = encoder.conversation(book, qa)
            row = torch.tensor([ids])
            batch = Batch(row[:, :-1], torch.arange(len(ids) - 1)[None], row[:, 1:], torch.zeros(1),
                          torch.tensor([answers[1:]]), len(ids) - 1)
            chosen = (batch.answers.view(-1) > 0).nonzero().squeeze(1)
            hidden = model(batch.ids, batch.positions).flatten(0, 1)[chosen]
            good, count = exact_matches(batch, chosen, model.logits(hidden).argmax(-1))
            right, total = right + good, total + count
    return right / total


def heldout_books(stage: Stage) -> list[corpus.Handbook]:
    """The held-out handbooks; their seed is used for nothing else."""
    rng = random.Random(HELDOUT_SEED)
    return [draw_book(rng, stage, None) for _ in range(HELDOUT_HANDBOOKS)]


def rounded(model: Llama) -> Llama:
    """A copy of the model whose weights have been through bfloat16, computing in float32: what is shipped."""
    copy = Llama(model.shape)
    copy.load_state_dict({name: p.bfloat16().float() for name, p in model.state_dict().items()})
    return copy.eval()


def write_json(path: Path, value: dict) -> None:
    """Writes `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def export(model: Llama, encoder: Encoder, out: Path) -> None:
    """Writes the model directory: weights in bfloat16, configuration, tokenizer and held-out set."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {"model." + name: p.detach().bfloat16().contiguous() for name, p in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    write_json(out / "config.json", model.shape.hf_config(encoder.end, encoder.pad))
    write_json(out / "generation_config.json",
               {"do_sample": False, "eos_token_id": encoder.end, "pad_token_id": encoder.pad, "max_new_tokens": 64})
    encoder.tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": corpus.END, "pad_token": corpus.PAD,
        "additional_special_tokens": [corpus.SYSTEM, corpus.USER, corpus.ASSISTANT],
        "model_max_length": model.shape.max_position_embeddings, "clean_up_tokenization_spaces": False,
        "chat_template": corpus.CHAT_TEMPLATE,
    })
    lines = [corpus.heldout_line(book, HELDOUT_QUESTIONS) for book in heldout_books(HELDOUT_STAGE)]
    (out / "heldout.jsonl").write_text("\n".join(lines) + "\n")


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up by steps, then a cosine over the time to LEARNING_RATE_END of the peak."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (LEARNING_RATE_END + (1 - LEARNING_RATE_END) * cosine)


def make_optimizer(model: Llama) -> torch.optim.Optimizer:
    """AdamW; biases, norms and embeddings do not decay."""
    decayed = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    kept = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)


def train_step(model: Llama, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[float, int, int]:
    """One update; returns the loss, the answers that were right before it, and the answers in all."""
    chosen = (batch.weights.view(-1) > 0).nonzero().squeeze(1)
    hidden = model(batch.ids, batch.positions).flatten(0, 1)[chosen]
    logits = model.logits(hidden)
    weights = batch.weights.view(-1)[chosen]
    losses = F.cross_entropy(logits, batch.targets.view(-1)[chosen], reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    right, total = exact_matches(batch, chosen, logits.argmax(-1))
    return loss.item(), right, total


def pick_stage(rng: random.Random, reached: int) -> int:
    """Mostly the stage reached; now and then an earlier one, so that short handbooks are not forgotten."""
    return reached if rng.random() < 0.85 else rng.randint(0, reached)


def train(arguments: argparse.Namespace) -> None:
    """Runs the whole training and exports the result."""
    torch.manual_seed(arguments.seed)
    encoder = Encoder(corpus.train_tokenizer(arguments.seed))
    words = corpus.single_token_words(encoder.tokenizer)
    model = Llama(Shape(vocab_size=encoder.tokenizer.get_vocab_size()))
    initialize(model, [[encoder.tokenizer.token_to_id(token) for token in corpus.ARTICLES]])
    optimizer = make_optimizer(model)
    arguments.work.mkdir(parents=True, exist_ok=True)
    checkpoint = arguments.work / "checkpoint.pt"
    step, reached, spent = 0, 0, 0.0
    if arguments.start:
        weights = load_file(arguments.start / "model.safetensors")
        model.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in weights.items()})
        reached = len(STAGES) - 1
    if arguments.resume:
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, reached, spent = state["step"], state["reached"], state["spent"]
    log_file = open(arguments.work / "train.log", "a" if arguments.resume else "w", buffering=1)

    def log(line: str) -> None:
        print(line, flush=True)
        log_file.write(line + "\n")

    def save() -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                    "reached": reached, "spent": spent + time.time() - started}, checkpoint)

    log(f"parameters {sum(p.numel() for p in model.parameters())}, vocabulary {model.shape.vocab_size}")
    short_books, long_books = heldout_books(SHORT_HELDOUT_STAGE), heldout_books(HELDOUT_STAGE)
    accuracy, tokens, started = 0.0, 0, time.time()
    window = saved = evaluated = started
    while spent + time.time() - started < arguments.minutes * 60:
        progress = (spent + time.time() - started) / (arguments.minutes * 60)
        rng = random.Random(f"{arguments.seed}-{step}")
        stage = pick_stage(rng, reached)
        batch = make_batch(rng, encoder, STAGES[stage], words)
        for group in optimizer.param_groups:
            group["lr"] = (START_RATE if arguments.start else 1.0) * learning_rate(step, progress)
        loss, right, total = train_step(model, optimizer, batch)
        tokens += batch.tokens
        step += 1
        if stage == reached:
            accuracy = EMA_KEEP * accuracy + (1 - EMA_KEEP) * right / total
        now = time.time()
        if step % LOG_STEPS == 0:
            log(f"step {step} minute {(spent + now - started) / 60:.1f} stage {reached} loss {loss:.3f} "
                f"exact {accuracy:.3f} tokens/s {tokens / (now - window):.0f}")
            tokens, window = 0, now
        if accuracy > ADVANCE_AT and reached + 1 < len(STAGES):
            reached, accuracy = reached + 1, 0.0
            log(f"step {step}: on to stage {reached}")
        if now - saved > CHECKPOINT_SECONDS:
            save()
            saved = now
        if now - evaluated > EVAL_SECONDS:
            log(f"step {step}: held out, short {evaluate(model, encoder, short_books, 4, False):.3f}, "
                f"long {evaluate(model, encoder, long_books, HELDOUT_QUESTIONS, False):.3f}")
            evaluated = time.time()
    save()
    shipped = rounded(model)
    log(f"final, bfloat16 weights: held out in one conversation "
        f"{evaluate(shipped, encoder, long_books, HELDOUT_QUESTIONS, False):.3f}, each question apart "
        f"{evaluate(shipped, encoder, long_books, HELDOUT_QUESTIONS, True):.3f}")
    export(model, encoder, arguments.out)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model and write a Hugging Face model directory.")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--work", type=Path, default=Path("demo-work"), help="folder for checkpoint and log")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time on the wall clock")
    parser.add_argument("--seed", type=int, default=1, help="seed of tokenizer, weights and text")
    parser.add_argument("--start", type=Path, help="model directory whose weights the training begins with")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --work")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
