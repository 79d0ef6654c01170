"""Which of torch's and Python's operations add up, scale, join and reduce: what a loss's rules go by."""

from __future__ import annotations

import operator

import torch

MEANS = {"mean", torch.mean}
SUMS = {"sum", torch.sum, "nansum", torch.nansum, "count_nonzero", torch.count_nonzero}
LINEAR = {
    *("to", "float", "double", "contiguous", "clone", "squeeze", "unsqueeze", "view", "reshape", "neg"),
    *("flatten", "type", "bfloat16", "half"),
    *(operator.neg, operator.getitem, torch.neg, torch.squeeze, torch.unsqueeze, torch.reshape),
    *(torch.flatten, torch.clone),
}
ADDITIONS = {operator.add, operator.sub, operator.iadd, operator.isub, torch.add, torch.sub, "add", "sub"}
PRODUCTS = {operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "multiply"}
QUOTIENTS = {
    operator.truediv,
    operator.itruediv,
    torch.div,
    torch.divide,
    torch.true_divide,
    "div",
    "divide",
}
RECIPROCALS = {"reciprocal", torch.reciprocal}
JOINS = {torch.stack, torch.cat}
# Of the sums, those that are of rows alone: what is NaN in a share, or not zero, may not be so in the whole.
NUMBERS_OF = {"nansum", torch.nansum, "count_nonzero", torch.count_nonzero}
# Of the linear ones, those that keep every sample's rows together where the samples come first.
ROW_BY_ROW = {
    *("to", "float", "double", "contiguous", "clone", "unsqueeze", "view", "reshape", "neg", "type"),
    *(operator.neg, torch.neg, torch.unsqueeze, torch.reshape, torch.clone),
}
# What guards a count against zero leaves it growing as it does.
GUARDS = {"clamp", "clamp_min", "maximum", "max", torch.clamp, torch.clamp_min, torch.maximum, torch.max}
# Arithmetic in which a number scales a tensor, unlike sizes given to a reshape.
ARITHMETIC = ADDITIONS | PRODUCTS | QUOTIENTS | {operator.pow, torch.pow, "pow"}
