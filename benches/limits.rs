//! The machine's limits, next to a step that was measured in the same run.

#[path = "../crates/cli/src/limits.rs"]
mod measured;

pub(crate) use measured::Limits;

/// Returns lines that compare the limits with a step of `num_params` parameters and `tokens` tokens on all ranks
/// together, which takes `millis` milliseconds. Six operations per parameter and token are the usual estimate.
pub(crate) fn beside(
    limits: &Limits,
    num_params: usize,
    tokens: usize,
    ranks: usize,
    millis: f64,
) -> String {
    let copy = ranks as f64 * 4.0 * num_params as f64 / limits.copy * 1e3;
    let reached = 6.0 * num_params as f64 * tokens as f64 / (millis / 1e3);
    format!(
        "limits      {copy:9.1} ms for a copy of all parameters on each rank, at {:.1} GB/s together\n\
         limits      {:9.1} GFLOP/s in matrix products; the step reaches {:.1}, {:.2} of it",
        limits.copy / 1e9,
        limits.products / 1e9,
        reached / 1e9,
        reached / limits.products,
    )
}
