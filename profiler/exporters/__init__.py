"""Recorded traces in the formats other tools read, one file a format."""

from __future__ import annotations

from cbtop.profiler.exporters.base import Exporter, text_of_many, text_of_one
from cbtop.profiler.exporters.chrome_trace import write_chrome_trace
from cbtop.profiler.exporters.csv_rows import write_csv
from cbtop.profiler.exporters.dot import write_dot
from cbtop.profiler.exporters.json_lines import write_json_lines
from cbtop.profiler.exporters.perfetto import write_perfetto
from cbtop.profiler.exporters.speedscope import write_speedscope

EXPORTERS: dict[str, Exporter] = {
    "chrome-trace": text_of_many(write_chrome_trace),
    "perfetto": Exporter(write_perfetto, holds_many=True, is_binary=True),
    "speedscope": text_of_many(write_speedscope),
    "csv": text_of_one(write_csv),
    "jsonl": text_of_one(write_json_lines),
    "dot": text_of_one(write_dot),
}
