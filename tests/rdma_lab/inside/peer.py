# SPDX-License-Identifier: Apache-2.0
"""One end of a reliable connection over pyverbs: a peer that has no line in common with the engine."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, WC
from pyverbs.device import Context
from pyverbs.enums import (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_QPT_RC,
    IBV_SEND_SIGNALED,
    IBV_WC_WITH_IMM,
    IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM,
    IBV_WR_SEND,
    ibv_wc_status,
)
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

if TYPE_CHECKING:
    from typing_extensions import Self

PORT = 1
# Index of the address that an IPv4 address gives; 0 is the link-local one.
GID_INDEX = 1


@dataclass(frozen=True)
class Address:
    """What the other end must know of one."""

    qpn: int
    psn: int
    gid: str
    mtu: int  # as in enum ibv_mtu: 5 is 4096 bytes, 3 is 1024


@dataclass(frozen=True)
class Completion:
    """What became of a work request."""

    wr_id: int
    status: str  # of enum ibv_wc_status, such as "SUCCESS" or "REM_ACCESS_ERR"
    length: int  # of what was received
    immediate: int | None  # as a number of this host, whatever the order of its bytes was


class Buffer:
    """Registered memory of an endpoint."""

    def __init__(self, region: MR, length: int) -> None:
        self.region = region
        self.length = length
        self.address: int = region.buf
        self.rkey: int = region.rkey

    def write(self, data: bytes, offset: int = 0) -> None:
        assert offset + len(data) <= self.length
        self.region.write(data, len(data), offset)

    def read(self, length: int | None = None, offset: int = 0) -> bytes:
        content: bytes = self.region.read(self.length - offset if length is None else length, offset)
        return content

    def piece(self, offset: int, length: int | None) -> SGE:
        return SGE(self.address + offset, self.length - offset if length is None else length, self.region.lkey)


class Endpoint:
    """A queue pair with its completion queue and its memory.

    Args:
        device: such as "rxea0".
        depth: work requests of each kind that may be outstanding.
        psn: the first packet sequence number it sends.
        beside: another endpoint of the device whose memory is this one's too, and which is closed after it.
    """

    def __init__(
        self,
        device: str,
        *,
        gid_index: int = GID_INDEX,
        depth: int = 64,
        psn: int = 0x1234,
        beside: Endpoint | None = None,
    ) -> None:
        self._beside = beside
        self.context = Context(name=device) if beside is None else beside.context
        self.pd = PD(self.context) if beside is None else beside.pd
        self.cq = CQ(self.context, 2 * depth)
        cap = QPCap(max_send_wr=depth, max_recv_wr=depth, max_send_sge=1, max_recv_sge=1)
        self.qp = QP(self.pd, QPInitAttr(qp_type=IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap))
        self._gid_index = gid_index
        self._posted = 0
        gid = str(self.context.query_gid(PORT, gid_index))
        self.address = Address(self.qp.qp_num, psn, gid, self.context.query_port(PORT).active_mtu)

    def register(self, length: int, *, writable: bool = True, readable: bool = True) -> Buffer:
        """Allocate memory that the other end may write and read, or may not."""
        access = IBV_ACCESS_LOCAL_WRITE
        access |= IBV_ACCESS_REMOTE_WRITE if writable else 0
        access |= IBV_ACCESS_REMOTE_READ if readable else 0
        buffer = Buffer(MR(self.pd, length, access), length)
        buffer.write(bytes(length))
        return buffer

    def connect(self, remote: Address, *, timeout: int = 14, retries: int = 7, rnr_retries: int = 7) -> None:
        """Make the queue pair ready to receive and send.

        Args:
            remote: the other end, which has to be told of this one likewise.
            timeout: exponent of the time without an answer after which is sent again: 4.096 us * 2**timeout.
            retries: how often.
            rnr_retries: how often for want of a receive request; 7 is for ever.
        """
        route = GlobalRoute(dgid=GID(remote.gid), sgid_index=self._gid_index, hop_limit=64)
        attributes = QPAttr()
        attributes.port_num = PORT
        attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ
        attributes.dest_qp_num = remote.qpn
        attributes.path_mtu = min(remote.mtu, self.address.mtu)
        attributes.rq_psn = remote.psn
        attributes.sq_psn = self.address.psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 16
        attributes.min_rnr_timer = 12
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = timeout, retries, rnr_retries
        attributes.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
        self.qp.to_rts(attributes)

    def write(self, local: Buffer, remote: int, rkey: int, *, length: int | None = None, offset: int = 0) -> int:
        """Post an RDMA write of a part of `local` (all of it by default), and return its number."""
        return self._post(IBV_WR_RDMA_WRITE, local.piece(offset, length), remote, rkey)

    def read(self, local: Buffer, remote: int, rkey: int, *, length: int | None = None, offset: int = 0) -> int:
        """Post an RDMA read into a part of `local`."""
        return self._post(IBV_WR_RDMA_READ, local.piece(offset, length), remote, rkey)

    def write_with_immediate(
        self, local: Buffer, remote: int, rkey: int, immediate: int, *, length: int | None = None, offset: int = 0
    ) -> int:
        """Post an RDMA write that takes a receive request of the other end and hands it a number."""
        return self._post(IBV_WR_RDMA_WRITE_WITH_IMM, local.piece(offset, length), remote, rkey, immediate)

    def send(self, local: Buffer, *, length: int | None = None, offset: int = 0) -> int:
        return self._post(IBV_WR_SEND, local.piece(offset, length))

    def receive(self, local: Buffer, *, length: int | None = None, offset: int = 0) -> int:
        """Post a receive request."""
        self._posted += 1
        self.qp.post_recv(RecvWR(wr_id=self._posted, num_sge=1, sg=[local.piece(offset, length)]))
        return self._posted

    def _post(self, opcode: int, piece: SGE, remote: int = 0, rkey: int = 0, immediate: int = 0) -> int:
        self._posted += 1
        request = SendWR(
            wr_id=self._posted,
            opcode=opcode,
            num_sge=1,
            sg=[piece],
            imm_data=socket.htonl(immediate),
            send_flags=IBV_SEND_SIGNALED,
        )
        if rkey:
            request.set_wr_rdma(rkey, remote)
        self.qp.post_send(request)
        return self._posted

    def completions(self, count: int = 1, *, limit: float = 20.0) -> list[Completion]:
        """Return the next `count` completions, whatever became of the requests; fails after `limit` seconds."""
        end = time.monotonic() + limit
        found: list[Completion] = []
        while len(found) < count:
            number, taken = self.cq.poll(count - len(found))
            found += [_completion(one) for one in taken[:number]]
            if not number:
                assert time.monotonic() < end, f"{len(found)} of {count} completions within {limit:g} s: {found}"
                time.sleep(0.001)
        return found

    def finish(self, count: int = 1, *, limit: float = 20.0) -> list[Completion]:
        """Return the next `count` completions, all of which must be good."""
        found = self.completions(count, limit=limit)
        assert all(one.status == "SUCCESS" for one in found), found
        return found

    def close(self) -> None:
        """Close everything; an open context closes what was made in it."""
        if self._beside is None:
            self.context.close()
        else:
            self.qp.close()
            self.cq.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _completion(one: WC) -> Completion:
    immediate = socket.ntohl(one.imm_data) if one.wc_flags & IBV_WC_WITH_IMM else None
    return Completion(one.wr_id, ibv_wc_status(one.status).name.removeprefix("IBV_WC_"), one.byte_len, immediate)


def join(first: Endpoint, second: Endpoint) -> None:
    """Connect two endpoints of this process."""
    first.connect(second.address)
    second.connect(first.address)
