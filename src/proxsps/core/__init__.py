"""The mathematics, once: pure functions on arrays of any array-API library, in the paper's notation.

Nothing here imports a framework, mutates an argument or reads a number back to the host. Symbols follow Schaipp, Gower
and Ulbrich, "A Stochastic Proximal Polyak Step Size" (TMLR 2023): alpha (cap on the step), lam (strength of the squared
l2 norm), C (lower bound of the loss), u (dual variable in [0, 1]), tau = alpha u (step), zeta (adaptive step before the
cap). Last axis: blocks (parameter groups). Leading axes: independent runs.
"""
