"""What goes wrong between ranks: which rank failed, hangs or is left over, and what each rank did last.

This package is above comm, which knows a supervisor and a recorder (comm/supervision.py,
comm/interceptors.py). Only the end of a job communicates here. All other messages between ranks go through
the mesh that a watch is given.
"""
