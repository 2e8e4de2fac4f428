"""Little exercises with words: lists, repeating, spelling, reversing, sorting, joining, plurals."""

from __future__ import annotations

from models.corpus import words
from models.corpus.document import CorpusDocument, Draw, assistant, user

CATEGORIES = {
    "animals": words.ANIMALS,
    "colors": words.COLOURS[:10],
    "cities": words.CITIES,
    "foods": words.FOODS,
    "names": words.FIRST_NAMES,
    "things in a house": words.OBJECTS,
}
SHORT_WORDS = (
    "cat",
    "dog",
    "sun",
    "moon",
    "tree",
    "book",
    "star",
    "fish",
    "bird",
    "lamp",
    "door",
    "ring",
    "bear",
    "wolf",
    "cake",
    "milk",
)


def _list(draw: Draw) -> tuple[str, str]:
    category = draw.pick(list(CATEGORIES))
    count = draw.integer(2, 5)
    chosen = draw.sample(CATEGORIES[category], count)
    number = draw.pick((str(count), words.NUMBER_WORDS[count]))
    if draw.chance(0.4):
        lines = "\n".join(f"{index}. {item}" for index, item in enumerate(chosen, 1))
        return draw.pick(
            (f"Write a list of {number} {category}.", f"Make a numbered list of {number} {category}.")
        ), lines
    sentence = ", ".join(chosen[:-1]) + f" and {chosen[-1]}."
    return draw.pick((f"Name {number} {category}.", f"Give me {number} {category}.")), sentence[
        0
    ].upper() + sentence[1:]


def _repeat(draw: Draw) -> tuple[str, str]:
    text = " ".join(
        draw.pick((draw.thing, draw.code, draw.made_up, draw.person))() for _ in range(draw.integer(1, 5))
    )
    form = draw.pick(
        ("Repeat: {t}", "Repeat after me: {t}", "Say this again: {t}", "Copy this text: {t}", 'Say "{t}".')
    )
    return form.format(t=text), text


def _spell(draw: Draw) -> tuple[str, str]:
    word = draw.pick(SHORT_WORDS)
    letters = list(word)
    return draw.pick(
        (
            (f"Spell {word}.", "-".join(letters)),
            (f"How do you spell {word}?", "-".join(letters)),
            (
                f"Reverse the word {word}.",
                "-".join(letters) + " backwards is " + "".join(reversed(letters)) + ".",
            ),
            (
                f"How many letters are in {word}?",
                f"The word {word} has {words.NUMBER_WORDS[len(word)]} letters.",
            ),
        )
    )


def _order(draw: Draw) -> tuple[str, str]:
    chosen = draw.sample(words.NOUNS, draw.integer(2, 4))
    listed = ", ".join(chosen)
    return draw.pick(
        (
            (f"What is the first word of this list: {listed}?", f"The first word is {chosen[0]}."),
            (f"What is the last word of this list: {listed}?", f"The last word is {chosen[-1]}."),
            (
                f"How many words are in this list: {listed}?",
                f"There are {words.NUMBER_WORDS[len(chosen)]} words.",
            ),
            (f"Reverse this list: {listed}", ", ".join(reversed(chosen))),
            (f"Write these words as a list: {listed}", "\n".join(f"- {word}" for word in chosen)),
        )
    )


def _sort(draw: Draw) -> tuple[str, str]:
    numbers = draw.sample(range(1, 100), draw.integer(2, 4))
    listed = ", ".join(str(number) for number in numbers)
    return f"Sort these numbers: {listed}", ", ".join(str(number) for number in sorted(numbers))


def _choose(draw: Draw) -> tuple[str, str]:
    animal = draw.pick(words.ANIMALS)
    thing = draw.pick(words.OBJECTS)
    one, other = draw.sample((animal, thing), 2)
    return draw.pick(
        (
            (f"Which one is an animal: {one} or {other}?", f"The {animal} is an animal."),
            (f"Is a {animal} an animal? Answer yes or no.", "Yes"),
            (f"Is a {thing} an animal? Answer yes or no.", "No"),
        )
    )


def wordplay(draw: Draw) -> CorpusDocument:
    question, answer = draw.pick((_list, _list, _repeat, _repeat, _spell, _order, _sort, _choose))(draw)
    return CorpusDocument(task="wordplay", messages=(user(question), assistant(answer)), answer=answer)
