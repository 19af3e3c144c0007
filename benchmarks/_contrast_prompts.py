"""Forty questions of two kinds, each asked in four ways: capitals of countries, and sums."""

from typing import Any

COUNTRIES = (
    "France", "Japan", "Italy", "Egypt", "Canada", "Spain", "Germany", "China", "India", "Russia",
    "Greece", "Poland", "Turkey", "Norway", "Sweden", "Cuba", "Peru", "Kenya", "Iran", "Austria",
)  # fmt: skip
SUMS = (
    (12, 30), (7, 5), (40, 2), (9, 9), (15, 20), (3, 8), (60, 6), (11, 4), (25, 25), (8, 70),
    (14, 5), (2, 90), (33, 3), (6, 13), (50, 17), (21, 7), (4, 44), (80, 9), (16, 16), (5, 62),
)  # fmt: skip
CAPITALS = (
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "Please tell me the capital city of {}.",
    "{} is a country. What is its capital?",
)
ADDITIONS = (
    "What is the sum of {} and {}?",
    "How much is {} plus {}?",
    "Please add the numbers {} and {}.",
    "Take {} apples and {} more. How many are there?",
)


def rows() -> list[dict[str, Any]]:
    """The rows of the dataset; `wording` is in which of the four ways one is asked."""
    found = []
    for number, (country, (first, second)) in enumerate(zip(COUNTRIES, SUMS, strict=True)):
        wording = number % len(CAPITALS)
        found.append(
            {
                "id": f"capital-{country}",
                "prompt": CAPITALS[wording].format(country),
                "condition": "capital",
                "wording": wording,
                "subject": country,
            }
        )
        found.append(
            {
                "id": f"sum-{first}+{second}",
                "prompt": ADDITIONS[wording].format(first, second),
                "condition": "arithmetic",
                "wording": wording,
                "subject": str(first),
            }
        )
    return found
