"""What goes wrong between ranks: who failed, who hangs, who is left over, and what each did last.

Below comm, whose communicators write into the flight recorder and ask who has left. Nothing here communicates
but the end of a job: what else ranks tell each other goes through the mesh that a watch is given.
"""
