//! Formats of optimizer states in fewer bits, which both engines use.

use std::cell::Cell;
use std::sync::LazyLock;

/// The format in which a `LowBitOptimizer` keeps states between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateFormat {
    /// 16 bits per element, the upper half of a 32-bit float: 8 bits of precision. Half the memory.
    Bf16,
    /// 8 bits per element, plus 32 bits per block of [`BLOCK`](Self::BLOCK) elements for the block's largest magnitude,
    /// which is exact. Each element has a sign and one of 128 levels relative to that magnitude: the dynamic tree of
    /// Dettmers et al., 2021, with 64 levels in the top decade and half as many in each decade below. A quarter of the
    /// memory.
    ///
    /// In the eager engine, a step is rejected if a block spans two shards; to prevent this, use `Cut::Multiples`. A
    /// compiled step cuts such parameters between blocks.
    Block8,
}

impl StateFormat {
    /// Number of elements in a block of [`Block8`](Self::Block8), counted from the first element of the whole
    /// parameter.
    pub const BLOCK: usize = 256;

    /// Returns the size of `num_elements` elements in this format, in bytes.
    pub fn num_bytes(self, num_elements: usize) -> usize {
        match self {
            Self::Bf16 => 2 * num_elements,
            Self::Block8 => num_elements + size_of::<f32>() * num_elements.div_ceil(Self::BLOCK),
        }
    }

    /// Rounds 32-bit floats, and returns them in this format: the elements, and then the scales of their blocks. The
    /// first value must be the first of a block.
    pub fn rounded(self, values: impl Iterator<Item = f32>, rounding: Rounding) -> Vec<u8> {
        match self {
            Self::Bf16 => {
                let values = values.enumerate();
                let halves = values.map(|(at, value)| bf16(value, rounding.draw(at)));
                halves.flat_map(u16::to_ne_bytes).collect()
            }
            Self::Block8 => {
                let values: Vec<f32> = values.collect();
                let mut bytes = Vec::with_capacity(self.num_bytes(values.len()));
                let mut scales = Vec::with_capacity(values.len().div_ceil(Self::BLOCK));
                for (block, values) in values.chunks(Self::BLOCK).enumerate() {
                    let draw = |at| rounding.draw(block * Self::BLOCK + at);
                    scales.push(encode(values, draw, &mut bytes));
                }
                bytes.extend(scales.into_iter().flat_map(f32::to_ne_bytes));
                bytes
            }
        }
    }

    /// Returns the bytes of `num_elements` elements as 32-bit floats, given their bytes in this format.
    pub fn widened(self, bytes: &[u8], num_elements: usize) -> Vec<u8> {
        match self {
            Self::Bf16 => {
                let (halves, _) = bytes.as_chunks::<2>();
                let halves = halves.iter().map(|half| u16::from_ne_bytes(*half));
                let words = halves.map(|half| u32::from(half) << 16);
                words.flat_map(u32::to_ne_bytes).collect()
            }
            Self::Block8 => {
                let (codes, scales) = bytes.split_at(num_elements.min(bytes.len()));
                let (scales, _) = scales.as_chunks::<4>();
                let mut wide = Vec::with_capacity(size_of::<f32>() * num_elements);
                for (codes, scale) in codes.chunks(Self::BLOCK).zip(scales) {
                    let levels = LEVELS.map(|level| level * f32::from_ne_bytes(*scale));
                    wide.extend(codes.iter().flat_map(|code| {
                        let code = code.cast_signed();
                        let value = levels[usize::from(code.unsigned_abs())];
                        let signed = if code < 0 { -value } else { value };
                        signed.to_ne_bytes()
                    }));
                }
                wide
            }
        }
    }
}

/// The pseudorandom draws for rounding the elements of one tensor.
#[derive(Debug, Clone, Copy)]
pub struct Rounding {
    seed: u64,
    /// The flat index of the tensor's first element in the whole parameter.
    start: usize,
}

impl Rounding {
    /// Returns the seed for the state with this name, after it was rounded `num_roundings` times.
    pub fn seed(name: &str, num_roundings: u64) -> u64 {
        name.bytes().fold(mixed(num_roundings), |seed, byte| {
            mixed(seed ^ u64::from(byte))
        })
    }

    /// Creates the draws of a tensor whose first element has the flat index `start` in the whole parameter.
    pub fn new(seed: u64, start: usize) -> Self {
        Self { seed, start }
    }

    /// Returns the 32-bit random number for element `at` of the tensor.
    fn draw(self, at: usize) -> u32 {
        (mixed(self.seed ^ (self.start + at) as u64) >> 32) as u32
    }
}

/// Mixes the bits of `word` like splitmix64.
fn mixed(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Returns the bits of `value` in bf16. `draw` decides whether to round up or down.
fn bf16(value: f32, draw: u32) -> u16 {
    let bits = value.to_bits();
    let half = |bits: u32| (bits >> 16) as u16;
    let up = f32::from_bits(bits.wrapping_add(draw & 0xffff) & 0xffff_0000);
    match (value.is_nan(), value.is_finite() && up.is_finite()) {
        // A NaN stays NaN even if its low bits are lost.
        (true, _) => half(bits) | 0x40,
        // Rounding up must not overflow.
        (false, false) => half(bits),
        // A nonzero number stays nonzero.
        (false, true) if up == 0.0 && value != 0.0 => half(bits) | 1,
        (false, true) => half(up.to_bits()),
    }
}

/// The levels of magnitude relative to the largest. Each decade has half as many levels as the next larger one, evenly
/// spaced. The last level is the largest magnitude itself.
static LEVELS: LazyLock<[f32; 128]> = LazyLock::new(|| {
    const TENTHS: [f64; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut levels = [0.0; 128];
    for (exponent, tenth) in TENTHS.into_iter().enumerate() {
        let len = 1 << exponent;
        for i in 0..len {
            let middle = 0.1 + 0.9 * (i as f64 + 0.5) / len as f64;
            levels[len + i] = (middle * tenth) as f32;
        }
    }
    levels[127] = 1.0;
    levels
});

/// Appends the codes of a block to `codes`. Returns the block's scale.
fn encode(values: &[f32], draw: impl Fn(usize) -> u32, codes: &mut Vec<u8>) -> f32 {
    let is_finite = values.iter().all(|value| value.is_finite());
    let largest = values
        .iter()
        .fold(0.0, |max: f32, value| max.max(value.abs()));
    let scale = if is_finite { largest } else { f32::NAN };
    // Values are compared with decoded levels, so a decoded value encodes to the same code.
    let levels = LEVELS.map(|level| level * scale);
    codes.extend(values.iter().enumerate().map(|(at, value)| {
        let size = value.abs();
        let above = levels.partition_point(|level| *level <= size).min(127);
        let below = above.saturating_sub(1);
        let part = f64::from(size - levels[below]) / f64::from(levels[above] - levels[below]);
        let is_up =
            levels[below] == 0.0 && size > 0.0 || f64::from(draw(at)) < part * 2f64.powi(32);
        let code = match (size >= levels[127], is_up) {
            (true, _) => 127,
            (false, true) => above as i8,
            (false, false) => below as i8,
        };
        let code = if value.is_sign_negative() {
            -code
        } else {
            code
        };
        code.cast_unsigned()
    }));
    scale
}

/// A trace's knowledge of an optimizer that keeps its states in fewer bits between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LowBits {
    /// The format of all states.
    pub format: StateFormat,
    /// Number of times that the states were rounded before this step.
    pub num_roundings: u64,
}

thread_local! {
    static TRACED: Cell<Option<LowBits>> = const { Cell::new(None) };
}

impl LowBits {
    /// Tells the trace that runs on this thread that the optimizer's step rounds its new states.
    pub fn tell(self) {
        TRACED.set(Some(self));
    }

    /// Returns what the optimizer's step on this thread has told, and forgets it.
    pub fn told() -> Option<Self> {
        TRACED.take()
    }
}

#[cfg(test)]
mod tests {
    use super::{Rounding, StateFormat};

    fn rounded(values: &[f32], format: StateFormat, num_roundings: u64) -> Vec<f32> {
        let seed = Rounding::seed("a state", num_roundings);
        let rounding = Rounding::new(seed, StateFormat::BLOCK);
        let rounded = format.rounded(values.iter().copied(), rounding);
        assert_eq!(rounded.len(), format.num_bytes(values.len()));
        let wide = format.widened(&rounded, values.len());
        let (words, _) = wide.as_chunks::<4>();
        words.iter().map(|word| f32::from_ne_bytes(*word)).collect()
    }

    /// Returns values of every magnitude, from the smallest number to the largest, and blocks with only small values.
    fn values() -> Vec<f32> {
        let sizes = [
            1e-45,
            3e-42,
            1e-38,
            1e-30,
            1e-12,
            1e-3,
            0.0,
            1.0,
            7e5,
            f32::MAX,
        ];
        let of_block = |most: usize| (0..StateFormat::BLOCK).map(move |i| sizes[i * 7 % most]);
        let values = (1..=sizes.len()).flat_map(of_block).enumerate();
        values
            .map(|(i, size)| size * ((i * 31 % 64) as f32 / 32.0 - 1.0))
            .collect()
    }

    #[test]
    fn rounding_is_idempotent() {
        for format in [StateFormat::Bf16, StateFormat::Block8] {
            let once = rounded(&values(), format, 0);
            assert_ne!(once, values());
            for again in 1..20 {
                assert_eq!(rounded(&once, format, again), once, "{format:?}");
            }
        }
    }

    #[test]
    fn nonzero_values_become_neither_zero_nor_infinite() {
        for format in [StateFormat::Bf16, StateFormat::Block8] {
            for draw in 0..20 {
                for (value, got) in values().into_iter().zip(rounded(&values(), format, draw)) {
                    assert_eq!(value == 0.0, got == 0.0, "{format:?}: {value}, {got}");
                    assert!(
                        got.is_finite() && value * got >= 0.0,
                        "{format:?}: {value}, {got}"
                    );
                }
            }
        }
    }

    #[test]
    fn nan_and_infinities_are_not_hidden() {
        for wrong in [f32::NAN, f32::INFINITY] {
            let mut values = vec![1.0; 2 * StateFormat::BLOCK];
            values[3] = wrong;
            let got = rounded(&values, StateFormat::Block8, 0);
            assert!(got[..StateFormat::BLOCK].iter().all(|value| value.is_nan()));
            assert!(got[StateFormat::BLOCK..].iter().all(|value| *value == 1.0));
            let got = rounded(&values, StateFormat::Bf16, 0);
            assert_eq!(got[3].is_nan(), wrong.is_nan());
            assert!(!got[3].is_finite() && got[4] == 1.0);
        }
    }
}
