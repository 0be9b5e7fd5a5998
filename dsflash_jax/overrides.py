"""From the words of a command line to a configuration: find CONFIG, then apply dotted `key=value` overrides.

Works on any nest of frozen dataclasses. A record is rebuilt once with all its changes, so its own checks see the final
values only: keys that belong together can be given in any order.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dsflash_jax.config import Config, hint, unknown_key

Record = TypeVar("Record")

_HERE = Path(__file__).resolve().parent
FOLDERS = (_HERE / "configs", _HERE.parent / "configs")  # of an installed wheel, of a checkout


def names() -> list[str]:
    """Names of the configurations that come with the package, in order."""
    return sorted({path.stem for folder in FOLDERS for path in folder.glob("*.py")})


def find(source: str) -> Any:
    """The configuration `source` stands for: a Python file, a config.json of a checkpoint, or a name from `names()`.

    A Python file is run and must define `config`, a dataclass instance (a `Config`, or a run that holds one).
    Raises FileNotFoundError naming the nearest name, or ValueError for a file of another kind or one that fails.
    """
    path = Path(source)
    is_file = os.path.isfile(source)  # unlike Path.is_file, false for what no path can be, as a too long one
    if path.suffix == ".json" and is_file:
        return Config.from_json(path)
    if path.suffix == ".py" and is_file:
        return _run_file(path)
    for folder in FOLDERS:
        if os.path.isfile(folder / f"{source}.py"):
            return _run_file(folder / f"{source}.py")
    if is_file:
        raise ValueError(f"{source}: a configuration is a .py file that defines `config`, or a config.json")
    raise FileNotFoundError(
        f"no configuration {source!r}: neither a file nor one of {names()}{hint(path.stem, names())}"
    )


def _run_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"dsflash_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: not an importable Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: running the file failed with {type(error).__name__}: {error}") from error
    config = getattr(module, "config", None)
    if not isinstance(getattr(config, "model", config), Config):  # a run holds its architecture there
        raise ValueError(f"{path}: expected a module-level `config` (a Config or a run record), got {config!r}")
    return config


def override(record: Record, assignments: Sequence[str]) -> Record:
    """`record` with every `key=value` applied; keys are dotted, values are read by the field's type.

    A `Config` also takes `modes="S S F2 U"`, see `Config.with_modes`. A later value of a key replaces an earlier.
    Raises ValueError that names the key, the expected type and the value, or the nearest key of that level.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise ValueError(f"override {assignment!r} is not of the form key=value")
        level = changes
        *parents, leaf = key.split(".")
        for parent in parents:
            level = level.setdefault(parent, {})
            if not isinstance(level, dict):
                raise ValueError(f"override {key!r}: {parent!r} is given as a whole as well; give one of the two")
        if isinstance(level.get(leaf), dict):
            raise ValueError(f"override {key!r}: keys below {leaf!r} are given as well; give one of the two")
        level[leaf] = value
    return _replace(record, changes, "")


def _replace(record: Any, changes: dict[str, Any], prefix: str) -> Any:
    """Rebuild `record`; `changes` maps a field to its text, or to the changes of the record inside it."""
    kinds = get_type_hints(type(record))
    known = [f.name for f in dataclasses.fields(record)]
    layers = changes.pop("modes", None) if isinstance(record, Config) else None
    values: dict[str, Any] = {}
    for name, change in changes.items():
        key = prefix + name
        if name not in known:
            raise unknown_key(name, [*known, *["modes"] * isinstance(record, Config)], f"override {key!r}")
        if isinstance(change, str):
            values[name] = parse_value(change, kinds[name], key)
            continue
        inner = getattr(record, name)
        if not dataclasses.is_dataclass(inner):
            raise ValueError(f"override {key}.{next(iter(change))}: {key} is {inner!r} and has no keys of its own")
        values[name] = _replace(inner, change, key + ".")
    if isinstance(record, Config) and layers is not None:
        return record.with_modes(_unquoted(layers), **values)
    return dataclasses.replace(record, **values)


def parse_value(text: str, kind: Any, key: str) -> Any:
    """Read `text` as a value of the type `kind`.

    int, float, bool, str, None, Literal choices, Path, unions of these, and tuples of them as `0,0,2` or `[0,0,2]`;
    `key` stands in the error.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if type(None) in args and text in ("None", "null"):
            return None
        return _first_that_reads(text, [a for a in args if a is not type(None)], kind, key)
    if origin is Literal:
        return _choice(_unquoted(text), args, key)
    if origin is tuple:
        return _tuple(text, args, kind, key)
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is str or kind is Path:
        return kind(_unquoted(text))
    if kind is int or kind is float:
        try:
            return kind(text)
        except ValueError as error:
            raise _mismatch(key, kind, text) from error
    raise _mismatch(key, kind, text)


def _first_that_reads(text: str, kinds: Sequence[Any], union: Any, key: str) -> Any:
    for kind in kinds:
        try:
            return parse_value(text, kind, key)
        except ValueError:
            continue  # another member of the union may read it
    raise _mismatch(key, union, text)


def _choice(text: str, choices: tuple[Any, ...], key: str) -> Any:
    for choice in choices:
        if text == str(choice):
            return choice
    near = hint(text, [str(c) for c in choices])
    raise ValueError(f"override {key!r}: expected one of {list(choices)}, got {text!r}{near}")


def _tuple(text: str, args: tuple[Any, ...], kind: Any, key: str) -> tuple[Any, ...]:
    body = text.strip()
    if (body[:1], body[-1:]) in (("[", "]"), ("(", ")")):
        body = body[1:-1]
    items = [item.strip() for item in body.split(",")]
    if items[-1] == "":  # an empty tuple, or the trailing comma of `(1,)`
        items.pop()
    kinds = [args[0]] * len(items) if args[-1] is Ellipsis else args
    if len(kinds) != len(items):
        raise _mismatch(key, kind, text)
    try:
        return tuple(parse_value(item, k, key) for item, k in zip(items, kinds, strict=True))
    except ValueError as error:
        raise _mismatch(key, kind, text) from error


def _unquoted(text: str) -> str:
    """Text without the quotes that survive a shell."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        try:
            return str(ast.literal_eval(text))
        except SyntaxError as error:
            raise ValueError(f"override value {text}: quotes that do not match; leave them out") from error
    return text


def _mismatch(key: str, kind: Any, text: str) -> ValueError:
    name = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    return ValueError(f"override {key!r}: expected {name}, got {text!r}")
