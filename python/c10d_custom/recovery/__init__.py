"""How processes go on together after a loss, or with others: who is left (survivors.py, of a group that has lost
ranks), or who has been named (handle.py, regroup.py, by a program that says which processes are to make a group); then
these meet at the store of the first of them, and make a group as always. Imported by c10d/, which hands in what makes a
group."""
