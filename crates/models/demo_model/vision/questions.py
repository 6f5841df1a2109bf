"""Questions about scenes with their answers, and the tokenizer trained on them.

Every question has one right answer, which follows from the scene. A question about a thing that is missing is answered
with that. Of things that there are several of, only the number is asked.
"""

import random
from collections import Counter

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pictures import COLOR_NAMES, PLACES, SHAPES, EDGE, Scene, Thing, draw_scene

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<end_of_utterance>", "<|system|>", "<|user|>", "<|assistant|>"
IMAGE, AROUND, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
SPECIAL_TOKENS = [PAD, END, SYSTEM, USER, ASSISTANT, IMAGE, AROUND, GLOBAL]
VOCAB_SIZE = 576
TOKENIZER_SCENES = 6000
POOL_REPEATS = 300

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "<end_of_utterance>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

ABOUT = "I am a small demo model: show me a picture of a few shapes and a digit, and ask me about it."
SYSTEMS = ["You are a helpful assistant.", "Answer briefly.", "You answer questions about pictures.", "Be brief."]
SMALL_TALK = ["Hello!", "Hi!", "Hi there!", "Good morning!", "Hey", "hello", "Who are you?", "What can you do?",
              "What are you?", "How are you?", "Help!", "Thanks!", "Thank you!", "What is this?", "Tell me a joke.",
              "What is your name?", "Can you help me?", "Write a poem.", "How does this work?", "Goodbye!"]
# How often each kind of question is asked.
KINDS = {"color": 2, "count": 3, "count color": 4, "count all": 1, "place": 3, "digit": 2, "where": 3, "point": 2,
         "exists": 4, "describe": 2, "small talk": 0.1}
# Several ways to name a place in a question; the first is that of answers.
PLACE_WORDS = [
    ["at the top left", "in the top left", "in the top left corner", "in the upper left corner", "at top left"],
    ["at the top", "at the top centre", "at the top middle", "in the top row in the middle"],
    ["at the top right", "in the top right", "in the top right corner", "in the upper right corner", "at top right"],
    ["on the left", "at the left", "on the middle left", "in the middle left"],
    ["in the middle", "in the centre", "in the center", "at the centre"],
    ["on the right", "at the right", "on the middle right", "in the middle right"],
    ["at the bottom left", "in the bottom left", "in the bottom left corner", "in the lower left corner",
     "at bottom left"],
    ["at the bottom", "at the bottom centre", "at the bottom middle", "in the bottom row in the middle"],
    ["at the bottom right", "in the bottom right", "in the bottom right corner", "in the lower right corner",
     "at bottom right"],
]


def plural(count: int, what: str) -> str:
    """There are 2 circles."""
    if count == 0:
        return f"There are no {what}s."
    return f"There is 1 {what}." if count == 1 else f"There are {count} {what}s."


def name(thing: Thing) -> str:
    """A red circle, or the digit 7."""
    if thing.is_digit:
        return f"the digit {thing.kind}"
    return f"{'an' if thing.color == 'orange' else 'a'} {thing.color} {thing.kind}"


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return text[0].upper() + text[1:] + "."


def listing(names: list[str]) -> str:
    """With commas, and `and` before the last."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def coordinates(thing: Thing) -> str:
    """The center, as shares of width and height from the top left corner in steps of 0.05."""
    x, y = (max(0.05, min(0.95, round(20 * c / EDGE) / 20)) for c in thing.center)
    return f"x={x:.2f} y={y:.2f}"


def subject(rng: random.Random, scene: Scene, colors: bool) -> tuple[str, Thing | None]:
    """What to ask about: a noun, with its color at times if `colors`, and the only thing that it names, or `None`."""
    if scene.digit and rng.random() < 0.2:
        return "digit", scene.digit
    named = Counter(thing.kind for thing in scene.shapes)
    alone = [thing for thing in scene.shapes if named[thing.kind] == 1]
    precise = Counter((thing.color, thing.kind) for thing in scene.shapes)
    alone_with_color = [thing for thing in scene.shapes if precise[thing.color, thing.kind] == 1]
    if rng.random() < 0.85 and colors and alone_with_color and (not alone or rng.random() < 0.4):
        thing = rng.choice(alone_with_color)
        return f"{thing.color} {thing.kind}", thing
    if rng.random() < 0.85 and alone:
        thing = rng.choice(alone)
        return thing.kind, thing
    missing = [kind for kind in SHAPES if not named[kind]] + ([] if scene.digit else ["digit"])
    if missing:
        return rng.choice(missing), None
    # The scene has all shapes and a digit.
    color, kind = rng.choice([(c, k) for c in COLOR_NAMES for k in SHAPES if not precise[c, k]])
    return (f"{color} {kind}", None) if colors else ("digit", scene.digit)


def ask_color(rng: random.Random, scene: Scene) -> tuple[str, str]:
    noun, thing = subject(rng, scene, False)
    if not thing and scene.things and rng.random() < 0.7:
        return ask_place(rng, scene)
    question = rng.choice([f"What colour is the {noun}?", f"What colour is the {noun}?", f"Which colour is the {noun}?",
                           f"What color is the {noun}?", f"What is the colour of the {noun}?",
                           f"Which colour does the {noun} have?"])
    return question, f"The {noun} is {thing.color}." if thing else f"There is no {noun}."


def ask_count(rng: random.Random, scene: Scene) -> tuple[str, str]:
    kind = rng.choice(scene.shapes).kind if scene.shapes and rng.random() < 0.8 else rng.choice(SHAPES)
    return how_many(rng, kind), plural(sum(thing.kind == kind for thing in scene.shapes), kind)


def how_many(rng: random.Random, what: str) -> str:
    """The question for a number of things."""
    return rng.choice([f"How many {what}s are there?", f"How many {what}s are there?", f"How many {what}s do you see?",
                       f"How many {what}s are in the picture?", f"Count the {what}s.", f"How many {what}s?"])


def ask_count_color(rng: random.Random, scene: Scene) -> tuple[str, str]:
    color = rng.choice(scene.shapes).color if scene.shapes and rng.random() < 0.8 else rng.choice(COLOR_NAMES)
    noun = f"{color} shape"
    return how_many(rng, noun), plural(sum(thing.color == color for thing in scene.shapes), noun)


def ask_count_all(rng: random.Random, scene: Scene) -> tuple[str, str]:
    return how_many(rng, "shape"), plural(len(scene.shapes), "shape")


def ask_place(rng: random.Random, scene: Scene) -> tuple[str, str]:
    place = rng.choice(scene.things).place if rng.random() < 0.75 else rng.randrange(9)
    words = PLACE_WORDS[place][0] if rng.random() < 0.5 else rng.choice(PLACE_WORDS[place])
    question = rng.choice([f"What is {words}?", f"What is {words}?", f"What is {words}?", f"What do you see {words}?",
                           f"What's {words}?", f"Which shape is {words}?"])
    found = [thing for thing in scene.things if thing.place == place]
    what = name(found[0]) if found else "nothing"
    return question, sentence(f"{what} is {PLACES[place]}")


def ask_digit(rng: random.Random, scene: Scene) -> tuple[str, str]:
    question = rng.choice(["Which digit is shown?", "Which digit is shown?", "Which digit do you see?",
                           "What digit is shown?", "Which number is shown?", "What is the digit?", "Read the digit.",
                           "Which digit is in the picture?", "What number do you see?"])
    return question, f"The digit is {scene.digit.kind}." if scene.digit else "There is no digit."


def ask_where(rng: random.Random, scene: Scene) -> tuple[str, str]:
    noun, thing = subject(rng, scene, True)
    question = rng.choice([f"Where is the {noun}?", f"Where is the {noun}?", f"Where do you see the {noun}?",
                           f"Find the {noun}.", f"Where is the {noun} in the picture?"])
    return question, f"The {noun} is {PLACES[thing.place]}." if thing else f"There is no {noun}."


def ask_point(rng: random.Random, scene: Scene) -> tuple[str, str]:
    noun, thing = subject(rng, scene, True)
    question = rng.choice([f"Point at the {noun}.", f"Point at the {noun}.", f"Point to the {noun}.",
                           f"Give the coordinates of the {noun}.", f"What are the coordinates of the {noun}?"])
    return question, coordinates(thing) if thing else f"There is no {noun}."


def ask_exists(rng: random.Random, scene: Scene) -> tuple[str, str]:
    thing = rng.choice(scene.shapes) if scene.shapes else None
    color, kind = (thing.color, thing.kind) if thing else (rng.choice(COLOR_NAMES), rng.choice(SHAPES))
    if rng.random() < 0.5:
        color, kind = rng.choice([(rng.choice(COLOR_NAMES), kind), (color, rng.choice(SHAPES)),
                                   (rng.choice(scene.shapes or [thing]).color if thing else color, kind)])
    article = "an" if color == "orange" else "a"
    question = rng.choice([f"Is there {article} {color} {kind}?", f"Is there {article} {color} {kind}?",
                           f"Do you see {article} {color} {kind}?"])
    is_there = any((t.color, t.kind) == (color, kind) for t in scene.shapes)
    return question, "Yes." if is_there else "No."


def ask_describe(rng: random.Random, scene: Scene) -> tuple[str, str]:
    question = rng.choice(["What do you see?", "Describe the picture.", "What is in the picture?", "Describe this.",
                           "What is shown?", "What do you see in the picture?", "Describe this picture.",
                           "Describe the image.", "What is in this picture?"])
    return question, sentence(listing([f"{name(thing)} {PLACES[thing.place]}" for thing in scene.things]))


def ask_small_talk(rng: random.Random, scene: Scene | None) -> tuple[str, str]:
    return rng.choice(SMALL_TALK), ABOUT


ASK = {"color": ask_color, "count": ask_count, "count color": ask_count_color, "count all": ask_count_all,
       "place": ask_place, "digit": ask_digit, "where": ask_where, "point": ask_point, "exists": ask_exists,
       "describe": ask_describe, "small talk": ask_small_talk}


def ask(rng: random.Random, scene: Scene, kind: str) -> tuple[str, str]:
    """A question of this kind, sometimes typed carelessly, and its answer."""
    question, answer = ASK[kind](rng, scene)
    if rng.random() < 0.12:
        question = question.rstrip("?.!")
    if rng.random() < 0.12:
        question = question[0].lower() + question[1:]
    return question, answer


def ask_several(rng: random.Random, scene: Scene, count: int) -> list[tuple[str, str, str]]:
    """Questions of random kinds: kind, question and answer."""
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=count)
    return [(kind, *ask(rng, scene, kind)) for kind in kinds]


def ask_nothing_shown(rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    """What is said when there is no picture, whatever the question."""
    scene = draw_scene(rng)
    questions = [ask_small_talk(rng, None) if rng.random() < 0.5 else ask_several(rng, scene, 1)[0][1:]
                 for _ in range(count)]
    return [("no picture", question, ABOUT) for question, _ in questions]


def pool_words() -> list[str]:
    """Every word that must be a single token when it follows a space."""
    words = {word for places in PLACE_WORDS for place in places for word in place.split()}
    for noun in (*SHAPES, "shape", "digit"):
        words.update([noun, noun + "s"])
    words.update(COLOR_NAMES)
    words.update(ABOUT.replace(":", "").replace(",", "").replace(".", "").split())
    return sorted(words)


def train_tokenizer(seed: int) -> Tokenizer:
    """Trains byte-level BPE on questions and answers; numbers of two digits become tokens, and so does each word."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [" " + " ".join(pool_words())] * POOL_REPEATS
    texts += [f"x=0.{n:02} y=0.{n:02}" for n in range(5, 100, 5)] * POOL_REPEATS
    texts += (SMALL_TALK + SYSTEMS) * 8
    for _ in range(TOKENIZER_SCENES):
        for _, question, answer in ask_several(rng, draw_scene(rng), 4):
            texts += [question, answer]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    split = [word for word in pool_words() if len(tokenizer.encode(" " + word).ids) != 1]
    assert not split, f"pool words of several tokens: {split}"
    return tokenizer
