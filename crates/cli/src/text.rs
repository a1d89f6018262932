//! Text generation by a model.
//!
//! - `queue`: which rank continues which prompt, and when.
//! - `active`: the prompts that one rank continues at the moment.
//! - `decoder`: what computes their logits: the model with caches, or `placed`, a compiled graph whose weights are
//!   divided among ranks.
//! - `sample`: how prompts are continued, and their answers.

mod active;
mod decoder;
mod placed;
mod queue;
mod sample;

use std::time::Instant;

use burn_fsdp::ProcessGroup;
use burn_fsdp_models::LanguageModel;
use serde::{Deserialize, Serialize};

use crate::error::RankError;
use active::Active;
pub(crate) use decoder::Cached;
use decoder::Decoder;
pub(crate) use placed::{PlacedDecoder, bytes_moved_by_placements};
use queue::Queue;
pub(crate) use sample::{Answer, Finish, Prompt, Sample};

/// Divisor of the logits. A value below 1 favors likely tokens, which suits models that were trained only briefly.
pub(crate) const TEMPERATURE: f64 = 0.8;

/// The result of a generation.
#[derive(Debug, Default)]
pub(crate) struct Generated {
    /// The answers to all prompts, in order.
    pub(crate) answers: Vec<Answer>,
    /// Time from the first forward to the last, in seconds.
    pub(crate) seconds: f64,
    /// Most bytes of keys and values that one rank had at once.
    pub(crate) cache_bytes: usize,
}

/// What a rank reports after its last step.
#[derive(Default, Serialize, Deserialize)]
struct Report {
    answers: Vec<Answer>,
    cache_bytes: usize,
}

impl Sample<'_> {
    /// Continues one prompt, and returns the text of all tokens. The model must be without autodiff. Collective.
    pub(crate) fn go_on<M: LanguageModel>(
        &self,
        model: &M,
        prompt: Prompt,
        world: &ProcessGroup,
        is_stopped: impl Fn() -> bool,
    ) -> Result<Vec<u8>, RankError> {
        let prompt_len = prompt.tokens.len();
        let mut decoder = Cached::new(model, self);
        let generated = self.continue_all(&mut decoder, &[prompt], 1, world, is_stopped)?;
        let text = generated.answers.first();
        let text = text
            .map(|answer| self.text(answer, prompt_len))
            .transpose()?;
        Ok(text.map(|text| text.whole).unwrap_or_default())
    }

    /// Appends generated tokens to all prompts until each text ends, or the run is asked to stop. At most `batch`
    /// prompts run at once, divided among the ranks, unless the decoder is [joint](Decoder::is_joint). Collective.
    ///
    /// The text of a prompt does not depend on the others, except for the rounding of products.
    pub(crate) fn continue_all(
        &self,
        decoder: &mut impl Decoder,
        prompts: &[Prompt],
        batch: usize,
        world: &ProcessGroup,
        is_stopped: impl Fn() -> bool,
    ) -> Result<Generated, RankError> {
        if self.num_tokens == 0 {
            return Ok(unchanged(prompts));
        }
        let start = Instant::now();
        let is_joint = decoder.is_joint();
        let (parts, own) = if is_joint {
            (1, 0)
        } else {
            (world.size(), world.rank())
        };
        let mut queue = Queue::new(prompts.len(), parts, batch);
        let mut active = Active::new(self, prompts);
        let mut report = Report::default();
        active.add(queue.next(own));
        while !queue.is_done() {
            let step = active.step(decoder)?;
            // Without parts, every rank has all answers.
            let is_reported = !is_joint || world.rank() == 0;
            let answers = step.answers.into_iter().filter(|_| is_reported);
            report.answers.extend(answers);
            report.cache_bytes = report.cache_bytes.max(step.cache_bytes);
            let note = queue::Note {
                is_stopped: is_stopped(),
                has_failed: step.has_failed,
                num_active: active.num_prompts(),
                chosen: step.chosen,
            };
            let notes = world.exchange("sample", note.to_bytes())?;
            let notes: Vec<_> = notes.iter().map(|note| queue::Note::of(note)).collect();
            if notes.iter().any(|note| note.has_failed) {
                return Err(RankError::NoNumbers);
            }
            let other = notes.iter().position(|note| note.chosen != notes[0].chosen);
            if let Some(rank) = other.filter(|_| is_joint) {
                return Err(RankError::OtherTokens { rank });
            }
            if notes.iter().any(|note| note.is_stopped) {
                let answers = active.interrupted().into_iter();
                report.answers.extend(answers.filter(|_| is_reported));
                break;
            }
            queue.update(&notes);
            active.add(queue.next(own));
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(collected(report, world)?.during(seconds))
    }
}

impl Report {
    fn during(self, seconds: f64) -> Generated {
        Generated {
            answers: self.answers,
            seconds,
            cache_bytes: self.cache_bytes,
        }
    }
}

/// Returns answers without any tokens.
fn unchanged(prompts: &[Prompt]) -> Generated {
    let answer = |(index, prompt): (usize, &Prompt)| Answer {
        index,
        tokens: prompt.tokens.clone(),
        finish: Finish::Length,
    };
    let report = Report {
        answers: prompts.iter().enumerate().map(answer).collect(),
        cache_bytes: 0,
    };
    report.during(0.0)
}

/// Returns the answers of all ranks on every rank, in the order of the prompts. Collective.
fn collected(own: Report, world: &ProcessGroup) -> Result<Report, RankError> {
    let failed = |error: serde_json::Error| RankError::Result {
        problem: error.to_string(),
    };
    let note = serde_json::to_vec(&own).map_err(failed)?;
    let mut all = Report::default();
    for note in world.exchange("answers", note)? {
        let report: Report = serde_json::from_slice(&note).map_err(failed)?;
        all.answers.extend(report.answers);
        all.cache_bytes = all.cache_bytes.max(report.cache_bytes);
    }
    all.answers.sort_by_key(|answer| answer.index);
    Ok(all)
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
