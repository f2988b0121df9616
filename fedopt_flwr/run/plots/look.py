"""How every picture looks, where its parts stand, and how it becomes a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's "muted" colours, made to be told apart by the colour-blind, without the two palest
COLOURS = (
    "#332288",
    "#CC6677",
    "#117733",
    "#88CCEE",
    "#882255",
    "#999933",
    "#AA4499",
    "#44AA99",
)
MARKERS = ("o", "s", "D", "^")  # one each time that the colours begin again
GREY = "#8C8C8C"  # of what is there, but not named by a colour
INK = "#222222"
ALARM = "#D55E00"  # of failures and divergence: Okabe and Ito's vermilion
WIDTH = 9.0  # inches: in a column of 800 pixels a text of 9 points is then 11 pixels high
_LOOK = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
    "savefig.dpi": 130,
    "svg.hashsalt": "fedopt",  # the same names in the same picture
    "pdf.fonttype": 42,
    "text.parse_math": False,  # names may hold dollars
}
_ONE_AT_A_TIME = threading.Lock()  # matplotlib has one set of defaults for all threads
_NO_DATES = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


@contextmanager
def drawing() -> Iterator[None]:
    """Give all that is drawn meanwhile one look, whatever the user's own matplotlib is set to."""
    from matplotlib import style

    with _ONE_AT_A_TIME, style.context(["default", _LOOK]):
        yield


def save(figure: Figure, path: Path) -> None:
    """Write a picture whole or not at all; its kind is the ending of its name, else PNG.

    The same picture is the same bytes. OSError if it cannot be written, ValueError for a kind that
    is not known.
    """
    picture = BytesIO()
    kind = path.suffix.removeprefix(".") or "png"
    figure.savefig(picture, format=kind, metadata=_NO_DATES.get(kind))
    write_whole(path, picture.getvalue())


def place_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Add axes at a place in inches from the left and from the top of the picture."""
    whole_width, whole_height = figure.get_size_inches()
    bottom = whole_height - top - height
    return figure.add_axes(
        (left / whole_width, bottom / whole_height, width / whole_width, height / whole_height)
    )


def write_heading(figure: Figure, title: str, subtitle: str) -> None:
    """Write what the picture shows at its top left; it takes `heading_inches(subtitle)`."""
    height = figure.get_size_inches()[1]
    figure.text(0.1 / WIDTH, 1 - 0.08 / height, title, size=13, weight="bold", va="top")
    figure.text(0.1 / WIDTH, 1 - 0.35 / height, subtitle, color="#555555", va="top")


def heading_inches(subtitle: str) -> float:
    return 0.45 + 0.16 * len(subtitle.splitlines())


def text_inches(texts: Sequence[str], **style: Any) -> float:
    """Return how wide the widest of these texts is, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    widths = [figure.text(0, 0, text, **style).get_window_extent(renderer).width for text in texts]
    return max(widths, default=0.0) / figure.dpi


def text_colour(colour: str) -> str:
    """Return a colour's hue, dark enough for small text on white."""
    from matplotlib.colors import hsv_to_rgb, rgb_to_hsv, to_hex, to_rgb

    if colour == GREY:
        return "#666666"
    hue, saturation, brightness = rgb_to_hsv(to_rgb(colour))
    red, green, blue = hsv_to_rgb((hue, saturation, min(brightness, 0.7)))
    return to_hex((red, green, blue))


def spread(wanted: np.ndarray, heights: np.ndarray, lowest: float, highest: float) -> np.ndarray:
    """Return middles near the wanted ones, in the same order, so that nothing overlaps.

    What has these middles and heights lies between `lowest` and `highest`, if there is room.
    """
    order = np.argsort(wanted, kind="stable")
    own = heights[order]
    steps = np.cumsum(np.concatenate([own[:1], (own[:-1] + own[1:]) / 2])) - own[:1] / 2
    free = wanted[order] - steps  # nothing overlaps where these do not fall
    pushed_up = np.maximum.accumulate(free)
    pushed_down = np.minimum.accumulate(free[::-1])[::-1]
    room = highest - own.sum()
    middles = np.empty(len(wanted))
    middles[order] = np.clip((pushed_up + pushed_down) / 2, lowest, max(lowest, room)) + steps
    return middles
