"""Recorded traces in the formats other tools read, one file a format."""

from __future__ import annotations

from cbtop.profiler.exporters.base import Exporter
from cbtop.profiler.exporters.chrome_trace import write_chrome_trace
from cbtop.profiler.exporters.csv_rows import write_csv
from cbtop.profiler.exporters.json_lines import write_json_lines
from cbtop.profiler.exporters.speedscope import write_speedscope

EXPORTERS: dict[str, Exporter] = {
    "chrome-trace": Exporter(".json", write_chrome_trace),
    "speedscope": Exporter(".speedscope.json", write_speedscope),
    "csv": Exporter(".csv", write_csv),
    "jsonl": Exporter(".jsonl", write_json_lines),
}
