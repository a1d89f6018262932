//! The evaluation: the loss on held-out text.

use std::ops::Range;

use burn_fsdp::ProcessGroup;
use burn_fsdp_models::Rows;

use crate::error::RankError;
use crate::train::config::TrainConfig;
use crate::train::share;

/// Rows of a batch that one rank evaluates.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    /// The row numbers, counted over all batches. All parts of one batch have the same number of rows.
    rows: Range<usize>,
    /// False for rows that this rank evaluates only because all ranks must gather together.
    counts: bool,
}

/// Computes the mean loss per token of the held-out text, over at most the configured number of batches. Returns `None`
/// if there is no held-out text. Each learned token counts once. `loss` returns the mean over the learned tokens of rows.
///
/// All ranks evaluate the same number of batches with the same shapes, because every gather needs all of them. The rows
/// differ.
pub(crate) fn evaluate(
    config: &TrainConfig,
    world: &ProcessGroup,
    mut loss: impl FnMut(&Rows) -> Result<f32, RankError>,
) -> Result<Option<f64>, RankError> {
    let Some(batches) = config.data.held_out(config.batch_shape()) else {
        return Ok(None);
    };
    let whole = batches.num_whole_rows().unwrap_or(usize::MAX);
    if whole == 0 && batches.rest().is_none() {
        return Ok(None);
    }
    let most = config.eval_batches.saturating_mul(config.batch);
    let mut own = share::Sum::default();
    let mut add = |rows: &Rows, counts: bool| -> Result<(), RankError> {
        let mean = loss(rows)?;
        if counts {
            own.add(mean, rows.num_learned());
        }
        Ok(())
    };
    for part in parts(whole.min(most), config.batch, (world.rank(), world.size())) {
        add(&batches.rows(0, part.rows)?, part.counts)?;
    }
    if let Some(rest) = batches.rest().filter(|_| whole < most) {
        add(&rest, world.rank() == 0)?;
    }
    Ok(Some(share::mean(world, "evaluation", own)?))
}

/// Divides `whole` rows into batches for `ranks` ranks, and returns the parts of one rank. Whole batches are divided as
/// in training. The remaining rows are divided equally, and any leftover rows go to one rank each.
fn parts(whole: usize, batch: usize, (rank, ranks): (usize, usize)) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut start = 0;
    let own = |start: usize, each: usize| {
        let first = start + rank * each;
        first..first + each
    };
    while whole - start >= batch {
        parts.push(own(start, batch / ranks));
        start += batch;
    }
    let each = (whole - start) / ranks;
    if each > 0 {
        parts.push(own(start, each));
        start += each * ranks;
    }
    let mut parts: Vec<_> = parts
        .into_iter()
        .map(|rows| Part { rows, counts: true })
        .collect();
    if start < whole {
        let rows = own(start, 1);
        let counts = rows.start < whole;
        parts.push(Part { rows, counts });
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_count_once_and_all_ranks_have_equal_parts() {
        for ranks in 1..=4 {
            for batch in [ranks, 3 * ranks] {
                for whole in 0..30 {
                    let of = |rank| parts(whole, batch, (rank, ranks));
                    let all: Vec<_> = (0..ranks).map(of).collect();
                    let lens = |parts: &[Part]| -> Vec<usize> {
                        parts.iter().map(|part| part.rows.len()).collect()
                    };
                    assert!(all.iter().all(|parts| lens(parts) == lens(&all[0])));
                    let counted = all.iter().flatten().filter(|part| part.counts);
                    let mut rows: Vec<_> = counted.flat_map(|part| part.rows.clone()).collect();
                    rows.sort_unstable();
                    assert_eq!(rows, (0..whole).collect::<Vec<_>>(), "{ranks} {batch}");
                }
            }
        }
    }
}
