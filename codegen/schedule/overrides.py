"""How the memory-bound kernels of a program are laid out where that is not as the rules say: a value.

Schedules are ranked by a cost model (`fusepass.codegen.schedule.ranking`), the rules' own one first. A set of schedule overrides departs
from the rules in one respect, so that a measurement says what that is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusepass.codegen.ir.program import Kernel


@dataclass(frozen=True, order=True)
class ScheduleOverrides:
    """A departure from what the rules say of a program's kernels; none by default.

    Attributes:
        kernel: the number of the kernel that has another schedule.
        rank: the place of this schedule in the kernel's ranking; 0 is the rules' one.
        anchor_rank: the same for kernels that compute an anchor, whatever their numbers.
        teams: whether blocks may share rows.
        pieces: times as many pieces of long rows.
        over_rows: whether what goes along rows may reduce over them, too.
    """

    kernel: int = 0
    rank: int = 0
    teams: bool = True
    pieces: float = 1.0
    over_rows: bool = True
    anchor_rank: int = 0

    def rank_of(self, number: int, kernel: Kernel) -> int:
        """The place in its ranking of the schedule that `kernel`, which has this number, has."""
        if kernel.anchor is not None and self.anchor_rank:
            return self.anchor_rank
        return self.rank if number == self.kernel else 0

    @property
    def words(self) -> tuple[str, ...]:
        """What it changes, for reports and records."""
        schedule = (f"schedule {self.rank} of kernel {self.kernel}",) if self.rank else ()
        teams = () if self.teams else ("no teams",)
        pieces = () if self.pieces == 1.0 else (f"{self.pieces:g} times the pieces",)
        apart = () if self.over_rows else ("rows reduced over apart",)
        anchor = (f"schedule {self.anchor_rank} of the anchor",) if self.anchor_rank else ()
        return schedule + teams + pieces + apart + anchor

    @property
    def suffix(self) -> str:
        """The same for names of files; empty where nothing changes."""
        parts = [f"_k{self.kernel}s{self.rank}"] * bool(self.rank) + ["_no_teams"] * (not self.teams)
        parts += ["_apart"] * (not self.over_rows) + [f"_a{self.anchor_rank}"] * bool(self.anchor_rank)
        return "".join(parts) + (f"_pieces{self.pieces:g}" if self.pieces != 1.0 else "").replace(".", "_")


NO_OVERRIDES = ScheduleOverrides()
"""Everything as the rules say."""
