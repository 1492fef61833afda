"""The words the passes speak: the plan, the marker ops, collectives, and how a graph is printed."""
