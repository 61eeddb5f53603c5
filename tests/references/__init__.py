"""The algorithms as plain NumPy loops, each beside the transform that it is the reference of.

A reference shares no code with the library: it holds the parameters of all replicas as the rows
of one array and follows the papers.
"""

from tests.references import (
    compressed,
    federated,
    gossip,
    local,
    outer,
    overlap,
    periods,
    trajectory,
)

RECIPES = {
    name: recipe
    for family in (local, periods, outer, overlap, gossip, federated, compressed, trajectory)
    for name, recipe in family.RECIPES.items()
}
