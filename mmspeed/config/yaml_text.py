"""YAML from outside, with a limit: aliases let a few lines stand for billions of nodes."""

from __future__ import annotations

from typing import Any

import yaml

MOST_NODES = 100_000  # after aliases are followed; a config of every key has some 500
MOST_LEVELS = 100
TOO_DEEP = f"it is nested too deeply, by more than {MOST_LEVELS} levels"

# libyaml's parser where PyYAML brings it: some ten times as fast; its errors are worded otherwise
FastLoader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class TooManyNodesError(yaml.YAMLError):
    """YAML with more nodes than `MOST_NODES` or levels than `MOST_LEVELS`, or with a node that contains itself."""


def parse_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader, fast: type[Any] = FastLoader) -> Any:
    """The value of a YAML document, by `fast`, a loader like `loader` over libyaml; what that refuses is read by `loader`, for its words.

    Raises yaml.YAMLError; for more than `MOST_NODES` nodes or `MOST_LEVELS` levels TooManyNodesError, before anything is built.
    """
    _require_small(text)
    try:
        try:
            return _value(fast(text))
        except TooManyNodesError:
            raise
        except yaml.YAMLError:
            return _value(loader(text))
    except RecursionError:  # where another error ended the count of levels
        raise TooManyNodesError(TOO_DEEP) from None


def _value(loader: Any) -> Any:
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _require_few_nodes(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _require_small(text: str) -> None:
    """Count the nodes and levels that the text itself holds, without building them."""
    count = depth = 0
    try:
        for event in yaml.parse(text, Loader=FastLoader):
            count += isinstance(event, yaml.NodeEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if count > MOST_NODES:
                raise TooManyNodesError(f"it has more than {MOST_NODES:,} nodes")
            if depth > MOST_LEVELS:
                raise TooManyNodesError(TOO_DEEP)
    except TooManyNodesError:
        raise
    except yaml.YAMLError as error:
        # newer versions of libyaml have a limit of their own, and meet it before they give the first event
        if "nesting depth" in str(error):
            raise TooManyNodesError(TOO_DEEP) from None
        return  # the loader says it, with its place


def _require_few_nodes(root: yaml.Node) -> None:
    """Count nodes as often as aliases repeat them."""
    sizes: dict[int, int] = {}
    under_way: set[int] = set()

    def size(node: yaml.Node) -> int:
        key = id(node)
        if key in under_way:
            raise TooManyNodesError("no section may contain itself, by an alias or otherwise")
        if key not in sizes:
            under_way.add(key)
            sizes[key] = 1 + sum(size(child) for child in _children(node))
            under_way.discard(key)
        return sizes[key]

    if size(root) > MOST_NODES:
        raise TooManyNodesError(f"with its aliases it has more than {MOST_NODES:,} nodes")


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
