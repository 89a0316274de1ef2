"""How the memory-bound kernels of a program are laid out where that is not as the rules say: a value, and which are worth a try.

Schedules are ranked by a cost model (`fusepass.codegen.schedule.ranking`), the rules' own one first. An arrangement departs
from the rules in one respect, so that a measurement says what that is worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.source import Target

_UNSURE = 1.03  # times the rules' estimate: what is less, may well be faster
_LEAST_SHARE = 0.1  # of the bytes that the program's largest kernel moves: what moves less, takes little of the time
_LEAST_SECONDS = 20e-6  # of a kernel: below, a launch is most of what could be measured


@dataclass(frozen=True, order=True)
class Arrangement:
    """A departure from what the rules say of a program's kernels; none by default.

    Attributes:
        kernel: the number of the kernel that has another schedule.
        rank: the place of this schedule in the kernel's ranking; 0 is the rules' one.
        teams: whether blocks may share rows.
        pieces: times as many pieces of long rows.
    """

    kernel: int = 0
    rank: int = 0
    teams: bool = True
    pieces: float = 1.0

    def rank_of(self, kernel: int) -> int:
        """The place in its ranking of the schedule that the kernel with this number has."""
        return self.rank if kernel == self.kernel else 0

    @property
    def words(self) -> tuple[str, ...]:
        """What it changes, for reports and records."""
        schedule = (f"schedule {self.rank} of kernel {self.kernel}",) if self.rank else ()
        teams = () if self.teams else ("no teams",)
        pieces = () if self.pieces == 1.0 else (f"{self.pieces:g} times the pieces",)
        return schedule + teams + pieces

    @property
    def suffix(self) -> str:
        """The same for names of files; empty where nothing changes."""
        parts = [f"_k{self.kernel}s{self.rank}"] * bool(self.rank) + ["_no_teams"] * (not self.teams)
        return "".join(parts) + (f"_pieces{self.pieces:g}" if self.pieces != 1.0 else "").replace(".", "_")


RULES = Arrangement()
"""Everything as the rules say."""

_STRUCTURES = (Arrangement(teams=False), Arrangement(pieces=0.5), Arrangement(pieces=2.0))


@dataclass(frozen=True)
class Contender:
    """An arrangement that may be worth a try; `seconds` is what it takes by the cost model, less what the rules' one takes."""

    arrangement: Arrangement
    seconds: float


def contenders(program: Program, facts: DeviceFacts, effort: str) -> tuple[Contender, ...]:
    """Arrangements of `program`, which the rules laid out, the most promising ones first.

    `effort` is `Config.tune`: at ``"fast"`` the schedules of large kernels that the cost model takes for about as fast as the
    rules' one, or faster; at ``"max"`` all schedules, and other ways to share or split rows.
    """
    found = sorted(_schedules(program, facts, effort), key=lambda each: each.seconds)
    if effort == "max" and any(kernel.sweeps for kernel in program.kernels):
        found += [Contender(each, 0.0) for each in _STRUCTURES]
    return tuple(found)


def _schedules(program: Program, facts: DeviceFacts, effort: str) -> Iterator[Contender]:
    if facts.target is not Target.CUDA:
        return
    from fusepass.codegen.schedule import ranking

    most = max((_moved(program, kernel) for kernel in program.kernels), default=0)
    for number, kernel in enumerate(program.kernels):
        if kernel.anchor is not None or kernel.row_count * max(kernel.col_count, 1) == 0:
            continue
        moved = _moved(program, kernel)
        if moved < _LEAST_SHARE * most or (effort != "max" and moved < _LEAST_SECONDS * facts.bandwidth):
            continue
        first, *others = ranking(kernel, program, facts)
        for rank, each in enumerate(others, 1):
            if effort == "max" or each.seconds < _UNSURE * first.seconds:
                yield Contender(Arrangement(number, rank), each.seconds - first.seconds)


def _moved(program: Program, kernel: Kernel) -> int:
    return sum(program.buffer(name).nbytes for name in kernel.reads | kernel.writes)
