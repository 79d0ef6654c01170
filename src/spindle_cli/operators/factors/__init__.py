"""Gradients of a matrix as what they are made of: rows of an embedding, the two factors of a linear map."""
