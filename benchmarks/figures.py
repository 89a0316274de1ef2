"""Draws what was measured: bars of the share of the hardware limit, by matplotlib (``pip install -e '.[bench]'``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_COLORS = {"eager": "#b8b8b8", "torch.compile": "#7aa6d8", "max-autotune": "#3a6ea5", "fusepass": "#d9702e"}
_INCHES = 0.1  # height of a bar
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fusepass", "font.size": 8, "font.family": "sans-serif"}


def draw_shares(shares: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Write a figure with a group of bars for each workload.

    Args:
        shares: by workload, and there by implementation: limit over time, so that 1 is as fast as the hardware allows.
        path: the file, whose ending says of what kind it is. An SVG keeps its texts as texts.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter
    except ImportError as error:
        raise SystemExit(f"figures are drawn by matplotlib: pip install -e '.[bench]' ({error})") from error

    ways = [way for way in _COLORS if any(way in each for each in shares.values())]
    group = len(ways) + 1
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, _INCHES * group * len(shares) + 0.6), layout="constrained")
        axes = figure.add_subplot()
        for number, way in enumerate(ways):
            places = [place * group + number for place, each in enumerate(shares.values()) if way in each]
            lengths = [each[way] for each in shares.values() if way in each]
            bars = axes.barh(
                places, [min(length, 1.0) for length in lengths], height=0.9, color=_COLORS[way], label=way
            )
            axes.bar_label(bars, list(map(percent, lengths)), padding=2, fontsize=6)
        axes.set_yticks([place * group + (len(ways) - 1) / 2 for place in range(len(shares))], [*shares])
        axes.set(xlim=(0, 1.06), ylim=(group * len(shares) - 1, -1), xlabel="share of the hardware limit")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.legend(ncols=len(ways), loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
        figure.savefig(path, metadata={"Date": None})  # the same file whenever it is drawn


def percent(share: float) -> str:
    """A share as bars are labelled."""
    return f"{share:.0%}"


def texts(shares: Mapping[str, Mapping[str, float]]) -> Sequence[str]:
    """The texts that a figure of `shares` shows, in no certain order."""
    return [*shares, *(percent(share) for each in shares.values() for share in each.values())]
