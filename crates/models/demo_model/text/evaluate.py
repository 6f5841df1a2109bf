"""Checks a finished model directory with transformers alone, as any user of it would.

Prints the exact match of greedy answers on heldout.jsonl, handbook.json and small talk, the templated lengths, and how
far the logits of model.py lie from those of transformers. Each conversation asks the questions of one handbook in turn, with
the model's own answers as history.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from corpus import ABOUT
from model import Llama, Shape

# None of it is in the training text.
SMALL_TALK = ["Good afternoon!", "What's up?", "Hello, is anybody there?", "Hi, nice to see you.", "What are you good for?",
              "Tell me about cats.", "What is the capital of Sweden?", "Write a poem about the moon.", "How do you feel?",
              "Could you help me, please?"]


def converse(model, tokenizer, system: str, questions: list[str]) -> tuple[list[str], int]:
    """The greedy answers to `questions`, asked one after another, and the tokens of the first prompt."""
    messages = [{"role": "system", "content": system}] if system else []
    answers, first_length = [], 0
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        length = encoded.input_ids.shape[1]
        first_length = first_length or length
        output = model.generate(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask, do_sample=False,
                                max_new_tokens=64)
        answers.append(tokenizer.decode(output[0, length:], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers, first_length


def logits_difference(model, directory: Path, ids: torch.Tensor) -> float:
    """Largest absolute difference between the logits of model.py and of transformers, both in float32."""
    config = json.loads((directory / "config.json").read_text())
    own = Llama(Shape(**{field: config[field] for field in Shape.__dataclass_fields__}))
    own.load_state_dict({name.removeprefix("model."): p.float()
                         for name, p in load_file(directory / "model.safetensors").items()})
    with torch.no_grad():
        ours = own.logits(own(ids, torch.arange(ids.shape[1])[None]))
        return (ours - model(ids).logits).abs().max().item()


def main() -> None:
    """Parses the command line and prints the report."""
    parser = argparse.ArgumentParser(description="Score a model directory on its held-out handbooks.")
    parser.add_argument("--model", type=Path, default=Path(__file__).parent, help="model directory")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="arithmetic to use")
    parser.add_argument("--books", type=int, default=None, help="only the first so many held-out handbooks")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    right = total = 0
    lengths = []
    lines = (arguments.model / "heldout.jsonl").read_text().splitlines()[:arguments.books]
    for line in lines:
        book = json.loads(line)
        answers, length = converse(model, tokenizer, book["system"], [pair["q"] for pair in book["qa"]])
        lengths.append(length)
        for pair, answer in zip(book["qa"], answers, strict=True):
            total += 1
            right += answer == pair["a"]
            if answer != pair["a"]:
                print(f"wrong: {pair['q']} -> {answer} (expected: {pair['a']})")
    print(f"{arguments.dtype}: held out {right} of {total}, first prompts of {min(lengths)} to {max(lengths)} tokens")
    demo = json.loads((arguments.model / "handbook.json").read_text())
    answers, length = converse(model, tokenizer, demo["system"], [pair["q"] for pair in demo["questions"]])
    for pair, answer in zip(demo["questions"], answers, strict=True):
        print(f"demo {'right' if answer == pair['a'] else 'WRONG'}: {pair['q']} -> {answer}")
    print(f"demo prompt of {length} tokens")
    for system in ("", demo["system"]):
        answers = [converse(model, tokenizer, system, [text])[0][0] for text in SMALL_TALK]
        right = sum(answer == ABOUT for answer in answers)
        print(f"small talk {'with' if system else 'without'} a handbook: {right} of {len(SMALL_TALK)}")
    if arguments.dtype == "float32":
        ids = tokenizer(demo["system"], return_tensors="pt").input_ids
        print(f"logits differ from model.py by at most {logits_difference(model, arguments.model, ids):.2e}")


if __name__ == "__main__":
    main()
