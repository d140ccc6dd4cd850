"""What the ranks were doing: the files that each rank writes of what its transports remember (transport/call_log.py),
ours (file.py) and torch's (flight_recorder.py), and what ours say together (report.py, timeline.py, command.py).

c10d/trace_dump.py says when they are written."""
