"""What this machine will do, in one screen: a file of checks for each subject, command.py runs them, finding.py prints.

Each check gives Findings (finding.py). What it asks of the system it asks for real, in this process; a group of two
ranks is made at the end, in processes of their own (self_test.py)."""
