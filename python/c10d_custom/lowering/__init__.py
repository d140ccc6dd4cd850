"""c10d's operations as calls: shapes checked and tensors made into what a transport takes (call.py). Imported by c10d/
only; knows no process group and no Work."""
