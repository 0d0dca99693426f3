"""All views of the screen, in the order of their tabs and keys.

A new view needs a file in this folder and an entry in this list.
"""

from __future__ import annotations

from cbtop.tui.views.base import View
from cbtop.tui.views.bricks import Bricks
from cbtop.tui.views.devices import Devices
from cbtop.tui.views.graph import Graph
from cbtop.tui.views.layers import Layers
from cbtop.tui.views.overview import Overview
from cbtop.tui.views.roofline import Roofline
from cbtop.tui.views.sources import Sources
from cbtop.tui.views.timeline import Timeline
from cbtop.viewmodels.verdict import About

VIEWS: tuple[type[View], ...] = (Overview, Bricks, Layers, Timeline, Roofline, Graph, Sources, Devices)
# The view with the evidence for each kind of subject. The overview opens it.
EVIDENCE: dict[About, type[View]] = {
    About.SOURCE: Sources,
    About.RANK: Sources,
    About.DEVICE: Devices,
    About.STEPS: Timeline,
    About.LAYER: Layers,
    About.BRICK: Bricks,
    About.ROOF: Roofline,
}
# The views of verdicts with evidence elsewhere, by the verdict's id.
EVIDENCE_OF_VERDICT: dict[str, type[View]] = {"starved": Devices}
