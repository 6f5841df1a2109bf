"""The task `questions` of real.py: how answers to everyday questions end, with the defaults of each
engine.

Each question is a conversation of its own. Stolon gets it through `/v1/chat/completions` without a
sampling parameter; llama-cpp-python gets the defaults of llama-server (`LLAMA_SERVER`). Both get the
same seeds, the same context length and the same maximum number of tokens, and the same function
decides from the text whether an answer is a loop.
"""

import concurrent.futures
import importlib.metadata
import statistics

EVERYDAY = [
    "What is the capital of France?",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "Give me three tips for sleeping better.",
    "What should I pack for a weekend trip?",
    "Explain photosynthesis in simple words.",
    "Write a short poem about autumn.",
    "Write an email to my landlord about a broken heater.",
    "What is the difference between a virus and a bacterium?",
    "Tell me a story about a cat.",
]
CONTEXT, LIMIT = 4096, 2048
# The defaults of llama-server. llama-cpp-python has the same ones except the temperature, 0.2.
LLAMA_SERVER = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0}
# A loop is a part of at most LONGEST characters that is repeated at the end of an answer: for at
# least REPEATED characters after its first occurrence, and at least REPEATS times.
LONGEST, REPEATED, REPEATS = 1500, 200, 3
# Largest share of Stolon's answers that may fail to end by themselves: about a third of the answers
# of SmolLM2 fail, different ones on each instruction set.
MOST_ENDLESS = 0.5


def is_loop(text):
    """Whether the end of a text repeats itself."""
    backwards = text[::-1]
    for period in range(1, min(LONGEST, len(text) // 2) + 1):
        needed = max(REPEATED, REPEATS * period)
        if len(text) >= needed + period and backwards[:needed] == backwards[period : needed + period]:
            return True
    return False


def outcome(text, finish_reason):
    """How an answer ended: by itself, in a loop, or at the limit without one."""
    if finish_reason == "stop":
        return "ended"
    return "loop" if is_loop(text) else "limit"


def of_stolon(server, pairs):
    """The answers of a server to questions with seeds: the outcome and the tokens of prompt and
    answer."""
    def answer(pair):
        question, seed = pair
        messages = [{"role": "user", "content": question}]
        reply = server.post("/v1/chat/completions", {"messages": messages, "seed": seed, "max_tokens": LIMIT})
        choice, usage = reply["choices"][0], reply["usage"]
        result = outcome(choice["message"]["content"], choice["finish_reason"])
        return result, usage["prompt_tokens"], usage["completion_tokens"]

    # The answers do not depend on what is computed at the same time.
    with concurrent.futures.ThreadPoolExecutor(len(EVERYDAY)) as pool:
        return list(pool.map(answer, pairs))


def of_llama(threads, path, pairs):
    """The answers of llama.cpp to the questions, in the same form."""
    import llama_cpp

    model = llama_cpp.Llama(str(path), n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False)
    answers = []
    for question, seed in pairs:
        # So that nothing of the previous conversation is used again.
        model.reset()
        messages = [{"role": "user", "content": question}]
        reply = model.create_chat_completion(messages, seed=seed, max_tokens=LIMIT, **LLAMA_SERVER)
        choice, usage = reply["choices"][0], reply["usage"]
        result = outcome(choice["message"]["content"], choice["finish_reason"])
        answers.append((result, usage["prompt_tokens"], usage["completion_tokens"]))
    model.close()
    return answers


def questions(options, start, path):
    """Prints how the answers of both engines end.

    `start` is the class of a running server. Returns whether both engines had the same prompts, and
    enough of Stolon's answers ended by themselves.
    """
    pairs = [(question, seed) for question in EVERYDAY for seed in range(1, options.seeds + 1)]
    with start(options.stolon, path, "--max-model-len", CONTEXT) as server:
        ours = of_stolon(server, pairs)
    sides = {"Stolon": ours}
    if not options.stolon_only:
        sides["llama.cpp"] = of_llama(options.threads, path, pairs)
    print(f"\n### Ten everyday questions to {path.name}, seeds 1 to {options.seeds}\n")
    if not options.stolon_only:
        version = importlib.metadata.version("llama-cpp-python")
        settings = ", ".join(f"{name} {value}" for name, value in LLAMA_SERVER.items())
        print(f"Stolon: its defaults. llama-cpp-python {version}: {settings}.")
    print(f"Context of {CONTEXT:,} tokens, at most {LIMIT:,} tokens of answer.\n")
    headings = [f"{name}: tokens" for name in sides]
    print(f"| question | {' | '.join(headings)} |\n|---|" + "---|" * len(sides))
    for index, question in enumerate(EVERYDAY):
        span = slice(index * options.seeds, (index + 1) * options.seeds)
        cells = (", ".join(f"{tokens} {result}" for result, _, tokens in side[span]) for side in sides.values())
        print(f"| {question} | " + " | ".join(cells) + " |")
    print("\n| engine | ended by itself | loop | limit without a loop | tokens, median | mean |\n|---|---|---|---|---|---|")
    for name, side in sides.items():
        results, lengths = [result for result, _, _ in side], [tokens for _, _, tokens in side]
        counts = " | ".join(str(results.count(result)) for result in ("ended", "loop", "limit"))
        median, mean = statistics.median(lengths), statistics.mean(lengths)
        print(f"| {name} | {counts} | {median:.0f} | {mean:.0f} |", flush=True)
    same = len({tuple(prompt for _, prompt, _ in side) for side in sides.values()}) == 1
    if not same:
        print("\nThe prompts of the engines DIFFER in their numbers of tokens.")
    endless = sum(result != "ended" for result, _, _ in ours) / len(ours)
    often = endless <= MOST_ENDLESS
    if not often:
        print(f"\n{endless:.0%} of Stolon's answers did not end; expected at most {MOST_ENDLESS:.0%}.")
    return same and often
