"""A cluster that is only pretended: engines and a trainer of given speeds, under the scheduler that real ones have."""
