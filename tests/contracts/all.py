"""All contracts."""

from tests.contracts import (
    CONTRACTS,
    attention,
    casts,
    elementwise,
    losses,
    norms,
    optimizers,
    products,
    routes,
    vision,
)

__all__ = [
    "CONTRACTS",
    "attention",
    "casts",
    "elementwise",
    "losses",
    "norms",
    "optimizers",
    "products",
    "routes",
    "vision",
]
