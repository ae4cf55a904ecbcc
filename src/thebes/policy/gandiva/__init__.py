"""Gandiva (OSDI 2018): time slicing, packing, migration and growing, judged by measured progress."""
