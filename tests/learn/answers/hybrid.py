FAST = (8, 64)
FRUGAL = (64, 8)
