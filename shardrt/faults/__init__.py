"""What goes wrong between ranks: who failed, who hangs, who is left over, and what each did last.

Above comm, which knows a supervisor and a recorder (comm/supervision.py, comm/interceptors.py). Nothing here
communicates but the end of a job: what else ranks tell each other goes through the mesh that a watch is
given.
"""
