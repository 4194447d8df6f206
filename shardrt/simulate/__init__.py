"""What can be said of recorded programs (shardrt/device/program.py) without a device: races, needless waits.

Read: order, shadow, races, waits.
"""
