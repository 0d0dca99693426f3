"""Exporters that convert records of processes for other tools, with one file per format."""

from __future__ import annotations

from cbtop.exporters.base import Exporter, text_of_many, text_of_one
from cbtop.exporters.chrome_trace import write_chrome_trace
from cbtop.exporters.csv_rows import write_csv
from cbtop.exporters.dot import write_dot
from cbtop.exporters.folded import write_folded
from cbtop.exporters.json_lines import write_json_lines
from cbtop.exporters.parquet import write_parquet
from cbtop.exporters.perfetto import write_perfetto
from cbtop.exporters.speedscope import write_speedscope

EXPORTERS: dict[str, Exporter] = {
    "chrome-trace": text_of_many(write_chrome_trace),
    "perfetto": Exporter(write_perfetto, holds_many=True, is_binary=True),
    "speedscope": text_of_many(write_speedscope),
    "folded": text_of_many(write_folded),
    "parquet": Exporter(write_parquet, holds_many=True, is_binary=True),
    "csv": text_of_one(write_csv),
    "jsonl": text_of_one(write_json_lines),
    "dot": text_of_one(write_dot),
}
