"""How the memory-bound kernels of a program are laid out where that is not as the rules say: a value.

Schedules are ranked by a cost model (`fusepass.codegen.schedule.ranking`), the rules' own one first. A set of schedule overrides departs
from the rules in one respect, so that a measurement says what that is worth.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class ScheduleOverrides:
    """A departure from what the rules say of a program's kernels; none by default.

    Attributes:
        kernel: the number of the kernel that has another schedule.
        rank: the place of this schedule in the kernel's ranking; 0 is the rules' one.
        teams: whether blocks may share rows.
        pieces: times as many pieces of long rows.
        over_rows: whether what goes along rows may reduce over them, too.
    """

    kernel: int = 0
    rank: int = 0
    teams: bool = True
    pieces: float = 1.0
    over_rows: bool = True

    def rank_of(self, kernel: int) -> int:
        """The place in its ranking of the schedule that the kernel with this number has."""
        return self.rank if kernel == self.kernel else 0

    @property
    def words(self) -> tuple[str, ...]:
        """What it changes, for reports and records."""
        schedule = (f"schedule {self.rank} of kernel {self.kernel}",) if self.rank else ()
        teams = () if self.teams else ("no teams",)
        pieces = () if self.pieces == 1.0 else (f"{self.pieces:g} times the pieces",)
        apart = () if self.over_rows else ("rows reduced over apart",)
        return schedule + teams + pieces + apart

    @property
    def suffix(self) -> str:
        """The same for names of files; empty where nothing changes."""
        parts = [f"_k{self.kernel}s{self.rank}"] * bool(self.rank) + ["_no_teams"] * (not self.teams)
        parts += ["_apart"] * (not self.over_rows)
        return "".join(parts) + (f"_pieces{self.pieces:g}" if self.pieces != 1.0 else "").replace(".", "_")


NO_OVERRIDES = ScheduleOverrides()
"""Everything as the rules say."""
