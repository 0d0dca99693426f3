"""The views, in the order of their tabs and keys. A new one is a file here and a line in this list."""

from __future__ import annotations

from cbtop.views.base import View
from cbtop.views.bricks import Bricks
from cbtop.views.categories import Categories
from cbtop.views.graph import Graph
from cbtop.views.roofline import Roofline

VIEWS: tuple[type[View], ...] = (Bricks, Categories, Roofline, Graph)
