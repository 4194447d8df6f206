"""What can be said of recorded programs (shardrt/device/program.py) without a device: races, waits, times.

Read: order, shadow, races, waits, proof; then machine, links, timing, clock. Programs come from script.py;
which ranks are recorded roles.py says.
"""
