# The compiled hot path has the Python one's types.
from cbtop.profiler.hot_path import HotPath as HotPath
from cbtop.profiler.hot_path import Position as Position
from cbtop.profiler.hot_path import Scope as Scope
from cbtop.profiler.hot_path import Span as Span
