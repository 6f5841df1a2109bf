"""Trains an EAGLE-3 head for a model, and measures what it brings on questions that it was not trained with.

    pip install torch transformers safetensors
    python3 benches/eagle3.py answer target/release/stolon --model MODEL answers.jsonl
    python3 benches/eagle3.py train --model MODEL answers.jsonl HEAD [--minutes 20]
    python3 benches/eagle3.py measure target/release/stolon --model MODEL HEAD

MODEL is a directory of safetensors files of Llama's kind whose embedding is its output matrix, such as SmolLM2.
The head is written to the directory HEAD in the form of speculators.

- `answer` lets the model answer some hundred questions, at the temperature of its conversations.
- `train` computes the hidden states of these texts once. Then it trains the head to give the model's most
  probable tokens, for three guesses in a row, of which the later ones read the head's own results (EAGLE-3's
  training-time test). The layer begins as the model's last one.
- `measure` asks other questions at three servers, by turns: without speculation, with the sources that are on by
  default, and with the head in addition. It prints tokens a second of one and of four sequences, and fails if an
  answer differs.
"""

import argparse
import concurrent.futures
import json
import pathlib
import re
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "crates/serve/cli/tests/agents"))

from proxy import connect
from sessions import serve, stop

TASKS = [
    "Explain {} to a child.",
    "Write a short story about {}.",
    "What are three facts about {}?",
    "List the advantages and disadvantages of {}.",
    "How did {} change the way people live?",
    "Write a poem about {}.",
    "Describe {} in one paragraph.",
    "Give me a plan to learn more about {}.",
    "What questions do people ask about {}? Answer two of them.",
    "Write an email to a friend about {}.",
    "Compare {} today and a hundred years ago.",
    "Why does {} matter?",
]
# The head is measured with the last ones.
SUBJECTS = (
    "rain, bread, the moon, bicycles, volcanoes, chess, honey bees, glaciers, the printing press, salt, tea, "
    "whales, bridges, the heart, mirrors, steam engines, spiders, maps, clocks, coral reefs, wool, the desert, "
    "photography, lightning, rivers, cheese, music, elephants, the alphabet, trains, gardens, gold, sleep, glass, "
    "the post office, wolves, magnets, rice, castles, winter, telescopes, horses, silk, the ocean, paper, "
    "apples, football, electricity, museums, snow, libraries, airplanes, penguins, coffee"
).split(", ")
UNSEEN = 6
GUESSES = 3
# The most probable tokens of the model for which the head is trained.
BEST = 8


def ask(url, question, **options):
    """The answer and its number of tokens."""
    body = {"model": "m", "messages": [{"role": "user", "content": question}], "max_tokens": 256, **options}
    connection = connect(url)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    value = json.loads(reply.read())
    if reply.status != 200:
        sys.exit(f"{reply.status} {value}")
    return value["choices"][0]["message"]["content"], value["usage"]["completion_tokens"]


def answer(options):
    questions = [task.format(subject) for subject in SUBJECTS[:-UNSEEN] for task in TASKS]
    server, url = serve(options.binary, options.model)
    try:
        with concurrent.futures.ThreadPoolExecutor(16) as pool, options.answers.open("w") as file:
            answers = pool.map(lambda question: ask(url, question)[0], questions)
            for question, text in zip(questions, answers):
                print(json.dumps({"question": question, "answer": text}), file=file, flush=True)
    finally:
        stop(server)


def texts(options, tokenizer):
    for line in options.answers.read_text().splitlines():
        row = json.loads(line)
        messages = [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        yield tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


def train(options):
    import torch
    from safetensors.torch import save_file
    from torch.nn import functional
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    config, layers = model.config, len(model.model.layers)
    read = [2, layers // 2, layers - 3]
    width, dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sequences = list(texts(options, AutoTokenizer.from_pretrained(options.model)))
    counts = torch.bincount(torch.tensor(sum(sequences, [])), minlength=config.vocab_size)
    ids = counts.topk(min(options.vocabulary, int((counts > 0).sum()))).indices.sort().values
    index = torch.full([config.vocab_size], -1).index_put([ids], torch.arange(len(ids)))

    # Of each position: the tokens, the hidden states, and the model's best next tokens.
    examples = []
    with torch.no_grad():
        for tokens in sequences:
            output = model(torch.tensor([tokens]), output_hidden_states=True)
            states = torch.cat([output.hidden_states[layer][0] for layer in read], -1)
            best = output.logits[0].float().softmax(-1).topk(BEST)
            shares = torch.where(index[best.indices] >= 0, best.values, 0.0)
            examples.append((torch.tensor(tokens), states, index[best.indices].clamp(min=0), shares))
    print(f"{len(examples)} texts, {sum(map(len, sequences))} tokens, {len(ids)} different ones guessed", flush=True)

    last = model.model.layers[-1].state_dict()
    embedding = model.get_input_embeddings().weight.detach()
    zeros = lambda rows, columns: torch.zeros(rows, columns)
    weights = {
        "fc": torch.cat([zeros(width, 2 * width), torch.eye(width)], 1),
        "layers.0.input_layernorm": torch.ones(width),
        "layers.0.hidden_norm": last["input_layernorm.weight"],
        "layers.0.post_attention_layernorm": last["post_attention_layernorm.weight"],
        "norm": model.model.norm.weight.detach(),
        "lm_head": embedding[ids],
    }
    for part in ["q", "k", "v"]:
        own = last[f"self_attn.{part}_proj.weight"]
        weights[f"layers.0.self_attn.{part}_proj"] = torch.cat([zeros(*own.shape), own.float()], 1)
    for part in ["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]:
        weights[f"layers.0.{part}"] = last[f"{part}.weight"]
    weights = {name: value.float().clone().requires_grad_() for name, value in weights.items()}

    def norm(x, name):
        return functional.rms_norm(x, [width], weights[name], config.rms_norm_eps)

    def linear(x, name):
        return functional.linear(x, weights[name])

    half = torch.arange(dim // 2) * 2 / dim
    frequencies = config.rope_parameters["rope_theta"] ** -half

    def rotate(x, positions):
        angles = torch.cat([positions[:, None] * frequencies] * 2, -1)
        rotated = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * angles.cos() + rotated * angles.sin()

    def step(features, embedded, kept):
        """The logits and the states of pairs. `kept` has the keys and values of earlier guesses."""
        count, guess = features.shape[-2], len(kept)
        pair = torch.cat([norm(embedded, "layers.0.input_layernorm"), norm(features, "layers.0.hidden_norm")], -1)
        split = lambda x: x.unflatten(-1, [-1, dim]).transpose(-2, -3)
        parts = [split(linear(pair, f"layers.0.self_attn.{part}_proj")) for part in "qkv"]
        positions = torch.arange(count, dtype=torch.float32)
        query, key = rotate(parts[0], positions), rotate(parts[1], positions)
        kept.append([part.repeat_interleave(heads // kv_heads, -3) for part in (key, parts[2])])
        # Pairs of the model up to the one from which the guesses begin, and of each guess after it.
        scores = query @ kept[0][0].transpose(-1, -2)
        seen = torch.ones(count, count, dtype=torch.bool).tril(-guess)
        scores = scores.masked_fill(~seen, -torch.inf)
        own = [
            (query * key.roll(guess - place, -2)).sum(-1, keepdim=True)
            for place, (key, _) in enumerate(kept)
            if place > 0
        ]
        shares = (torch.cat([scores, *own], -1) * dim**-0.5).softmax(-1)
        attended = shares[..., :count] @ kept[0][1]
        for place in range(1, len(kept)):
            value = kept[place][1].roll(guess - place, -2)
            attended = attended + shares[..., count + place - 1, None] * value
        x = features + linear(attended.transpose(-2, -3).flatten(-2), "layers.0.self_attn.o_proj")
        inner = norm(x, "layers.0.post_attention_layernorm")
        gate = functional.silu(linear(inner, "layers.0.mlp.gate_proj"))
        x = x + linear(gate * linear(inner, "layers.0.mlp.up_proj"), "layers.0.mlp.down_proj")
        return linear(norm(x, "norm"), "lm_head"), x

    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    begun, report, done = time.time(), [], 0
    while (share := (time.time() - begun) / (60 * options.minutes)) < 1:
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (done + 1) / 50) * max(1 - share, 0.02)
        for example in torch.randint(len(examples), [options.batch]).tolist():
            tokens, states, best, shares = examples[example]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                # The pair at index `i` is the state of position `i` and the token after it.
                features, kept = linear(states.float(), "fc")[:-1], []
                embedded = embedding[tokens[1:]].float()
                losses = []
                for guess in range(GUESSES):
                    logits, x = step(features, embedded, kept)
                    # The first pairs have no state of such a guess.
                    logits, wanted, weight = logits[guess:], best[1 + guess :], shares[1 + guess :]
                    logs = logits.float().log_softmax(-1).gather(-1, wanted)
                    losses.append(-(weight * logs).sum(-1).mean() * 0.8**guess)
                    right = (logits.argmax(-1) == wanted[:, 0]) & (weight[:, 0] > 0)
                    report.append((guess, right.float().mean().item()))
                    features = x.roll(1, -2)
            (sum(losses) / options.batch).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done % 25 == 0:
            rates = [statistics.fmean(rate for place, rate in report if place == guess) for guess in range(GUESSES)]
            print(f"{done} steps, right: {', '.join(f'{rate:.3f}' for rate in rates)}", flush=True)
            report.clear()

    options.head.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}.weight": value.detach().bfloat16() for name, value in weights.items()}
    tensors["d2t"] = ids - torch.arange(len(ids))
    save_file(tensors, options.head / "model.safetensors")
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["max_position_embeddings", "rms_norm_eps", "hidden_act", "vocab_size"]
    layer = {name: getattr(config, name) for name in names}
    layer |= {"model_type": "llama", "num_hidden_layers": 1, "rope_theta": config.rope_parameters["rope_theta"]}
    head = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "dtype": "bfloat16",
        "draft_vocab_size": len(ids),
        "eagle_aux_hidden_state_layer_ids": read,
        "norm_before_residual": False,
        "transformer_layer_config": layer,
    }
    (options.head / "config.json").write_text(json.dumps(head, indent=2) + "\n")


def counters(url):
    """The tokens of the head that were proposed, and those of them that were right."""
    connection = connect(url)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    values = re.findall(r'^stolon:spec_decode_draft_model_tokens(?:_total)?\{(.*)\} (\d+)', text, re.M)
    of = lambda event: sum(int(value) for labels, value in values if f'event="{event}"' in labels)
    return of("proposed"), of("accepted")


def measure(options):
    questions = [task.format(subject) for subject in SUBJECTS[-UNSEEN:] for task in TASKS]
    flags = {"plain": ["--speculation", "off"], "default": [], "head": ["--draft-model", options.head]}
    servers = {name: serve(options.binary, options.model, *more) for name, more in flags.items()}
    try:
        for temperature in [0.0, 0.8]:
            for sequences in [1, 4]:
                before, rates = counters(servers["head"][1]), {name: [] for name in servers}
                for round in range(options.rounds):
                    part = questions[round * 4 :][:4]
                    answers, salt = {}, f"{temperature} {sequences}"
                    for name, (_, url) in servers.items():
                        # No answer is guessed from one to the same question.
                        query = lambda question: ask(
                            url, question, temperature=temperature, seed=7, cache_salt=salt
                        )
                        start = time.perf_counter()
                        with concurrent.futures.ThreadPoolExecutor(sequences) as pool:
                            answers[name] = list(pool.map(query, part))
                        tokens = sum(count for _, count in answers[name])
                        rates[name].append(tokens / (time.perf_counter() - start))
                    if not answers["plain"] == answers["default"] == answers["head"]:
                        sys.exit(f"other answers: {answers}")
                drafted, accepted = (new - old for new, old in zip(counters(servers["head"][1]), before))
                times = {
                    name: statistics.median(rate / plain for rate, plain in zip(rates[name], rates["plain"]))
                    for name in ["default", "head"]
                }
                print(
                    f"temperature {temperature}, {sequences} sequences: plain {statistics.median(rates['plain']):.1f} "
                    f"tokens/s, default times {times['default']:.2f}, with the head times {times['head']:.2f}; "
                    f"{accepted} of {drafted} guesses of the head right",
                    flush=True,
                )
    finally:
        for server, _ in servers.values():
            stop(server)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for run in [answer, train, measure]:
        command = commands.add_parser(run.__name__)
        command.set_defaults(run=run)
        if run != train:
            command.add_argument("binary", type=pathlib.Path)
        command.add_argument("--model", required=True)
        if run != measure:
            command.add_argument("answers", type=pathlib.Path)
        if run != answer:
            command.add_argument("head", type=pathlib.Path)
    train_command, measure_command = (commands.choices[name] for name in ["train", "measure"])
    train_command.add_argument("--minutes", type=float, default=20)
    train_command.add_argument("--batch", type=int, default=8)
    train_command.add_argument("--vocabulary", type=int, default=8192, help="tokens that can be guessed, at most")
    measure_command.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
