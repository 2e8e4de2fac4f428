"""Short stories from a small grammar: a hero, a wish, a trouble, help, and an end that fits."""

from __future__ import annotations

from models.corpus import words
from models.corpus.document import CorpusDocument, Draw, assistant, user

PLACES = (
    "near a quiet river",
    "in a small village",
    "on a green hill",
    "by the sea",
    "in an old castle",
    "in a dark forest",
    "in a big city",
    "on a farm",
    "on a tiny island",
    "at the edge of a lake",
)
TRAITS = ("brave", "kind", "clever", "happy", "quiet", "curious", "gentle", "proud", "shy", "little")
WISHES = (
    ("wanted to see the sea", "walked to the shore and watched the waves"),
    ("wanted to find a friend", "was never lonely again"),
    ("wanted to learn to sing", "sang a sweet song for everyone"),
    ("wanted to touch the moon", "learned that the moon is best seen from home"),
    ("wanted to build a boat", "sailed across the lake"),
    ("wanted to bake a cake", "shared the cake with the whole village"),
    ("wanted to grow a garden", "saw the first flower open in the spring"),
    ("wanted to climb the mountain", "stood at the top and smiled"),
    ("wanted to find a golden key", "opened the old door and found a room full of books"),
    ("wanted to give a gift to the queen", "was thanked by the queen in front of everyone"),
)
TROUBLES = (
    "But the road was long and it began to rain.",
    "But a strong wind came and night fell.",
    "But nobody knew the way.",
    "But the bridge was broken.",
    "But {he} was a little afraid.",
    "One day {he} got lost in the snow.",
    "At first nothing worked and {he} felt sad.",
)
HELPERS = (
    'Then {a_helper} came by and said, "Do not worry, I will help you."',
    'Then {he} met {a_helper}. "Come with me," said the {helper}.',
    "Luckily {a_helper} lived close by and knew what to do.",
    'In the morning {he} saw {a_helper}. "Can you help me?" {he} asked, and the {helper} said yes.',
)
MIDDLES = (
    "Together they worked all day.",
    "They walked side by side and told each other jokes.",
    "They shared some {food} and made a plan.",
    "They tried again and again, and did not give up.",
)
ENDS = (
    "In the end {name} {result}.",
    "At last {name} {result}, and they were friends for ever.",
    "That evening {name} {result}. It was the best day of all.",
)
REQUESTS = (
    "Write a short story about {topic}.",
    "Tell me a story about {topic}.",
    "Can you tell me a story about {topic}?",
    "Please write a story about {topic}.",
    "I would like a short story about {topic}.",
    "Write a story about {topic}.",
)

HEROES = (*words.ANIMALS, "girl", "boy", "king", "farmer", "robot", "dragon")


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def story(draw: Draw, hero: str = "", name: str = "", place: str = "") -> str:
    """Five to seven sentences, about 75 tokens."""
    hero = hero or draw.pick(HEROES)
    name = name or draw.pick(words.FIRST_NAMES)
    he = {"girl": "she", "boy": "he", "king": "he"}.get(hero) or draw.pick(("he", "she"))
    helper = draw.pick([animal for animal in words.ANIMALS if animal != hero])
    wish, result = draw.pick(WISHES)
    trait = draw.pick(TRAITS)
    slots = {
        "he": he,
        "name": name,
        "result": result,
        "helper": helper,
        "a_helper": with_article(f"{draw.pick(TRAITS)} {helper}"),
        "food": draw.pick(words.FOODS),
    }
    opening = draw.pick(("Once upon a time there was", "There once was", "Long ago there lived"))
    sentences = [
        f"{opening} {with_article(f'{trait} {hero}')} named {name} who lived {place or draw.pick(PLACES)}.",
        f"{name} {wish}.",
        draw.pick(TROUBLES).format(**slots),
        draw.pick(HELPERS).format(**slots),
        draw.pick(MIDDLES).format(**slots),
        draw.pick(ENDS).format(**slots),
    ]
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def story_chat(draw: Draw) -> CorpusDocument:
    """A request that fixes the hero, and sometimes the name or the place, answered by a story that keeps
    to it."""
    hero = draw.pick(HEROES)
    topic, name, place = with_article(hero), "", ""
    if draw.chance(0.3):
        name = draw.pick(words.FIRST_NAMES)
        topic += f" named {name}"
    if draw.chance(0.2):
        place = draw.pick(PLACES)
        topic += f" {place}"
    request = "Tell me a story." if draw.chance(0.1) else draw.pick(REQUESTS).format(topic=topic)
    text = story(draw) if request == "Tell me a story." else story(draw, hero, name, place)
    return CorpusDocument(task="story", messages=(user(request), assistant(text)))
