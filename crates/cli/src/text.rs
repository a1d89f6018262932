//! Text generation by a model.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp::internals::collectives::Error as CollectiveError;
use burn_fsdp::{ProcessGroup, catch};
use burn_fsdp_models::{KeyValueCache, LanguageModel, TextCodec};

use crate::choice::Choice;
use crate::error::RankError;
use crate::random::Random;

/// Divisor of the logits. A value below 1 favors likely tokens, which suits models that were trained only briefly.
pub(crate) const TEMPERATURE: f64 = 0.8;

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
    pub(crate) seed: u64,
    pub(crate) choice: Choice,
    /// The device of the model.
    pub(crate) device: Device,
}

impl Sample<'_> {
    /// Appends generated tokens until the requested number is reached, the text ends, or the run is asked to stop.
    /// Returns the text of all tokens. The model must be without autodiff.
    pub(crate) fn go_on<M: LanguageModel>(
        &self,
        model: &M,
        mut tokens: Vec<i64>,
        world: &ProcessGroup,
        is_stopped: impl Fn() -> bool,
    ) -> Result<Vec<u8>, RankError> {
        let mut random = Random(self.seed);
        let mut cache = KeyValueCache::new();
        let prompt = tokens.len();
        for _ in 0..self.num_tokens {
            let logits = catch(|| self.next_logits(model, &tokens, &mut cache))?;
            let choice = self.choice.of(logits, &tokens, random.next_unit());
            match next_token(world, choice, is_stopped())? {
                NextToken::Is(token) if self.is_end(token) => break,
                NextToken::Is(token) => {
                    tokens.push(token);
                    if let Some(text) = self.stopped(&tokens, prompt)? {
                        return Ok(text);
                    }
                }
                NextToken::NoNumbers => return Err(RankError::NoNumbers),
                NextToken::Stop => break,
            }
        }
        Ok(self.codec.decode(&tokens)?)
    }

    /// Returns the text before the first of the texts that end it, if one is among the tokens after the prompt.
    fn stopped(&self, tokens: &[i64], prompt: usize) -> Result<Option<Vec<u8>>, RankError> {
        if self.stops.is_empty() {
            return Ok(None);
        }
        let text = self.codec.decode(tokens)?;
        let start = self.codec.decode(&tokens[..prompt])?.len().min(text.len());
        let found = self.stops.iter().filter_map(|stop| {
            let mut places = text[start..].windows(stop.len());
            places.position(|place| place == stop.as_bytes())
        });
        Ok(found.min().map(|place| text[..start + place].to_vec()))
    }

    fn is_end(&self, token: i64) -> bool {
        self.ends.iter().any(|end| i64::from(*end) == token)
    }

    /// Returns the logits of the token after `tokens`. They are limited to tokens that occur in text, because the
    /// vocabulary may be larger.
    ///
    /// Beyond the maximum length, each new token shifts all earlier ones, so the cache cannot be reused.
    fn next_logits<M: LanguageModel>(
        &self,
        model: &M,
        tokens: &[i64],
        cache: &mut KeyValueCache,
    ) -> Vec<f32> {
        let seen = match tokens.len().checked_sub(self.seq) {
            Some(gone) if gone > 0 => {
                *cache = KeyValueCache::new();
                gone
            }
            _ => cache.num_tokens(),
        };
        let new = tokens[seen..].to_vec();
        let input = TensorData::new(new, [1, tokens.len() - seen]);
        let input = Tensor::<2, Int>::from_data(input, &self.device);
        let logits = model.next_logits(input, cache);
        let known = logits.slice([0..1, 0..self.codec.num_ids()]);
        known.into_data().iter::<f32>().collect()
    }
}

/// The outcome of sampling the next token.
#[derive(Debug, Clone, Copy, PartialEq)]
enum NextToken {
    Is(i64),
    /// Rank 0's logits are not valid numbers.
    NoNumbers,
    /// A rank was asked to stop.
    Stop,
}

/// Returns rank 0's token on every rank, unless a rank was asked to stop.
fn next_token(
    world: &ProcessGroup,
    own: Option<i64>,
    own_stop: bool,
) -> Result<NextToken, CollectiveError> {
    let mut note = vec![u8::from(own_stop), u8::from(own.is_some())];
    note.extend(own.unwrap_or(0).to_le_bytes());
    let notes = world.exchange("sample", note)?;
    if notes.iter().any(|note| note.first() == Some(&1)) {
        return Ok(NextToken::Stop);
    }
    let first = notes.first().and_then(|note| note.split_first_chunk::<2>());
    Ok(match first {
        Some(([_, 1], token)) => match token.try_into() {
            Ok(token) => NextToken::Is(i64::from_le_bytes(token)),
            Err(_) => NextToken::NoNumbers,
        },
        _ => NextToken::NoNumbers,
    })
}

/// Returns bytes as text that is safe to print. Invalid UTF-8 and control characters except newlines and tabs are
/// replaced.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let is_safe = |c: char| !c.is_control() || c == '\n' || c == '\t';
    String::from_utf8_lossy(bytes)
        .chars()
        .map(|c| {
            if is_safe(c) {
                c
            } else {
                char::REPLACEMENT_CHARACTER
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable(b"a\x1b[2J\xff\n"), "a\u{fffd}[2J\u{fffd}\n");
    }
}
