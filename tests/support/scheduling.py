"""Which tests one process of a run by several runs together."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

TOGETHER = "tests/rules/"  # they share syntax trees of all files, which take each process 10 s


class RulesTogether(LoadScopeScheduling):
    """xdist's `--dist loadscope`, a file at a time, with the rules as one."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)
