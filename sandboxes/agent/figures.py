"""matplotlib figures, shown inline: saved and closed at `plt.show()` and at the end of a cell.

matplotlib itself is never imported here: this acts only once user code has imported it.
"""

from __future__ import annotations

import io
import sys

from . import pristine
from .images import Images
from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

globals()["__builtins__"] = BUILTINS


def show_inline(pyplot: Any, images: Callable[[], Images]) -> None:
    """Makes `plt.show()` save what is open to the running cell's `images()`."""

    def show(*args: object, **details: object) -> None:
        save_open(images())

    pyplot.show = show
    # What `figure.show()` says of the Agg backend: the figure is shown, when the cell ends.
    pristine.load("warnings").filterwarnings("ignore", "FigureCanvasAgg is non-interactive")


def save_open(images: Images) -> None:
    """Saves every open pyplot figure and closes it. Figures that cannot be drawn are counted in the images' note."""
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    if helpers is None:
        return
    for manager in list(helpers.Gcf.get_all_fig_managers()):
        figure = manager.canvas.figure
        try:
            save(figure, images)
        finally:
            helpers.Gcf.destroy(manager.num)


def save(figure: Any, images: Images) -> None:
    """Saves one figure as PNG, unless this cell has shown it already."""
    if id(figure) in images.figures:
        return
    images.figures.add(id(figure))
    buffer = io.BytesIO()
    try:
        figure.savefig(buffer, format="png", bbox_inches="tight")
    except Exception as error:  # noqa: BLE001 - drawing runs user code: labels, callbacks, data
        images.skip(f"the figure cannot be drawn ({type(error).__name__}: {error})")
        return
    images.save(buffer.getvalue(), "image/png")


def is_figure(value: object) -> bool:
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, module.Figure)


def is_open(figure: Any) -> bool:
    """Whether pyplot manages the figure: it is then shown when the cell ends."""
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    managers = helpers.Gcf.get_all_fig_managers() if helpers is not None else []
    return any(manager.canvas.figure is figure for manager in managers)
