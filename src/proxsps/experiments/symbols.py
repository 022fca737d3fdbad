"""Claims for people: letters of formulas (alpha_0 becomes α₀), and how many claims hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

LETTERS = {  # not in names of claims, such as best-lambda
    r"(?<![-\w])alpha_0\b": "α₀",
    r"(?<![-\w])alpha_k\b": "αₖ",
    r"(?<![-\w])alpha\b": "\u03b1",
    r"(?<![-\w])zeta_k\b": "ζₖ",
    r"(?<![-\w])lambda\b": "λ",
    r"(?<![-\w])sigma\^2": "σ²",
    r">=": "≥",
    r"<=": "≤",
}


def symbols(text: str, encoding: str = "utf-8") -> str:
    """A text with letters instead of their names, if the encoding has them all."""
    try:
        "".join(LETTERS.values()).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text
    for name, letter in LETTERS.items():
        text = re.sub(name, letter, text)
    return text


def counted(claims: Sequence[Any]) -> str:
    """How many claims hold, here and on the paper's own curves."""
    if not claims:
        return "There are no claims to check."
    text = _share([claim.verdict for claim in claims], "claims hold")
    published = [claim.published[0] for claim in claims if claim.published]
    return f"{text} On the paper's own curves: {_share(published, '')}" if published else text


def _share(verdicts: list[str], what: str) -> str:
    partly = verdicts.count("holds in part")
    text = f"{verdicts.count('holds')} of {len(verdicts)} {what}".rstrip()
    return f"{text}, {partly} in part." if partly else f"{text}."
