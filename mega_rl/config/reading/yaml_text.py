"""Reading YAML text: as OmegaConf reads it, but ``on``, ``off``, ``yes`` and ``no`` stay the words they are.

YAML 1.1 turns those words into booleans, so that ``bridge.verify: off`` would arrive as ``False``; and it
reads ``5e-7`` as a string. Both are settled here as YAML 1.2 does.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from mega_rl.errors import shortened, shown

MAX_CHARACTERS = 1 << 18  # of one document; the shipped configurations have a few thousand
MAX_VALUES = 10_000  # in one document; what an alias stands for counts each time
MAX_DEPTH = 32  # sections and lists inside one another
_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
_NOT_OURS = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp")}
_PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")}
_NO_TEXT = re.compile(r"[\x00\ud800-\udfff]")  # NUL, and halves of a character


def unusable_text(text: str) -> str | None:
    """What is wrong with a text that no file name and no UTF-8 file can hold; None for any other."""
    found = _NO_TEXT.search(text)
    return None if found is None else f"a text has the character U+{ord(found[0]):04X}, which no file can hold"


class _Loader(yaml.SafeLoader):
    """Plain values only; a document that is too large or too deep is refused while it is read, before it costs time."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NOT_OURS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {
        tag: construct for tag, construct in yaml.SafeLoader.yaml_constructors.items() if tag is None or tag in _PLAIN
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_values = 0
        self._depth = 0  # of what is being read
        self._sizes: dict[int, tuple[int, int]] = {}  # id of a finished node -> its values and its depth

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                raise yaml.composer.ComposerError(None, None, "an alias stands inside what it names", mark)
            num_values, depth = self._sizes[id(node)]
            self._count(num_values, depth, mark)
            return node
        before = self._num_values
        self._count(1, 1, mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        children = [] if isinstance(node, yaml.ScalarNode) or node is None else node.value
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        depth = 1 + max((self._sizes[id(part)][1] for part in parts), default=0)
        self._sizes[id(node)] = self._num_values - before, depth
        return node

    def _count(self, num_values: int, depth: int, mark: yaml.Mark) -> None:
        self._num_values += num_values
        problem = None
        if self._num_values > MAX_VALUES:
            problem = f"there are more than {MAX_VALUES} values"
        elif self._depth + depth > MAX_DEPTH:
            problem = f"values are nested more than {MAX_DEPTH} deep"
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, problem, mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            problem = None
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key is a list or a section, not a word"
            elif key.value in seen:
                problem = f"the key {shown(key.value)} stands twice"
            if problem is not None:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        problem = unusable_text(str(value))
        if problem is not None:
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = super().construct_yaml_int(node)
        if abs(value) >= 1 << 63:
            raise yaml.constructor.ConstructorError(None, None, "a whole number has over 63 bits", node.start_mark)
        return value


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_yaml(text: str) -> Any:
    """The plain Python value of a YAML document.

    Raises:
        ValueError: the text is no YAML of plain values, or larger than a configuration can be; the message is one line
            with the place.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"there are more than {MAX_CHARACTERS} characters")
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader with fewer types
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{shortened(error.problem or error.context or '')}{place}") from error
    except yaml.YAMLError as error:
        raise ValueError(shortened(" ".join(str(error).split()))) from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:  # PyYAML's, of a bad tag
        raise ValueError(f"a value is not what its tag says ({shown(str(error))})") from error
