"""Who copies weights from whom, so that they cross the network once for each node and in all nodes at the same time.

Pure functions of what is told: no network, no clock, no Ray. A node gives every chunk on as soon as it has it, so a
version takes little longer to many nodes than to one. A new copy comes from whoever gives to the fewest, and so the
copies of a version that all want at once form a chain, in which everybody sends every byte once. If a node is lost, the
one behind it goes on from another, with the chunks that it has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

FAN_OUT = 2  # nodes that a node gives to at a time
NODE_SLOTS = 2  # versions on a node without the trainer: the one that its engines hold or load, and the coming one
NUM_AHEAD = 4  # chunks that are asked for at a time
Content = int | None  # a version, or what no version changes


class Order(NamedTuple):
    """A node is to copy this from another one, from the first chunk on that it lacks."""

    node: str
    content: Content
    stamp: int
    slot: int | None  # of the node
    source: str
    source_slot: int | None
    number: int  # of the copy: one with another number begins with nothing


@dataclass
class NodeCopy:
    """A version on a node, whole or coming."""

    node: str
    content: Content
    stamp: int
    number: int  # of all copies, in their order
    slot: int | None = None  # on its node; of what no version changes, None
    source: str | None = None  # None: nobody gives to it
    num_chunks: int = 0  # that it has
    is_whole: bool = False
    users: set[int] = field(default_factory=set)  # engines that wait for it or read it
    avoids: set[str] = field(default_factory=set)  # nodes that did not give to it


class Relay:
    """What every node has, and from whom it gets the rest. The root has all that anybody may ask for."""

    def __init__(self, root: str, slot_of: Callable[[int], int]) -> None:
        """``slot_of``: of a version at the root."""
        self._root, self._slot_of = root, slot_of
        self._copies: dict[str, dict[Content, NodeCopy]] = defaultdict(dict)  # by node
        self._silent: set[str] = set()  # nodes that did not give when they were asked, and have said nothing since
        self._numbers = count()
        self._is_settled = True  # nothing has happened since the last orders that others could follow from

    def want(self, node: str, content: Content, stamp: int, user: int) -> None:
        """An engine of a node needs this there until ``done``."""
        copy = self._copies[node].get(content)
        if copy is not None and copy.stamp != stamp:
            self._drop(copy)
            copy = None
        if copy is None:
            copy = self._copies[node][content] = NodeCopy(node, content, stamp, next(self._numbers))
        copy.users.add(user)
        self._is_settled = False

    def done(self, node: str, user: int) -> None:
        """An engine needs nothing there any more; what is coming goes on coming, for others may copy it."""
        for copy in list(self._copies[node].values()):
            copy.users.discard(user)
            if not copy.users and copy.slot is None and copy.content is not None:  # it has not begun
                self._drop(copy)
        self._is_settled = False

    def slot(self, node: str, content: Content) -> int | None:
        return self._copies[node][content].slot

    def is_whole(self, node: str, content: Content, stamp: int) -> bool:
        copy = self._copies[node].get(content)
        return copy is not None and copy.stamp == stamp and copy.is_whole

    def came(self, order: Order, num_chunks: int, is_whole: bool) -> bool:
        """A node has so many chunks of what it was to copy; returns whether these are more than before."""
        if order.node in self._silent:
            self._silent.remove(order.node)
            self._is_settled = False
        copy = self._copies[order.node].get(order.content)
        if copy is None or copy.number != order.number or copy.is_whole:
            return False
        has_grown, copy.num_chunks, copy.is_whole = num_chunks > copy.num_chunks, num_chunks, is_whole
        if is_whole:
            copy.source, self._is_settled = None, False
            copy.avoids.clear()
        return has_grown

    def is_current(self, order: Order) -> bool:
        """Whether the node is still to do this."""
        copy = self._copies[order.node].get(order.content)
        return copy is not None and (copy.number, copy.source) == (order.number, order.source)

    def failed(self, order: Order, is_silent: bool) -> None:
        """The source did not give, being silent or having something else by now; another one is looked for.

        If it was the root, which has something else, there is no other: whoever wants it must say ``forget``.
        """
        if not self.is_current(order):
            return
        copy = self._copies[order.node][order.content]
        copy.source, self._is_settled = None, False
        if order.source != self._root:
            copy.avoids.add(order.source)
            if is_silent:
                self._silence(order.source)

    def _silence(self, node: str) -> None:
        """Count on a node no more, nor give to it, until it says something."""
        self._silent.add(node)
        for copy in self._copies[node].values():
            copy.source = None

    def forget(self, node: str, content: Content) -> None:
        """The copy will not come."""
        if content in self._copies[node]:
            self._drop(self._copies[node][content])

    def lost(self, node: str) -> None:
        """Nothing that the node had is there any more."""
        for copy in list(self._copies[node].values()):
            self._drop(copy)

    def orders(self) -> list[Order]:
        """What nodes are to do that they have not been told."""
        found: list[Order] = []
        while not self._is_settled:  # a place that is taken makes others look for another source
            self._is_settled = True
            found += self._new_orders()
        return found

    def _new_orders(self) -> list[Order]:
        found = []
        heard = [of_node for node, of_node in self._copies.items() if node not in self._silent]
        waiting = [c for of_node in heard for c in of_node.values() if not c.is_whole and not c.source]
        for copy in sorted(waiting, key=lambda copy: copy.number):
            is_there = self._copies[copy.node].get(copy.content) is copy  # another one may have taken its place
            if is_there and (copy.users or self._behind(copy)) and self._has_slot(copy):
                copy.source = self._source(copy)
                if copy.source is not None:
                    place = copy.slot, copy.source, self._there(copy)
                    found.append(Order(copy.node, copy.content, copy.stamp, *place, copy.number))
        return found

    def num_streams(self, node: str) -> int:
        """Nodes that it gives to."""
        return self._streams()[node]

    def _streams(self) -> Counter[str | None]:
        return Counter(copy.source for of_node in self._copies.values() for copy in of_node.values())

    def _there(self, copy: NodeCopy) -> int | None:
        """The slot of its source."""
        if copy.source != self._root:
            return self._copies[str(copy.source)][copy.content].slot
        return None if copy.content is None else self._slot_of(copy.content)

    def _source(self, copy: NodeCopy) -> str | None:
        """Of those that may give, the one that gives to the fewest, the root last and then the one with most."""
        streams, unfit = self._streams(), {copy.node, *copy.avoids, *self._silent, *self._behind(copy)}
        found = [(streams[self._root], True, 0, self._root)]
        for node, of_node in self._copies.items():
            other = of_node.get(copy.content)
            if other is None or other.stamp != copy.stamp or node in unfit:
                continue
            if other.is_whole or other.source is not None:
                found.append((streams[node], False, -other.num_chunks, node))
        num_streams, _, _, source = min(found)
        return source if num_streams < FAN_OUT else None

    def _behind(self, copy: NodeCopy) -> set[str]:
        """The nodes that get what this copy has, through others or not."""
        same = [of_node[copy.content] for of_node in self._copies.values() if copy.content in of_node]
        receivers: dict[str, list[str]] = defaultdict(list)
        for other in same:
            if other.source is not None:
                receivers[other.source].append(other.node)
        found, todo = set[str](), [copy.node]
        while todo:
            new = receivers[todo.pop()]
            found.update(new)
            todo += new
        return found

    def _has_slot(self, copy: NodeCopy) -> bool:
        """Give the copy a place on its node if there is one that nobody needs."""
        if copy.slot is not None or copy.content is None:
            return True
        others = {other.slot: other for other in self._copies[copy.node].values() if other.slot is not None}
        free = [slot for slot in range(NODE_SLOTS) if slot not in others]
        if not free:
            idle = [other for other in others.values() if not other.users]
            if not idle:
                return False
            # One that gives to other nodes last: they would have to go on from a third.
            oldest = min(idle, key=lambda other: (bool(self._behind(other)), other.number))
            free = [slot for slot, other in others.items() if other is oldest]
            self._drop(oldest)
        copy.slot = free[0]
        return True

    def _drop(self, copy: NodeCopy) -> None:
        del self._copies[copy.node][copy.content]
        for of_node in self._copies.values():
            other = of_node.get(copy.content)
            if other is not None and other.source == copy.node:
                other.source = None
        self._is_settled = False


class ChunkWindow:
    """Which chunks of a copy a node asks its source for: some at a time, and one that the source may not have yet."""

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.have = 0  # the first chunks, without a gap: so many can be given on
        self._came: set[int] = set()  # beyond those
        self._asked: set[int] = set()
        self._written_next: set[int] = set()  # that have come, and are not in their place yet
        self._at_source = 0  # chunks that the source has, as far as it is known

    @property
    def is_whole(self) -> bool:
        return self.have == self.num_chunks

    def next(self) -> int | None:
        """The chunk to ask for now; None: none."""
        if len(self._asked) >= NUM_AHEAD:
            return None
        taken = self._asked | self._written_next | self._came
        number = next(number for number in count(self.have) if number not in taken)
        waits = any(asked >= self._at_source for asked in self._asked)
        if number >= self.num_chunks or (number >= self._at_source and waits):
            return None
        self._asked.add(number)
        return number

    def answered(self, number: int, at_source: int, has_come: bool) -> None:
        """The source has told how many chunks it has, and sent this one if it has it."""
        self._asked.discard(number)
        self._at_source = max(self._at_source, at_source)
        if has_come:
            self._written_next.add(number)

    def written(self, number: int) -> None:
        """A chunk is in its place."""
        self._written_next.discard(number)
        self._came.add(number)
        while self.have in self._came:
            self._came.remove(self.have)
            self.have += 1

    def ask_another(self) -> None:
        """The source is another one from now on: nothing that was asked for comes."""
        self._asked.clear()
        self._at_source = 0
