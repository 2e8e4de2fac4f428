"""Simple facts about the world: capitals, animals, colours, days, months, opposites, planets."""

from __future__ import annotations

from models.corpus import words
from models.corpus.document import CorpusDocument, Draw, Message, assistant, user

CAPITALS = {
    "France": "Paris",
    "England": "London",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Austria": "Vienna",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "India": "New Delhi",
    "Canada": "Ottawa",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Finland": "Helsinki",
    "Hungary": "Budapest",
    "Kenya": "Nairobi",
    "Sweden": "Stockholm",
    "Denmark": "Copenhagen",
    "Belgium": "Brussels",
    "Switzerland": "Bern",
    "Turkey": "Ankara",
    "Russia": "Moscow",
    "China": "Beijing",
    "Cuba": "Havana",
    "Chile": "Santiago",
    "Australia": "Canberra",
    "Brazil": "Brasilia",
    "Scotland": "Edinburgh",
    "Iceland": "Reykjavik",
    "Thailand": "Bangkok",
    "the United States": "Washington",
}
ANIMAL_FACTS = {
    "dog": ("barks", "puppy", 4),
    "cat": ("meows", "kitten", 4),
    "cow": ("moos", "calf", 4),
    "hen": ("clucks", "chick", 2),
    "duck": ("quacks", "duckling", 2),
    "sheep": ("bleats", "lamb", 4),
    "lion": ("roars", "cub", 4),
    "wolf": ("howls", "pup", 4),
    "horse": ("neighs", "foal", 4),
    "pig": ("grunts", "piglet", 4),
    "frog": ("croaks", "tadpole", 4),
    "bee": ("buzzes", "larva", 6),
    "owl": ("hoots", "owlet", 2),
    "bear": ("growls", "cub", 4),
    "goat": ("bleats", "kid", 4),
    "mouse": ("squeaks", "pup", 4),
}
COLOUR_OF = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "a banana": "yellow",
    "blood": "red",
    "coal": "black",
    "the sun": "yellow",
    "an orange": "orange",
    "milk": "white",
    "a leaf": "green",
    "a lemon": "yellow",
    "chocolate": "brown",
    "the sea": "blue",
    "a tomato": "red",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "happy": "sad",
    "up": "down",
    "day": "night",
    "old": "new",
    "light": "dark",
    "open": "closed",
    "high": "low",
    "wet": "dry",
    "loud": "quiet",
    "hard": "soft",
    "rich": "poor",
    "early": "late",
    "long": "short",
    "full": "empty",
    "clean": "dirty",
    "strong": "weak",
    "left": "right",
}
MIXES = {
    "blue and yellow": "green",
    "red and yellow": "orange",
    "red and blue": "purple",
    "black and white": "gray",
    "red and white": "pink",
}
OTHERS = {
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many days are in a year?": "There are 365 days in a year, and 366 in a leap year.",
    "How many hours are in a day?": "There are 24 hours in a day.",
    "How many minutes are in an hour?": "There are 60 minutes in an hour.",
    "How many seconds are in a minute?": "There are 60 seconds in a minute.",
    "What is the largest planet?": "Jupiter is the largest planet of our solar system.",
    "Which planet do we live on?": "We live on the planet Earth.",
    "What is the closest star?": "The closest star to us is the Sun.",
    "How many planets are there?": "There are eight planets in our solar system.",
    "Which planet is called the red planet?": "Mars is called the red planet.",
    "What is the largest ocean?": "The Pacific is the largest ocean.",
    "What is the largest animal?": "The blue whale is the largest animal.",
    "What is the tallest animal?": "The giraffe is the tallest animal.",
    "What is the fastest land animal?": "The cheetah is the fastest land animal.",
    "What do bees make?": "Bees make honey.",
    "What do plants need?": "Plants need water, light and air.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
    "At what temperature does water boil?": "Water boils at 100 degrees Celsius.",
    "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.",
    "What is ice?": "Ice is frozen water.",
    "Name the four seasons.": "The four seasons are spring, summer, autumn and winter.",
    "What are the primary colors?": "The primary colors are red, yellow and blue.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many continents are there?": "There are seven continents.",
    "What is the highest mountain?": "Mount Everest is the highest mountain on Earth.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "What is the moon?": "The moon is a ball of rock that goes around the Earth.",
    "Why is the sky blue?": "The air scatters blue light more than red light, so the sky looks blue.",
    "Name the days of the week.": "The days of the week are " + ", ".join(words.DAYS[:-1]) + " and Sunday.",
    "Name the months of the year.": "The months are " + ", ".join(words.MONTHS[:-1]) + " and December.",
}


def _an(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


CAPITAL_FORMS = (
    "What is the capital of {c}?",
    "Capital of {c}?",
    "Tell me the capital of {c}.",
    "Which city is the capital of {c}?",
    "What's the capital of {c}?",
    "Do you know the capital of {c}?",
    "what is the capital of {c}",
)
COUNTRY_FORMS = ("Which country has the capital {c}?", "{c} is the capital of which country?")


def _capital(draw: Draw) -> tuple[str, str]:
    country, capital = draw.pick(list(CAPITALS.items()))
    if draw.chance(0.25):
        return draw.pick(COUNTRY_FORMS).format(c=capital), f"{capital} is the capital of {country}."
    return draw.pick(CAPITAL_FORMS).format(c=country), f"The capital of {country} is {capital}."


def _animal(draw: Draw) -> tuple[str, str]:
    animal = draw.pick(list(ANIMAL_FACTS))
    sound, young, legs = ANIMAL_FACTS[animal]
    number = words.NUMBER_WORDS[legs]
    return draw.pick(
        (
            (f"What sound does {_an(animal)} make?", f"{_an(animal).capitalize()} {sound}."),
            (f"How many legs does {_an(animal)} have?", f"{_an(animal).capitalize()} has {number} legs."),
            (f"What is a young {animal} called?", f"A young {animal} is called {_an(young)}."),
            (f"What is a baby {animal} called?", f"A baby {animal} is called {_an(young)}."),
        )
    )


def _calendar(draw: Draw) -> tuple[str, str]:
    cycle, kind = draw.pick(((words.DAYS, "day"), (words.MONTHS, "month")))
    index = draw.integer(0, len(cycle) - 1)
    here, later, before = cycle[index], cycle[(index + 1) % len(cycle)], cycle[index - 1]
    return draw.pick(
        (
            (f"Which {kind} comes after {here}?", f"{later} comes after {here}."),
            (f"What comes after {here}?", f"{later} comes after {here}."),
            (f"Which {kind} comes before {here}?", f"{before} comes before {here}."),
            (f"What {kind} is before {here}?", f"{before} comes before {here}."),
        )
    )


def _word(draw: Draw) -> tuple[str, str]:
    kind = draw.integer(0, 3)
    if kind == 0:
        thing, colour = draw.pick(list(COLOUR_OF.items()))
        sentence = f"{thing[0].upper()}{thing[1:]} is {colour}."
        return draw.pick((f"What color is {thing}?", f"What is the color of {thing}?")), sentence
    if kind == 1:
        mix, colour = draw.pick(list(MIXES.items()))
        return f"What do you get when you mix {mix}?", f"When you mix {mix}, you get {colour}."
    one, other = draw.pick(list(OPPOSITES.items()))
    if draw.chance(0.5):
        one, other = other, one
    return draw.pick(
        (f"What is the opposite of {one}?", f"Opposite of {one}?")
    ), f"The opposite of {one} is {other}."


def _other(draw: Draw) -> tuple[str, str]:
    return draw.pick(list(OTHERS.items()))


def question_and_answer(draw: Draw) -> tuple[str, str]:
    return draw.pick((_capital, _capital, _animal, _calendar, _word, _other))(draw)


def fact(draw: Draw) -> CorpusDocument:
    """One to three questions in a conversation, each answered in one sentence."""
    messages: list[Message] = []
    for _ in range(draw.integer(1, 3)):
        question, answer = question_and_answer(draw)
        messages += [user(question), assistant(answer)]
    return CorpusDocument(task="facts", messages=tuple(messages), answer=messages[-1]["content"])
