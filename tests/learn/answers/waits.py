FOUND = {
    "A": ("compute reads", "gather writes"),
    "B": ("gather writes", "compute reads"),
    "C": None,
    "D": ("compute writes", "gather reads"),
}
