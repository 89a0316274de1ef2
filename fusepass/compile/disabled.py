"""Names in the option `disable` that mean nothing: most likely slips of the pen, which would else go unnoticed."""

from __future__ import annotations

from difflib import get_close_matches

from fusepass.autotune.whole_graph import WHOLE_GRAPH
from fusepass.codegen.generate import TEAMS
from fusepass.compile.chunks import CHUNKS
from fusepass.compile.constants import CONSTANTS
from fusepass.config import ALL, current
from fusepass.errors import warn
from fusepass.patterns.channels_last import CHANNELS_LAST
from fusepass.patterns.lists import LISTS
from fusepass.patterns.one_layout import ONE_LAYOUT
from fusepass.patterns.packing import PACKED_WEIGHTS
from fusepass.patterns.pattern import names as pattern_names
from fusepass.patterns.rules import RULES
from fusepass.patterns.simplify import COMMON_SUBEXPRESSION

_told: set[str] = set()


def warn_of_unknown_names() -> None:
    """Warn once of each disabled name that no rule or pattern has now; patterns may be registered at any time."""
    disabled = current().disable - _told
    if not disabled:
        return
    known = {
        *(rule.name for rule in RULES),
        COMMON_SUBEXPRESSION,
        *pattern_names(),
        CHANNELS_LAST,
        ONE_LAYOUT,
        PACKED_WEIGHTS,
        CONSTANTS,
        WHOLE_GRAPH,
        TEAMS,
        CHUNKS,
        LISTS.name,
        ALL,
    }
    for name in sorted(disabled - known):
        _told.add(name)
        near = get_close_matches(name, known, n=1)
        hint = f"; the nearest name is {near[0]!r}" if near else "; docs/algebra.md lists the rules"
        warn(f"{name!r} is disabled, but no rule or pattern is called so{hint}")
