"""What the ranks were doing, from files that each writes: merge.py says what the files of all ranks say together.

The calls are recorded by transport/call_log.py, in files as transport/trace_file.py has them, which c10d/trace_dump.py
writes."""
