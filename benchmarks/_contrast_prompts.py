"""Forty questions of two kinds that end alike: capitals of countries, and sums of numbers."""

from typing import Any

COUNTRIES = (
    "France", "Japan", "Italy", "Egypt", "Canada", "Spain", "Germany", "China", "India", "Russia",
    "Greece", "Poland", "Turkey", "Norway", "Sweden", "Cuba", "Peru", "Kenya", "Iran", "Austria",
)  # fmt: skip
SUMS = (
    (12, 30), (7, 5), (40, 2), (9, 9), (15, 20), (3, 8), (60, 6), (11, 4), (25, 25), (8, 70),
    (14, 5), (2, 90), (33, 3), (6, 13), (50, 17), (21, 7), (4, 44), (80, 9), (16, 16), (5, 62),
)  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """The rows of the dataset; number n of the one kind is paired with number n of the other."""
    found = []
    for number, (country, (first, second)) in enumerate(zip(COUNTRIES, SUMS, strict=True)):
        found.append(
            {
                "id": f"capital-{country}",
                "prompt": f"What is the capital of {country}?",
                "condition": "capital",
                "pair": number,
                "subject": country,
            }
        )
        found.append(
            {
                "id": f"sum-{first}+{second}",
                "prompt": f"What is the sum of {first} and {second}?",
                "condition": "arithmetic",
                "pair": number,
                "subject": str(first),
            }
        )
    return found
