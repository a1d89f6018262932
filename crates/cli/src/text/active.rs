//! The prompts that one rank continues at the moment.

use burn::tensor::{Int, Tensor, TensorData};
use burn_fsdp::catch;
use burn_fsdp_models::{Continuation, KeyValueCache, LanguageModel};

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
    cache: KeyValueCache,
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
}

impl Running {
    fn finished(self, finish: Finish) -> Answer {
        Answer {
            index: self.index,
            tokens: self.tokens,
            finish,
        }
    }

    /// Returns the tokens that the model has not seen.
    ///
    /// Beyond the maximum length `seq`, each new token shifts all earlier ones, so the cache cannot be reused.
    fn new_tokens(&mut self, seq: usize) -> Vec<i64> {
        let seen = match self.tokens.len().checked_sub(seq) {
            Some(gone) if gone > 0 => {
                self.cache = KeyValueCache::new();
                gone
            }
            _ => self.cache.num_tokens(),
        };
        self.tokens[seen..].to_vec()
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
                cache: KeyValueCache::new(),
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

    /// Adds a token to each prompt, and removes those that are complete. Collective: a rank without prompts also
    /// gathers each unit.
    pub(super) fn step<M: LanguageModel>(&mut self, model: &M) -> Result<Step, RankError> {
        let logits = catch(|| self.next_logits(model))?;
        let bytes = self.running.iter().map(|running| running.cache.num_bytes());
        let mut step = Step {
            cache_bytes: bytes.sum(),
            ..Step::default()
        };
        let mut remaining = Vec::new();
        for (mut running, logits) in self.running.drain(..).zip(logits) {
            let sample = self.sample;
            let position = running.random.next_unit();
            let Some(token) = sample.choice.of(logits, &running.tokens, position) else {
                step.has_failed = true;
                continue;
            };
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
        Ok(step)
    }

    /// Returns the logits of the token after each prompt. They are limited to tokens that occur in text, because the
    /// vocabulary may be larger.
    fn next_logits<M: LanguageModel>(&mut self, model: &M) -> Vec<Vec<f32>> {
        let device = &self.sample.device;
        let tensor = |tokens: Vec<i64>| {
            let shape = [1, tokens.len()];
            Tensor::<2, Int>::from_data(TensorData::new(tokens, shape), device)
        };
        if self.running.is_empty() {
            let _ = model.next_logits(tensor(vec![0]), &mut KeyValueCache::new());
            return Vec::new();
        }
        let seq = self.sample.seq;
        let continuations = self.running.iter_mut().map(|running| Continuation {
            tokens: tensor(running.new_tokens(seq)),
            cache: &mut running.cache,
        });
        let logits = model.next_logits_of_each(continuations.collect());
        let [num_prompts, _] = logits.dims();
        let num_ids = self.sample.codec.num_ids();
        let known = logits.slice([0..num_prompts, 0..num_ids]).into_data();
        let known: Vec<f32> = known.iter::<f32>().collect();
        known.chunks(num_ids).map(<[f32]>::to_vec).collect()
    }
}
