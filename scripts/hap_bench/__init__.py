"""HAP's alternation (EuroSys 2024), written anew from what is published of it, to compare plans with.

operators.py    a model as a chain of operators
program.py      rules: how an operator may be computed by all devices, and what that moves
search.py       the cheapest program for given ratios, by A*
ratios.py       the best ratios for a given program, by a linear program
alternate.py    the two in turn until neither changes
truth.py        what a program takes by the curves of a profile

HAP's own search goes over tensors and all operators of PyTorch; here over the chains that these models are.
Where its publications and its code differ, what is better for it is taken: rowwise splits and sufficient
factors, which its code does not have, and a heuristic that is not 0.
"""
