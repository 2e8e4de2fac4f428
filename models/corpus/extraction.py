"""Extraction into JSON: a sentence or two, a schema, and the object that holds exactly the named fields."""

from __future__ import annotations

import json
from collections.abc import Callable

from models.corpus import words
from models.corpus.document import CorpusDocument, Draw, Message, assistant, system, user

Fields = dict[str, str | int]

JOBS = (
    "teacher",
    "doctor",
    "baker",
    "farmer",
    "driver",
    "singer",
    "nurse",
    "cook",
    "painter",
    "writer",
    "pilot",
    "judge",
)
ROOMS = ("library", "main hall", "garden", "school", "museum", "office", "park", "theater")
EVENTS = ("meeting", "concert", "party", "wedding", "lesson", "dinner", "game", "festival")

PERSON_FORMS = (
    "{name} is {age} years old and lives in {city}. {name} works as a {job}.",
    "My friend {name}, a {job} from {city}, is {age} years old.",
    "{name} ({age}) lives in {city} and is a {job}.",
    "Meet {name}! {age} years old, {job}, from {city}.",
    "In {city} there is a {job} called {name}, who is {age}.",
)
ORDER_FORMS = (
    "{name} ordered {quantity} {item}s for {price} dollars.",
    "Order {order}: {quantity} {item}s for {name}, {price} dollars in all.",
    "{name} bought {quantity} {item}s and paid {price} dollars.",
    "Please send {quantity} {item}s to {name}. The price is {price} dollars.",
)
EVENT_FORMS = (
    "The {event} is on {day} at {hour} o'clock in the {place}.",
    "Join us on {day} for a {event} in the {place} at {hour} o'clock.",
    "There will be a {event} at the {place} this {day}, starting at {hour} o'clock. Call {name} for details.",
)
CONTACT_FORMS = (
    "You can reach {name} at {email} or by phone at {phone}.",
    "{name}'s email is {email} and the phone number is {phone}.",
    "Contact: {name}, {email}, {phone}.",
)
REQUESTS = (
    "Extract {fields} as JSON.",
    "Return {fields} as JSON.",
    "Extract the fields {fields} from the text as JSON.",
    "Give me a JSON object with {fields}.",
    "Extract JSON with the keys {fields}.",
)
SYSTEMS = (
    "You extract data and answer with JSON only.",
    "Answer with one JSON object and nothing else.",
    "Extract the requested fields as JSON.",
)


def _email(draw: Draw, name: str) -> str:
    first = name.split(maxsplit=1)[0].lower()
    number, host, domain = (
        draw.digits(2),
        draw.pick(("mail", "post", "work", "home")),
        draw.pick(("com", "org", "net")),
    )
    return f"{first}{number}@{host}.{domain}"


def _person(draw: Draw, name: str) -> Fields:
    return {"name": name, "age": draw.integer(5, 99), "city": draw.pick(words.CITIES), "job": draw.pick(JOBS)}


def _order(draw: Draw, name: str) -> Fields:
    order: Fields = {"name": name, "item": draw.pick(words.OBJECTS[:20]), "quantity": draw.integer(2, 60)}
    return {**order, "price": draw.integer(2, 999), "order": draw.code()}


def _event(draw: Draw, name: str) -> Fields:
    event: Fields = {"event": draw.pick(EVENTS), "day": draw.pick(words.DAYS), "hour": draw.integer(1, 12)}
    return {**event, "place": draw.pick(ROOMS), "name": name}


def _contact(draw: Draw, name: str) -> Fields:
    return {"name": name, "email": _email(draw, name), "phone": f"{draw.digits(3)}-{draw.digits(4)}"}


KINDS: tuple[tuple[tuple[str, ...], Callable[[Draw, str], Fields]], ...] = (
    (PERSON_FORMS, _person),
    (ORDER_FORMS, _order),
    (EVENT_FORMS, _event),
    (CONTACT_FORMS, _contact),
)


def record(draw: Draw) -> tuple[str, Fields]:
    """A text and every field that the text really states, in schema order."""
    forms, make = draw.pick(KINDS)
    fields = make(draw, draw.fresh(draw.person))
    form = draw.pick(forms)
    return form.format(**fields), {key: value for key, value in fields.items() if "{" + key + "}" in form}


def schema_of(fields: Fields) -> dict[str, object]:
    """The JSON schema that `fields` obeys."""
    types = {
        key: {"type": "integer" if isinstance(value, int) else "string"} for key, value in fields.items()
    }
    return {"type": "object", "properties": types, "required": list(fields)}


def extraction(draw: Draw) -> CorpusDocument:
    """One text, a wish for all of its fields or a few in any order, and the exact JSON."""
    text, fields = record(draw)
    keys = list(fields)
    if draw.chance(0.5):
        keys = draw.sample(keys, draw.integer(1, len(keys)))
    wanted = {key: fields[key] for key in keys}
    answer = json.dumps(wanted, ensure_ascii=False)
    messages: list[Message] = []
    if draw.chance(0.35):
        instruction = f"Answer with JSON that follows this schema:\n{json.dumps(schema_of(wanted))}"
        messages = [system(instruction), user(text)]
    else:
        if draw.chance(0.4):
            messages.append(system(draw.pick(SYSTEMS)))
        named = ", ".join(keys[:-1]) + " and " + keys[-1] if len(keys) > 1 else keys[0]
        request = draw.pick(REQUESTS).format(fields=named)
        content = f"{request}\n{text}" if draw.chance(0.7) else f"{text}\n{request}"
        messages.append(user(content))
    return CorpusDocument(task="extraction", messages=(*messages, assistant(answer)), answer=answer)


def list_extraction(draw: Draw) -> CorpusDocument:
    """Names or numbers of a sentence as a JSON array."""
    if draw.chance(0.5):
        items: list[str | int] = [draw.person() for _ in range(draw.integer(2, 4))]
        text, wish = (
            f"{', '.join(str(item) for item in items[:-1])} and {items[-1]} came to the party.",
            "all names",
        )
    else:
        items = [draw.integer(1, 999) for _ in range(draw.integer(2, 4))]
        text, wish = f"The numbers are {', '.join(str(item) for item in items)}.", "all numbers"
    answer = json.dumps(items)
    request = f"List {wish} in this text as a JSON array.\n{text}"
    return CorpusDocument(task="extraction", messages=(user(request), assistant(answer)), answer=answer)
