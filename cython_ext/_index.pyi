# SPDX-License-Identifier: Apache-2.0
"""The chunk index of the master: which chunk is where, who may write it, who reads it, and what goes first.

Batches are packed as in ``proto/pool.proto``: hashes ``n x 32`` bytes, lengths and generations little-endian u64,
statuses ``n`` bytes with numbers of ``ItemStatus``, extents of 32 bytes. Every method that takes a batch works on it
without the GIL. All are thread-safe. A wrong type or size of an argument raises TypeError or ValueError and changes
nothing; a segment that is not there raises KeyError. Where the system gives no memory it is MemoryError, and nothing
has changed either; but `abort`, `fenced` and `restore` may have done a part, which stays done, and `evict`,
`evict_disk` and `spoilt` return what they have given up so far.

Times are milliseconds of any clock that does not go back; the index has none of its own.
"""

from collections.abc import Iterable, Sequence
from typing import Any

HASH_BYTES: int
EXTENT_BYTES: int
MOVE_BYTES: int
HEADER_BYTES: int
LEAF_BYTES: int
NO_SEGMENT: int
SHARDS_MAX: int

def extent_bytes(length: int) -> int:
    """Bytes of an extent whose payload has `length`: header, payload, and 8 for each of its leaves if it has several.

    Extents begin at multiples of 64. Wherever there is a `length` of an extent, it is that of its payload. ValueError:
    no segment is so large.
    """

class ChunkIndex:
    """An index, empty at first.

    Args:
        policy: ``"prefix"``, ``"s3fifo"`` or ``"lru"``.
        chunks_max: the bound of the table, below 2^32 - 1. A chunk with R shards counts as R.
        epoch: of the leader, below 2^24; the upper 24 bits of every generation, so that none is given twice.
        seed: of the choice between segments.
    """

    def __init__(self, *, policy: str = "prefix", chunks_max: int = ..., epoch: int = 1, seed: int = 0) -> None: ...
    # ---- segments
    def add_segment(
        self,
        segment: int,
        capacity_bytes: int,
        host: int,
        ramp_up_ms: int,
        now_ms: int,
        *,
        disk_of: int | None = None,
    ) -> None:
        """A segment that takes extents. It ramps up: its share of new extents grows over `ramp_up_ms`.

        A segment that `restore` has named, or that was added before, gets its capacity here and becomes readable.
        ValueError: it has extents beyond this capacity, or was dropped (or there are 65,535 segments).

        With `disk_of` it is the disk of the node that lends this segment of memory, which was added before. KeyError:
        there is no such memory, or this one was added or restored as memory before.
        """

    def know_disk(self, segment: int) -> None:
        """Before `restore`: records that name this segment name extents on a disk, which fill blocks of 4 KiB."""

    def set_segment(self, segment: int, *, writable: bool, readable: bool) -> None: ...
    def drop_segment(self, segment: int) -> None:
        """It is lost. Its extents are gone at once, for every call; `sweep` tidies up behind it.

        Who is to be fenced there is not asked for any more.
        """

    def drop_unknown(self, known: Iterable[int]) -> None:
        """After a restart: as `drop_segment` for each segment that only `restore` has named, but those `known`."""

    def sweep(self, count_max: int) -> tuple[bytes, bool]:
        """Look at up to `count_max` slots for chunks that have lost all extents of a shard.

        Returns (slots of chunks that are removed, as in `evict`; whether the round is complete). The first call after
        `restore` also names the slots whose records were refused: their rows are to be deleted in the same way.
        """

    def chunks_in(self, segment: int, count_max: int) -> bytes:
        """Up to so many committed chunks with an extent there: records of u32 namespace, 32 bytes of hash."""

    # ---- puts
    def start(
        self,
        owner: int,
        namespace: int,
        hashes: bytes,
        parents: bytes,
        lengths: bytes,
        shard: int,
        shards: int,
        replicas: int,
        avoid: Sequence[int],
        host: int,
        now_ms: int,
        deadline_ms: int,
    ) -> tuple[bytes, bytes]:
        """Begin to write. Returns (statuses, extents: n x replicas).

        Fewer replicas than asked for are given when there are not so many hosts; none is NO_SPACE.
        `host`: preferred for the first replica; 0: no preference. The same owner that starts what it is already
        writing is told WRITING. Where there are enough hosts but not enough room on them, it is NO_SPACE too.
        A chunk that has lost all extents of this shard is written anew, in its slot.
        What is ALREADY there is touched when the first shard is put, unless a lease on it is running; in the place of
        its first extent is its generation, without a segment. A shard that only disks have which cannot be read now is
        written anew too.
        """

    def commit(
        self, owner: int, namespace: int, hashes: bytes, generations: bytes, shard: int, written: bytes
    ) -> tuple[bytes, bytes, bytes]:
        """First half of a commit.

        Returns (statuses, slots: n_ok x u32, records: n_ok x varying, each with a u32 length before it).
        What it names is not visible yet: make the records durable under their slots, then `publish`, or `revoke`.
        A chunk with several shards has a new record with each of them; records of one slot are to be made durable in
        the order in which `commit` gave them.

        ALREADY: this generation is committed. NOT_OWNER: also while an earlier commit of it waits for its record, or
        when all its extents were lost. INVALID: `written` names no replica; nothing has changed. Replicas that are
        not in `written` wait for `fenced`.
        """

    def publish(self, slots: bytes) -> bytes:
        """Second half: visible from now on.

        Returns what has all its shards now: records of u32 namespace, 32 bytes of hash.
        """

    def revoke(self, slots: bytes) -> None:
        """The records could not be made durable: as if aborted and settled."""

    def abort(self, owner: int, namespace: int, hashes: bytes, generations: bytes, shard: int, settled: bool) -> bytes:
        """Give up what `start` gave. Unless `settled`, the extents wait for `fenced`.

        `settled` also ends the waiting of extents that were given up before, by whichever way. NOT_OWNER: this owner
        has no such extents, or has committed them.
        """

    def expire(self, now_ms: int) -> bytes:
        """Give up every write that is past its deadline. Returns pairs (u32 owner, u32 segment) to fence."""

    def drop_owner(self, owner: int) -> bytes:
        """Its session is over: its pins end and its writes are given up. Returns pairs (owner, segment) to fence."""

    def to_fence(self) -> bytes:
        """Every pair (owner, segment) whose extents wait for `fenced`."""

    def fenced(self, owner: int, segment: int) -> int:
        """The owner can write there no more: what waited for that is free. Returns bytes."""

    # ---- reads
    def exists(self, namespace: int, hashes: bytes) -> bytes:
        """OK: there with all shards, each readable; NOT_FOUND otherwise. Nothing is touched."""

    def match_prefix(self, namespace: int, hashes: bytes, now_ms: int, lease_ms: int) -> int:
        """How many of the first are there with all shards, each readable. They are touched and leased.

        A batch is touched from its last to its first, so that a chain is not younger at its end.
        """

    def locate(self, namespace: int, hashes: bytes, shard: int, now_ms: int, lease_ms: int) -> tuple[bytes, bytes, int]:
        """(statuses, extents: n x replicas, replicas: the most that one of them has). What is OK is leased.

        It is touched too, unless a lease on it is running: then this is the same use as the look-up that took the
        lease, or as that of another rank. NOT_FOUND: also when no replica of this shard is readable. Those that are
        come first. LOADING: it lies on disks only; it is leased and touched, and has no extents. See `promote`.
        """

    def pin(self, owner: int, pin: int, namespace: int, hashes: bytes) -> bytes:
        """CHUNKS_MAX: as many are pinned as there may be chunks. The same pin may be given more."""

    def unpin(self, owner: int, pin: int) -> int:
        """How many it held; 0: there is no such pin. A chunk that it held and that was lost is not counted."""

    # ---- removal: gone at once for every call; the space is given out again after `reclaim` and the last lease
    def remove(self, namespace: int, hashes: bytes, generations: bytes | None = None) -> tuple[bytes, bytes]:
        """(statuses, slots: u32 each of those that are OK). IN_USE: pinned.

        With `generations` (n x u64) only a chunk of which a shard has its generation goes; another is NOT_FOUND.
        """

    def remove_prefix(self, namespace: int, hash: bytes) -> tuple[bytes, int]:
        """It and all that descend from it: (slots, how many are pinned and stay). What is still written stays too."""

    def evict(
        self,
        want_bytes: int,
        now_ms: int,
        *,
        uses_min: int = 0,
        count_max: int = 0,
        bytes_max: int = 0,
        avoid: Sequence[int] = (),
        generations: bytes = b"",
        namespace: int = 0,
        hashes: bytes = b"",
        newest: int = ...,
    ) -> tuple[bytes, bytes, int, int, bytes, int]:
        """By the policy, until so many bytes leave memory; chunks that are pinned, leased or parents are passed over.

        Only bytes in writable segments of memory count, and only chunks that have some go. What is on disks with all
        its shards stays there. One call looks at 100,000 chunks at most; where more are to be passed over, the next
        call goes on.

        Args:
            want_bytes: so many.
            now_ms: the time.
            uses_min: chunks that were used so often, their put included, are copied to the disk of their node first;
                those of an earlier epoch too, since nobody has counted their uses; 0: none are. Where that disk has no
                room but could have, or is to be avoided, it ends there.
            count_max: copies to begin.
            bytes_max: no further copy begins when so many bytes are to be copied.
            avoid: disks that have enough to do.
            generations: chunks with a shard whose generation lies in one of these ranges are passed over (n x 16 bytes:
                u64 of the first, u64 of the last; they do not overlap).
            namespace: of `hashes`.
            hashes: these chunks are passed over.
            newest: where a chunk with a later generation would go next, the call ends.

        Returns:
            (slots of chunks that are gone, their records of u32 namespace and 32 bytes of hash, their bytes, bytes
            that leave memory in all, moves, a disk that has no room or NO_SEGMENT). The moves are as those of
            `move_to`; one that goes to NO_SEGMENT is of a chunk that is on disks: commit it at once.
        """

    def reclaim(self, slots: bytes, now_ms: int) -> int:
        """The removal of these slots is durable: they may be used again. Returns bytes freed now.

        Space without a running lease is free at once, the rest with a later `reclaim(b"", now_ms)`.
        """

    # ---- moves: a replica of a shard goes to another segment. A chunk has one move under way at most.
    #
    # A move is 96 bytes: u64 number (never given again), u32 segment that it leaves, u32 segment that it goes to,
    # u32 segment that is to be read, u32 namespace, u64 generation, u64 offset there, u64 new offset, u64 length of the
    # payload, u32 shard, u32 zero, 32 bytes of hash.
    #
    # The new extent is as large as the old one, and belongs to the move until `publish_moves`. Whoever copies the bytes
    # says when nothing of that can write there any more; before, `commit_moves` and `abort_moves` may not name it.
    # Until it is published readers find the old extent. A chunk that is removed, evicted or lost under way goes as any
    # other; its move comes to nothing, and keeps the new extent until it is ended. A restart knows of no moves: one
    # whose record (of `commit_moves`) is durable has happened; of any other the new extent is free.
    def move_out(
        self,
        segment: int,
        begin: int,
        looks_max: int,
        count_max: int,
        bytes_max: int,
        room_bytes: int,
        avoid: Sequence[int],
        now_ms: int,
    ) -> tuple[bytes, int, int]:
        """Begin to move what lies in a segment to where there is room, other than in the segments of `avoid`.

        A replica goes to a host that has none of the others, where there is room on one, else to a segment that has
        none. What is written, or moves already, is passed over, and everything in a segment that is not readable.

        Args:
            segment: of the old extents.
            begin: where the round goes on: what the last call returned, or 0.
            looks_max: extents to look at.
            count_max: moves to begin.
            bytes_max: no further move begins when so many bytes are to be moved.
            room_bytes: the moves take no more than this in all. What does not fit has found no room.
            avoid: segments.
            now_ms: the time.

        Returns:
            (moves, where the round goes on or NO_SEGMENT when it is complete, extents that found no room)
        """

    def move_to(
        self, namespace: int, hashes: bytes, segment: int, count_max: int, bytes_max: int
    ) -> tuple[bytes, bytes]:
        """Begin to move chunks to a segment, one shard of each.

        The replica that goes is the one on the host of this segment, else one in a segment that is not writable, else
        the first.

        Returns:
            (statuses, moves: one for each that is OK). ALREADY: each shard has a replica there. WRITING: it is written
            or moves already, or these are as many moves as were asked for. NO_SPACE: no room, or not writable.
            TOO_LARGE: for this segment. NOT_FOUND: also when it cannot be read.
        """

    def mend(
        self, namespace: int, hashes: bytes, shard: int, extents: bytes, replace: bool, now_ms: int
    ) -> tuple[bytes, bytes, bytes]:
        """Begin to replace copies that are spoilt, of each chunk the one at this extent (as `locate` gives it).

        Each moves to where there is room, its own segment included, and another copy is to be read for it. Where there
        is no other that can be read, or no room, it moves to nowhere (segment NO_SEGMENT): nothing is to be copied, and
        with the record of `commit_moves` the chunk has one replica less; but not its last one (NOT_FOUND).
        A chunk of which it is the last copy of a shard is removed, also when it is pinned.

        Args:
            namespace: of the chunks.
            hashes: of them.
            shard: whose copies.
            extents: n x 32 bytes.
            replace: where that can be; otherwise all move to nowhere.
            now_ms: the time.

        Returns:
            (statuses, moves, slots of chunks that are removed, as in `evict`). NOT_FOUND: there is no such copy any
            more. WRITING: the chunk is written or moves.
        """

    def commit_moves(self, moves: bytes) -> tuple[bytes, bytes, bytes]:
        """First half: the copies of these moves (n x u64) are good. Returns (statuses, slots, records), as `commit`.

        Make the records durable, then `publish_moves`, or `abort_moves`. What is not OK is over, and its new extent is
        free: NOT_FOUND, when the chunk, its old extent or one of the segments has gone, or no such move is under way;
        WRITING, when another shard of it is written.
        While a record is on its way, a put of another shard of the chunk is WRITING.
        """

    def publish_moves(self, moves: bytes, now_ms: int) -> int:
        """Second half: readers find the new extents from now on. Those that are over are ignored.

        Returns bytes of old extents that are free now. Where a lease is running it is with a later `reclaim`.
        """

    def abort_moves(self, moves: bytes) -> int:
        """They are over, and nothing of them can write any more. Returns bytes of new extents that are free now."""

    # ---- memory and disks: a chunk is copied to the disk below its memory before it leaves it, and keeps that copy
    # when it is read back. These copies are moves as those above, which leave the old extent where it is; with the last
    # shard that reaches a disk, all extents in memory are given up. Eviction from memory looks at what is in memory,
    # eviction from a disk at what is on disks only. A chunk with children in memory does not leave it, and one with
    # any children does not leave a disk.
    def demote_more(self, slots: bytes, uses_min: int, avoid: Sequence[int]) -> bytes:
        """Of chunks with several shards, of which some are on disks by now: copy the next one. Returns moves."""

    def evict_disk(self, segment: int, want_bytes: int, now_ms: int) -> tuple[bytes, bytes, int]:
        """Chunks that are on disks only, what was not used for longest first, until so many bytes are given up there.

        Returns (slots, records, bytes) as `evict`.
        """

    def promote(
        self, namespace: int, hashes: bytes, shard: int, count_max: int, bytes_max: int
    ) -> tuple[bytes, bytes, int]:
        """Begin to copy a shard of chunks into the memory above the disk that has it.

        Returns:
            (statuses, moves: one for each that is OK, bytes that found no room). ALREADY: it is in memory. WRITING: it
            moves already, or these are as many as were asked for. NO_SPACE: no room in that memory. NOT_FOUND: also
            when that memory takes nothing, or the disk cannot be read. TOO_LARGE: for that memory.
        """

    def spoilt(self, moves: bytes) -> tuple[bytes, bytes]:
        """What these moves (n x u64) were to copy from disks is not there: their chunks are gone.

        The moves are to be aborted as ever. Returns (slots, records) as `evict`; chunks of which this shard is in
        memory by now, or is written anew, stay.
        """

    # ---- restart
    def restore(self, slots: bytes, records: bytes) -> int:
        """Take records as `commit` made them. Extents in segments not added yet are kept and are not readable.

        Returns how many were taken; a damaged record, a key that is there already, an extent that overlaps another or a
        slot that is taken is refused and counted in stats, and its slot is named by the next `sweep`. ValueError: there
        are not as many records as slots; nothing has changed.
        """

    # ---- state
    def segment_stats(self, segment: int) -> dict[str, int]:
        """capacity_bytes, used_bytes, waiting_bytes, largest_free_bytes, extents, chunks, free_pieces.

        Of the `extents`, `chunks` are those of shards that are committed, and not given up. `used_bytes` belong to
        chunks or puts, `waiting_bytes` to nobody any more, but they are not free yet.
        """

    def stats(self) -> dict[str, Any]:
        """Numbers of the whole index.

        chunks (with a committed shard), on_disk (of those, in no memory), chunks_max (the bound also of those that are
        written or wait for `reclaim`), writing (shards), moving (replicas, until the move is over), pinned (times),
        leased_until_ms (the longest lease ever given), generation (the last one given), evicted, refused_records,
        policy, memory_bytes; of writable memory: capacity_bytes = used_bytes + condemned_bytes + free_bytes.
        """

    def namespaces(self) -> bytes:
        """The numbers (u32) of the namespaces that have a chunk, also one that is written or waits for `reclaim`."""

    def check(self) -> str:
        """What contradicts itself in the index, or an empty string. For tests: it looks at everything."""
