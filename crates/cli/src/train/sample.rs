//! The text with which a run shows what the model has learned.

use burn_fsdp::ProcessGroup;
use burn_fsdp_models::{LanguageModel, TokenStream};

use crate::error::RankError;
use crate::text::{Sample, TEMPERATURE};
use crate::train::config::TrainConfig;
use crate::train::data::Data;

/// Maximum tokens of held-out text that the sample goes on from.
const MAX_PROMPT_TOKENS: usize = 32;

/// Returns true if a run ends with a sample.
pub(crate) fn is_wanted(config: &TrainConfig) -> bool {
    matches!(config.data, Data::Text(_)) && config.sample_tokens > 0
}

/// Returns the start of the held-out text and the text that the model adds; `None` if no sample is
/// wanted, or if the model gives no numbers.
///
/// All ranks run the sharded model together and go on with rank 0's choice.
pub(crate) fn generate<M: LanguageModel>(
    model: &M,
    config: &TrainConfig,
    world: &ProcessGroup,
) -> Result<Option<Vec<u8>>, RankError> {
    let Data::Text(text) = &config.data else {
        return Ok(None);
    };
    if config.sample_tokens == 0 {
        return Ok(None);
    }
    let sample = Sample {
        codec: &text.codec,
        seq: config.model.seq(),
        num_tokens: config.sample_tokens,
        // What it goes on with is the middle of a text.
        ends: Vec::new(),
        seed: config.seed,
        temperature: TEMPERATURE,
        device: config.device(world),
    };
    let is_stopped = || config.is_stopped();
    let prompt = prompt(&text.held_out(), config.model.seq());
    match sample.go_on(&model.valid(), prompt, world, is_stopped) {
        // The training is done; its losses say what is wrong.
        Err(RankError::NoNumbers) => Ok(None),
        sample => sample.map(Some),
    }
}

fn prompt(stream: &TokenStream, seq: usize) -> Vec<i64> {
    let known = stream.period().unwrap_or(1);
    let prompt = 0..known.min(MAX_PROMPT_TOKENS).min(seq);
    prompt.map(|index| stream.token(index)).collect()
}
