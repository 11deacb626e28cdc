"""Which engine samples what, with which weights, and what becomes of it when an engine dies.

Everything here is a pure function of the events that it is told and of the clock that is passed in: no engine, no
process group, no thread. ``tickets`` has the rules, ``window`` holds what was sampled, ``scheduler`` decides, and
``events`` are the words between the scheduler and whoever carries its decisions out.
"""
