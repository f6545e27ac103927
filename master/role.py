# SPDX-License-Identifier: Apache-2.0
"""Whether a master leads, and what is to be told about it while it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import moonpool
from moonpool.master.core import Core
from moonpool.master.overview import gauges, health, status

__all__ = ["Role"]


@dataclass
class Role:
    """What a master is at the moment. Changed from the event loop only.

    Attributes:
        core: the state of the pool; None: it does not lead.
        waits: whether another one leads, or did a moment ago, and this one is ready to follow it.
        leader: address of that one, as far as it is known.
        turns: how often it has led.
        trouble: what keeps it from leading when it should; "" when nothing does.
    """

    core: Core | None = None
    waits: bool = False
    leader: str = ""
    turns: int = 0
    trouble: str = ""

    def wrong(self) -> list[str]:
        """Return what is wrong; nothing: all is well. To wait for one's turn is well."""
        if self.core is not None:
            return health(self.core)
        if self.trouble:
            return [self.trouble]
        return [] if self.waits else ["it is starting"]

    @property
    def leads(self) -> bool:
        """Whether it leads, and can tell that it still does."""
        return self.core is not None and self.core.store.leading

    def said(self) -> str:
        """Return a line about it, for people."""
        if self.core is not None:
            return "it leads" if self.leads else "it cannot tell whether it still leads"
        if self.trouble:
            return f"it cannot lead: {self.trouble}"
        return f"it waits for its turn: {self.leader or 'nobody known'} leads"

    def doing(self) -> str:
        """Return what it does, in a few words."""
        if self.core is not None:
            return "serving"
        if self.trouble:
            return f"waiting for its store ({self.trouble})"
        return f"waiting ({self.leader or 'another one'} leads)"

    def status(self) -> dict[str, Any]:
        """Return what /status answers."""
        if self.core is not None:
            return {**status(self.core), "leads": self.leads}
        return {"version": moonpool.__version__, "leads": False, "leader": self.leader, "health": self.wrong()}

    def metrics(self) -> str:
        """Return what /metrics answers."""
        own = (
            f"# TYPE moonpool_master_leads gauge\nmoonpool_master_leads {int(self.leads)}\n"
            f"# TYPE moonpool_master_turns_total counter\nmoonpool_master_turns_total {self.turns}\n"
        )
        return own if self.core is None else own + self.core.metrics.render(gauges(self.core))
