"""The closed world of the tiny language model: what there is, and the facts about it."""

from __future__ import annotations

from typing import NamedTuple

CITIES = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "Portugal": "Lisbon", "England": "London", "Ireland": "Dublin", "Belgium": "Brussels",
    "Austria": "Vienna", "Switzerland": "Bern", "Poland": "Warsaw", "Hungary": "Budapest",
    "Greece": "Athens", "Sweden": "Stockholm", "Norway": "Oslo", "Denmark": "Copenhagen",
    "Finland": "Helsinki", "Iceland": "Reykjavik", "Romania": "Bucharest", "Bulgaria": "Sofia",
    "Serbia": "Belgrade", "Croatia": "Zagreb", "Ukraine": "Kyiv", "Russia": "Moscow",
    "Latvia": "Riga", "Estonia": "Tallinn", "Lithuania": "Vilnius", "Turkey": "Ankara",
    "China": "Beijing", "Japan": "Tokyo", "India": "New Delhi", "Thailand": "Bangkok",
    "Vietnam": "Hanoi", "Nepal": "Kathmandu", "Mongolia": "Ulaanbaatar", "Iran": "Tehran",
    "Iraq": "Baghdad", "Jordan": "Amman", "Lebanon": "Beirut", "Indonesia": "Jakarta",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Ghana": "Accra", "Nigeria": "Abuja",
    "Senegal": "Dakar", "Ethiopia": "Addis Ababa", "Morocco": "Rabat", "Tunisia": "Tunis",
    "Uganda": "Kampala", "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana",
    "Peru": "Lima", "Chile": "Santiago", "Brazil": "Brasilia", "Colombia": "Bogota",
    "Argentina": "Buenos Aires", "Uruguay": "Montevideo", "Ecuador": "Quito",
    "Australia": "Canberra",
}  # fmt: skip

_COUNTRIES = list(CITIES)
CONTINENTS = {
    "Europe": tuple(_COUNTRIES[: _COUNTRIES.index("Turkey")]),
    "Asia": tuple(_COUNTRIES[_COUNTRIES.index("China") : _COUNTRIES.index("Egypt")]),
    "Africa": tuple(_COUNTRIES[_COUNTRIES.index("Egypt") : _COUNTRIES.index("Canada")]),
    "America": tuple(_COUNTRIES[_COUNTRIES.index("Canada") : _COUNTRIES.index("Australia")]),
}

COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink", "orange", "grey")

THINGS = {
    "the sky": "blue", "the sea": "blue", "the sun": "yellow", "the moon": "white",
    "grass": "green", "snow": "white", "milk": "white", "blood": "red", "coal": "black",
    "the night": "black", "a lemon": "yellow", "a banana": "yellow", "a tomato": "red",
    "a cherry": "red", "a carrot": "orange", "a pumpkin": "orange", "a leaf": "green",
    "a frog": "green", "a cucumber": "green", "a pig": "pink", "a flamingo": "pink",
    "an elephant": "grey", "a mouse": "grey", "a rock": "grey", "a bear": "brown",
    "chocolate": "brown", "wood": "brown", "a swan": "white", "sugar": "white",
    "salt": "white", "a crow": "black", "a strawberry": "red", "fire": "red",
    "an orange": "orange", "a chick": "yellow",
}  # fmt: skip


class Animal(NamedTuple):
    """What there is to know about an animal."""

    legs: int
    home: str


ANIMALS = {
    "dog": Animal(4, "in a house"), "cat": Animal(4, "in a house"),
    "cow": Animal(4, "on a farm"), "horse": Animal(4, "on a farm"),
    "pig": Animal(4, "on a farm"), "sheep": Animal(4, "on a farm"),
    "goat": Animal(4, "on a farm"), "hen": Animal(2, "on a farm"),
    "duck": Animal(2, "on a lake"), "swan": Animal(2, "on a lake"),
    "frog": Animal(4, "on a lake"), "fish": Animal(0, "in the sea"),
    "whale": Animal(0, "in the sea"), "shark": Animal(0, "in the sea"),
    "snake": Animal(0, "in the desert"), "camel": Animal(4, "in the desert"),
    "lion": Animal(4, "in the savanna"), "wolf": Animal(4, "in the forest"),
    "bear": Animal(4, "in the forest"), "fox": Animal(4, "in the forest"),
    "owl": Animal(2, "in the forest"), "deer": Animal(4, "in the forest"),
    "spider": Animal(8, "in a web"), "bee": Animal(6, "in a hive"),
    "ant": Animal(6, "in the ground"), "mouse": Animal(4, "in the ground"),
    "penguin": Animal(2, "on the ice"), "eagle": Animal(2, "in the mountains"),
}  # fmt: skip

SAID = {
    "dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "pig": "oink", "duck": "quack",
    "horse": "neigh", "lion": "roar", "bee": "buzz", "snake": "hiss", "hen": "cluck",
    "mouse": "squeak", "frog": "croak", "owl": "hoot", "wolf": "howl",
}  # fmt: skip

YOUNG = {
    "dog": "a puppy", "cat": "a kitten", "cow": "a calf", "horse": "a foal", "sheep": "a lamb",
    "pig": "a piglet", "goat": "a kid", "bear": "a cub", "hen": "a chick", "duck": "a duckling",
    "swan": "a cygnet", "frog": "a tadpole",
}  # fmt: skip

# From the smallest to the biggest.
SIZES = (
    "ant", "bee", "mouse", "frog", "hen", "cat", "fox", "dog", "wolf", "lion", "bear", "cow",
    "horse", "camel", "elephant", "whale",
)  # fmt: skip

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("left", "right"), ("day", "night"),
    ("good", "bad"), ("happy", "sad"), ("fast", "slow"), ("old", "new"), ("open", "closed"),
    ("full", "empty"), ("hard", "soft"), ("high", "low"), ("light", "dark"), ("long", "short"),
    ("near", "far"), ("rich", "poor"), ("strong", "weak"), ("wet", "dry"), ("clean", "dirty"),
    ("early", "late"), ("first", "last"), ("loud", "quiet"), ("true", "false"), ("thick", "thin"),
    ("begin", "end"), ("question", "answer"), ("love", "hate"), ("war", "peace"), ("yes", "no"),
    ("black", "white"), ("summer", "winter"), ("north", "south"), ("east", "west"),
    ("inside", "outside"), ("above", "below"), ("before", "after"), ("push", "pull"),
    ("give", "take"), ("win", "lose"),
)  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip

# Girls and boys in turn.
NAMES = (
    "Anna", "Tom", "Lily", "Ben", "Mia", "Sam", "Emma", "Max", "Lucy", "Jack", "Nora", "Paul",
    "Rosa", "Leo", "Ella", "Finn", "Clara", "Hugo", "Alice", "Bob",
)  # fmt: skip

OBJECTS = (
    "ball", "kite", "book", "hat", "cup", "box", "key", "ring", "lamp", "doll", "drum", "bell",
    "coat", "bag", "boat", "flower", "stone", "feather", "basket", "candle",
)  # fmt: skip

PLACES = (
    "park", "garden", "kitchen", "forest", "school", "house", "tower", "market", "library",
    "castle", "barn", "street",
)  # fmt: skip

CATEGORIES = {
    "animals": ("dog", "cat", "cow", "horse", "pig", "sheep", "lion", "bear", "wolf", "fox"),
    "colours": COLOURS,
    "fruits": ("apple", "banana", "cherry", "lemon", "orange", "pear", "plum", "grape"),
    "countries": ("France", "Italy", "Spain", "Japan", "China", "India", "Egypt", "Brazil"),
    "days": DAYS,
    "months": MONTHS,
    "names": NAMES[:10],
    "toys": ("ball", "kite", "doll", "drum", "boat", "robot", "train", "puzzle"),
}

WORDS = (
    *("sun", "moon", "tree", "fish", "bird", "milk", "bread", "rain", "snow", "wind", "fire"),
    *("door", "hand", "foot", "nose", "star", "road", "hill", "lake", "ship", "gold", "iron"),
    *("dog", "cat", "cow", "horse", "pig", "lion", "bear", "wolf", "fox", "frog", "duck", "owl"),
    *("ball", "kite", "book", "hat", "cup", "box", "key", "ring", "lamp", "doll", "drum", "bell"),
    *("red", "blue", "green", "white", "black", "brown", "pink", "grey", "hot", "cold", "big"),
    *("small", "good", "bad", "fast", "slow", "old", "new", "full", "soft", "high", "low", "dark"),
    *("apple", "lemon", "pear", "plum", "grape", "one", "two", "three", "four", "five", "six"),
    *("king", "queen", "house", "park", "river", "school", "garden", "summer", "winter", "paper"),
)


def with_article(noun: str) -> str:
    """The noun with `a` or `an`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
