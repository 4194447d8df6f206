"""What can be said of recorded programs (shardrt/device/program.py) without a device: races, waits, times.

Programs come from script.py, for which roles.py says which ranks are recorded, and values.py what the host
reads. Read then: order, shadow, races, waits, proof; or machine, links, timing, clock, and of what they give
memory, phases, report; step.py is all of that for one command, space and plan for many.
"""
