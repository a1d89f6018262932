//! The text that a run generates after training, to show what the model has learned.

use burn_fsdp::ProcessGroup;
use burn_fsdp_models::LanguageModel;

use crate::choice::Choice;
use crate::error::RankError;
use crate::text::{Prompt, Sample, TEMPERATURE};
use crate::train::config::TrainConfig;

/// Maximum number of held-out tokens in the sample's prompt.
const MAX_PROMPT_TOKENS: usize = 32;

/// Returns true if a run ends with a sample.
pub(crate) fn is_wanted(config: &TrainConfig) -> bool {
    config.sample_tokens > 0 && config.data.prompt(1).is_some()
}

/// Returns the start of the held-out text and the text that the model adds; `None` if no sample is requested, or if the
/// model outputs no valid numbers.
///
/// Collective: all ranks gather the sharded model together, and rank 0 continues the text.
pub(crate) fn generate<M: LanguageModel>(
    model: &M,
    config: &TrainConfig,
    world: &ProcessGroup,
) -> Result<Option<Vec<u8>>, RankError> {
    let len = MAX_PROMPT_TOKENS.min(config.model.seq());
    let Some((codec, tokens)) = config.data.prompt(len).filter(|_| config.sample_tokens > 0) else {
        return Ok(None);
    };
    let sample = Sample {
        codec,
        seq: config.model.seq(),
        num_tokens: config.sample_tokens,
        // The prompt is from the middle of a text, so no token ends the sample.
        ends: Vec::new(),
        stops: Vec::new(),
        choice: Choice::by_temperature(TEMPERATURE),
        device: config.device(world),
    };
    let prompt = Prompt {
        tokens,
        seed: config.seed,
    };
    let is_stopped = || config.is_stopped();
    match sample.go_on(&model.valid(), prompt, world, is_stopped) {
        // The training is complete, and its losses show the problem.
        Err(RankError::NoNumbers) => Ok(None),
        sample => sample.map(Some),
    }
}
