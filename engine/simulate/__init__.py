"""A whole run on a virtual clock: the real scheduler, admission, router and sessions over a cost model of the rest."""
