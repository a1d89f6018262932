//! The text with which a run shows what the model has learned.

use burn::module::Module;
use burn_fsdp::ProcessGroup;
use burn_fsdp_models::{Gpt, TokenStream};

use crate::error::RankError;
use crate::text::Sample;
use crate::train::config::TrainConfig;
use crate::train::data::Data;

/// Maximum bytes of held-out text that the sample goes on from.
const MAX_PROMPT_BYTES: usize = 32;

/// Returns true if a run ends with a sample.
pub(crate) fn is_wanted(config: &TrainConfig) -> bool {
    matches!(config.data, Data::Text(_)) && config.sample_bytes > 0
}

/// Returns the start of the held-out text and the text that the model adds; `None` if no sample is
/// wanted, or if the model gives no numbers.
///
/// All ranks run the sharded model together and go on with rank 0's choice.
pub(crate) fn generate(
    model: &Gpt,
    config: &TrainConfig,
    world: &ProcessGroup,
) -> Result<Option<Vec<u8>>, RankError> {
    let Data::Text(text) = &config.data else {
        return Ok(None);
    };
    if config.sample_bytes == 0 {
        return Ok(None);
    }
    let prompt = prompt(&text.held_out(), config.model.seq);
    let sample = Sample {
        seq: config.model.seq,
        num_bytes: config.sample_bytes,
        seed: config.seed,
        device: config.device(world),
    };
    let is_stopped = || config.is_stopped();
    match sample.go_on(&model.valid(), prompt, world, is_stopped) {
        // The training is done; its losses say what is wrong.
        Err(RankError::NoNumbers) => Ok(None),
        sample => sample.map(Some),
    }
}

fn prompt(stream: &TokenStream, seq: usize) -> Vec<u8> {
    match stream {
        TokenStream::Bytes(range) => {
            let bytes = range.as_slice();
            bytes[..bytes.len().min(MAX_PROMPT_BYTES).min(seq)].to_vec()
        }
        _ => vec![b'\n'],
    }
}
