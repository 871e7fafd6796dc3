"""State of each KV block (blank, in use or unused), and the hashes under which published blocks are found.

An unused block is published and has no users. It keeps its content until its memory is needed; the least recently used
block is taken first. Must not know what is in a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from core.text import BlockHash


class BlockPool:
    """Blocks by number. Invariant: a block with two users is published."""

    def __init__(self, blocks: range) -> None:
        self._blocks = blocks
        self._blank: dict[int, object] = dict.fromkeys(blocks)
        """Each blank block and its last user, whose rows are still in it; in order of release."""
        self._unused: dict[int, int] = {}
        """Each unused block and the time of its last use; oldest first."""
        self._num_users: Counter[int] = Counter()
        self._published: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._clock = 0

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: blank and unused ones. Allocating an unused one drops its content."""
        return len(self._blank) + len(self._unused)

    def lookup(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks published under these hashes, up to the first missing one."""
        blocks = []
        for block_hash in hashes:
            if block_hash not in self._published:
                break
            blocks.append(self._published[block_hash])
        return blocks

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Publish a block under this hash, unless the block has a hash already or another block has this one."""
        if block not in self._hash_of and block_hash not in self._published:
            self._published[block_hash] = block
            self._hash_of[block] = block_hash

    def unpublish(self, block: int) -> None:
        """Unpublish a block because its only user will write to it; a shared block stays published."""
        if block in self._hash_of and not self.is_shared(block):
            self._drop_hash(block)

    def are_private(self, blocks: Sequence[int]) -> bool:
        """Whether none of the blocks is published, so that they may be written."""
        return self._hash_of.keys().isdisjoint(blocks)

    def is_shared(self, block: int) -> bool:
        return self._num_users[block] > 1

    def is_unused(self, block: int) -> bool:
        return block in self._unused

    def allocate(self, preferred: int | None) -> tuple[int, object]:
        """Take a block without users. Returns it and the last user, whose rows are still in it; None if unknown.

        Takes the preferred block if it is blank or stale: attention reads the KV of adjacent blocks in place.
        """
        block = (
            preferred
            if preferred in self._blank or self._is_stale(preferred)
            else next(iter(self._blank or self._unused))
        )
        assert block is not None
        last_user = self._blank.pop(block, None)
        if block in self._unused:
            del self._unused[block]
            self._drop_hash(block)
        return block, last_user

    def _is_stale(self, block: int | None) -> bool:
        """Whether an unused block's last use lies in the older half of the time since the oldest block's last use.

        False while there are blank blocks.
        """
        if block not in self._unused or self._blank:
            return False
        oldest = next(iter(self._unused.values()))
        return self._unused[block] <= (oldest + self._clock) // 2

    def use(self, block: int) -> None:
        """Add a user to a block that was found or allocated."""
        self._unused.pop(block, None)
        self._num_users[block] += 1

    def release(self, block: int, user: object) -> None:
        """Remove a user. Without users, a published block keeps its content; any other is blank, with `user`'s rows."""
        self._num_users[block] -= 1
        if self._num_users[block]:
            return
        del self._num_users[block]
        self._clock += 1
        if block in self._hash_of:
            self._unused[block] = self._clock
        else:
            self._blank[block] = user

    def return_unclaimed(self, blocks: Iterable[int]) -> None:
        """Return allocated blocks that got no user."""
        self._blank.update(dict.fromkeys(blocks))

    def _drop_hash(self, block: int) -> None:
        del self._published[self._hash_of.pop(block)]

    def check_integrity(self, users: Counter[int]) -> None:
        """Raises: AssertionError unless every block is accounted for once. `users`: number of users of each block."""
        assert users == +self._num_users, "a block's users are miscounted"
        shared = {block for block, count in users.items() if count > 1}
        assert shared <= self._hash_of.keys(), "a block that was not published has two owners"
        assert not (self._blank.keys() | self._unused.keys()) & users.keys(), "a free block has an owner"
        assert not self._blank.keys() & self._hash_of.keys(), "a blank block is published"
        assert self._unused.keys() <= self._hash_of.keys(), "a block is kept for nothing"
        everything = self._blank.keys() | self._unused.keys() | users.keys()
        assert everything == set(self._blocks), "a block is lost"
        assert {block: name for name, block in self._published.items()} == self._hash_of, "a hash leads elsewhere"
