"""The last calls of each rank, for whoever asks later what everybody was doing: a record (record.py), the file of one
rank (dump.py writes it, record.py reads it), and what the files of all ranks say together (merge.py)."""
