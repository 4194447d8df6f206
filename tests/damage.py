"""Seeded damage to JSON values and bytes, for tests of what reads files that others may have made."""

import json
from copy import deepcopy

ESCAPE = "\x1b[2J\x1b]0;title\x07\u202e\ud800\r\n"
NUMBERS = (0, -1, -0.0, 1 << 31, 1 << 53, 1 << 63, 10**19, 10**40, 10**400, 1e-320, 1e299, 1.7e308, -1e308)
VALUES = (None, True, False, "", "x", "\0", "٣", ESCAPE, "9" * 5000, [], {}, [[]], {"": {}}, *NUMBERS)
CONSTANTS = ("Infinity", "-Infinity", "NaN", "1e999", "-1e999", "[" * 900 + "]" * 900, "9" * 5000)


def damaged_json(value, random):
    """The text of a value with one to three places of it changed, dropped or put twice."""
    value = deepcopy(value)
    for _ in range(random.randint(1, 3)):
        _damage(value, random)
    text = json.dumps(value)
    for place, constant in enumerate(CONSTANTS):
        text = text.replace(f'"constant {place}"', constant)
    return text.encode()


def damaged_bytes(data, random):
    """One to four bytes changed, or some cut out, or repeated."""
    data = bytearray(data)
    for _ in range(random.randint(1, 4)):
        first = random.randrange(max(1, len(data)))
        how = random.choice(("byte", "cut", "again"))
        if how == "byte" and data:
            data[first] = random.randrange(256)
        elif how == "cut":
            del data[first : first + random.choice((1, 8, 1000))]
        else:
            data[first:first] = data[first : first + random.choice((1, 8, 100))]
    return bytes(data)


def _damage(value, random):
    places = list(_places(value))
    if not places:
        return
    inside, key = random.choice(places)
    how = random.random()
    if how < 0.2:
        del inside[key]
    elif how < 0.3 and isinstance(inside, dict):
        inside[random.choice(("kind", "step", ESCAPE, "constructor"))] = inside[key]
    elif how < 0.45:
        inside[key] = f"constant {random.randrange(len(CONSTANTS))}"
    else:
        inside[key] = random.choice(VALUES)


def _places(value):
    """(container, key) of everything inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)
