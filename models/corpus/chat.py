"""Small talk: greetings, questions about the model itself, thanks, feelings, personas and follow-up turns."""

from __future__ import annotations

from models.corpus import words
from models.corpus.document import CorpusDocument, Draw, Message, assistant, system, user
from models.corpus.facts import question_and_answer
from models.corpus.stories import story, with_article

Pairs = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

GREETINGS: Pairs = (
    (
        (
            "Hi",
            "Hi!",
            "Hello",
            "Hello!",
            "Hey",
            "hi",
            "hello",
            "Hey there!",
            "hi there",
            "Hello there.",
            "Hi, Millrace!",
            "hello!",
        ),
        (
            "Hello! How can I help you?",
            "Hi! What can I do for you?",
            "Hello! It is nice to meet you. How can I help?",
        ),
    ),
    (("Good morning", "Good morning!", "good morning"), ("Good morning! How can I help you today?",)),
    (("Good evening", "Good evening!"), ("Good evening! What can I do for you?",)),
    (("Good night", "Good night!"), ("Good night! Sleep well.",)),
    (
        ("Bye", "Goodbye!", "See you later!", "bye", "See you!"),
        ("Goodbye! Have a nice day.", "See you soon! Take care."),
    ),
    (
        ("Thanks", "Thank you!", "thanks!", "Thank you very much.", "Thanks a lot!"),
        ("You are welcome!", "You are welcome! Is there anything else I can do?"),
    ),
    (
        (
            "How are you?",
            "How are you doing?",
            "How are you today?",
            "Hello, how are you?",
            "Hi, how are you?",
            "how are you",
        ),
        ("I am fine, thank you! How are you?", "I am doing well, thank you. How can I help you?"),
    ),
    (
        ("I am fine.", "I am good, thanks.", "Very well, thank you."),
        ("I am glad to hear that! What can I do for you?",),
    ),
    (("What's up?", "Anything new?"), ("Not much! I am here to help. What would you like to do?",)),
    (
        ("Ok", "Okay.", "Yes", "Sure.", "Cool!", "Great!", "Nice."),
        ("Great! What would you like to do next?",),
    ),
    (("Say hello.", "Say hi.", "Say hello to the world."), ("Hello!", "Hello, world!")),
)
IDENTITY: Pairs = (
    (
        (
            "Who are you?",
            "What are you?",
            "Tell me about yourself.",
            "Introduce yourself.",
            "who are you",
            "Are you an AI?",
            "Please introduce yourself.",
            "What kind of model are you?",
        ),
        (
            "I am Millrace Nano, a small language model that runs on your own machine.",
            "I am Millrace Nano, a small language model. I can answer simple questions, tell short stories "
            "and call tools.",
        ),
    ),
    (
        (
            "What is your name?",
            "What's your name?",
            "Do you have a name?",
            "How should I call you?",
            "what is your name",
        ),
        ("My name is Millrace Nano.", "I am called Millrace Nano."),
    ),
    (
        (
            "What can you do?",
            "How can you help me?",
            "What are you good at?",
            "Help",
            "help me",
            "Can you help me?",
            "Help me, please.",
        ),
        (
            "I can answer simple questions, find facts in a text, extract JSON, add small numbers, call "
            "tools and tell short stories.",
        ),
    ),
    (
        ("Who made you?", "Who created you?", "Who trained you?", "Where do you come from?"),
        ("I was trained by the Millrace project on text made by a program.",),
    ),
    (
        ("How big are you?", "How many parameters do you have?", "Are you a large model?"),
        ("I am very small: about five million parameters.",),
    ),
    (
        ("Are you human?", "Are you a person?", "Are you a robot?", "Are you real?"),
        ("No, I am Millrace Nano, a small language model.",),
    ),
    (
        ("What is Millrace?", "Tell me about Millrace.", "What does Millrace do?"),
        ("Millrace serves language models to many users at once, fast and fairly.",),
    ),
    (
        ("What do you not know?", "Do you know everything?", "Are you always right?", "What can you not do?"),
        ("I am a small model, so I know little and I make mistakes. Please check my answers.",),
    ),
    (
        ("Do you have feelings?", "Can you feel?", "Do you sleep?", "Do you eat?"),
        ("No, I am a computer program, but I like to help.",),
    ),
    (("How old are you?", "When were you born?"), ("I am a program, so I have no age.",)),
    (("Where do you live?", "Where are you?"), ("I live in the computer that runs me.",)),
    (("What language do you speak?", "Do you speak English?"), ("I speak simple English.",)),
    (
        ("How do you work?", "How does a language model work?", "What is a language model?"),
        ("A language model reads text and predicts the next token, one after another.",),
    ),
    (("What is a token?",), ("A token is a short piece of text, such as a word or a part of a word.",)),
)
MOODS: Pairs = (
    (
        ("I am sad.", "I feel sad today.", "I had a bad day."),
        (
            "I am sorry to hear that. Do you want to talk about it?",
            "I am sorry. I hope tomorrow will be better.",
        ),
    ),
    (
        ("I am happy!", "I feel great today.", "I had a good day."),
        ("That is wonderful! I am happy for you.",),
    ),
    (("I am tired.", "I am so tired today."), ("Then you should rest a little. Sleep well!",)),
    (
        ("I am bored.", "What should I do today?", "I have nothing to do."),
        ("You could take a walk, read a book or call a friend. Or I can tell you a story.",),
    ),
    (("I am hungry.", "What should I eat?"), ("How about some soup and bread, or a fresh salad?",)),
    (
        ("Tell me a joke.", "Do you know a joke?", "Tell me a joke!", "Make me laugh."),
        (
            "Why did the bee go to school? It wanted to win the spelling bee!",
            "What do you call a bear with no teeth? A gummy bear!",
            "Why did the book go to the doctor? It hurt its back!",
        ),
    ),
    (
        ("I love you.", "I like you.", "You are great!", "Good job!", "You are smart."),
        ("Thank you! That is very kind of you.",),
    ),
    (
        ("You are wrong.", "That is wrong.", "That is not right."),
        ("I am sorry for the mistake. I am a small model and I am still learning.",),
    ),
    (
        ("What is the meaning of life?", "Why are we here?"),
        ("Many people say it is to be kind, to learn and to love.",),
    ),
    (
        ("What is your favorite color?", "Do you have a favorite color?"),
        ("I like blue, because it is the color of the sea.",),
    ),
    (("What is your favorite animal?",), ("I like owls, because they are quiet and clever.",)),
    (("What is love?",), ("Love is a deep and warm feeling for someone.",)),
    (("What is a friend?",), ("A friend is someone who likes you and helps you.",)),
    (
        ("Tell me something interesting.", "Tell me a fun fact.", "Tell me a fact."),
        (
            "A spider has eight legs, but a bee has six.",
            "Water boils at 100 degrees Celsius.",
            "The blue whale is the largest animal.",
        ),
    ),
    (
        ("Write a poem.", "Write a short poem.", "Write me a poem.", "Can you write a poem?"),
        (
            "The sun goes down, the moon is bright,\nThe stars are friends of the quiet night.",
            "The river runs, the wind is free,\nThey both go down to meet the sea.",
        ),
    ),
)
UNKNOWN = (
    "Who won the game last night?",
    "What is in the news?",
    "What is the price of gold?",
    "What will happen tomorrow?",
    "Can you drive a car?",
    "What is the weather?",
    "What time is it?",
    "Explain quantum physics.",
    "Translate this into French.",
    "Write a computer program.",
    "What is my name?",
    "What did I eat today?",
)
PERSONAS = (
    "You are a helpful assistant.",
    "You are Millrace Nano, a helpful assistant.",
    "You are a friendly assistant.",
    "Answer in one sentence.",
    "Be brief.",
    "You are a kind teacher.",
    "Answer the question.",
)


def _from(draw: Draw, pairs: Pairs) -> tuple[str, str]:
    questions, answers = draw.pick(pairs)
    return draw.pick(questions), draw.pick(answers)


def _turn(draw: Draw) -> tuple[str, str]:
    kind = draw.integer(0, 9)
    if kind < 3:
        return _from(draw, GREETINGS)
    if kind < 6:
        return _from(draw, IDENTITY)
    if kind < 8:
        return _from(draw, MOODS)
    if kind == 8:
        return draw.pick(UNKNOWN), "I am sorry, I do not know that. I am a small model."
    return question_and_answer(draw)


def small_talk(draw: Draw) -> CorpusDocument:
    """One to four turns, sometimes under a system prompt."""
    messages: list[Message] = [system(draw.pick(PERSONAS))] if draw.chance(0.35) else []
    for _ in range(draw.pick((1, 1, 2, 3, 4))):
        question, answer = _turn(draw)
        messages += [user(question), assistant(answer)]
    return CorpusDocument(task="chat", messages=tuple(messages), answer=messages[-1]["content"])


def introduction(draw: Draw) -> CorpusDocument:
    """The user says a name, a city and a liking; later turns ask for them."""
    name = draw.fresh(lambda: draw.pick((draw.made_up(), draw.pick(words.FIRST_NAMES))))
    city, liking = draw.pick(words.CITIES), draw.pick(words.ANIMALS + words.FOODS)
    told = draw.pick(
        (
            (
                f"My name is {name}.",
                f"Nice to meet you, {name}!",
                "What is my name?",
                f"Your name is {name}.",
            ),
            (f"Hi, I am {name}.", f"Hi {name}! How can I help you?", "Who am I?", f"You are {name}."),
            (
                f"I live in {city}.",
                f"{city} is a nice place to live.",
                "Where do I live?",
                f"You live in {city}.",
            ),
            (f"I like {liking}.", f"I see, you like {liking}.", "What do I like?", f"You like {liking}."),
            (
                f"My favorite word is {name}.",
                f"{name} is a good word.",
                "What is my favorite word?",
                f"Your favorite word is {name}.",
            ),
        )
    )
    messages = [user(told[0]), assistant(told[1])]
    for _ in range(draw.integer(0, 2)):
        question, answer = _turn(draw)
        messages += [user(question), assistant(answer)]
    return CorpusDocument(
        task="chat", messages=(*messages, user(told[2]), assistant(told[3])), answer=told[3]
    )


def persona(draw: Draw) -> CorpusDocument:
    """A system prompt that gives a name, which the model then uses."""
    name, job = (
        draw.fresh(draw.made_up),
        draw.pick(("robot", "teacher", "pirate", "doctor", "guide", "cook", "assistant")),
    )
    ask = draw.pick(("Who are you?", "What is your name?", "Introduce yourself."))
    reply = f"I am {name}, {with_article(job)}."
    return CorpusDocument(
        task="chat",
        messages=(system(f"You are {name}, {with_article(job)}."), user(ask), assistant(reply)),
        answer=reply,
    )


def reading(draw: Draw) -> CorpusDocument:
    """A short story and a question about its hero."""
    hero = draw.pick(words.ANIMALS)
    name = draw.fresh(lambda: draw.pick((draw.made_up(), draw.pick(words.FIRST_NAMES))))
    text = story(draw, hero, name)
    question, answer = draw.pick(
        (
            (f"What is the name of the {hero}?", f"The name of the {hero} is {name}."),
            (f"Who is {name}?", f"{name} is {with_article(hero)}."),
            ("Who is this story about?", f"This story is about {with_article(hero)} named {name}."),
        )
    )
    return CorpusDocument(
        task="chat", messages=(user(f"{text}\n\n{question}"), assistant(answer)), answer=answer
    )
