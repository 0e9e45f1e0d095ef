"""The structure of arguments and results as text, in torch's own form of pytrees."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from lenz.errors import UserError

T = TypeVar("T")
# Factories of missing values. torch would import the module of any other, and that of any enum.
FACTORIES = ("bool", "dict", "float", "int", "list", "set", "str", "tuple")


def dumps(spec: pytree.TreeSpec) -> str:
    """A structure as JSON. Raises UserError for a type that torch has no name for."""
    hint = "take and return tuples, lists and dicts, or give the type a `serialized_type_name`"
    make = lambda: _checked(pytree.treespec_dumps(spec))
    return _run(make, "an artifact cannot hold this structure", hint)


def loads(text: str) -> pytree.TreeSpec:
    """The structure of a text. Raises UserError for a type that is unknown in this process."""
    hint = "import the module that registers the type, such as transformers, before loading"
    return _run(lambda: pytree.treespec_loads(_checked(text)), "unknown structure", hint)


def _run(make: Callable[[], T], what: str, hint: str) -> T:
    _name_results()
    try:
        return make()
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError) as e:
        raise UserError(f"{what}: {e}", hint=hint) from e


def _checked(text: str) -> str:
    """The text. Raises ValueError if torch would import a module for a part of it."""
    json.loads(text, object_hook=_part)
    return text


def _part(told: dict[str, Any]) -> None:
    module, name = told.get("default_factory_module"), told.get("default_factory_name")
    is_factory = module is None or (module == "builtins" and name in FACTORIES)
    if "__enum__" in told or not is_factory:
        raise ValueError(f"it needs {told.get('fqn', f'{module}.{name}')}, which is not imported")
    if isinstance(context := told.get("context"), str):
        with suppress(json.JSONDecodeError):  # the form of another library
            _checked(context)


def _name_results() -> None:
    """Name the results of ops such as `topk`, which torch registers without names."""
    for cls in torch.return_types.all_return_types:
        name = f"torch.return_types.{cls.__name__}"
        pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.setdefault(name, cls)
        entry = pytree.SUPPORTED_SERIALIZED_TYPES[cls]
        if entry.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
            pytree.SUPPORTED_SERIALIZED_TYPES[cls] = entry._replace(serialized_type_name=name)
