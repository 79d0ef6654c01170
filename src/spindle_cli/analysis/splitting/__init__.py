"""May an op's batch be split?"""
