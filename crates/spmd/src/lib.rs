//! A whole train step as one SPMD graph: trace, place, passes, plan, run.
