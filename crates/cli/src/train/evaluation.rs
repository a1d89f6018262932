//! The evaluation: the loss on text that was held out.

use burn::tensor::{Int, Tensor};
use burn_fsdp::ProcessGroup;

use crate::error::RankError;
use crate::train::config::TrainConfig;
use crate::train::share;

/// Computes the mean of the losses of batches of the held-out text, or `None` without any.
///
/// All ranks evaluate the same number of batches, each its own rows, because every gather needs
/// all of them.
pub(crate) fn evaluate(
    config: &TrainConfig,
    world: &ProcessGroup,
    mut loss: impl FnMut(Tensor<2, Int>, Tensor<2, Int>) -> Result<f32, RankError>,
) -> Result<Option<f64>, RankError> {
    let Some(batches) = config.data.held_out(config.batch_shape()) else {
        return Ok(None);
    };
    let distinct = batches.num_distinct().unwrap_or(usize::MAX);
    let num_batches = config.eval_batches.min(distinct);
    let device = config.device(world);
    let mut sum = 0.0;
    for index in 0..num_batches {
        let rows = config.rows_of(world.rank());
        let (inputs, targets) = batches.rows(index, rows).to_tensors(&device);
        sum += loss(inputs, targets)?;
    }
    let own_mean = sum / num_batches as f32;
    Ok(Some(share::mean(world, "evaluation", own_mean)?))
}
