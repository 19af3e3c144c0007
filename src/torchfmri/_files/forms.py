"""The forms that values of JSON may have, so that a wrong one is found where it is read.

Histories, inspections, findings, contrasts and the table of places check with it right after
parsing; their readers turn the error into a FileFormatError. True does not count as a number here,
though bool is a subclass of int. Further forms may be added freely.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Form: TypeAlias = Any
"""A type, a tuple of alternatives, `[form]` for lists, `{str: form}` for objects; None is None."""


def require_form(value: Any, form: Form, name: str) -> None:
    """Raise `ValueError` if a value is not of the form; a whole number is a float too.

    Args:
        value: As JSON gives it.
        form: The form that it must have.
        name: Of the value, for the error.
    """
    if not _fits(value, form):
        raise ValueError(f"{name} is {repr(value)[:80]}")


def require_forms(values: Any, forms: dict[str, Form]) -> None:
    """Raise if one of the named values is missing or not of its form.

    Raises:
        KeyError: It is missing.
        ValueError: It is of another form, or the values are not an object.
    """
    require_form(values, dict, "the description")
    for name, form in forms.items():
        require_form(values[name], form, name)


def _fits(value: Any, form: Form) -> bool:
    """Whether a value is of a form; bool is a form of its own, though Python's bools are ints."""
    if isinstance(form, tuple):
        return any(_fits(value, each) for each in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(each, form[0]) for each in value)
    if isinstance(form, dict):
        inner = next(iter(form.values()))
        return isinstance(value, dict) and all(_fits(each, inner) for each in value.values())
    if form is None:
        return value is None
    if form is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, form) and (form is bool or not isinstance(value, bool))
