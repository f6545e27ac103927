# SPDX-License-Identifier: Apache-2.0
"""Who may write: a key under a lease, and the condition that every change carries.

The revision at which the key of the leader was last written is the mark. A transaction changes something only where the
mark is as its sender knows it. So nobody writes who has been deposed, however late; and whoever does not know what came
of a transaction writes the key once more, after which that transaction cannot be carried out any more and may be
asked for again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from moonpool.master.errors import StoreBusyError, StoreDamagedError, StoreLostError
from moonpool.master.store.base import EPOCH_MAX, Identity
from moonpool.master.store.etcd.calls import Members, RefusedError, UnansweredError
from moonpool.master.store.etcd.layout import Layout
from moonpool.master.store.etcd.options import EtcdOptions
from moonpool.master.store.etcd.requests import compare, first, get, unavailable

__all__ = ["Owner"]

_log = logging.getLogger("moonpool.master")
_LOOK: Final = 0.1
# Renewals for each lease that runs out.
_RENEWALS: Final = 4
# The part of a lease that is counted on. The rest is for clocks that differ in their speed.
_COUNTED: Final = 0.9
_ANSWER: Final = 15.0
# What is refused for want of space is tried again so often.
_FULL_PAUSE: Final = 0.5
# Epochs are minutes since 2026, where that is more than the last one and one: a store that was set back does not know
# which epochs there have been since, and a generation is never to be given twice.
_FIRST_MINUTE: Final = 1_767_225_600 // 60

Change = tuple[bytes, "bytes | None"]


class Owner:
    """Leads, as long as nobody else does. Used from one event loop.

    Args:
        members: of the etcd.
        options: how long a lease is.
        layout: the keys.
        when_lost: called once, when somebody else leads.

    Attributes:
        mark: revision at which the key of the leader was written last. 0: never.
        until: time of `time.monotonic` until which nobody else can have taken over.
        lost: what ended it, once something has.
        fences: times that the key was written again.
        address: of this master, for those who wait and for people who look at the key.
    """

    def __init__(
        self, members: Members, options: EtcdOptions, layout: Layout, when_lost: Callable[[StoreLostError], None]
    ) -> None:
        self.mark = 0
        self.until = 0.0
        self.lost: StoreLostError | None = None
        self.fences = 0
        self.address = ""
        self._members = members
        self._rpc = members.rpc
        self._options = options
        self._layout = layout
        self._when_lost = when_lost
        self._boot = os.urandom(16).hex()
        self._turn = 0
        self._lease = 0
        self._lease_s = 0.0
        self._epoch_mark = 0
        self._fencing = asyncio.Lock()

    # ---------------------------------------------------------------- taking over

    async def campaign(self) -> Identity:
        """Become the leader.

        Raises:
            StoreBusyError: somebody else leads.
            StoreDamagedError: what is there makes no sense.
            StoreUnavailableError: etcd does not answer.
        """
        await self._see_that_nobody_leads()
        await self._grant()
        while not await self._take_key():
            await self._see_that_nobody_leads()
        return await self._begin_epoch()

    async def _see_that_nobody_leads(self) -> None:
        found = await self.read(self._layout.leader)
        if found is None or self._is_mine(found):
            return
        busy = StoreBusyError(
            f"another master leads: {found.value.decode(errors='replace')}",
            cause="it has the key of the leader in etcd, until its lease is over",
            retryable=True,
            hint="wait for it, stop that one, or another prefix or cluster",
        )
        with contextlib.suppress(ValueError, TypeError, KeyError):  # of another version: who it is stays unknown
            busy.leader = str(json.loads(found.value)["address"])
        raise busy

    async def wait(self, seconds: float) -> None:
        """Return when nobody leads, or after so long."""
        end = time.monotonic() + seconds
        while await self.read(self._layout.leader) is not None and time.monotonic() < end:
            await asyncio.sleep(_LOOK)

    async def _grant(self) -> None:
        sent = time.monotonic()
        request = self._rpc.LeaseGrantRequest(TTL=max(1, round(self._options.lease)))
        try:
            reply = await self._members.ask("LeaseGrant", request, _ANSWER)
        except RefusedError as error:
            raise unavailable("etcd gives no lease", error) from error
        self._lease, self._lease_s = reply.ID, float(reply.TTL)
        self.until = sent + _COUNTED * self._lease_s

    async def _take_key(self) -> bool:
        """Write the key of the leader, unless it is there. Returns whether it is this one's."""
        rpc, key = self._rpc, self._layout.leader
        request = rpc.TxnRequest(compare=[compare(rpc, key, create=0)], success=[self._put_key()])
        request.failure.append(get(rpc, key))
        try:
            reply = await self._members.ask("Txn", request, _ANSWER)
        except RefusedError as error:
            if error.no_lease:
                return False
            raise unavailable("the key of the leader cannot be written", error) from error
        if reply.succeeded:
            self.mark = reply.header.revision
            return True
        found = first(reply.responses[0])
        if found is not None and self._is_mine(found):
            # An earlier attempt was carried out, whose answer was lost.
            self.mark = found.mod_revision
            return True
        return False

    async def _begin_epoch(self) -> Identity:
        """Draw an epoch that no leader had, and have it durable."""
        layout = self._layout
        known, last = await self.read(layout.cluster_id), await self.read(layout.epoch)
        cluster_id, before = self._understand(known, last)
        self._epoch_mark = 0 if last is None else last.mod_revision
        epoch = max(before + 1, int(time.time()) // 60 - _FIRST_MINUTE)
        if epoch > EPOCH_MAX:
            raise StoreDamagedError(f"{layout.root.decode()} has epoch {epoch}", hint="see the clock, or a new prefix")
        now = {"epoch": epoch, "boot": self._boot, "etcd_cluster": f"{self._members.etcd_cluster:x}"}
        changes: list[Change] = [(layout.epoch, json.dumps(now).encode())]
        if known is None:
            changes.append((layout.cluster_id, cluster_id.hex().encode()))
        try:
            while not await self.change(changes):
                await asyncio.sleep(_FULL_PAUSE)
        except RefusedError as error:
            raise unavailable("the epoch cannot be written", error) from error
        found = await self.read(layout.epoch)
        if found is None or json.loads(found.value) != now:
            raise StoreBusyError("somebody else has taken over meanwhile", retryable=True, hint="wait for its turn")
        self._epoch_mark = found.mod_revision
        return Identity(cluster_id, epoch)

    def _understand(self, known: Any, last: Any) -> tuple[bytes, int]:
        root, etcd = self._layout.root.decode(), f"{self._members.etcd_cluster:x}"
        if known is None and last is None:
            return os.urandom(16), 0
        try:
            cluster_id = bytes.fromhex(known.value.decode())
            said = {"epoch": 0, "etcd_cluster": etcd} if last is None else json.loads(last.value)
            epoch, etcd_before = said["epoch"], said["etcd_cluster"]
            if len(cluster_id) != 16 or not isinstance(epoch, int) or not 0 <= epoch <= EPOCH_MAX:
                raise ValueError(f"cluster id of {len(cluster_id)} bytes, epoch {epoch!r}")
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise StoreDamagedError(
                f"{root} has no cluster id or epoch that makes sense", cause=str(error), hint="another prefix"
            ) from error
        if etcd_before != etcd:
            raise StoreDamagedError(
                f"{root} was written in another etcd cluster: this is a snapshot that was restored",
                cause=f"the cluster id of etcd was {etcd_before}, and is {etcd}",
                hint=f"stop every node, then etcdctl del {root}/epoch; see docs/master.md on snapshots",
            )
        return cluster_id, epoch

    # ---------------------------------------------------------------- changing something

    async def change(self, changes: Sequence[Change]) -> bool:
        """Carry out puts and deletes (value None) of distinct keys together.

        Returns:
            False: for want of space they have not been carried out.

        Raises:
            StoreLostError: somebody else leads. Whether they were carried out is not known.
            RefusedError: they have not been carried out, for another reason than want of space.
        """
        while True:
            mark = self.mark
            try:
                if await self._attempt(changes, mark):
                    return True
            except UnansweredError:
                await self._members.pause()
            except RefusedError as error:
                if error.busy:
                    await self._members.pause()
                    continue
                if await self._are_there(changes):
                    return True
                if error.full:
                    return False
                raise
            except StoreDamagedError as error:
                raise self.give_up(error) from error
            await self.fence(mark)

    async def _attempt(self, changes: Sequence[Change], mark: int) -> bool:
        if self.lost is not None:
            raise self.lost
        rpc = self._rpc
        request = rpc.TxnRequest(compare=[compare(rpc, self._layout.leader, mod=mark)])
        add = request.success.add
        for key, value in changes:
            if value is None:
                add().request_delete_range.key = key
            else:
                put = add().request_put
                put.key = key
                put.value = value
        reply = await self._members.attempt("Txn", request)
        return bool(reply.succeeded)

    async def _are_there(self, changes: Sequence[Change]) -> bool:
        """Return whether changes that were refused have been carried out, which is all of them or none.

        etcd says that it has no space also of the change that took the last of it. And what is refused may have been
        carried out by an attempt before, of which the answer was lost.
        """
        try:
            for key, value in changes:
                found = await self._look(key)
                if (None if found is None else found.value) != value:
                    return False
        except (RefusedError, StoreDamagedError) as error:
            raise self.give_up(error) from error
        return True

    async def _look(self, key: bytes) -> Any:
        """Return a key with its value, or None. It takes as long as it takes, as long as this one may lead."""
        while self.lost is None:
            with contextlib.suppress(UnansweredError):
                reply = await self._members.attempt("Range", self._rpc.RangeRequest(key=key))
                return reply.kvs[0] if reply.kvs else None
            await self._members.pause()
        raise self.lost

    async def fence(self, mark: int) -> None:
        """See that nothing is carried out any more that was asked for under `mark`, and that this one leads.

        It takes as long as it takes: nobody can say what came of the changes before.

        Raises:
            StoreLostError: somebody else leads.
        """
        async with self._fencing:
            while self.mark == mark and self.lost is None:
                self._turn += 1
                try:
                    await self._write_key()
                except UnansweredError:
                    await self._members.pause()
                except RefusedError:
                    # Without space it can be neither written nor leased again. The upkeep makes some.
                    await asyncio.sleep(_FULL_PAUSE)
                except StoreDamagedError as error:
                    raise self.give_up(error) from error
            if self.lost is not None:
                raise self.lost

    async def _write_key(self) -> None:
        """One attempt to move the mark on."""
        rpc, key = self._rpc, self._layout.leader
        request = rpc.TxnRequest(compare=[compare(rpc, key, mod=self.mark)], success=[self._put_key()])
        request.failure.append(get(rpc, key))
        try:
            reply = await self._members.attempt_anywhere("Txn", request)
        except RefusedError as error:
            if not error.no_lease:
                raise
            await self._lease_again()
            return
        if reply.succeeded:
            self._marked(reply.header.revision)
            return
        found = first(reply.responses[0])
        if found is None:
            await self._lease_again()
        elif self._is_mine(found):
            self._marked(found.mod_revision)
        else:
            raise self._deposed(found)

    async def _lease_again(self) -> None:
        """One attempt to lead again after the lease was over, which is as if it had not been if nobody else led."""
        rpc, layout = self._rpc, self._layout
        sent = time.monotonic()
        grant = rpc.LeaseGrantRequest(TTL=max(1, round(self._options.lease)))
        reply = await self._members.attempt_anywhere("LeaseGrant", grant)
        self._lease, self._lease_s = reply.ID, float(reply.TTL)
        request = rpc.TxnRequest(
            compare=[compare(rpc, layout.leader, create=0), compare(rpc, layout.epoch, mod=self._epoch_mark)],
            success=[self._put_key()],
        )
        request.failure.extend([get(rpc, layout.leader), get(rpc, layout.epoch)])
        reply = await self._members.attempt_anywhere("Txn", request)
        if reply.succeeded:
            _log.warning("the lease of the leader was over, and nobody else has led: it goes on")
            self._marked(reply.header.revision)
            self.until = sent + _COUNTED * self._lease_s
            return
        found, epoch = first(reply.responses[0]), first(reply.responses[1])
        if epoch is None or epoch.mod_revision != self._epoch_mark or (found is not None and not self._is_mine(found)):
            raise self._deposed(found or epoch)
        if found is not None:
            # An earlier attempt was carried out, or the key is not gone yet with its lease: then it is looked at again.
            self._lease = found.lease
            self._marked(found.mod_revision)

    def _marked(self, revision: int) -> None:
        self.fences += self.mark != revision
        self.mark = revision

    # ---------------------------------------------------------------- keeping it

    async def keep(self) -> None:
        """Renew the lease, for ever, and take it again where it was over.

        Raises:
            StoreLostError: somebody else leads.
        """
        while True:
            try:
                alive = await self._renew()
            except StoreDamagedError as error:
                raise self.give_up(error) from error
            if not alive:
                await self.fence(self.mark)
            await asyncio.sleep(self._lease_s / _RENEWALS if alive and self.leads else _LOOK)

    async def _renew(self) -> bool:
        """Renew the lease once. Returns whether it is not over, as far as is known."""
        sent = time.monotonic()
        try:
            request = self._rpc.LeaseKeepAliveRequest(ID=self._lease)
            reply = await self._members.attempt_anywhere("LeaseKeepAlive", request)
        except (UnansweredError, RefusedError):
            await self._members.pause()
            return True
        if reply.TTL > 0:
            self.until = max(self.until, sent + _COUNTED * reply.TTL)
        return bool(reply.TTL > 0)

    @property
    def leads(self) -> bool:
        """Whether nobody else can have taken over by now."""
        return self.lost is None and time.monotonic() < self.until

    async def resign(self) -> None:
        """End the lease, and with it the key, so that the next one need not wait."""
        if self._lease and self.lost is None:
            await self._members.ask("LeaseRevoke", self._rpc.LeaseRevokeRequest(ID=self._lease), 1.0)

    # ---------------------------------------------------------------- small things

    async def read(self, key: bytes) -> Any:
        """Return a key with its value, or None."""
        try:
            reply = await self._members.ask("Range", self._rpc.RangeRequest(key=key), _ANSWER)
        except RefusedError as error:
            raise unavailable(f"{key.decode()} cannot be read", error) from error
        return reply.kvs[0] if reply.kvs else None

    def _put_key(self) -> Any:
        value = {"address": self.address, "boot": self._boot, "turn": self._turn}
        request = self._rpc.RequestOp()
        put = request.request_put
        put.key, put.value, put.lease = self._layout.leader, json.dumps(value).encode(), self._lease
        return request

    def _is_mine(self, found: Any) -> bool:
        return self._boot.encode() in found.value

    def give_up(self, cause: Exception) -> StoreLostError:
        """Write nothing any more."""
        return self._lose("what is in etcd is not what it should be", f"{type(cause).__name__}: {cause}")

    def _deposed(self, found: Any) -> StoreLostError:
        said = "nothing" if found is None else found.value.decode(errors="replace")
        return self._lose("another master has led meanwhile", f"the key in etcd says {said}")

    def _lose(self, what: str, cause: str) -> StoreLostError:
        if self.lost is None:
            self.lost = StoreLostError(
                f"{what}: this master writes nothing any more",
                cause=cause,
                retryable=True,
                hint="it waits for its turn again",
            )
            _log.error("%s", self.lost)
            self._when_lost(self.lost)
        return self.lost
