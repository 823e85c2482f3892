"""Numeric keywords of JSON Schemas, rewritten so that llguidance compiles them as they are meant.

llguidance rounds numbers of more than 15 digits, has 64 bits for the part before the point, and takes some excluded
bounds for included ones. So it gets included bounds alone, rounded to numbers that it reads exactly. They are rounded
towards the allowed values, so that every output is within the client's bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, TypeGuard

from serve_app.openai.tools.shapes.calls import JsonObject

_MAX_DIGITS = 15
_MAX_DECIMALS = 22
"""Most significant digits of a number, and most digits behind its point, that are read exactly."""
_MAX_EXACT_INTEGER = 2**53
_MAX_NUMBER = Decimal(10**18)
_MAX_INTEGER = Decimal(2**63 - 1024)
"""Largest numbers that are written where a number is bounded, or is an integer; the latter is a double."""
_MAX_SIZE = 2**32 - 1
"""Largest bound on the length of a string, or on the items or properties."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LEAST_SIZES = ("minLength", "minItems", "minProperties")
_LARGEST_SIZES = ("maxLength", "maxItems", "maxProperties")
_INFINITY = Decimal("Infinity")


@dataclass(frozen=True, slots=True)
class _Bound:
    """Lower bound of numbers. The upper bound of numbers is the lower bound of their negatives."""

    value: Decimal
    is_excluded: bool

    def first(self, *, is_integer: bool) -> Decimal:
        """Return the smallest number within the bound that is read exactly; infinity: there is none."""
        if is_integer:
            integer = max(self.first_integer(), -_MAX_INTEGER)
            if integer > _MAX_INTEGER:
                return _INFINITY
            double = float(integer)
            return Decimal(double if double >= integer else math.nextafter(double, math.inf))
        if self.value >= _MAX_NUMBER:
            return _INFINITY if self.is_excluded else self.value
        value = max(self.value, -_MAX_NUMBER)
        step = Decimal(1).scaleb(max(value.adjusted() + 1 - _MAX_DIGITS, -_MAX_DECIMALS) if value else -_MAX_DECIMALS)
        number = value.quantize(step, ROUND_CEILING)
        return number + step if self.is_excluded and number == value else number

    def first_integer(self) -> Decimal:
        """Return the smallest integer within the bound."""
        integer = self.value.to_integral_value(ROUND_CEILING)
        return integer + 1 if self.is_excluded and integer == self.value else integer


@dataclass(frozen=True, slots=True)
class _Range:
    """Bounds of a schema's numbers."""

    lower: _Bound
    upper: _Bound
    is_integer: bool

    @property
    def is_empty(self) -> bool:
        """True if no number is within the bounds."""
        if self.is_integer:
            return self.lower.first_integer() > -self.upper.first_integer()
        low, high = self.lower.value, -self.upper.value
        return low > high or (low == high and (self.lower.is_excluded or self.upper.is_excluded))

    def ends(self) -> tuple[Decimal, Decimal]:
        """Return the smallest and the largest number that are read exactly; the first is larger if there is none."""
        return self.lower.first(is_integer=self.is_integer), -self.upper.first(is_integer=self.is_integer)


def is_compilable(keyword: str, schema: JsonObject) -> bool:
    """Return False if a keyword of a schema has no equivalent that llguidance compiles."""
    value = schema[keyword]
    if keyword in ("const", "enum"):
        return _is_exact(value)
    if keyword in _LEAST_SIZES:
        return not _is_number(value) or value <= _MAX_SIZE
    if keyword not in _BOUNDS:
        return True
    numbers = _range_of(schema)
    low, high = numbers.ends()
    return low <= high or numbers.is_empty


def compilable(schema: JsonObject) -> JsonObject:
    """Return a schema with numeric keywords that llguidance compiles as they are meant; schemas in it stay as they are.

    Integers get at most 19 digits. So do numbers that have bounds or multiples, before their point.
    """
    rewritten = {keyword: _whole(value) for keyword, value in schema.items() if not _is_endless(keyword, value)}
    numbers = _range_of(schema)
    has_keywords = "multipleOf" in schema or any(_is_number(schema.get(keyword)) for keyword in _BOUNDS)
    if numbers.is_empty or not (numbers.is_integer or has_keywords):
        return rewritten
    low, high = _between_multiples(*numbers.ends(), schema.get("multipleOf"))
    others = {keyword: value for keyword, value in rewritten.items() if keyword not in _BOUNDS}
    return others | {"minimum": _json_number(low), "maximum": _json_number(high)}


def _range_of(schema: JsonObject) -> _Range:
    bounds = []
    for keyword, exclusive_keyword in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        bound, excluded = schema.get(keyword), schema.get(exclusive_keyword)
        candidates = [(-_INFINITY, False)]
        if _is_number(bound):  # In Draft 4 the exclusive keyword is a flag.
            candidates.append((_decimal(bound, keyword), excluded is True))
        if _is_number(excluded):
            candidates.append((_decimal(excluded, keyword), True))
        bounds.append(_Bound(*max(candidates)))
    types = schema.get("type")
    is_integer = types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)
    return _Range(bounds[0], bounds[1], is_integer)


def _between_multiples(low: Decimal, high: Decimal, step: object) -> tuple[Decimal, Decimal]:
    """Return bounds between two multiples, where few are allowed: llguidance may lose one that is a bound itself."""
    if not _is_number(step) or not 0 < step <= _MAX_SIZE:
        return low, high
    multiple = _decimal(step, "minimum")
    first = (low / multiple).to_integral_value(ROUND_CEILING) * multiple
    last = (high / multiple).to_integral_value(ROUND_FLOOR) * multiple
    if not 0 <= last - first <= multiple:
        return low, high
    return first - multiple / 2 if first else low, last + multiple / 2 if last else high


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _decimal(number: float, keyword: str) -> Decimal:
    """Return a bound as it is written in JSON, an upper one as the lower bound of the negatives."""
    decimal = Decimal(number if isinstance(number, int) else str(number))
    return decimal.copy_negate() if keyword == "maximum" else decimal


def _json_number(number: Decimal) -> float:
    return int(number) if number == number.to_integral_value() else float(number)


def _is_endless(keyword: str, value: object) -> bool:
    """Return True for a bound that is larger than any output."""
    return keyword in _LARGEST_SIZES and _is_number(value) and value > _MAX_SIZE


def _whole(value: Any) -> Any:
    """Return a value, and a float without a fraction as an integer: JSON Schema tells them not apart."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_exact(value: object) -> bool:
    """Return True if the numbers in a JSON value are read exactly."""
    if isinstance(value, dict | list):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    if not _is_number(value):
        return not isinstance(value, float)
    if abs(value) > _MAX_EXACT_INTEGER:
        return False
    _, digits, exponent = Decimal(str(value)).as_tuple()
    assert isinstance(exponent, int)
    return isinstance(value, int) or (len(digits) <= _MAX_DIGITS and exponent >= -_MAX_DECIMALS)
