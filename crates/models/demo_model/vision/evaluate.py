"""Checks a finished model directory with transformers alone, as any user of it would.

Draws held-out scenes by Pillow in random sizes and saves them as PNG or JPEG files, prepares these by the image
processor of transformers, and prints how many answers of each kind of question are right: all tokens are the most
likely ones, which is what greedy decoding gives. Coordinates also count as near if each is at most 0.05 off.
"""

import argparse
import io
import random
import re
from collections import Counter
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import SmolVLMForConditionalGeneration
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

import questions
from drawing import EXAMPLE_QUESTIONS, PLAIN, draw
from pictures import draw_scene
from train import Encoder

SEED = 2_000_003
EDGES = (90, 900)


def photographed(rng: random.Random, image: Image.Image) -> Image.Image:
    """The picture after it was saved as PNG, or as JPEG in some quality."""
    file = io.BytesIO()
    if rng.random() < 0.5:
        image.save(file, "PNG")
    else:
        image.save(file, "JPEG", quality=rng.randint(50, 95))
    return Image.open(file).convert("RGB")


def drawn(rng: random.Random, scene) -> Image.Image:
    """A held-out scene in a random size, whose proportions are at most 3 to 2."""
    width = rng.randint(*EDGES)
    height = round(width * rng.uniform(2 / 3, 3 / 2)) if rng.random() < 0.5 else width
    colors = PLAIN if scene.background == (1.0, 1.0, 1.0) and rng.random() < 0.5 else None
    return photographed(rng, draw(scene, (width, height), colors))


@torch.no_grad()
def answer(model, encoder: Encoder, pixels: dict, question: str, expected: str) -> str:
    """The most likely tokens at the places of the expected answer, as text up to the end token."""
    prompt = [encoder.role["user"], *encoder.picture, *encoder.tokenizer.encode(question).ids, encoder.end,
              encoder.role["assistant"]]
    said = [*encoder.tokenizer.encode(expected).ids, encoder.end]
    logits = model(input_ids=torch.tensor([prompt + said]), **pixels, use_cache=False).logits[0]
    predicted = logits[len(prompt) - 1:-1].argmax(-1).tolist()
    is_whole = predicted[-1] == encoder.end and encoder.end not in predicted[:-1]
    return encoder.tokenizer.decode(predicted[:-1]) if is_whole else encoder.tokenizer.decode(predicted) + " ..."


def is_near(text: str, expected: str) -> bool:
    """Whether two pairs of coordinates differ by at most one step each."""
    found, wanted = ([float(n) for n in re.findall(r"\d\.\d\d", t)] for t in (text, expected))
    return len(found) == len(wanted) > 0 and all(abs(a - b) < 0.06 for a, b in zip(found, wanted, strict=True))


def main() -> None:
    """Parses the command line and prints the report."""
    parser = argparse.ArgumentParser(description="Score a model directory on drawn pictures.")
    parser.add_argument("--model", type=Path, default=Path(__file__).parent, help="model directory")
    parser.add_argument("--pictures", type=int, default=300, help="number of pictures")
    parser.add_argument("--show", action="store_true", help="print the wrong answers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = SmolVLMForConditionalGeneration.from_pretrained(arguments.model, dtype=torch.float32).eval()
    processor = SmolVLMImageProcessorPil.from_pretrained(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    grid = model.config.vision_config.image_size // model.config.vision_config.patch_size // model.config.scale_factor
    encoder = Encoder(tokenizer, grid ** 2)
    prepared = lambda image: dict(processor([[image]], return_tensors="pt"))
    rng, right, total = random.Random(SEED), Counter(), Counter()
    for _ in range(arguments.pictures):
        scene = draw_scene(rng)
        pixels = prepared(drawn(rng, scene))
        for kind in questions.KINDS:
            question, expected = questions.ask(rng, scene, kind)
            text = answer(model, encoder, pixels, question, expected)
            found = kind
            if kind == "point" and expected.startswith("x="):
                total["point, near"] += 1
                right["point, near"] += is_near(text, expected)
                found = "point, exact"
            total[found] += 1
            right[found] += text == expected
            if arguments.show and text != expected:
                print(f"wrong: {question} -> {text} (expected: {expected})")
    for kind in sorted(total):
        print(f"{kind}: {right[kind]} of {total[kind]} ({right[kind] / total[kind]:.1%})")
    pixels = prepared(Image.open(arguments.model / "picture.png").convert("RGB"))
    for question, expected in EXAMPLE_QUESTIONS:
        text = answer(model, encoder, pixels, question, expected)
        print(f"demo {'right' if text == expected else 'WRONG'}: {question} -> {text}")


if __name__ == "__main__":
    main()
