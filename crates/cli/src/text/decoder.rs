//! What computes the logits of the next tokens.

use std::collections::BTreeMap;

use burn::tensor::{Int, Tensor, TensorData};
use burn_fsdp::catch;
use burn_fsdp_models::{Continuation, KeyValueCache, LanguageModel};

use super::sample::Sample;
use crate::error::RankError;

/// A prompt, with the tokens that were added to it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence<'a> {
    /// The index of the prompt.
    pub(super) prompt: usize,
    pub(super) tokens: &'a [i64],
}

/// Computes the logits of the next tokens.
pub(crate) trait Decoder {
    /// Returns true if all ranks continue the same prompts together, instead of each its own.
    fn is_joint(&self) -> bool;

    /// Returns the logits of the token after each sequence, limited to tokens that occur in text, because the
    /// vocabulary may be larger. Sequences that are not among them have ended. Collective, also for a rank without
    /// sequences.
    fn next_logits(&mut self, sequences: &[Sequence<'_>]) -> Result<Vec<Vec<f32>>, RankError>;

    /// Returns the bytes of all keys and values.
    fn num_bytes(&self) -> usize;
}

/// A model, whose weights are whole or are gathered, with a cache of keys and values for each sequence.
///
/// All sequences of a rank are one batch, so it gathers each unit once a step. The model must be without autodiff.
pub(crate) struct Cached<'a, M> {
    model: &'a M,
    sample: &'a Sample<'a>,
    /// The caches, by prompt.
    caches: BTreeMap<usize, KeyValueCache>,
}

impl<'a, M: LanguageModel> Cached<'a, M> {
    pub(crate) fn new(model: &'a M, sample: &'a Sample<'a>) -> Self {
        Self {
            model,
            sample,
            caches: BTreeMap::new(),
        }
    }

    fn tensor(&self, tokens: Vec<i64>) -> Tensor<2, Int> {
        let shape = [1, tokens.len()];
        Tensor::from_data(TensorData::new(tokens, shape), &self.sample.device)
    }
}

/// Returns the tokens of a sequence that a model sees, at most `seq`, and the number of those that it has seen.
///
/// Beyond `seq`, each new token shifts all earlier ones, so nothing that it has seen is of use.
pub(super) fn seen_tokens(tokens: &[i64], num_seen: usize, seq: usize) -> (&[i64], usize) {
    match tokens.len().saturating_sub(seq) {
        0 => (tokens, num_seen),
        gone => (&tokens[gone..], 0),
    }
}

/// Returns the logits of tokens that occur in text.
pub(super) fn known(sample: &Sample<'_>, mut logits: Vec<f32>) -> Vec<f32> {
    logits.truncate(sample.codec.num_ids());
    logits
}

impl<M: LanguageModel> Decoder for Cached<'_, M> {
    fn is_joint(&self) -> bool {
        false
    }

    fn next_logits(&mut self, sequences: &[Sequence<'_>]) -> Result<Vec<Vec<f32>>, RankError> {
        let is_left = |prompt: &usize| sequences.iter().any(|sequence| sequence.prompt == *prompt);
        self.caches.retain(|prompt, _| is_left(prompt));
        if sequences.is_empty() {
            let nothing = self.tensor(vec![0]);
            catch(|| self.model.next_logits(nothing, &mut KeyValueCache::new()))?;
            return Ok(Vec::new());
        }
        let seq = self.sample.seq;
        let mut running = Vec::new();
        for Sequence { prompt, tokens } in sequences {
            let mut cache = self.caches.remove(prompt).unwrap_or_default();
            let (tokens, seen) = seen_tokens(tokens, cache.num_tokens(), seq);
            if seen == 0 {
                cache = KeyValueCache::new();
            }
            running.push((*prompt, self.tensor(tokens[seen..].to_vec()), cache));
        }
        let continuations = running.iter_mut().map(|(_, tokens, cache)| Continuation {
            tokens: tokens.clone(),
            cache,
        });
        let continuations = continuations.collect();
        let logits = catch(|| {
            let logits = self.model.next_logits_of_each(continuations);
            let vocab = logits.dims()[1];
            let logits: Vec<f32> = logits.into_data().iter::<f32>().collect();
            (logits, vocab)
        });
        let (logits, vocab) = logits?;
        let caches = running
            .into_iter()
            .map(|(prompt, _, cache)| (prompt, cache));
        self.caches.extend(caches);
        let rows = logits.chunks(vocab).map(<[f32]>::to_vec);
        Ok(rows.map(|row| known(self.sample, row)).collect())
    }

    fn num_bytes(&self) -> usize {
        self.caches.values().map(KeyValueCache::num_bytes).sum()
    }
}
