# SPDX-License-Identifier: Apache-2.0
"""``moonpool drain``: empty a segment, so that its node can leave."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.commands.common import connected, open_client
from moonpool.units import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress

    from moonpool.store_client import StoreClient

__all__ = ["drain"]

_LOOK: Final = 0.2
# For so long nothing has changed, and nothing is under way: what is left has no place to go. Where nothing was refused,
# it may be waiting for readers and writers.
_PATIENCE: Final = 10.0
_PATIENCE_WITH_OTHERS: Final = 60.0


@click.command(short_help="Empty a segment, so that its node can leave.")
@click.argument("which", metavar="[SEGMENT|NODE]", required=False)
@click.option("--segment", type=click.IntRange(min=0, max=0xFFFFFFFE), help="The segment of this number.")
@click.option("--node", metavar="NAME", help="The segment of the node of this name.")
@click.option("--undo", is_flag=True, help="Stop, and use it again.")
@click.option(
    "--drop-disk", is_flag=True, help="Then give up what the disk of its node holds, for a node that goes for ever."
)
@click.option("--wait", is_flag=True, help="Until it is empty, or what is left cannot move.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@connected
def drain(
    which: str | None,
    segment: int | None,
    node: str | None,
    undo: bool,
    drop_disk: bool,
    wait: bool,
    as_json: bool,
    master: str | None,
    timeout: str | None,
    config: str | None,
) -> None:
    """Put nothing more into a segment, and move what it has to others.

    Which one is said by a number that `moonpool ls` shows, or by the name of a node. The node can be stopped without a
    loss when it is empty, which --wait waits for. That fails when something stays, because there is no room elsewhere.
    What a disk holds stays on it, and is found again when its node is back; --drop-disk gives it up.
    """
    if undo and (wait or drop_disk):
        raise click.UsageError("--undo goes with neither --wait nor --drop-disk")
    if (which, segment, node).count(None) != 2:
        raise click.UsageError("one of SEGMENT, NODE, --segment and --node")
    with open_client(master, timeout, config) as client:
        number = segment if segment is not None else _number(client, which, node)
        asked = _segment(client, number)
        if asked is not None and asked.medium == pb.DISK and drop_disk:
            _tell_disks([asked], _drop(client, [asked]), as_json=as_json)
            return
        chunks = client.drain(number, undo=undo)
        left = _wait(client, number, shown=not as_json) if wait else _segment(client, number)
        disks = _disks_of(client, number)
        # Not while something stays in memory: somebody has to think again then.
        dropped = _drop(client, disks) if drop_disk and (not wait or _empty(left)) else {}
    if as_json:
        _tell_json(number, left, disks, dropped)
    elif not wait:
        click.echo(f"segment {number} is {'used again' if undo else 'draining'}: it has {chunks} chunks")
    if wait:
        _judge(left, number, quiet=as_json)
    if not undo and not as_json:
        _tell_disks(disks, dropped, as_json=False)


def _tell_json(number: int, left: pb.Segment | None, disks: list[pb.Segment], dropped: dict[int, int]) -> None:
    draining = left.draining if left is not None else pb.Draining()
    told = {
        "segment": number,
        "state": "gone" if left is None else pb.SegmentState.Name(left.state).lower(),
        "chunks": 0 if left is None else left.chunks,
        "moved": draining.moved,
        "moving": draining.moving,
        "stuck": draining.stuck,
        "cause": draining.cause,
        "trouble": "" if left is None else left.trouble,
        "disks": _disk_facts(disks, dropped),
    }
    click.echo(json.dumps(told, indent=2))


def _disk_facts(disks: list[pb.Segment], dropped: dict[int, int]) -> list[dict[str, Any]]:
    return [{"segment": one.segment, "chunks": one.chunks, "dropped": one.segment in dropped} for one in disks]


def _tell_disks(disks: list[pb.Segment], dropped: dict[int, int], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"disks": _disk_facts(disks, dropped)}, indent=2))
        return
    for one in disks:
        if one.segment in dropped:
            click.echo(f"disk {one.segment} of {one.node} is given up, with {dropped[one.segment]} chunks")
        elif one.chunks:
            click.echo(
                f"disk {one.segment} of {one.node} keeps {one.chunks} chunks ({format_bytes(one.used_bytes)}): they "
                "are found again when the node is back within `disk_grace` of the master. --drop-disk gives them up"
            )


def _disks_of(client: StoreClient, number: int) -> list[pb.Segment]:
    """Return the disks of the node of a segment."""
    known = client.segments()
    nodes = {one.node for one in known if one.segment == number}
    return [one for one in known if one.medium == pb.DISK and one.node in nodes]


def _drop(client: StoreClient, disks: list[pb.Segment]) -> dict[int, int]:
    """Give up disks. Returns how many chunks were on each."""
    return {one.segment: client.drain(one.segment, drop=True) for one in disks}


def _empty(left: pb.Segment | None) -> bool:
    return left is not None and left.state == pb.DRAINING and not left.chunks


def _judge(left: pb.Segment | None, number: int, *, quiet: bool) -> None:
    if left is None:
        raise click.ClickException(f"segment {number} is gone: its node has left, or is lost")
    if left.state == pb.QUARANTINED:
        raise click.ClickException(f"the node of segment {number} does not answer the master: {left.trouble}")
    if left.state != pb.DRAINING:
        raise click.ClickException(f"segment {number} is used again: the drain was undone")
    if left.chunks:
        cause = left.draining.cause or left.trouble or "they are still written, or read"
        raise click.ClickException(
            f"{left.chunks} chunks stay in segment {number}: {cause}. More nodes, fewer pins, or --undo"
        )
    if not quiet:
        click.echo(f"segment {number} is empty: its node can be stopped")


def _number(client: StoreClient, which: str | None, node: str | None) -> int:
    name = which if which is not None else node
    known = client.segments()
    its = [one for one in known if one.node == name and one.medium == pb.DRAM]
    # One whose node was started anew is there until the master gives it up.
    found = {one.segment for one in its if not one.away} or {one.segment for one in its}
    if which is not None and which.isdecimal():
        number = int(which)
        if not found or found == {number}:
            return number
        if any(one.segment == number for one in known):
            raise click.UsageError(
                f"{number} is a segment, and the name of the node of {sorted(found)}. Try: --segment or --node"
            )
    if len(found) != 1:
        raise click.UsageError(
            f"node {name!r} has several segments: {sorted(found)}. Try: --segment"
            if found
            else f"there is no node {name!r}"
        )
    return found.pop()


def _segment(client: StoreClient, number: int) -> pb.Segment | None:
    return next((one for one in client.segments() if one.segment == number), None)


def _wait(client: StoreClient, number: int, *, shown: bool) -> pb.Segment | None:
    """Return the segment when it is empty, when nothing has moved for a while, or when it is not drained any more."""
    before, since, told = None, time.monotonic(), False
    with _progress(shown) as (progress, task):
        while True:
            one = _segment(client, number)
            # One in quarantine may be drained on: it is waited for, as for a node that a new master has not seen yet.
            if one is None or (one.state != pb.QUARANTINED and (one.state != pb.DRAINING or not one.chunks)):
                return one
            if one.trouble and not told:
                click.echo(f"segment {number} of {one.node} waits: {_advice(one)}", err=True)
            told = bool(one.trouble)
            now = (one.chunks, one.draining.moved, one.draining.moving)
            if now != before:
                before, since = now, time.monotonic()
            patience = _PATIENCE if one.draining.stuck else _PATIENCE_WITH_OTHERS
            if not one.draining.moving and time.monotonic() - since > patience:
                return one
            if progress is not None:
                done = one.draining.moved
                text = f"{one.chunks:,} left, {one.draining.stuck:,} find no room"
                progress.update(task, completed=done, total=done + one.chunks, description=text)
            time.sleep(_LOOK)


def _advice(one: pb.Segment) -> str:
    return f"{one.trouble}. It goes on when the node answers again. Try: see the node, or stop it and lose its chunks"


@contextlib.contextmanager
def _progress(shown: bool) -> Iterator[tuple[Progress | None, Any]]:
    if not shown:
        yield None, None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress, progress.add_task("draining", total=None)
