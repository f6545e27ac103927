# SPDX-License-Identifier: Apache-2.0
"""One typed settings object per component, read strictly.

A component declares a frozen dataclass whose fields are made by `setting`, and reads it with `load`. For every
field the first of these wins:

1. the argument given by the caller;
2. the environment variable ``MOONPOOL_<COMPONENT>_<FIELD>`` (an empty one counts as not set);
3. ``<field>`` in the table ``[<component>]`` of the TOML file;
4. the default.

The TOML file is the one named by the caller, else by the environment variable ``MOONPOOL_CONFIG``; there is no
default location. An unknown key, a bad unit, a bad type and a value out of bounds are each a `ConfigError` that
names the place and the nearest valid choice.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, TypeVar

from moonpool.errors import ConfigError
from moonpool.units import format_bytes, format_duration, parse_bytes, parse_duration

__all__ = ["COMPONENTS", "Setting", "describe", "load", "setting"]

#: Every component that has settings. A TOML file may hold one table for each, and nothing else.
COMPONENTS = ("connector", "engine", "master", "node", "store_client")

Unit = Literal["bytes", "seconds"]
T = TypeVar("T")

# Kubernetes gives every container variables named after the services of its namespace. A service called
# "moonpool-engine" makes MOONPOOL_ENGINE_PORT=tcp://..., which nobody meant as a setting:
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
_BITS_SHOWN = 128
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def setting(
    default: Any,
    doc: str,
    *,
    unit: Unit | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] | None = None,
    secret: bool = False,
) -> Any:
    """Declare a field of a settings dataclass.

    Its type must be one of bool, int, float, str, bytes, or one of these ``| None``.

    Args:
        default: the value when nobody says anything.
        doc: one or two plain sentences for the reference page.
        unit: lets the value be written with a unit ("1MiB", "250ms"); the field holds bytes or seconds.
        minimum: smallest value allowed.
        maximum: largest value allowed.
        choices: the texts allowed.
        secret: never shown in ``repr`` or in error messages. A text that begins with ``@`` is the path of the file
            that it is in, of which white space at both ends is no part; bytes are always the secret itself.
    """
    return dataclasses.field(
        default=default,
        repr=not secret,
        metadata={
            "doc": doc,
            "unit": unit,
            "minimum": minimum,
            "maximum": maximum,
            "choices": tuple(choices) if choices is not None else None,
            "secret": secret,
        },
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the reference page says about one field: see `describe`."""

    name: str
    variable: str
    type: str
    default: str
    bounds: str
    doc: str


def load(
    cls: type[T],
    component: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Read the settings of `component` into `cls`.

    Args:
        cls: the component's settings dataclass.
        component: its name, one of `COMPONENTS`.
        arguments: what the caller was given, by field name. None for a field that cannot be None counts as not given.
        file: the TOML file; None: the one ``MOONPOOL_CONFIG`` names, if any.
        environ: the environment; None: ``os.environ``.

    Raises:
        ConfigError: an unknown key, a bad unit, type or value, or a file that cannot be read.
    """
    environ = os.environ if environ is None else environ
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    file = file if file is not None else environ.get("MOONPOOL_CONFIG") or None

    values: dict[str, Any] = {}
    # From the weakest source to the strongest, so that the later one overwrites.
    if file is not None:
        values.update(_from_file(fields, hints, component, file))
    values.update(_from_environment(fields, hints, component, environ))
    values.update(_from_arguments(fields, hints, component, arguments or {}))
    return cls(**values)


def describe(cls: type[Any], component: str) -> list[Setting]:
    """Return what the reference page says about every field of `cls`, in order of declaration."""
    hints = typing.get_type_hints(cls)
    return [
        Setting(
            name=field.name,
            variable=_variable(component, field.name),
            type=_type_name(hints[field.name], field.metadata["unit"]),
            default=_show(field.default, field),
            bounds=_bounds(field),
            doc=field.metadata["doc"],
        )
        for field in dataclasses.fields(cls)
    ]


_Fields = Mapping[str, "dataclasses.Field[Any]"]


def _from_arguments(
    fields: _Fields, hints: Mapping[str, Any], component: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    values = {}
    for name, value in arguments.items():
        if name not in fields:
            raise _unknown(f"{component} has no setting {name!r}", name, fields)
        if value is None and not _optional(hints[name]):
            continue
        values[name] = _convert(fields[name], hints[name], value, f"argument {name}")
    return values


def _from_environment(
    fields: _Fields, hints: Mapping[str, Any], component: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    variables = {_variable(component, name): name for name in fields}
    values = {}
    for variable, text in environ.items():
        if variable in variables:
            if text:
                name = variables[variable]
                values[name] = _convert(fields[name], hints[name], text, f"environment variable {variable}")
        elif variable.startswith("MOONPOOL_") and _SERVICE_LINK.search(variable) is None:
            # A name of this component must be known. Another name may belong to a program this code has never heard
            # of, so it is refused only when it looks like a slip of the pen.
            ours = variable.startswith(_variable(component, ""))
            if ours or _nearest(variable, variables, cutoff=0.9):
                raise _unknown(f"environment variable {variable} is no setting", variable, variables)
    return values


def _from_file(
    fields: _Fields, hints: Mapping[str, Any], component: str, file: str | os.PathLike[str]
) -> dict[str, Any]:
    document = _read_toml(file)
    for table in document:
        if table not in COMPONENTS:
            raise _unknown(f"{os.fspath(file)} has a table or key {table!r} that no component reads", table, COMPONENTS)
    content = document.get(component, {})
    if not isinstance(content, dict):
        raise ConfigError(f"{component} in {os.fspath(file)} is not a table", hint=f"[{component}]")
    values = {}
    for name, value in content.items():
        if name not in fields:
            raise _unknown(f"[{component}] in {os.fspath(file)} has an unknown key {name!r}", name, fields)
        values[name] = _convert(fields[name], hints[name], value, f"{component}.{name} in {os.fspath(file)}")
    return values


def _read_toml(file: str | os.PathLike[str]) -> dict[str, Any]:
    # Imported only when a file is named: most engines are configured by arguments alone.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the configuration file {os.fspath(file)} cannot be read",
            cause=error.strerror or str(error),
            hint="the path of a TOML file, or unset MOONPOOL_CONFIG",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the configuration file {os.fspath(file)} is not TOML",
            cause=str(error),
            hint="https://toml.io shows the form",
        ) from error


def _convert(field: dataclasses.Field[Any], hint: Any, value: Any, place: str) -> Any:
    kind = _base(hint)
    unit: Unit | None = field.metadata["unit"]
    if field.metadata["secret"] and isinstance(value, str) and value.startswith("@"):
        return _read_secret(value[1:], place)
    if _optional(hint) and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None
    try:
        converted = _parse(kind, unit, value) if isinstance(value, str) else _check_type(kind, value)
    except ConfigError as error:
        shown = "the value" if field.metadata["secret"] else error.message
        raise ConfigError(f"{place}: {shown}", hint=error.hint) from None
    if converted is None:
        shown = f"a {type(value).__name__}" if field.metadata["secret"] else _written(value, repr)
        raise ConfigError(f"{place} is {shown}", hint=_type_name(hint, unit))
    _check_bounds(field, converted, place)
    return converted


def _read_secret(file: str, place: str) -> bytes:
    try:
        content = Path(file).read_bytes().strip()
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{place}: the file {file} cannot be read", cause=cause, hint="@ and a path") from None
    if not content:
        raise ConfigError(f"{place}: the file {file} is empty", hint="a file with the secret")
    return content


def _parse(kind: type, unit: Unit | None, text: str) -> Any:
    """Return the value a text stands for, or None when it stands for none of that type."""
    if kind is str:
        return text
    if kind is bytes:
        try:
            # A byte that is no UTF-8 comes out of os.environ as half of a surrogate pair; this puts it back.
            return text.encode(errors="surrogateescape")
        except UnicodeEncodeError:
            return None
    if kind is bool:
        lower = text.strip().lower()
        return True if lower in _TRUE else False if lower in _FALSE else None
    if unit == "bytes":
        return parse_bytes(text)
    if unit == "seconds":
        return parse_duration(text)
    try:
        return kind(text)
    except ValueError:
        return None


def _check_type(kind: type, value: Any) -> Any:
    """Return `value` as a `kind`, or None when it is of another type. True is no number, 5 is a float."""
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else None
    if kind is float and isinstance(value, int):
        # Beyond every float is beyond every bound.
        if value.bit_length() >= sys.float_info.max_exp:
            return math.inf if value > 0 else -math.inf
        return float(value)
    if kind is bytes and isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if kind is int and not isinstance(value, int):
        try:
            return operator.index(value)
        except TypeError:
            return None
    return value if isinstance(value, kind) else None


def _check_bounds(field: dataclasses.Field[Any], value: Any, place: str) -> None:
    choices = field.metadata["choices"]
    if choices is not None and value not in choices:
        nearest = _nearest(str(value), choices)
        raise ConfigError(f"{place} is {value!r}", hint=nearest or ", ".join(choices))
    minimum, maximum = field.metadata["minimum"], field.metadata["maximum"]
    # Written so that NaN, which compares false with everything, is refused.
    if (minimum is not None and not value >= minimum) or (maximum is not None and not value <= maximum):
        raise ConfigError(f"{place} is {_show(value, field)}, out of bounds", hint=_bounds(field))


def _bounds(field: dataclasses.Field[Any]) -> str:
    choices, minimum, maximum = (field.metadata[key] for key in ("choices", "minimum", "maximum"))
    if choices is not None:
        return ", ".join(choices)
    if minimum is not None and maximum is not None:
        return f"{_show(minimum, field)} to {_show(maximum, field)}"
    if minimum is not None:
        return f"at least {_show(minimum, field)}"
    return f"at most {_show(maximum, field)}" if maximum is not None else ""


def _show(value: Any, field: dataclasses.Field[Any]) -> str:
    if value is None or value is MISSING:
        return "none"
    if isinstance(value, int) and value.bit_length() > _BITS_SHOWN:
        return _written(value, str)
    if field.metadata["unit"] == "bytes":
        return format_bytes(value)
    if field.metadata["unit"] == "seconds":
        return format_duration(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _written(value: Any, write: typing.Callable[[Any], str]) -> str:
    # Python refuses to write out ints of thousands of digits, and nobody would read them.
    huge = isinstance(value, int) and value.bit_length() > _BITS_SHOWN
    return f"a number of {value.bit_length()} bits" if huge else write(value)


def _variable(component: str, name: str) -> str:
    return f"MOONPOOL_{component}_{name}".upper()


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _optional(hint: Any) -> bool:
    return type(None) in _members(hint)


def _base(hint: Any) -> type:
    kinds = [member for member in _members(hint) if member is not type(None)]
    if len(kinds) != 1 or kinds[0] not in (bool, int, float, str, bytes):
        raise TypeError(f"a setting cannot be of type {hint}")
    return typing.cast(type, kinds[0])


def _type_name(hint: Any, unit: Unit | None) -> str:
    kind = _base(hint)
    if unit == "bytes":
        name = "a size such as 1MiB"
    elif unit == "seconds":
        name = "a duration such as 250ms or 5s"
    else:
        name = {bool: "true or false", int: "a whole number", float: "a number", str: "text", bytes: "bytes or text"}[
            kind
        ]
    return f"{name}, or none" if _optional(hint) else name


def _nearest(word: str, words: typing.Iterable[str], cutoff: float = 0.6) -> str | None:
    # difflib costs a few milliseconds to import, and only mistakes need it.
    import difflib

    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def _unknown(message: str, word: str, words: typing.Iterable[str]) -> ConfigError:
    words = list(words)
    return ConfigError(message, hint=_nearest(word, words) or ", ".join(words))
