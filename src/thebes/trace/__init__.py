"""Workloads come in and go out here: readers of public trace formats, the generator, statistics, and our own files.

`read` detects the format by content; `write` stores a trace as CSV, .csv.gz or Parquet; `generate` makes a
synthetic one, fitted to a real one; `describe` gives its figures. Each family of formats has a module, whose docstring
tells origin and quirks.
"""

from thebes.trace.generator import GeneratorSpec, generate
from thebes.trace.reader import FORMATS, Format, read
from thebes.trace.shipped import sample_path
from thebes.trace.statistics import describe
from thebes.trace.writer import write

__all__ = ["FORMATS", "Format", "GeneratorSpec", "describe", "generate", "read", "sample_path", "write"]
