//! How prompts are continued, and their answers.

use burn::tensor::Device;
use burn_fsdp_models::{ModelError, TextCodec};
use serde::{Deserialize, Serialize};

use crate::choice::Choice;

/// The configuration of a text generation.
pub(crate) struct Sample<'a> {
    pub(crate) codec: &'a TextCodec,
    /// Maximum number of earlier tokens that the model sees.
    pub(crate) seq: usize,
    pub(crate) num_tokens: usize,
    /// Tokens that end the text.
    pub(crate) ends: Vec<u32>,
    /// Texts before which the text ends.
    pub(crate) stops: Vec<String>,
    pub(crate) choice: Choice,
    /// The device of the model.
    pub(crate) device: Device,
}

/// The tokens of a prompt, and the seed of the random numbers that continue it.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<i64>,
    pub(crate) seed: u64,
}

/// The reason why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Finish {
    /// The model chose a token that ends the text.
    End,
    /// The text reached one of the texts that end it.
    Stop,
    /// The requested number of tokens was reached.
    Length,
    /// The run was asked to stop.
    Interrupted,
}

/// A prompt with the tokens that the model added.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// The prompt's index.
    pub(super) index: usize,
    pub(crate) tokens: Vec<i64>,
    pub(crate) finish: Finish,
}

/// The text of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AnswerText {
    /// The text of the prompt and the answer.
    pub(crate) whole: Vec<u8>,
    /// The start of the answer.
    pub(crate) start: usize,
}

impl Sample<'_> {
    /// Returns the text of an answer whose prompt has `prompt_len` tokens.
    pub(crate) fn text(
        &self,
        answer: &Answer,
        prompt_len: usize,
    ) -> Result<AnswerText, ModelError> {
        let mut whole = self.codec.decode(&answer.tokens)?;
        let start = self.codec.decode(&answer.tokens[..prompt_len])?.len();
        let start = start.min(whole.len());
        if answer.finish == Finish::Stop
            && let Some(end) = self.place_of_stop(&whole[start..])
        {
            whole.truncate(start + end);
        }
        Ok(AnswerText { whole, start })
    }

    /// Returns the place of the first text that ends an answer.
    fn place_of_stop(&self, answer: &[u8]) -> Option<usize> {
        let found = self.stops.iter().filter_map(|stop| {
            let mut places = answer.windows(stop.len());
            places.position(|place| place == stop.as_bytes())
        });
        found.min()
    }

    /// Returns true if the tokens after the prompt contain a text that ends them.
    pub(super) fn is_stopped(&self, tokens: &[i64], prompt_len: usize) -> Result<bool, ModelError> {
        if self.stops.is_empty() {
            return Ok(false);
        }
        let whole = self.codec.decode(tokens)?;
        let start = self.codec.decode(&tokens[..prompt_len])?.len();
        let answer = whole.get(start..).unwrap_or_default();
        Ok(self.place_of_stop(answer).is_some())
    }

    pub(super) fn is_end(&self, token: i64) -> bool {
        self.ends.iter().any(|end| i64::from(*end) == token)
    }
}
