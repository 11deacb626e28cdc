r"""Whether two short answers say the same: numbers by value, other text without markup, unit or ``x =``.

What is left out on one side only may be left out (``5`` for ``x = 5 \text{ cm}``); what both sides say must be the same
(``5 cm`` is not ``5 m``, ``x = 5`` not ``y = 5``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

PLAIN_NUMBER = re.compile(r"([-+]?)([0-9]*\.?[0-9]+)(?:\s*/\s*([0-9]+))?")
THOUSANDS_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
MAX_NUMBER_LENGTH = 400  # characters; Python refuses integers of more than 4,300 digits
MAX_FORM_LENGTH = 400  # characters; longer answers are compared as text only
# Only numeric ones, and no mixed numbers: 1\frac{1}{2} must not read as 11/2, nor \frac{a+b}{c} as a+b/c.
LATEX_FRACTION = re.compile(r"(?<![0-9])\\[dt]?frac(?:\{(-?[0-9]+)\}\{([0-9]+)\}|([0-9])([0-9]))")
OTHER_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
LATEX_ROOT = re.compile(r"\\sqrt[ ]*([0-9A-Za-z])")
LATEX_WORDS = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)[ ]*\{([^{}]*)\}")
LATEX_NOISE = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[()\[\]]|\\[!,;: %$]|[$%~]")
LATEX_COMMA = re.compile(r"\{,\}|,\\!")

UNITS = {
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "inch": "inch inches",
    "foot": "ft foot feet",
    "yard": "yd yard yards",
    "mile": "mi mile miles",
    "s": "sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "mg": "mg milligram milligrams",
    "g": "gm gram grams",
    "kg": "kg kilogram kilograms",
    "pound": "lb lbs pound pounds",
    "ounce": "oz ounce ounces",
    "ml": "ml mL milliliter milliliters millilitre millilitres",
    "l": "liter liters litre litres",
    "gallon": "gallon gallons",
    "mph": "mph",
    "km/h": "km/h kmph kph",
    "m/s": "m/s",
    "degree": "degree degrees deg ° ^\\circ ^{\\circ} \\circ \\degree",
    "radian": "radian radians rad",
    "dollar": "dollar dollars",
    "cent": "cent cents",
    "%": "% \\% percent",
    "unit": "unit units",
    "way": "ways",
    "point": "point points",
    "digit": "digits",
    "integer": "integers",
    "edge": "edges",
    "student": "students",
}
LETTER_UNITS = ("m", "s", "h", "g", "l", "L", "in")  # set upright only: otherwise they may be variables or words
UNIT_OF = {word: unit for unit, words in UNITS.items() for word in words.split()}
UNIT_WORDS = "|".join(map(re.escape, sorted(UNIT_OF, key=len, reverse=True)))
# Behind what can be a value: "5m" may be a product, and "cm" alone is no value.
UNIT = re.compile(
    rf"(?<=[0-9}})i.])[ ]*(?P<power>square |cubic |sq |sq\. )?(?P<unit>{UNIT_WORDS})"
    r"(?P<exponent>\^[23]|\^\{[23]\}|[²³])?$"
)
UPRIGHT_LETTER = re.compile(
    r"\\(?:text|mathrm|mbox)[ ]*\{\s*(" + "|".join(LETTER_UNITS) + r")\s*\}(\^[23]|\^\{[23]\})?[.$ ]*$"
)
LETTER_NAMES = {"m": "meters", "s": "seconds", "h": "hours", "g": "grams", "l": "liters", "L": "liters", "in": "inches"}
# The left side of an equation: a variable, or an expression with one; no second relation and no list.
NAMED = re.compile(r"(?P<name>[A-Za-z0-9_^{}()|+*/ \\-]*[A-Za-z][A-Za-z0-9_^{}()|+*/ \\-]*)=(?P<value>[^=]+)")
COMMAND = re.compile(r"\\([A-Za-z]+)")
COMMANDS_OF_A_NAME = {"angle", "triangle", "overline", "frac", "sqrt", "cdot", "sin", "cos", "tan", "log", "ln"} | {
    "alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "phi", "omega"
}  # fmt: skip
JOINED = re.compile(r"\b(?:or|and|not|if)\b")


@dataclass(frozen=True)
class _Form:
    name: str | None  # the left side of an equation
    value: str
    unit: str | None


def is_equal(answer: str, expected: str) -> bool:
    """Whether the answer says what is expected; see the module."""
    plain, wanted = _plain(answer), _plain(expected)
    if _is_same(plain, wanted):
        return True
    if max(len(answer), len(expected)) > MAX_FORM_LENGTH or None not in (parse_number(plain), parse_number(wanted)):
        return False
    mine, other = _form(answer), _form(expected)
    is_contradicted = any(
        a is not None and b is not None and a != b for a, b in ((mine.name, other.name), (mine.unit, other.unit))
    )
    return not is_contradicted and _is_same(mine.value, other.value)


def canonical(text: str) -> str:
    """One spelling for answers that are the same number, or the same text but for markup and whitespace."""
    plain = _plain(text)
    number = parse_number(plain)
    return "".join(plain.split()) if number is None else str(number)


def parse_number(text: str) -> Fraction | None:
    """The value of an integer, decimal or fraction, or None; $, %, thousands commas and a last dot are ignored."""
    plain = THOUSANDS_COMMA.sub("", text.replace("$", "").strip()).rstrip("%.")
    match = PLAIN_NUMBER.fullmatch(plain) if len(plain) <= MAX_NUMBER_LENGTH else None
    if match is None:
        return None
    sign, digits, denominator = match.groups()
    if denominator is not None and int(denominator) == 0:
        return None
    value = Fraction(digits) / Fraction(denominator or 1)
    return -value if sign == "-" else value


def _is_same(answer: str, expected: str) -> bool:
    number = parse_number(answer)
    if number is not None:
        return number == parse_number(expected)
    return "".join(answer.split()) == "".join(expected.split())


def _plain(text: str) -> str:
    """The text without markup."""
    text = LATEX_WORDS.sub(r"\1", LATEX_COMMA.sub(",", text))
    text = LATEX_FRACTION.sub(r"\1\3/\2\4", text)
    text = LATEX_ROOT.sub(r"\\sqrt{\1}", OTHER_FRACTION.sub(r"\\frac", text))
    return LATEX_NOISE.sub("", text).strip().rstrip(".")


def _form(text: str) -> _Form:
    unit = "dollar" if text.startswith("\\$") or (text.startswith("$") and text.count("$") == 1) else None
    text = UPRIGHT_LETTER.sub(lambda match: f" {LETTER_NAMES[match[1]]}{match[2] or ''}", text)
    percent = text.rstrip(" .$").endswith("%")
    text = _plain(text)
    name = None
    match = NAMED.fullmatch(text)
    if match and not JOINED.search(match["name"]) and COMMANDS_OF_A_NAME.issuperset(COMMAND.findall(match["name"])):
        name, text = "".join(match["name"].split()), match["value"].strip()
    if percent:
        unit = "%"
    elif found := UNIT.search(text):
        exponent = "2" if found["power"] and found["power"][0] == "s" else "3" if found["power"] else ""
        exponent = exponent or (found["exponent"] or "").strip("^{}").translate({178: "2", 179: "3"})
        unit, text = UNIT_OF[found["unit"]] + exponent, text[: found.start()].strip()
    return _Form(name, text, unit)
