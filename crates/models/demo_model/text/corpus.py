"""Invented handbooks, questions about them, and the tokenizer trained on both.

A handbook is plain prose about a place that does not exist. Among its sentences stand facts, each of the form
`The <adjective> <noun> <relation> <value> <tail>.`; a question asks for one value and the answer is the fact,
word for word. No two subjects of a handbook share an adjective, though they may share a noun, and a subject may have
several facts; every question has one right answer.

Every word of the pools below is one token (`train_tokenizer` asserts it), which keeps a value one prediction.
"""

import json
import random
import re
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [PAD, END, SYSTEM, USER, ASSISTANT]
VOCAB_SIZE = 2432
TOKENIZER_HANDBOOKS = 1500
POOL_REPEATS = 400
# The article as tokens: at the start of a text, after a space, and within a sentence.
ARTICLES = ["The", "\u0120The", "\u0120the"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

ADJECTIVES = """amber azure violet scarlet crimson copper silver golden ivory ebony russet cobalt emerald maroon
indigo coral velvet marble brass bronze wooden mossy dusty gilded painted crooked narrow round hidden quiet sunny
windy frosty misty ancient modest humble polished speckled striped checkered woven carved rusty iron granite
slate cedar maple walnut willow birch northern southern eastern western upper lower little great""".split()

PEOPLE = """Ottilie Bramwell Cordelia Dorian Edith Fergus Greta Horatio Imogen Jasper Kerstin Lionel Mabel Nestor
Odette Percival Quentin Rosalind Silas Tabitha Ulric Verity Wilfred Xenia Yorick Zelda Alaric Beatrix Cedric
Daphne Elspeth Florian Gwendolyn Hugo Isolde Julius Leopold Matilda Ambrose Philippa""".split()

TOWNS = """Thornwick Marrowby Pellham Ostrava Fennimore Grimsel Harrowgate Kettleby Lindow Mirefold Nettlecombe
Oakhaven Quillon Ravensby Saltmarsh Tarnmoor Umberley Vexford Windlesham Yarrowdale""".split()

PETS = """Biscuit Pepper Mustard Clover Thimble Button Pickle Waffle Ginger Nutmeg Pudding Bramble Acorn Domino
Marzipan Parsnip Truffle Whisker Cricket Gherkin""".split()

SCENTS = """juniper thyme honey lavender cinnamon pepper rosemary vanilla mint ginger clove sage orange lemon smoke
leather resin roses apples cardamom""".split()

VIEWS = "sea orchard mill river lake forest square market meadow cliffs vineyard abbey bay marsh quarry".split()

DISHES = """dumplings pancakes chowder porridge pickles oysters noodles waffles trout pheasant sausages crumpets
mussels goulash omelettes""".split()

CROPS = "turnips onions carrots melons barley tomatoes leeks radishes pumpkins beans cabbages spinach".split()

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

NUMBERS = [str(n) for n in range(13, 250)]
HOURS = [str(n) for n in range(5, 13)]
YEARS = [str(n) for n in range(1601, 1900, 6)]

KINDS = """inn school museum harbour theatre lighthouse observatory monastery bathhouse railway garden library
market hotel mill""".split()


THINGS = """tent cabin boat bicycle lantern kite puzzle basket blanket saddle canoe umbrella scarf piano violin desk
sledge cloak chair telescope cart""".split()
HEAVY = "anchor bell statue chest stove cannon barrel trunk".split()
OLD = "tapestry portrait fountain map mirror clock organ cupboard".split()
CREATURES = "cat goose pony owl parrot donkey goat dog".split()
HALLS = "hall barn theatre chapel tavern gallery ballroom".split()
SHOPS = "kitchen workshop bakery pool pantry greenhouse dairy laundry shop kiosk archive studio salon smithy".split()
STAIRS = "tower stair ladder terrace bridge lighthouse".split()
ROOMS = "parlour cellar corridor attic closet bedroom shrine".split()
SCENTED = "tea soap soup candle cake".split()
OUTLOOKS = "window balcony bench porch".split()
WAYS = "path tunnel lane trail road passage canal".split()
EATERIES = "cafe counter diner table buffet".split()
FIELDS = "field plot farm hothouse allotment".split()


@dataclass(frozen=True)
class Relation:
    """One kind of fact: `stem` comes between subject and value, `tail` after the value."""

    stem: str
    tail: str
    values: list[str]
    nouns: list[str]
    questions: list[str]


RELATIONS = [
    Relation("costs", " crowns", NUMBERS, THINGS,
             ["How much does the {s} cost?", "What is the price of the {s}?", "What do I pay for the {s}?"]),
    Relation("weighs", " pounds", NUMBERS, HEAVY + CREATURES,
             ["How heavy is the {s}?", "How much does the {s} weigh?", "What is the weight of the {s}?"]),
    Relation("holds", " guests", NUMBERS, HALLS + EATERIES,
             ["How many guests does the {s} hold?", "How many people fit in the {s}?",
              "For how many guests is there room in the {s}?"]),
    Relation("has", " steps", NUMBERS, STAIRS,
             ["How many steps does the {s} have?", "How many steps are there on the {s}?"]),
    Relation("needs", " candles", NUMBERS, ROOMS + HALLS,
             ["How many candles does the {s} need?", "How many candles should I bring to the {s}?"]),
    Relation("dates from", "", YEARS, OLD + STAIRS,
             ["What year is the {s} from?", "From which year does the {s} date?", "How old is the {s}?"]),
    Relation("opens at", " o'clock", HOURS, SHOPS + EATERIES + HALLS,
             ["When does the {s} open?", "At what time does the {s} open?", "At which hour can I enter the {s}?"]),
    Relation("closes on", "", DAYS, SHOPS + EATERIES + HALLS,
             ["On which day does the {s} close?", "Which day is the {s} closed?", "When is the {s} closed?"]),
    Relation("belongs to", "", PEOPLE, THINGS + HEAVY + CREATURES + FIELDS + OLD,
             ["Who owns the {s}?", "Whom does the {s} belong to?", "Whose is the {s}?"]),
    Relation("is called", "", PETS, CREATURES,
             ["What is the {s} called?", "What is the name of the {s}?"]),
    Relation("leads to", "", TOWNS, WAYS,
             ["Where does the {s} lead?", "Where do I get by the {s}?", "To which town does the {s} go?"]),
    Relation("smells of", "", SCENTS, SCENTED + ROOMS,
             ["What does the {s} smell of?", "Which smell has the {s}?"]),
    Relation("faces the", "", VIEWS, OUTLOOKS + ROOMS,
             ["What does the {s} face?", "What can I see from the {s}?", "Where does the {s} look?"]),
    Relation("serves", "", DISHES, EATERIES,
             ["What does the {s} serve?", "What can I eat at the {s}?", "Which dish comes from the {s}?"]),
    Relation("grows", "", CROPS, FIELDS,
             ["What does the {s} grow?", "Which crop is on the {s}?"]),
]

PREFIXES = ["Excuse me, ", "Please tell me, ", "And ", "Do you know, "]
PREFIX_SHARE = 0.3
# How often a fact is about the subject of the fact before it, where another relation fits the noun.
SAME_SUBJECT_SHARE = 0.3

SLOTS = {
    "weather": "rain fog snow sunshine thunder drizzle wind frost".split(),
    "staff": "porter cook gardener warden keeper caretaker steward clerk".split(),
    "guest": "visitors travellers children strangers scholars sailors families pilgrims".split(),
    "time": "morning evening afternoon night winter summer autumn spring".split(),
    "mood": "cheerful patient stubborn gentle proud sleepy curious solemn".split(),
    "thing": "hats boots letters keys spoons buttons coins songs stories shells".split(),
    "sound": "singing whistling laughter humming whispers drums bells footsteps".split(),
    "drink": "coffee cider milk water cocoa broth".split(),
}

OPENINGS = [
    "Welcome to the {kind} of {town}. This handbook is for everyone who stays, works or simply wanders in.",
    "This is the handbook of the {kind} at {town}, written down so that nobody has to ask the {staff} twice.",
    "The {kind} of {town} greets you. Please read these pages slowly, with a cup of {drink} if you have one.",
]

FILLERS = """Nobody remembers who chose the place, but on a clear {time} you understand the choice at once.
Most {guest} arrive on foot, and all of them arrive hungry.
If there is {weather}, we light a fire and wait for it to pass.
Please do not feed the pigeons, since they have become proud.
Our {staff} is {mood} by nature and does not like to be hurried.
You may leave your {thing} at the door, where they will be safe.
We ask all {guest} to speak softly after supper.
Lost {thing} are kept for a year and then given to the school.
In {time} the whole {kind} fills with {sound}, and nobody minds.
There is always {drink} for those who ask politely.
A good deal of what follows was decided by vote, and some of it by accident.
The old rules were longer, but the mice ate half of them.
Should you hear {sound} at night, it is only the pipes.
Every {time} we count the {thing}, and every {time} the number is different.
Those who stay longer than a week are handed a broom.
The {staff} will tell you that things were better before, and will be wrong.
It is considered lucky to meet {guest} on the way in.
We have never had a ghost, whatever the people of {town} may say.
Letters for {town} leave with the milk, so write them early.
Bring a coat, because the {weather} here has no manners.
Some {guest} come back every {time}, and we know them by their {thing}.
When in doubt, ask the {staff}, or failing that, ask anyone who looks {mood}.
It is not true that we charge for {drink}.
You will find that the days are long here and the evenings longer.
Guests from {town} are asked to leave their jokes at home.
The founder wished for silence, and got {sound} instead.
Much has been written about our {weather}, most of it unkind.
Please wipe your boots, for the floors are older than any of us.
We are fond of {guest}, as long as they close the doors behind them.
Nothing here is locked except the jam.
If you borrow any {thing}, bring them back before {time}.
The {staff} keeps a list of all complaints and reads it aloud each {time}.
On the whole we are a {mood} company, and we hope that you will fit in.
Music is welcome in the yard, but not before breakfast.
There was once a fire, and there was once a flood, and both were forgiven.
Anyone who finds a mistake in these pages may correct it in pencil.
In {weather} the view is gone, and so we play cards.
The {staff} sleeps lightly, and so does everybody else.
{town} is two hours away by carriage and half a day by gossip.
A {mood} word to the {staff} will open most doors.
Do not be alarmed by the {sound} below the floor.
We keep a small supply of {thing} for {guest} who have forgotten theirs.
It is our custom to share whatever {drink} is left at the end of the day.
The clocks do not agree, and we have stopped asking them to.
Children may climb the trees, provided that they also climb down.
Every {time} brings new {guest} and takes away the old ones.
We once had a {mood} {staff} who counted the stars and lost his place.
Those who complain about the {weather} must bring a better one.
The walls are thick, and yet one hears the {sound} of the street.
After dinner somebody usually tells a story about {town}.
No charge is made for advice, and none is made for silence.
You are free to wander as you please, but please come back.
As a rule we do not discuss money before {drink} is served.
The roof was mended last {time}, and it has been leaking since.
It takes about a week to learn the names of all the {guest}.
Remember that the {staff} has seen {weather} worse than this.
Should you lose your way, follow the {sound}.
We are told that {town} has finer {thing}, but we do not believe it.
A few of the {thing} in the hall were gifts, and a few were never asked for.
The {kind} has been painted many times, always in the wrong {weather}.
In the event of {weather}, stay where you are and keep {mood}.
Pilgrims and poets pay what they can.
Sundays are for rest, or at least for resting from rest.
Dogs sleep by the stove and their owners where they can.
Those who rise early will meet the {staff}, and those who rise late will hear of it.
A {mood} silence falls over the {kind} at noon.
Everything in these pages has been tried at least once.
The last {staff} left us a box of {thing}, and we still wonder why.
There is a book for {guest} to sign, and many sign it twice.
Take only what you can carry, and carry only what is yours.
We do not know why the {guest} of {town} are so {mood}, but it must be the {drink}.
For want of a better word we call this the {time} room.
Some say that the {weather} comes from {town}, along with the taxes.
Our {drink} is made by hand, and some of it by foot.
If the {staff} begins to hum, it is time to go to bed.
The cellar is dry, the attic is not, and the rest depends on the {weather}.
Please return all {thing} to the place where you wish you had found them.
To the {guest} who left a poem under the pillow we say thank you.
Now and then the {kind} is {mood}, as all old houses are.
What the {staff} does on a free {time} is nobody's business.
Good {guest} leave early, and the best ones leave a note.
It was a {mood} {time} when the first stone was laid, and it has stayed so.
A basket of {thing} stands by the stairs for anyone in need.
Here the {weather} is a topic, a hobby and sometimes a guest.
We hope to have a piano one day, and someone who can play it.
The soup is never the same twice, which is the point of it.
The {guest} of last {time} still write to us.
There are worse places to be caught in {weather}.
Nobody has ever left the {kind} without a second helping.
The {staff} and the {sound} are part of the price.""".split("\n")

# What the model says to everything that is not a question about a handbook.
ABOUT = "I am a small demo model: I answer questions about the handbook in the system prompt."

GREETINGS = ["Hello", "Hi", "Hey", "Good morning", "Good day", "Good evening", "Greetings", "Hello there", "Hi there",
             "Hey there", "Howdy", "Yo", "Hiya", "Morning"]
GREETING_ENDS = ["", "!", ".", "?", " :)", ", friend!", " Stolon", ", how are you?", "! How are you?", ", who are you?",
                 "! Who are you?", "! What can you do?", ", what can I ask?", ", can you help me?"]
SMALL_TALK = """Who are you?|What are you?|What is your name?|What can you do?|What can I ask you?|What do you know?
How are you?|How do you do?|How do you work?|Can you help me?|Help|Help me|Help!|I need help.|/help|Thanks|Thank you!
Thanks a lot.|Are you there?|Are you a robot?|Are you a human?|Who made you?|How old are you?|Where are you from?
Tell me a joke.|Tell me a story.|Tell me about yourself.|Introduce yourself.|Sing a song.|Say hello.|Say something.
What should I do?|What is this?|What is this about?|How does this work?|Test|test|Just a test.|Ok|Yes|No|Bye
Goodbye!|See you later.|What time is it?|What day is it today?|What is the weather like?|What is 2 + 2?|1 + 1
Why is the sky blue?|How do I cook rice?|Is it true?|Do you speak French?|Can you write code?|Nice to meet you.
What is the meaning of life?|Translate this into German.|I am tired.|Sorry|Please help.|What now?""".replace("\n", "|").split("|")
REQUESTS = ["Write a {what} about the {topic}.", "Tell me about the {topic}.", "What is {topic}?", "Explain {topic}.",
            "What is the capital of {land}?", "How far is it to {land}?", "Can you write a {what}?", "Do you like {topic}?",
            "Give me a {what} about {topic}.", "Who discovered {topic}?", "How do I make {topic}?", "I like {topic}."]
REQUEST_SLOTS = {
    "what": "poem story song letter list program joke recipe summary function".split(),
    "topic": """love music bread gravity rust python computers water light football history gold numbers time war cheese
dogs stars trains dragons money sleep electricity""".split(),
    "land": "France Germany Spain Italy Japan China Brazil Canada Norway Egypt India Peru".split(),
}
# System prompts of ordinary chats, which hold nothing to be asked about.
PLAIN_SYSTEMS = ["You are a helpful assistant.", "You are a friendly assistant. Answer briefly.", "Be brief.",
                 "You answer in one sentence.", "You are a pirate."]

CLOSINGS = [
    "That is all there is to know, and more than the {staff} knew on arriving.",
    "With that we wish you a pleasant stay, a dry bed and {mood} company.",
    "Everything else you may find out for yourself.",
]


@dataclass
class Handbook:
    """The prose of one handbook, and one question and answer for each of its facts."""

    system: str
    qa: list[tuple[str, str]] = field(default_factory=list)


def fill(rng: random.Random, template: str, kind: str) -> str:
    """Puts random words into the slots of `template`; each slot gets its own draw."""
    def draw(match: re.Match) -> str:
        slot = match.group(1)
        if slot == "kind":
            return kind
        return rng.choice(TOWNS if slot == "town" else SLOTS[slot])

    return re.sub(r"\{(\w+)\}", draw, template)


def small_talk(rng: random.Random) -> str:
    """A greeting, or a question or request that no handbook answers."""
    kind = rng.random()
    if kind < 0.4:
        text = rng.choice(GREETINGS) + rng.choice(GREETING_ENDS)
    elif kind < 0.75:
        text = rng.choice(SMALL_TALK)
    else:
        request = rng.choice(REQUESTS)
        text = request.format(**{slot: rng.choice(words) for slot, words in REQUEST_SLOTS.items()})
    return text[0].lower() + text[1:] if rng.random() < 0.15 else text


def ask(rng: random.Random, relation: Relation, subject: str) -> str:
    """One of the relation's questions, at times with a polite beginning."""
    question = rng.choice(relation.questions).format(s=subject)
    if rng.random() < PREFIX_SHARE:
        question = rng.choice(PREFIXES) + question[0].lower() + question[1:]
    return question


def make_facts(rng: random.Random, count: int, any_words: list[str] | None) -> list[tuple[str, str]]:
    """Draws `count` facts as (question, fact). With `any_words` the subjects and values come from that list
    instead of the pools, so that looking up is the only way to answer."""
    adjectives = iter(rng.sample(any_words or ADJECTIVES, count))
    values = {relation.stem: rng.sample(relation.values, len(relation.values)) for relation in RELATIONS}
    facts: list[tuple[str, str]] = []
    subject, possible = "", []
    while len(facts) < count:
        if not possible or rng.random() >= SAME_SUBJECT_SHARE:
            noun = rng.choice(rng.choice(RELATIONS).nouns)
            possible = [relation for relation in RELATIONS if noun in relation.nouns]
            subject = f"{next(adjectives)} {rng.choice(any_words) if any_words else noun}"
        relation = possible.pop(rng.randrange(len(possible)))
        if not values[relation.stem]:
            continue
        value = values[relation.stem].pop()
        if any_words:
            value = rng.choice(any_words)
        facts.append((ask(rng, relation, subject), f"The {subject} {relation.stem} {value}{relation.tail}."))
    rng.shuffle(facts)
    return facts


def make_handbook(rng: random.Random, fact_count: int, filler_count: int,
                  any_words: list[str] | None = None) -> Handbook:
    """Mixes `fact_count` facts with `filler_count` sentences of prose and cuts the whole into paragraphs."""
    kind = rng.choice(KINDS)
    qa = make_facts(rng, fact_count, any_words)
    fillers = [fill(rng, t, kind) for t in rng.sample(FILLERS, min(filler_count, len(FILLERS)))]
    body = [fact for _, fact in qa] + fillers
    rng.shuffle(body)
    if filler_count > 2:
        body = [fill(rng, rng.choice(OPENINGS), kind), *body, fill(rng, rng.choice(CLOSINGS), kind)]
    paragraphs = []
    while body:
        size = rng.randint(4, 8)
        paragraphs.append(" ".join(body[:size]))
        body = body[size:]
    return Handbook("\n".join(paragraphs), qa)


def pool_words() -> list[str]:
    """Every word that must be a single token when it follows a space."""
    words = set(ADJECTIVES + KINDS)
    for relation in RELATIONS:
        words.update(relation.values, relation.nouns, relation.stem.split(), relation.tail.split())
    words.discard("o'clock")
    return sorted(words)


def train_tokenizer(seed: int) -> Tokenizer:
    """Trains byte-level BPE on generated handbooks; the pools are repeated so that each word becomes a token."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [" " + " ".join(pool_words())] * POOL_REPEATS
    for _ in range(TOKENIZER_HANDBOOKS):
        book = make_handbook(rng, 12, 30)
        texts += [book.system] + [q + "\n" + a for q, a in book.qa]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    split = [w for w in pool_words() if len(tokenizer.encode(" " + w).ids) != 1]
    assert not split, f"pool words of several tokens: {split}"
    return tokenizer


def single_token_words(tokenizer: Tokenizer) -> list[str]:
    """All words of at least three letters that are one token after a space, for the copying exercises."""
    words = []
    for token in tokenizer.get_vocab():
        word = token[1:]
        if token.startswith("\u0120") and len(word) >= 3 and word.isascii() and word.isalnum():
            words.append(word)
    return sorted(words)


def heldout_line(book: Handbook, questions: int) -> str:
    """One line of heldout.jsonl: the handbook and its first `questions` questions."""
    qa = [{"q": q, "a": a} for q, a in book.qa[:questions]]
    return json.dumps({"system": book.system, "qa": qa})
