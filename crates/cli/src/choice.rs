//! The choice of the next token from a model's logits.

/// How a token is chosen. The rules apply in the order of the fields, as in transformers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Choice {
    /// Divisor of the positive logits, and factor of the negative logits, of tokens that are already in the text; 1 for
    /// no effect. From CTRL (Keskar et al., 2019).
    pub(crate) repetition_penalty: f64,
    /// Divisor of the logits; 0 picks the likeliest token, and the rules below have no effect.
    pub(crate) temperature: f64,
    /// Only this many of the likeliest tokens are chosen; `None` for all.
    pub(crate) top_k: Option<usize>,
    /// Only the likeliest tokens are chosen whose probabilities together reach this number; 1 for all. From nucleus
    /// sampling (Holtzman et al., 2020).
    pub(crate) top_p: f64,
}

impl Choice {
    /// Returns the choice by temperature alone.
    pub(crate) fn by_temperature(temperature: f64) -> Self {
        Self {
            repetition_penalty: 1.0,
            temperature,
            top_k: None,
            top_p: 1.0,
        }
    }

    /// Chooses the token after `text`. `position`, from 0 to 1, is a point in the cumulative distribution over the
    /// tokens by id. Returns `None` if the logits are not valid numbers, as for a model that has diverged.
    pub(crate) fn of(&self, mut logits: Vec<f32>, text: &[i64], position: f64) -> Option<i64> {
        self.penalize(&mut logits, text);
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !highest.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
            return None;
        }
        if self.temperature <= 0.0 {
            let likeliest = logits.iter().position(|logit| *logit == highest);
            return likeliest.map(|token| token as i64);
        }
        let weight = |logit: &f32| (f64::from(logit - highest) / self.temperature).exp();
        let weights: Vec<f64> = logits.iter().map(weight).collect();
        let allowed = self.allowed(&weights);
        let total: f64 = allowed.iter().map(|token| weights[*token]).sum();
        let mut left = position * total;
        for token in &allowed {
            left -= weights[*token];
            if left < 0.0 {
                return Some(*token as i64);
            }
        }
        // Reached only because of rounding.
        allowed.last().map(|token| *token as i64)
    }

    fn penalize(&self, logits: &mut [f32], text: &[i64]) {
        if self.repetition_penalty == 1.0 {
            return;
        }
        let penalty = self.repetition_penalty as f32;
        let mut present: Vec<_> = text.to_vec();
        present.sort_unstable();
        present.dedup();
        for token in present {
            let logit = usize::try_from(token)
                .ok()
                .and_then(|token| logits.get_mut(token));
            if let Some(logit) = logit {
                *logit = if *logit < 0.0 {
                    *logit * penalty
                } else {
                    *logit / penalty
                };
            }
        }
    }

    /// Returns the tokens that may be chosen, by id. Of equally likely ones, lower ids come first.
    fn allowed(&self, weights: &[f64]) -> Vec<usize> {
        let mut tokens: Vec<usize> = (0..weights.len()).collect();
        if self.top_k.is_none() && self.top_p >= 1.0 {
            return tokens;
        }
        let by_likelihood =
            |a: &usize, b: &usize| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b));
        if let Some(most) = self.top_k.filter(|most| (1..tokens.len()).contains(most)) {
            // Only these are sorted, because a vocabulary may be large.
            tokens.select_nth_unstable_by(most - 1, by_likelihood);
            tokens.truncate(most);
        }
        tokens.sort_unstable_by(by_likelihood);
        let total: f64 = tokens.iter().map(|token| weights[*token]).sum();
        let mut before = 0.0;
        let is_needed = |token: &usize| {
            let is_needed = before < self.top_p * total;
            before += weights[*token];
            is_needed
        };
        let needed = tokens.iter().copied().take_while(is_needed).count();
        tokens.truncate(needed.max(1));
        tokens.sort_unstable();
        tokens
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns all tokens that some position chooses.
    fn possible(choice: &Choice, logits: &[f32], text: &[i64]) -> BTreeSet<i64> {
        let at = |position| choice.of(logits.to_vec(), text, f64::from(position) / 1000.0);
        (0..1000).filter_map(at).collect()
    }

    fn logits(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn a_likely_token_is_chosen_almost_always() {
        let mut logits = vec![0.0; 256];
        logits[65] = 20.0;
        let choice = |position| Choice::by_temperature(0.8).of(logits.clone(), &[], position);
        assert!([0.1, 0.5, 0.9].iter().all(|&at| choice(at) == Some(65)));
        assert_eq!(choice(0.0), Some(0));
        let greedy = Choice::by_temperature(0.0);
        assert_eq!(greedy.of(logits.clone(), &[], 0.0), Some(65));
    }

    #[test]
    fn a_diverged_model_gives_no_token() {
        for temperature in [0.8, 0.0] {
            let choice = Choice::by_temperature(temperature);
            assert_eq!(choice.of(vec![f32::NAN; 256], &[], 0.5), None);
            let mut logits = vec![0.0; 256];
            logits[7] = f32::INFINITY;
            assert_eq!(choice.of(logits, &[], 0.5), None);
        }
    }

    #[test]
    fn only_the_likeliest_tokens_are_chosen() {
        let logits = logits(&[0.1, 0.4, 0.05, 0.3, 0.15]);
        let with = |top_k, top_p, temperature| Choice {
            top_k,
            top_p,
            ..Choice::by_temperature(temperature)
        };
        for (top_k, top_p, expected) in [
            (None, 1.0, &[0, 1, 2, 3, 4][..]),
            (Some(1), 1.0, &[1]),
            (Some(3), 1.0, &[1, 3, 4]),
            (Some(9), 1.0, &[0, 1, 2, 3, 4]),
            (None, 0.01, &[1]),
            (None, 0.39, &[1]),
            (None, 0.41, &[1, 3]),
            (None, 0.69, &[1, 3]),
            (None, 0.86, &[0, 1, 3, 4]),
            // The probabilities of the two likeliest are four and three sevenths.
            (Some(2), 0.57, &[1]),
            (Some(2), 0.58, &[1, 3]),
        ] {
            let found = possible(&with(top_k, top_p, 1.0), &logits, &[]);
            let expected: BTreeSet<i64> = expected.iter().copied().collect();
            assert_eq!(found, expected, "{top_k:?} {top_p}");
        }
        // A high temperature makes the tokens alike before their probabilities are added.
        let found = possible(&with(None, 0.41, 1e6), &logits, &[]);
        assert_eq!(found.len(), 3);
        // The share of each token is its probability among those that remain.
        let choice = with(Some(2), 1.0, 1.0);
        assert_eq!(choice.of(logits.clone(), &[], 0.57), Some(1));
        assert_eq!(choice.of(logits, &[], 0.58), Some(3));
    }

    #[test]
    fn tokens_of_the_text_become_less_likely() {
        let choice = |penalty, text: &[i64]| {
            let choice = Choice {
                repetition_penalty: penalty,
                ..Choice::by_temperature(0.0)
            };
            choice.of(vec![2.0, 3.0, -1.0, -1.5], text, 0.0)
        };
        assert_eq!(choice(1.0, &[1, 1]), Some(1));
        assert_eq!(
            choice(1.4, &[1, 1]),
            Some(1),
            "once, not for each occurrence"
        );
        assert_eq!(choice(1.6, &[1, 300]), Some(0));
        // A negative logit is multiplied.
        let negative = Choice {
            repetition_penalty: 2.0,
            ..Choice::by_temperature(0.0)
        };
        assert_eq!(negative.of(vec![-1.0, -1.5], &[0], 0.0), Some(1));
    }
}
