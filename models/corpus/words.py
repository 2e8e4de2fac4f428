"""Word lists that the corpus draws from: small on purpose, so that a 2,048-entry vocabulary covers them
well."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _split(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maya Noah Olivia Paul Rosa Sam Tom "
    "Vera Will Zoe Alice Bob Carol Daniel Ella Frank Hannah Ivan Julia Kevin Lily Mark Nina Oscar Peter "
    "Ruth Sara Theo Lena Omar Priya Hugo Mia Lucas Nora Max Amir Dora"
)
LAST_NAMES = _split(
    "Smith Brown Jones Miller Davis Wilson Moore Taylor White Harris Clark Lewis Young King Wright Hill "
    "Green Baker Carter Turner Parker Cook Morgan Bell Cooper Reed Ward Gray Stone Fisher Wood Marsh Lane "
    "Novak Costa Rossi Weber Silva Khan Tanaka"
)
CITIES = _split(
    "Paris London Berlin Madrid Rome Vienna Lisbon Dublin Oslo Prague Athens Cairo Tokyo Delhi Boston "
    "Chicago Denver Seattle Austin Toronto Sydney Lima Geneva Munich Milan Porto Warsaw Helsinki Budapest "
    "Nairobi"
)
COLOURS = _split("red blue green yellow white black brown orange purple pink gray golden silver")
ADJECTIVES = _split(
    "red blue green yellow white black brown golden silver gray small big old young quiet loud bright "
    "dark soft happy sad brave clever gentle warm cold quick slow tall tiny round sharp hidden lonely "
    "proud kind wild calm sweet fresh lucky strange heavy light early late northern southern eastern "
    "western royal secret lost"
)
NOUNS = _split(
    "apple river mountain garden window castle bridge forest lamp boat stone flower bell tower candle "
    "mirror drum ring key door book clock basket bottle cloud star moon sun tree leaf field road hill "
    "lake island harbor market village kitchen engine wagon hammer needle ladder blanket pillow table "
    "chair piano violin trumpet letter map coin crown sword shield arrow feather shell pearl diamond "
    "falcon eagle tiger lion wolf bear fox rabbit turtle dolphin whale owl robin spider ant bee horse cow "
    "sheep goat duck hen cat dog mouse frog snake"
)
ANIMALS = _split(
    "cat dog fox bear rabbit mouse owl duck horse frog turtle lion tiger wolf sheep goat hen cow robin bee"
)
OBJECTS = _split(
    "lamp chair table book clock basket bottle mirror blanket pillow drum piano violin ladder hammer "
    "candle bell map key cup bowl spoon plate knife bag coat hat shirt phone camera radio desk pen pencil "
    "box"
)
FOODS = _split(
    "apple bread cheese soup rice cake honey milk tea coffee salad pasta fish egg banana orange pear"
)
DAYS = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _split("January February March April May June July August September October November December")
ATTRIBUTES = _split("code number password color owner city price name room label")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NUMBER_WORDS = _split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
CONSONANTS = "bcdfghjklmnprstvz"
VOWELS = "aeiou"
