"""The structure of arguments and results as text, in torch's own form of pytrees."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from lenz.errors import UserError


def dumps(spec: pytree.TreeSpec) -> str:
    """A structure as JSON. Raises UserError for a type that torch has no name for."""
    _name_results()
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as e:
        hint = "take and return tuples, lists and dicts, or give the type a `serialized_type_name`"
        raise UserError(f"an artifact cannot hold this structure: {e}", hint=hint) from e


def loads(text: str) -> pytree.TreeSpec:
    """The structure of a text. Raises UserError for a type that is unknown in this process."""
    _name_results()
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as e:
        hint = "import the module that registers the type, such as transformers, before loading"
        raise UserError(f"unknown structure: {e}", hint=hint) from e


def _name_results() -> None:
    """Name the results of ops such as `topk`, which torch registers without names."""
    for cls in torch.return_types.all_return_types:
        name = f"torch.return_types.{cls.__name__}"
        pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.setdefault(name, cls)
        entry = pytree.SUPPORTED_SERIALIZED_TYPES[cls]
        if entry.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
            pytree.SUPPORTED_SERIALIZED_TYPES[cls] = entry._replace(serialized_type_name=name)
