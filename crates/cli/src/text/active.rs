//! The prompts that one rank continues at the moment.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::decoder::{Decoder, Sequence};
use super::sample::{Answer, Finish, Prompt, Sample};
use crate::error::RankError;
use crate::random::Random;

/// The prompts that one rank continues, and their answers so far.
pub(super) struct Active<'a> {
    sample: &'a Sample<'a>,
    prompts: &'a [Prompt],
    running: Vec<Running>,
}

/// A prompt that is being continued.
struct Running {
    index: usize,
    tokens: Vec<i64>,
    random: Random,
}

/// The result of a step.
#[derive(Debug, Default)]
pub(super) struct Step {
    /// Answers that are complete.
    pub(super) answers: Vec<Answer>,
    /// The bytes of all keys and values.
    pub(super) cache_bytes: usize,
    /// True if the logits are not valid numbers.
    pub(super) has_failed: bool,
    /// The hash of the chosen tokens.
    pub(super) chosen: u64,
}

impl Running {
    fn finished(self, finish: Finish) -> Answer {
        Answer {
            index: self.index,
            tokens: self.tokens,
            finish,
        }
    }
}

impl<'a> Active<'a> {
    pub(super) fn new(sample: &'a Sample<'a>, prompts: &'a [Prompt]) -> Self {
        Self {
            sample,
            prompts,
            running: Vec::new(),
        }
    }

    pub(super) fn num_prompts(&self) -> usize {
        self.running.len()
    }

    /// Starts the prompts with these indices.
    pub(super) fn add(&mut self, indices: Vec<usize>) {
        self.running.extend(indices.into_iter().map(|index| {
            let prompt = &self.prompts[index];
            Running {
                index,
                tokens: prompt.tokens.clone(),
                random: Random(prompt.seed),
            }
        }));
    }

    /// Ends all prompts.
    pub(super) fn interrupted(&mut self) -> Vec<Answer> {
        let running = self.running.drain(..);
        running
            .map(|running| running.finished(Finish::Interrupted))
            .collect()
    }

    /// Adds a token to each prompt, and removes those that are complete. Collective, also for a rank without prompts.
    pub(super) fn step(&mut self, decoder: &mut impl Decoder) -> Result<Step, RankError> {
        let sequences = self.running.iter().map(|running| Sequence {
            prompt: running.index,
            tokens: &running.tokens,
        });
        let logits = decoder.next_logits(&sequences.collect::<Vec<_>>())?;
        let mut step = Step {
            cache_bytes: decoder.num_bytes(),
            ..Step::default()
        };
        let mut chosen = DefaultHasher::new();
        let mut remaining = Vec::new();
        for (mut running, logits) in self.running.drain(..).zip(logits) {
            let sample = self.sample;
            let position = running.random.next_unit();
            let Some(token) = sample.choice.of(logits, &running.tokens, position) else {
                step.has_failed = true;
                continue;
            };
            token.hash(&mut chosen);
            if sample.is_end(token) {
                step.answers.push(running.finished(Finish::End));
                continue;
            }
            running.tokens.push(token);
            let prompt_len = self.prompts[running.index].tokens.len();
            if sample.is_stopped(&running.tokens, prompt_len)? {
                step.answers.push(running.finished(Finish::Stop));
            } else if running.tokens.len() - prompt_len >= sample.num_tokens {
                step.answers.push(running.finished(Finish::Length));
            } else {
                remaining.push(running);
            }
        }
        self.running = remaining;
        step.chosen = chosen.finish();
        Ok(step)
    }
}
