# The compiled stamps have the Python ones' types.
from cbtop.profiler.device.pairs import PairStamps as PairStamps
from cbtop.profiler.device.stamp_clock import MarkStamps as MarkStamps
