"""Nodes of trees that JAX knows and optree does not: equinox modules, flax states, your own.

optree takes an instance of a class it does not know for a leaf. Where JAX is loaded and has the
class in its registry, the class is registered with optree at first sight, to be taken apart and
put together by JAX itself: both libraries then see the same leaves in the same order. A class that
is registered with optree already stays as it is.
"""

from __future__ import annotations

import sys
from typing import Any

import optree


def adopt(leaves: list[Any]) -> bool:
    """Make known to optree what JAX takes for nodes among these leaves; whether there was any."""
    jax = sys.modules.get("jax")
    if jax is None or jax.tree_util.all_leaves(leaves):
        return False
    unknown = {type(leaf): leaf for leaf in leaves if not jax.tree_util.all_leaves([leaf])}
    for kind, node in unknown.items():
        pairs, _ = _one_level(node)
        named = all(isinstance(path[0], jax.tree_util.GetAttrKey) for path, _ in pairs)
        optree.register_pytree_node(
            kind,
            _flatten,
            _unflatten,
            path_entry_type=optree.GetAttrEntry if pairs and named else optree.AutoEntry,
            namespace=optree.registry.__GLOBAL_NAMESPACE,
        )
    return True


def _one_level(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The children with their keys, and the structure, which compares as JAX compares it."""
    from jax.tree_util import tree_flatten_with_path

    return tree_flatten_with_path(node, is_leaf=lambda child: child is not node)


def _flatten(node: Any) -> tuple[list[Any], Any, list[str]]:
    from jax.tree_util import keystr

    pairs, structure = _one_level(node)
    return [child for _, child in pairs], structure, [keystr(p, simple=True) for p, _ in pairs]


def _unflatten(structure: Any, children: Any) -> Any:
    return structure.unflatten(children)
