//! The generation of text by a model.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp::collectives::Error as CollectiveError;
use burn_fsdp::{ProcessGroup, catch};
use burn_fsdp_models::{BYTE_VOCAB, Gpt};

use crate::error::RankError;

/// Divisor of logits; below 1, so that likely bytes become likelier: a little training shows
/// better.
const TEMPERATURE: f64 = 0.8;

/// The configuration of a generated text.
pub(crate) struct Sample {
    /// Maximum number of bytes that the model looks back on.
    pub(crate) seq: usize,
    pub(crate) num_bytes: usize,
    pub(crate) seed: u64,
    /// The device of the model.
    pub(crate) device: Device,
}

impl Sample {
    /// Appends the bytes that the model generates, until there are enough or it is told to stop,
    /// and returns them after `bytes`. The model is without autodiff.
    pub(crate) fn go_on(
        &self,
        model: &Gpt,
        mut bytes: Vec<u8>,
        world: &ProcessGroup,
        is_stopped: impl Fn() -> bool,
    ) -> Result<Vec<u8>, RankError> {
        let mut random = Random(self.seed);
        for _ in 0..self.num_bytes {
            let window = &bytes[bytes.len().saturating_sub(self.seq)..];
            let logits = catch(|| last_logits(model, window, &self.device))?;
            let choice = choose(&logits, random.next_unit());
            match next_byte(world, choice, is_stopped())? {
                NextByte::Is(byte) => bytes.push(byte),
                NextByte::NoNumbers => return Err(RankError::NoNumbers),
                NextByte::Stop => break,
            }
        }
        Ok(bytes)
    }
}

/// Returns the logits of the byte after `window`. The vocabulary may be larger than there are
/// bytes.
fn last_logits(model: &Gpt, window: &[u8], device: &Device) -> Vec<f32> {
    let tokens: Vec<i64> = window.iter().map(|&byte| byte.into()).collect();
    let num_tokens = tokens.len();
    let input = TensorData::new(tokens, [1, num_tokens]);
    let logits = model.forward(Tensor::<2, Int>::from_data(input, device));
    let last = logits.slice([0..1, num_tokens - 1..num_tokens, 0..BYTE_VOCAB]);
    last.into_data().iter::<f32>().collect()
}

/// Chooses the byte at `position`, from 0 to 1, of a line along which each byte has a length by its
/// likelihood; `None` of a model that has diverged and gives no numbers.
fn choose(logits: &[f32], position: f64) -> Option<u8> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: &f32| (f64::from(logit - highest) / TEMPERATURE).exp();
    let total: f64 = logits.iter().map(weight).sum();
    if !total.is_finite() {
        return None;
    }
    let mut left = position * total;
    for (byte, logit) in (0..=u8::MAX).zip(logits) {
        left -= weight(logit);
        if left < 0.0 {
            return Some(byte);
        }
    }
    // By rounding.
    Some(u8::MAX)
}

/// The next byte of a sample.
#[derive(Debug, Clone, Copy, PartialEq)]
enum NextByte {
    Is(u8),
    /// No byte: the model gives no numbers to choose by.
    NoNumbers,
    /// The end: some rank was told to stop.
    Stop,
}

/// Returns rank 0's byte on every rank, unless a rank was told to stop.
fn next_byte(
    world: &ProcessGroup,
    own: Option<u8>,
    own_stop: bool,
) -> Result<NextByte, CollectiveError> {
    let note = vec![
        u8::from(own_stop),
        u8::from(own.is_some()),
        own.unwrap_or(0),
    ];
    let notes = world.exchange("sample", note)?;
    if notes.iter().any(|note| note.first() == Some(&1)) {
        return Ok(NextByte::Stop);
    }
    Ok(match notes.first().map(Vec::as_slice) {
        Some([_, 1, byte]) => NextByte::Is(*byte),
        _ => NextByte::NoNumbers,
    })
}

/// A generator of random numbers, SplitMix64: the same numbers on every rank and machine.
struct Random(u64);

impl Random {
    /// Returns a number from 0 to below 1.
    fn next_unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Returns bytes as text that is safe to print: bytes that are not UTF-8 and control characters are
/// replaced, but for newlines and tabs.
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
    fn the_likely_byte_is_chosen_nearly_everywhere() {
        let mut logits = vec![0.0; BYTE_VOCAB];
        logits[65] = 20.0;
        assert!(
            [0.1, 0.5, 0.9]
                .iter()
                .all(|&at| choose(&logits, at) == Some(65))
        );
        assert_eq!(choose(&logits, 0.0), Some(0));
    }

    #[test]
    fn a_diverged_model_gives_no_byte() {
        assert_eq!(choose(&[f32::NAN; BYTE_VOCAB], 0.5), None);
        let mut logits = [0.0; BYTE_VOCAB];
        logits[7] = f32::INFINITY;
        assert_eq!(choose(&logits, 0.5), None);
    }

    #[test]
    fn random_numbers_are_spread_over_the_unit() {
        let mut random = Random(1);
        let numbers: Vec<f64> = (0..1000).map(|_| random.next_unit()).collect();
        assert!(numbers.iter().all(|x| (0.0..1.0).contains(x)));
        let mean = numbers.iter().sum::<f64>() / 1000.0;
        assert!((mean - 0.5).abs() < 0.05);
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable(b"a\x1b[2J\xff\n"), "a\u{fffd}[2J\u{fffd}\n");
    }
}
