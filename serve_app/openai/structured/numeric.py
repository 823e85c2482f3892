"""Numeric keywords of JSON Schemas, rewritten so that llguidance compiles them as they are meant.

llguidance rounds numbers of more than 15 digits, has 64 bits for the part before the point, and takes some excluded
bounds for included ones. So it gets included bounds alone, rounded to numbers that it reads exactly. They are rounded
towards the allowed values, so that every output is within the client's bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
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

    def exact(self, *, is_integer: bool) -> _Bound:
        """Return the loosest bound within this one that llguidance compiles as it is meant; infinity: there is none.

        An excluded bound is only right where it is the end that is farther from zero.
        """
        if is_integer:
            integer = max(self.first_integer(), -_MAX_INTEGER)
            if integer > _MAX_INTEGER:
                return _Bound(_INFINITY, is_excluded=True)
            double = float(integer)
            return _Bound(Decimal(double if double >= integer else math.nextafter(double, math.inf)), is_excluded=False)
        if self.value > _MAX_NUMBER:
            return _Bound(_INFINITY, is_excluded=True)
        if self.value < -_MAX_NUMBER:
            return _Bound(-_MAX_NUMBER, is_excluded=False)
        digits = max(self.value.adjusted() + 1 - _MAX_DIGITS, -_MAX_DECIMALS) if self.value else -_MAX_DECIMALS
        step = Decimal(1).scaleb(digits)
        number = self.value.quantize(step, ROUND_CEILING)
        if not self.is_excluded or number > self.value:
            return _Bound(number, is_excluded=False)
        return self if number < 0 else _Bound(number + step, is_excluded=False)

    def first_integer(self) -> Decimal:
        """Return the smallest integer within the bound."""
        integer = self.value.to_integral_value(ROUND_CEILING)
        return integer + 1 if self.is_excluded and integer == self.value else integer

    def first_multiple(self, step: Decimal) -> Decimal:
        """Return the smallest multiple of `step` within the bound."""
        multiple = (self.value / step).to_integral_value(ROUND_CEILING) * step
        return multiple + step if self.is_excluded and multiple == self.value else multiple

    def of_multiples(self, step: Decimal) -> _Bound:
        """Return the bound that the same multiples of `step` have, if it can be read exactly.

        The end that is farther from zero is behind the last multiple, as llguidance takes no zeros behind a bound.
        """
        first = self.first_multiple(step)
        bound = _Bound(first - step, is_excluded=True) if first < 0 else _Bound(first, is_excluded=False)
        return bound if len(bound.value.normalize().as_tuple().digits) <= _MAX_DIGITS else self


@dataclass(frozen=True, slots=True)
class _Range:
    """Range of numbers."""

    lower: _Bound
    upper: _Bound
    """Lower bound of the numbers' negatives."""
    is_integer: bool

    @property
    def is_empty(self) -> bool:
        """True if there is no number between the bounds."""
        if self.is_integer:
            return self.lower.first_integer() > -self.upper.first_integer()
        low, high = self.lower.value, -self.upper.value
        return low > high or (low == high and (self.lower.is_excluded or self.upper.is_excluded))

    def exact(self) -> _Range:
        """Return the range in this one that llguidance compiles as it is meant."""
        lower, upper = (bound.exact(is_integer=self.is_integer) for bound in (self.lower, self.upper))
        return _Range(lower, upper, self.is_integer)

    def of_multiples(self, step: Decimal) -> _Range:
        """Return the range with bounds that fit the multiples of `step` in it."""
        return _Range(self.lower.of_multiples(step), self.upper.of_multiples(step), self.is_integer)

    def few_multiples(self, step: Decimal) -> list[Decimal]:
        """Return the multiples of `step` if there are one or two, else nothing.

        llguidance may take such a range for empty, since it divides with rounding errors.
        """
        first, last = self.lower.first_multiple(step), -self.upper.first_multiple(step)
        return sorted({first, last}) if 0 <= last - first <= step else []

    def keywords(self) -> JsonObject:
        """Return the keywords that express the range."""
        low, high = _json_number(self.lower.value), _json_number(self.upper.value.copy_negate())
        return {
            "exclusiveMinimum" if self.lower.is_excluded else "minimum": low,
            "exclusiveMaximum" if self.upper.is_excluded else "maximum": high,
        }


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
    return numbers.is_empty or not numbers.exact().is_empty


def compilable(schema: JsonObject) -> JsonObject:
    """Return a schema with numeric keywords that llguidance compiles as they are meant; schemas in it stay as they are.

    Integers get at most 19 digits. So do numbers that have bounds or multiples, before their point. Nothing meets the
    schema that is returned if a keyword is not compilable.
    """
    if not all(is_compilable(keyword, schema) for keyword in schema):
        return {"enum": []}
    rewritten = {keyword: _whole(value) for keyword, value in schema.items() if not _is_endless(keyword, value)}
    numbers, step = _range_of(schema), schema.get("multipleOf")
    has_keywords = _is_number(step) or any(_is_number(schema.get(keyword)) for keyword in _BOUNDS)
    if numbers.is_empty:
        is_read = all(_is_exact(schema.get(keyword)) for keyword in _BOUNDS)
        return rewritten if is_read else rewritten | {"minimum": 1, "maximum": 0}
    if not (numbers.is_integer or has_keywords):
        return rewritten
    exact = numbers.exact()
    others = {keyword: value for keyword, value in rewritten.items() if keyword not in _BOUNDS}
    if numbers.is_integer:  # As multiples among numbers they would have dead ends, such as a point.
        others["type"] = ["integer" if kind == "number" else kind for kind in _types(schema)]
    elif _is_number(step):
        multiple = Decimal(str(step))
        few = exact.few_multiples(multiple)
        if few and schema.get("type") == "number" and not schema.keys() & {"enum", "const"}:
            others.pop("multipleOf")
            return others | {"enum": list(map(_json_number, few))}
        exact = exact.of_multiples(multiple)
    return others | exact.keywords()


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
    types, step = _types(schema), schema.get("multipleOf")
    is_multiple = _is_number(step) and (isinstance(step, int) or step.is_integer())
    return _Range(bounds[0], bounds[1], is_multiple or ("integer" in types and "number" not in types))


def _types(schema: JsonObject) -> list[Any]:
    """Return the types that a schema names, or all."""
    types = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
    return types if isinstance(types, list) else [types]


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
