"""Configurations and command lines of other trainers: what becomes of every key of theirs.

``*.yaml`` are the tables, one per neighbour; ``reasons*.yaml`` have the sentences. ``convert`` applies a table to what
``reading`` found in a file or a command line.
"""
