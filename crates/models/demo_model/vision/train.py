"""Trains the demo model that sees, on invented pictures, and writes a Hugging Face model directory.

Pictures and questions are generated as they are needed (pictures.py, questions.py); none is used twice. In the first
steps the encoder alone learns to say what is in each part of a picture: a linear layer reads it off the embeddings that
the decoder will get. In all further steps the whole model learns to answer conversations of several questions about one
or two pictures, and the same layer stays as a small part of the loss. It is thrown away at the end.

Accuracy is exact match: a greedy answer equals the expected one, token by token, to its end. With the right answers of
earlier turns as context this is the same as "the most likely token is the right one at every position of the answer",
which one forward pass tells.
"""

import argparse
import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

import questions
from model import Shape, TextShape, Vision
from optimizer import Optimizer
from pictures import COLOR_NAMES, EDGE, SHAPES, Painter, Scene, draw_scene

LEARNING_RATE = 2e-3
LEARNING_RATE_END = 0.02
WARMUP_STEPS = 60
# How much the loss about the parts of pictures counts once the whole model is trained, and how many pictures more than
# those of the conversations it is about.
PARTS_WEIGHT = 0.5
MORE_PICTURES = 48
PICTURES = 64
ROWS = 32
TURNS = 6
NO_PICTURE_SHARE = 0.02
TWO_PICTURES_SHARE = 0.25
SYSTEM_SHARE = 0.1
GAP_SHARE = 0.4
GAP_MAX = 500
LOG_STEPS = 50
CHECKPOINT_STEPS = 250
EVAL_ROWS = 64
HELDOUT_SEED = 1_000_003
KINDS_OF_PARTS = ["nothing", *SHAPES, *(str(digit) for digit in range(10))]


@dataclass
class Batch:
    """Padded conversations; `targets` and `answers` belong to the prediction made at the same index. `answers` is 0
    or the number of the answer, and `kinds` has the kind of each question from 1 on."""

    scenes: list[Scene]
    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    answers: torch.Tensor
    kinds: list[str]


class Encoder:
    """Turns conversations into token ids exactly as the chat template, the processor and the tokenizer would."""

    def __init__(self, tokenizer: Tokenizer, image_tokens: int):
        self.tokenizer = tokenizer
        self.role = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("system", "user", "assistant")}
        self.end = tokenizer.token_to_id(questions.END)
        self.pad = tokenizer.token_to_id(questions.PAD)
        self.image = tokenizer.token_to_id(questions.IMAGE)
        around, whole = (tokenizer.token_to_id(text) for text in (questions.AROUND, questions.GLOBAL))
        self.picture = [around, whole, *[self.image] * image_tokens, around]

    def conversation(self, system: str, segments: list[tuple[Scene | None, list[tuple[str, str, str]]]],
                     kinds: list[str]) -> tuple[list[int], list[int], int]:
        """The ids, for each id 0 or the number of the answer that it belongs to, and where the first question ends.
        Appends the kinds of the questions to `kinds`."""
        ids = [self.role["system"], *self.tokenizer.encode(system).ids, self.end] if system else []
        answers = [0] * len(ids)
        begun = 0
        for scene, asked in segments:
            shown = self.picture if scene else []
            for kind, question, answer in asked:
                prompt = [self.role["user"], *shown, *self.tokenizer.encode(question).ids, self.end,
                          self.role["assistant"]]
                said = [*self.tokenizer.encode(answer).ids, self.end]
                kinds.append(kind)
                begun = begun or len(ids) + 1 + len(shown)
                ids += prompt + said
                answers += [0] * len(prompt) + [len(kinds)] * len(said)
                shown = []
        return ids, answers, begun


def draw_conversation(rng: random.Random) -> tuple[str, list[tuple[Scene | None, list[tuple[str, str, str]]]]]:
    """A system message or none, and questions about one or two pictures, or without any."""
    system = rng.choice(questions.SYSTEMS) if rng.random() < SYSTEM_SHARE else ""
    if rng.random() < NO_PICTURE_SHARE:
        return system, [(None, questions.ask_nothing_shown(rng, rng.randint(1, TURNS)))]
    if rng.random() < TWO_PICTURES_SHARE:
        before = rng.randint(1, TURNS - 1)
        counts = [before, TURNS - before]
    else:
        counts = [TURNS]
    segments = []
    for count in counts:
        scene = draw_scene(rng)
        segments.append((scene, questions.ask_several(rng, scene, count)))
    return system, segments


def make_batch(rng: random.Random, encoder: Encoder, rows: int) -> Batch:
    """Fresh conversations. Some have a gap in their positions after the first picture, which shows short conversations
    the long distances of RoPE."""
    kinds, scenes, encoded = [], [], []
    for _ in range(rows):
        system, segments = draw_conversation(rng)
        scenes += [scene for scene, _ in segments if scene]
        encoded.append(encoder.conversation(system, segments, kinds))
    width = max(len(ids) for ids, _, _ in encoded) - 1
    batch = Batch(scenes, torch.full((rows, width), encoder.pad), torch.arange(width).repeat(rows, 1),
                  torch.full((rows, width), encoder.pad), torch.zeros(rows, width, dtype=torch.long), kinds)
    for row, (ids, answers, begun) in enumerate(encoded):
        batch.ids[row, :len(ids) - 1] = torch.tensor(ids[:-1])
        batch.targets[row, :len(ids) - 1] = torch.tensor(ids[1:])
        batch.answers[row, :len(ids) - 1] = torch.tensor(answers[1:])
        if rng.random() < GAP_SHARE:
            batch.positions[row, begun:] += rng.randrange(GAP_MAX)
    return batch


class Parts(nn.Module):
    """Reads what is in each square of patches off its embedding: kind, color, place, and where the center is."""

    SIZES = (len(KINDS_OF_PARTS), len(COLOR_NAMES), 9, 2)

    def __init__(self, shape: Shape):
        super().__init__()
        self.grid = round(shape.image_tokens ** 0.5)
        self.read = nn.Linear(shape.text.hidden_size, sum(self.SIZES))

    def loss(self, seen: torch.Tensor, scenes: list[Scene]) -> tuple[torch.Tensor, float]:
        """The loss, and the share of things whose kind and color are both right."""
        kinds = torch.zeros(len(scenes), self.grid ** 2, dtype=torch.long)
        step = EDGE / self.grid
        at, facts, offsets = [], [], []
        for index, scene in enumerate(scenes):
            for thing in scene.things:
                column, row = (int(c // step) for c in thing.center)
                kinds[index, row * self.grid + column] = KINDS_OF_PARTS.index(thing.kind)
                at.append((index, row * self.grid + column))
                facts.append((COLOR_NAMES.index(thing.color), thing.place))
                offsets.append([c / step % 1 for c in thing.center])
        pictures, cells = torch.tensor(at).T
        colors, places = torch.tensor(facts).T
        kind, color, place, offset = self.read(seen).split(self.SIZES, dim=-1)
        mine = [x[pictures, cells] for x in (kind, color, place, offset)]
        loss = (F.cross_entropy(kind.flatten(0, 1), kinds.flatten()) * 4 + F.cross_entropy(mine[1], colors)
                + 0.3 * F.cross_entropy(mine[2], places) + 4 * F.mse_loss(mine[3], torch.tensor(offsets)))
        right = (mine[0].argmax(-1) == kinds[pictures, cells]) & (mine[1].argmax(-1) == colors)
        return loss, right.float().mean().item()


def exact_matches(batch: Batch, chosen: torch.Tensor, predictions: torch.Tensor) -> tuple[Counter, Counter]:
    """How many answers of each kind are wholly right, and how many there are. `chosen` are flat indices."""
    numbers = batch.answers.view(-1)[chosen]
    wrong = set(numbers[predictions != batch.targets.view(-1)[chosen]].tolist())
    right = Counter(kind for number, kind in enumerate(batch.kinds, 1) if number not in wrong)
    return right, Counter(batch.kinds)


def answer_logits(model: Vision, encoder: Encoder, batch: Batch, seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The flat indices of the answers' tokens, and the logits there."""
    chosen = (batch.answers.view(-1) > 0).nonzero().squeeze(1)
    hidden = model(batch.ids, batch.positions, seen, encoder.image).flatten(0, 1)[chosen]
    return chosen, model.text_model.logits(hidden)


@torch.no_grad()
def evaluate(model: Vision, encoder: Encoder, rows: int) -> tuple[float, str]:
    """Exact match on held-out pictures, as a whole and in words for each kind of question."""
    painter, right, total = Painter(HELDOUT_SEED), Counter(), Counter()
    for number in range(rows // EVAL_ROWS):
        batch = make_batch(random.Random(f"{HELDOUT_SEED}-{number}"), encoder, EVAL_ROWS)
        chosen, logits = answer_logits(model, encoder, batch, model.see(painter.paint(batch.scenes)))
        good, count = exact_matches(batch, chosen, logits.argmax(-1))
        right, total = right + good, total + count
    kinds = ", ".join(f"{kind} {right[kind] / total[kind]:.3f}" for kind in sorted(total))
    return right.total() / total.total(), kinds


def rounded(model: Vision) -> Vision:
    """A copy of the model whose weights have been through bfloat16, computing in float32: what is shipped."""
    copy = Vision(model.shape)
    copy.load_state_dict({name: p.bfloat16().float() for name, p in model.state_dict().items()})
    return copy.eval()


def write_json(path: Path, value: dict) -> None:
    """Writes `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def export(model: Vision, encoder: Encoder, out: Path) -> None:
    """Writes the model directory: weights in bfloat16, configuration, processor, tokenizer and chat template."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {"model." + name: p.detach().bfloat16().contiguous() for name, p in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    write_json(out / "config.json", model.shape.hf_config(encoder.end, encoder.pad, encoder.image))
    write_json(out / "generation_config.json",
               {"do_sample": False, "eos_token_id": encoder.end, "pad_token_id": encoder.pad, "max_new_tokens": 96})
    write_json(out / "preprocessor_config.json", {
        "image_processor_type": "SmolVLMImageProcessor", "do_convert_rgb": True, "do_resize": False,
        "do_image_splitting": False, "max_image_size": {"longest_edge": EDGE}, "resample": 2, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "do_pad": False,
    })
    encoder.tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": questions.END, "pad_token": questions.PAD,
        "additional_special_tokens": questions.SPECIAL_TOKENS[2:],
        "model_max_length": model.shape.text.max_position_embeddings, "clean_up_tokenization_spaces": False,
        "chat_template": questions.CHAT_TEMPLATE,
    })


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to LEARNING_RATE_END of the peak."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(step / steps, 1.0)))
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (LEARNING_RATE_END + (1 - LEARNING_RATE_END) * cosine)


class Log:
    """Prints lines and writes them to train.log, with averages of what was added since the last line."""

    def __init__(self, path: Path, is_continued: bool):
        self.file = open(path, "a" if is_continued else "w", buffering=1)
        self.sums, self.count, self.since = Counter(), 0, time.time()

    def line(self, text: str) -> None:
        """Writes a line."""
        print(text, flush=True)
        self.file.write(text + "\n")

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Adds the figures of a step, and writes a line every LOG_STEPS steps."""
        self.sums.update(figures)
        self.count += 1
        if step % LOG_STEPS == 0:
            means = " ".join(f"{name} {value / self.count:.3f}" for name, value in self.sums.items())
            self.line(f"step {step} {means} seconds/step {(time.time() - self.since) / self.count:.2f}")
            self.sums, self.count, self.since = Counter(), 0, time.time()


def train(arguments: argparse.Namespace) -> None:
    """Runs the whole training and exports the result."""
    torch.manual_seed(arguments.seed)
    arguments.work.mkdir(parents=True, exist_ok=True)
    vocabulary = arguments.work / "tokenizer.json"
    if not arguments.resume:
        questions.train_tokenizer(arguments.seed).save(str(vocabulary))
    tokenizer = Tokenizer.from_file(str(vocabulary))
    model = Vision(Shape(TextShape(tokenizer.get_vocab_size())))
    parts = Parts(model.shape)
    encoder = Encoder(tokenizer, model.shape.image_tokens)
    optimizer = Optimizer([model, parts])
    checkpoint, first = arguments.work / "checkpoint.pt", 0
    if arguments.resume:
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        parts.load_state_dict(state["parts"])
        optimizer.load(state["optimizer"])
        first = state["step"]
    log = Log(arguments.work / "train.log", arguments.resume)
    log.line(f"parameters {sum(p.numel() for p in model.parameters())}, vocabulary {tokenizer.get_vocab_size()}")
    for step in range(first, arguments.parts_steps + arguments.steps):
        # Seeded anew in each step, so that a run that was interrupted goes on as it would have.
        rng, painter = random.Random(f"{arguments.seed}-{step}"), Painter(step)
        if step < arguments.parts_steps:
            scenes = [draw_scene(rng) for _ in range(PICTURES)]
            loss, things = parts.loss(model.see(painter.paint(scenes)), scenes)
            figures = {"parts": loss.item(), "things": things}
            rate = learning_rate(step, 2 * arguments.parts_steps)
        else:
            batch = make_batch(rng, encoder, ROWS)
            scenes = batch.scenes + [draw_scene(rng) for _ in range(MORE_PICTURES)]
            seen = model.see(painter.paint(scenes))
            of_parts, things = parts.loss(seen, scenes)
            chosen, logits = answer_logits(model, encoder, batch, seen[:len(batch.scenes)])
            of_answers = F.cross_entropy(logits, batch.targets.view(-1)[chosen])
            right, total = exact_matches(batch, chosen, logits.argmax(-1))
            loss = of_answers + PARTS_WEIGHT * of_parts
            figures = {"loss": of_answers.item(), "exact": right.total() / total.total(), "parts": of_parts.item(),
                       "things": things}
            rate = learning_rate(step - arguments.parts_steps, arguments.steps)
        optimizer.update(loss, rate)
        log.add(step + 1, figures)
        if (step + 1) % CHECKPOINT_STEPS == 0:
            torch.save({"model": model.state_dict(), "parts": parts.state_dict(), "optimizer": optimizer.state(),
                        "step": step + 1}, checkpoint)
            if step >= arguments.parts_steps:
                log.line("held out {:.3f}: {}".format(*evaluate(model, encoder, EVAL_ROWS)))
    log.line("final, bfloat16 weights, held out {:.4f}: {}".format(*evaluate(rounded(model), encoder, 16 * EVAL_ROWS)))
    export(model, encoder, arguments.out)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model that sees.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="model directory to write")
    parser.add_argument("--work", type=Path, default=Path("work"), help="directory of the checkpoint and the log")
    parser.add_argument("--parts-steps", type=int, default=750, help="steps of the encoder alone")
    parser.add_argument("--steps", type=int, default=8000, help="steps of the whole model")
    parser.add_argument("--seed", type=int, default=1, help="seed of everything that is random")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(arguments)


if __name__ == "__main__":
    main()
