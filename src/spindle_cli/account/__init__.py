"""What a plan holds, moves and sums, worked out once, for whoever plans, links, simulates or reports."""
