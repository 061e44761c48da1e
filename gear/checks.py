"""What a wrong setting is answered with, and the checks that most settings share. No MLX."""

from __future__ import annotations

import math
from typing import Any


class SettingError(ValueError):
    """An unusable setting: the text names field, value, what is allowed and a next step."""

    def __init__(self, name: str, value: object, allowed: str, hint: str = "") -> None:
        self.name, self.value = name, value
        super().__init__(f"{name}={value!r}: must be {allowed}.{' ' + hint if hint else ''}")


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse anything but an int (bool excluded) within [low, high]."""
    allowed = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError(name, value, allowed)
    if value < low or (high is not None and value > high):
        raise SettingError(name, value, allowed)


def check_fraction(name: str, value: object, hint: str = "") -> None:
    """Refuse anything but a finite number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingError(name, value, "a number in [0, 1]", hint)
    if not 0 <= value <= 1:
        raise SettingError(name, value, "a number in [0, 1]", hint)


def check_one_of(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    """Refuse a value that is not one of ``allowed`` (1 is not True here)."""
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        raise SettingError(name, value, "one of " + ", ".join(map(str, allowed)))
